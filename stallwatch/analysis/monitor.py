"""All engines together: observations in, findings out.

The one object that judges. It reads no clock: time comes with the observations and with the moment that findings are
asked for, so that a recorded list of observations gives the same findings bit for bit.
"""

from collections import Counter
from dataclasses import dataclass, field

from stallwatch.analysis.episodes import StallNews
from stallwatch.analysis.findings import Findings
from stallwatch.analysis.gpu import GpuHistory
from stallwatch.analysis.observer import ObserverHistory
from stallwatch.analysis.phase import PhaseWatch
from stallwatch.analysis.stalls import StallLimits
from stallwatch.analysis.streams import WAIT_WINDOW, Objectives
from stallwatch.analysis.surroundings import Surroundings
from stallwatch.analysis.watch import EngineWatch, Freshness
from stallwatch.observations import (
    CanarySkipped,
    EngineSample,
    GpuSample,
    HostSample,
    Observation,
    ObserverSample,
    Outcome,
    PollFailure,
    ServerFacts,
    SkipReason,
    Source,
    StreamClosed,
    StreamOpened,
    StreamTokens,
)

MOST_ENGINES = 64
"""Engines (data-parallel ranks) that are told apart; a server that names more is not believed."""

_HARDWARE_HOLDS = 15.0  # seconds for which a reading of the GPUs or the host is shown


@dataclass(slots=True)
class Monitor:
    """Judges one server."""

    objectives: Objectives
    freshness: Freshness
    persistent: bool = False
    limits: StallLimits = field(default_factory=StallLimits)
    engines: dict[str, EngineWatch] = field(default_factory=dict)
    life: PhaseWatch = field(default_factory=PhaseWatch)
    facts: ServerFacts | None = None
    gpus: GpuHistory = field(default_factory=GpuHistory)
    host: HostSample | None = None
    observer: ObserverHistory = field(default_factory=ObserverHistory)
    around: Surroundings = field(init=False)
    _missing: frozenset[str] = frozenset()
    _outcomes: Counter[Outcome] = field(default_factory=Counter)
    _skipped: Counter[SkipReason] = field(default_factory=Counter)
    _canary_tokens: int = 0
    _canary_success: float | None = None
    _home: dict[int, str] = field(default_factory=dict)  # engine of each open stream
    _throttled: float | None = None

    def __post_init__(self) -> None:
        self.around = Surroundings(self.gpus, self.observer)

    def observe(self, seen: Observation) -> None:
        """Takes one observation; observations come in the order of their times."""
        match seen:
            case ObserverSample():
                self._heartbeat(seen)
            case EngineSample():
                self._scraped(seen)
            case ServerFacts():
                self.facts = seen
                for engine, watch in self.engines.items():
                    watch.work.cache = seen.caches.get(engine)
            case StreamOpened():
                self._home[seen.stream] = seen.engine
                self._watch(seen.engine).stream_opened(seen)
            case StreamTokens():
                self._canary_tokens += seen.tokens
                # A recording may begin in the middle of a stream.
                if seen.stream in self._home:
                    self._watch(self._home[seen.stream]).stream_tokens(seen)
            case StreamClosed():
                self._closed(seen)
            case CanarySkipped():
                self._skipped[seen.reason] += 1
            case GpuSample():
                self.gpus.add(seen)
                self.around.sampled(seen)
            case HostSample():
                self.host = seen
                self.around.read_host(seen)
            case PollFailure():
                if seen.source is Source.ENGINE:
                    self.life.failed(seen)
                    self.around.failed(seen)

    def findings(self, now: float) -> Findings:
        """Everything there is to say at `now`."""
        gpus, host = self.gpus.latest, self.host
        gpus = gpus if gpus is not None and now - gpus.at <= _HARDWARE_HOLDS else None
        return Findings(
            at=now,
            phase=self.life.phase,
            restarts=self.life.restarts,
            version=self.facts.version if self.facts else None,
            model_name=self.facts.model_name if self.facts else None,
            engines=tuple(watch.findings(now) for _, watch in sorted(self.engines.items())),
            missing_fields=self._missing,
            canary_requests=dict(self._outcomes),
            canary_skipped=dict(self._skipped),
            canary_tokens=self._canary_tokens,
            canary_last_success=self._canary_success,
            observer_lag=self.observer.lag_within(now - WAIT_WINDOW, now),
            observer_excluded=sum(watch.streams.excluded for watch in self.engines.values()),
            observer_throttled=self._throttled,
            gpus=gpus,
            gpu_spans=self.gpus.last_second() if gpus is not None else (),
            host=host if host is not None and now - host.at <= _HARDWARE_HOLDS else None,
        )

    def news(self) -> tuple[StallNews, ...]:
        """What became of stalls since this was asked last, in the order of engines and times."""
        told: list[StallNews] = []
        for _, watch in sorted(self.engines.items()):
            told += watch.stalls.ledger.news
            watch.stalls.ledger.news.clear()
        return tuple(told)

    @property
    def slow(self) -> bool:
        """Whether the last scrape showed readers of any engine waiting longer than promised."""
        return any(watch.slow for watch in self.engines.values())

    def _heartbeat(self, seen: ObserverSample) -> None:
        self.observer.add(seen)
        if seen.throttled is not None:
            self._throttled = (self._throttled or 0.0) + seen.throttled
        for watch in self.engines.values():
            watch.tick(seen.at, self.life.phase)

    def _scraped(self, seen: EngineSample) -> None:
        if self.life.answered(seen):
            self.around.restarted(seen.at)
            for watch in self.engines.values():
                watch.restart(seen.at)
        self._missing = (self._missing - _asked(seen)) | seen.missing
        for engine, counters in seen.engines.items():
            if engine in self.engines or len(self.engines) < MOST_ENGINES:
                self._watch(engine).scraped(seen, counters)
        self.around.answered(seen.at)

    def _closed(self, seen: StreamClosed) -> None:
        self._outcomes[seen.outcome] += 1
        if seen.outcome in {Outcome.COMPLETED, Outcome.ROTATED}:
            self._canary_success = seen.at
        engine = self._home.pop(seen.stream, None)
        if engine is not None:
            self._watch(engine).stream_closed(seen)

    def _watch(self, engine: str) -> EngineWatch:
        watch = self.engines.get(engine)
        if watch is None:
            watch = EngineWatch(
                engine, self.objectives, self.observer, self.freshness, self.persistent, self.around, self.limits
            )
            if self.facts is not None:
                watch.work.cache = self.facts.caches.get(engine)
            self.engines[engine] = watch
        return watch


def _asked(seen: EngineSample) -> frozenset[str]:
    """Fields that this scrape found, so that they are no longer missing."""
    found = set()
    for counters in seen.engines.values():
        found |= {name for name in counters.__slots__ if getattr(counters, name) is not None}
    return frozenset(found)
