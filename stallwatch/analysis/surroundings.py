"""What surrounds the engines, digested so that rules can ask about any stretch of time: GPUs, host, path, ourselves.

Bounded: each list keeps a quarter of an hour. Everything here is evidence about the machine as a whole; what one engine
did is in `window`.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median
from typing import Final, TypeVar

from stallwatch.analysis.gpu import GpuHistory, is_busy
from stallwatch.analysis.observer import ObserverHistory
from stallwatch.analysis.spans import SpanUnion
from stallwatch.observations import Failure, GpuSample, HostSample, PollFailure

_KEPT_SECONDS: Final = 900.0
_KEPT_SAMPLES: Final = 4500  # a quarter of an hour of GPU polls
_RATES: Final = 300  # host intervals that make up what is usual
_LEAST_RATES: Final = 5
_BURST: Final = 10.0  # times the usual rate of a network counter
_LEAST_EVENTS: Final = 50.0  # a second, below which a network counter says nothing
_LINK_FELL: Final = 0.9
_ABSENT: Final = frozenset({Failure.REFUSED, Failure.DNS})
_PAGE_HOLDS: Final = 3.0  # seconds for which an answered scrape says that the server is there
_DOWN_AFTER: Final = 1.0  # seconds of nothing but refusals: one refusal may be a full backlog


_Sample = TypeVar("_Sample", "_Gpus", "_Host")


@dataclass(frozen=True, slots=True)
class _Gpus:
    at: float
    idle: bool | None  # every GPU
    ratio: float | None  # lowest clock of a busy GPU, to its own usual one
    power: float | None  # watts, all GPUs


@dataclass(frozen=True, slots=True)
class GpuSpell:
    """The GPUs over a stretch of time; what is not known is None."""

    samples: int
    idle: float | None = None  # share of the samples in which no GPU was busy
    ratio: float | None = None  # mean of the lowest clock, to the usual one
    power: float | None = None  # mean watts of all


@dataclass(frozen=True, slots=True)
class _Host:
    since: float
    at: float
    pressure: float  # share of the time that tasks waited for memory or disk, beyond the usual
    throttled: float  # share of the time that vLLM's container was not allowed to run
    network: str  # what the network shows that is not usual; empty when nothing


@dataclass(frozen=True, slots=True)
class HostSpell:
    """The host over a stretch of time; shares of it."""

    known: bool
    pressure: float = 0.0
    throttled: float = 0.0
    congested: float = 0.0
    network: str = ""


@dataclass(slots=True)
class _Usual:
    """What a rate usually is."""

    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=_RATES))

    def beyond(self, rate: float) -> float:
        """By how much a rate exceeds what was usual before it."""
        usual = median(self._rates) if len(self._rates) >= _LEAST_RATES else 0.0
        self._rates.append(rate)
        return max(0.0, rate - usual)

    def is_burst(self, rate: float) -> bool:
        """Whether a rate is far above what was usual before it; a past is needed to tell."""
        known = len(self._rates) >= _LEAST_RATES
        usual = median(self._rates) if known else 0.0
        self._rates.append(rate)
        return known and rate >= _LEAST_EVENTS and rate > _BURST * usual


class Surroundings:
    """Follows the sources that all engines share."""

    def __init__(self, gpus: GpuHistory, observer: ObserverHistory) -> None:
        self.observer = observer
        self.refused_since: float | None = None
        self.silent_since: float | None = None  # the metrics page has timed out since
        self.errors = 0  # streams of ours that the server refused or broke, one after the other
        self._errors_since: float | None = None
        self._gpu_history = gpus
        self._gpus: list[_Gpus] = []
        self._hosts: list[_Host] = []
        self._down = SpanUnion(keep=_KEPT_SECONDS)
        self._answered: float | None = None
        self._last_host: HostSample | None = None
        self._pressures: dict[tuple[str, str], _Usual] = {}
        self._counters: dict[tuple[str, str, str], _Usual] = {}
        self._rates: dict[tuple[str, str], float] = {}

    # what happened

    def sampled(self, seen: GpuSample) -> None:
        """Takes a poll of the GPUs, already in their history."""
        # Another tenant's GPU on the same node says nothing about this server.
        if seen.scope == "node":
            return
        told = [is_busy(reading) for reading in seen.gpus]
        ratios = []
        for reading in seen.gpus:
            usual = self._gpu_history.usual_clock(reading.gpu)
            if usual and reading.sm_clock is not None and is_busy(reading):
                ratios.append(reading.sm_clock / usual)
        idle = None if not told or None in told else not any(told)
        drawn = [reading.power for reading in seen.gpus if reading.power is not None]
        _keep(self._gpus, _Gpus(seen.at, idle, min(ratios, default=None), sum(drawn) if drawn else None))

    def read_host(self, seen: HostSample) -> None:
        """Takes a reading of the host."""
        before, self._last_host = self._last_host, seen
        if before is None or seen.at <= before.at:
            return
        seconds = seen.at - before.at
        pressure = 0.0
        for key, total in seen.pressure_seconds.items():
            if key[0] in {"memory", "io"} and key in before.pressure_seconds:
                rate = max(0.0, total - before.pressure_seconds[key]) / seconds
                pressure = max(pressure, self._pressures.setdefault(key, _Usual()).beyond(rate))
        throttled = 0.0
        if seen.engine_throttled_seconds is not None and before.engine_throttled_seconds is not None:
            throttled = max(0.0, seen.engine_throttled_seconds - before.engine_throttled_seconds) / seconds
        network = self._network(before, seen, seconds)
        _keep(self._hosts, _Host(before.at, seen.at, min(1.0, pressure), min(1.0, throttled), network))

    def answered(self, at: float) -> None:
        """The metrics page was read."""
        if self.refused_since is not None:
            if at - self.refused_since >= _DOWN_AFTER:
                self._down.add(self.refused_since, at)
            self.refused_since = None
        self.silent_since = None
        self._answered = at

    def failed(self, failure: PollFailure) -> None:
        """A scrape failed."""
        if failure.reason in _ABSENT:
            if self.refused_since is None:
                self.refused_since = failure.at
            self.silent_since = None
        elif failure.reason is Failure.TIMEOUT and self.silent_since is None:
            self.silent_since = failure.at

    def restarted(self, at: float) -> None:
        """The server was seen to be another process at `at`."""
        if self._answered is not None:
            self._down.add(self._answered, at)

    def stream_failed(self, at: float) -> None:
        """The server refused or broke a stream of ours."""
        self.errors += 1
        if self._errors_since is None:
            self._errors_since = at

    def stream_flows(self, at: float) -> None:
        """A stream of ours got a token."""
        since = self.down_since(at)
        if since is not None:
            self._down.add(since, at)
        self.errors = 0
        self._errors_since = None

    @property
    def page_silent(self) -> bool:
        """Whether the last scrape timed out."""
        return self.silent_since is not None

    # what rules ask

    def down_since(self, now: float) -> float | None:
        """Since when the server refuses everybody; None while it does not."""
        if self.refused_since is not None and now - self.refused_since >= _DOWN_AFTER:
            return self.refused_since
        # While the engine's own page answers, a stream that fails says more about our request than about the server.
        if self.errors < 2 or (self._answered is not None and now - self._answered < _PAGE_HOLDS):
            return None
        return self._errors_since

    def down_within(self, start: float, end: float) -> float:
        """Seconds of [start, end] in which the server was down or became another process."""
        since = self.down_since(end)
        ongoing = max(0.0, end - max(start, since)) if since is not None else 0.0
        return min(end - start, self._down.within(start, end) + ongoing)

    def gpus(self, start: float, end: float) -> GpuSpell:
        """The GPUs over (start, end]."""
        key = attrgetter("at")
        first = bisect_right(self._gpus, start, key=key)
        picked = self._gpus[first : bisect_right(self._gpus, end, first, key=key)]
        idle = [sample.idle for sample in picked if sample.idle is not None]
        ratios = [sample.ratio for sample in picked if sample.ratio is not None]
        power = [sample.power for sample in picked if sample.power is not None]
        return GpuSpell(
            len(picked),
            sum(idle) / len(idle) if idle else None,
            sum(ratios) / len(ratios) if ratios else None,
            sum(power) / len(power) if power else None,
        )

    def host(self, start: float, end: float) -> HostSpell:
        """The host over [start, end]."""
        pressure = throttled = congested = covered = 0.0
        network = ""
        for index in range(bisect_right(self._hosts, start, key=attrgetter("at")), len(self._hosts)):
            seen = self._hosts[index]
            overlap = min(seen.at, end) - max(seen.since, start)
            if overlap <= 0:
                break
            covered += overlap
            pressure += overlap * seen.pressure
            throttled += overlap * seen.throttled
            if seen.network:
                congested += overlap
                network = seen.network
        if covered <= 0:
            return HostSpell(known=False)
        return HostSpell(
            known=True,
            pressure=pressure / covered,
            throttled=throttled / covered,
            congested=congested / covered,
            network=network,
        )

    @property
    def host_known_until(self) -> float | None:
        """The time of the last reading of the host."""
        return self._hosts[-1].at if self._hosts else None

    @property
    def gpus_known_until(self) -> float | None:
        """The time of the last poll of GPUs that are this server's."""
        return self._gpus[-1].at if self._gpus else None

    def _network(self, before: HostSample, seen: HostSample, seconds: float) -> str:
        found = []
        earlier = {(port.device, port.port): port for port in before.rdma}
        for port in seen.rdma:
            key = (port.device, port.port)
            last = earlier.get(key)
            if last is None:
                continue
            if last.active and port.active is False:
                found.append(f"link {port.device}/{port.port} went down")
            best = self._rates[key] = max(self._rates.get(key, 0.0), port.rate_gbps or 0.0)
            if port.rate_gbps is not None and port.rate_gbps < _LINK_FELL * best:
                found.append(f"link {port.device}/{port.port} at {port.rate_gbps:g} of {best:g} Gb/s")
            for name, rate in _rates_of(last.congestion, port.congestion, seconds):
                if self._counters.setdefault((*key, name), _Usual()).is_burst(rate):
                    found.append(f"{name} on {port.device}/{port.port} at {rate:.0f} a second")
        return "; ".join(found[:3])


def _rates_of(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Iterable[tuple[str, float]]:
    for name, count in after.items():
        if name in before and count >= before[name]:
            yield name, (count - before[name]) / seconds


def _keep(samples: list[_Sample], new: _Sample) -> None:
    """Appends; the older half goes now and then, when there are too many."""
    samples.append(new)
    if len(samples) > 2 * _KEPT_SAMPLES:
        del samples[:_KEPT_SAMPLES]
