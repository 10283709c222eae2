"""The flight recorder's timeline: what was seen, figure beside figure, at the resolution of the fastest look.

It is for looking, not for judging: a value is where it was read, a difference of counters where its later reading was.
A figure that no source tells has no column.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stallwatch.analysis.counting import Growth, delta, was_reset
from stallwatch.analysis.episodes import Stall
from stallwatch.analysis.prefill import PrefillInterval
from stallwatch.analysis.steps import StepWatch
from stallwatch.observations import (
    EngineCounters,
    EngineSample,
    GpuReading,
    GpuSample,
    HostSample,
    Observation,
    ObserverSample,
    PollFailure,
    StreamClosed,
    StreamOpened,
    StreamTokens,
)
from stallwatch.recorder.columns import SLOT_SECONDS, Columns, Cut, Name

MOST_COLUMNS: Final = 512
"""Figures beyond it are left out; at four bytes a slot this many take 7 MiB over 15 minutes."""

_MOST_STALLS: Final = 1000
_GAUGES: Final = ("running", "waiting", "waiting_capacity", "waiting_deferred", "kv_usage")
_BOOKED: Final = {
    "generation_tokens": "generation_tokens",
    "prompt_local_compute": "prompt_computed_tokens",
    "prompt_local_cache_hit": "prompt_cached_tokens",
    "preemptions": "preemptions",
}
_GPU_GAUGES: Final = {
    "utilization": "utilization",
    "memory_utilization": "memory_utilization",
    "dram_active": "dram_active",
    "sm_clock": "sm_clock_hertz",
    "power": "power_watts",
    "temperature": "temperature_celsius",
    "memory_used": "memory_used_bytes",
    "pcie_rx": "pcie_rx_bytes_per_second",
    "pcie_tx": "pcie_tx_bytes_per_second",
}


@dataclass(slots=True)
class _Engine:
    steps: StepWatch = field(default_factory=StepWatch)
    growth: Growth = field(default_factory=Growth)
    known: EngineCounters | None = None
    prefill_until: float | None = None


@dataclass(slots=True)
class _Stream:
    engine: str
    since: float
    tokens: int = 0


class Timeline:
    """The last minutes, slot by slot."""

    def __init__(self, seconds: float) -> None:
        self.columns = Columns(max(1, math.ceil(seconds / SLOT_SECONDS)), MOST_COLUMNS)
        self._engines: dict[str, _Engine] = {}
        self._streams: dict[int, _Stream] = {}
        self._gpus: dict[str, tuple[float, GpuReading]] = {}
        self._host: HostSample | None = None
        self._stalls: deque[Stall] = deque(maxlen=_MOST_STALLS)

    def observe(self, seen: Observation) -> None:
        """Takes one observation."""
        self.columns.advance(seen.at)
        match seen:
            case ObserverSample():
                self._heartbeat(seen)
            case EngineSample():
                for engine, counters in seen.engines.items():
                    self._scraped(engine, counters, seen)
            case StreamOpened():
                self._streams[seen.stream] = _Stream(seen.engine, seen.at)
            case StreamTokens():
                self._tokens(seen)
            case StreamClosed():
                self._streams.pop(seen.stream, None)
            case GpuSample():
                for reading in seen.gpus:
                    self._gpu(reading, seen.at)
            case HostSample():
                self._pressure(seen)
            case PollFailure():
                self.columns.add(Name("sidecar", "", f"{seen.source}_failures"), seen.at, 1.0)

    def prefilled(self, engine: str, interval: PrefillInterval) -> None:
        """Takes what analysis says of the prompt tokens of an interval; the same interval twice counts once."""
        state = self._engines.setdefault(engine, _Engine())
        if state.prefill_until == interval.until:
            return
        state.prefill_until = interval.until
        self.columns.add(Name("engines", engine, "prefill_tokens"), interval.until, interval.prefill_tokens)
        self.columns.put(Name("engines", engine, "prefill_backlog_tokens"), interval.until, interval.backlog_tokens)
        exact = interval.exact_steps
        if exact is not None and exact.steps > 0:
            per_step = exact.prefill / exact.steps
            self.columns.put(Name("engines", engine, "prefill_tokens_per_step"), interval.until, per_step)

    def stall(self, found: Stall) -> None:
        """Takes what is known of a stall now; what was known of it before is forgotten."""
        for place, known in enumerate(self._stalls):
            if known.id == found.id:
                self._stalls[place] = found
                return
        self._stalls.append(found)

    def document(self, seconds: float, *, unix_offset: float) -> Callable[[], Mapping[str, Any]]:
        """The last `seconds` ready for JSON, by a call that takes milliseconds and may be made in a thread."""
        cut = self.columns.cut(seconds)
        stalls = [stall for stall in self._stalls if stall.end is None or stall.end >= cut.start]
        return lambda: _document(cut, stalls, unix_offset)

    def _heartbeat(self, seen: ObserverSample) -> None:
        self.columns.peak(Name("sidecar", "", "lag_seconds"), seen.at, seen.lag)
        self.columns.add(Name("sidecar", "", "throttled_seconds"), seen.at, seen.throttled)
        for stream in self._streams.values():
            self.columns.peak(Name("engines", stream.engine, "open_gap_seconds"), seen.at, seen.at - stream.since)

    def _tokens(self, seen: StreamTokens) -> None:
        stream = self._streams.get(seen.stream)
        if stream is None:
            return
        figure = "gap_seconds" if stream.tokens else "first_token_seconds"
        self.columns.peak(Name("engines", stream.engine, figure), seen.at, seen.at - stream.since)
        if stream.tokens:
            self.columns.add(Name("engines", stream.engine, "gaps"), seen.at, 1.0)
        stream.since = seen.at
        stream.tokens += seen.tokens

    def _scraped(self, engine: str, counters: EngineCounters, seen: EngineSample) -> None:
        state = self._engines.setdefault(engine, _Engine())
        if state.known is not None and was_reset(state.known, counters):
            state.steps.restart()
            state.growth.forget()
        state.known = counters
        for gauge in _GAUGES:
            self.columns.put(Name("engines", engine, gauge), seen.at, getattr(counters, gauge))
        for counter, figure in _BOOKED.items():
            self.columns.add(Name("engines", engine, figure), seen.at, state.growth.of(counters, counter))
        interval = state.steps.scraped(counters, seen.sent_at, seen.at)
        if interval is None:
            return
        self.columns.put(Name("engines", engine, "step_age_seconds"), seen.at, interval.silence)
        self.columns.put(Name("engines", engine, "decoders"), seen.at, state.steps.decoders)
        self.columns.put(Name("engines", engine, "step_seconds"), seen.at, interval.mean_itl)
        self.columns.add(Name("engines", engine, "steps"), seen.at, interval.steps)

    def _gpu(self, reading: GpuReading, at: float) -> None:
        for gauge, figure in _GPU_GAUGES.items():
            self.columns.put(Name("gpus", reading.gpu, figure), at, getattr(reading, gauge))
        before = self._gpus.get(reading.gpu)
        self._gpus[reading.gpu] = at, reading
        if before is None or before[1].uuid != reading.uuid or at <= before[0]:
            return
        for counter in ("nvlink_rx", "nvlink_tx"):
            moved = delta(getattr(before[1], counter), getattr(reading, counter))
            rate = None if moved is None else moved / (at - before[0])
            self.columns.put(Name("gpus", reading.gpu, f"{counter}_bytes_per_second"), at, rate)

    def _pressure(self, seen: HostSample) -> None:
        before, self._host = self._host, seen
        if before is None or seen.at <= before.at:
            return
        apart = seen.at - before.at
        for (resource, kind), seconds in seen.pressure_seconds.items():
            waited = delta(before.pressure_seconds.get((resource, kind)), seconds)
            share = None if waited is None else waited / apart
            self.columns.put(Name("host", "", f"{resource}_{kind}_ratio"), seen.at, share)
        throttled = delta(before.engine_throttled_seconds, seen.engine_throttled_seconds)
        share = None if throttled is None else throttled / apart
        self.columns.put(Name("host", "", "engine_throttled_ratio"), seen.at, share)


def _document(cut: Cut, stalls: list[Stall], unix_offset: float) -> Mapping[str, Any]:
    groups: dict[str, Any] = {"engines": {}, "gpus": {}, "host": {}, "sidecar": {}}
    for name, column in sorted(cut.columns.items()):
        numbers = _numbers(column)
        if all(number is None for number in numbers):
            continue
        group = groups[name.group]
        (group.setdefault(name.member, {}) if name.member else group)[name.figure] = numbers
    return {
        "start_unix": round(cut.start + unix_offset, 3),
        "slot_seconds": SLOT_SECONDS,
        "slots": cut.slots,
        **groups,
        "stalls": [_stall(stall, unix_offset) for stall in stalls],
    }


def _stall(stall: Stall, unix_offset: float) -> Mapping[str, Any]:
    return {
        "id": stall.id,
        "engine": stall.engine,
        "kind": stall.kind,
        "cause": stall.cause,
        "start_unix": round(stall.start + unix_offset, 3),
        "end_unix": None if stall.end is None else round(stall.end + unix_offset, 3),
        "stall_seconds": round(stall.seconds, 3),
    }


def _numbers(column: Iterable[float]) -> list[float | None]:
    # Seven digits are kept: more would be noise of the four bytes.
    return [None if math.isnan(one) else round(one, 6 if -1 < one < 1 else 3) for one in column]
