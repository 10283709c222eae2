"""One engine (data-parallel rank), watched: its scrapes, our streams on it, and the verdict on every second."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from stallwatch.analysis.counting import Growth, NetCounter, was_reset
from stallwatch.analysis.findings import EngineFindings
from stallwatch.analysis.history import RecentMaximum
from stallwatch.analysis.itl import Gap, GapWindow
from stallwatch.analysis.observer import ObserverHistory
from stallwatch.analysis.phase import Phase
from stallwatch.analysis.readers import ReadersView
from stallwatch.analysis.slo import SecondsIndicator, allowed_gap
from stallwatch.analysis.stalls import StallLimits, StallWatch
from stallwatch.analysis.steps import StepInterval, StepWatch
from stallwatch.analysis.streams import WAIT_WINDOW, Objectives, StreamsWatch
from stallwatch.analysis.surroundings import Surroundings
from stallwatch.analysis.work import EngineWork
from stallwatch.observations import EngineCounters, EngineSample, StreamClosed, StreamOpened, StreamTokens

LATENCY_WINDOW = 300.0  # seconds
SHORT_WINDOW = 60.0  # only a reader that is always there fills it

_FIELDS = tuple(entry.name for entry in fields(EngineCounters))


@dataclass(frozen=True, slots=True)
class Freshness:
    """How long a verdict holds without a new one, seconds."""

    scrape: float
    canary: float


@dataclass(slots=True)
class EngineWatch:
    """State of one engine; every method takes its time from the observation."""

    engine: str
    objectives: Objectives
    observer: ObserverHistory
    freshness: Freshness
    persistent: bool
    around: Surroundings
    limits: StallLimits = field(default_factory=StallLimits)
    slow: bool = False  # the last scrape showed readers waiting longer than promised
    indicator: SecondsIndicator = field(default_factory=SecondsIndicator)
    streams: StreamsWatch = field(init=False)
    known: EngineCounters | None = None  # the last known value of every field
    work: EngineWork = field(default_factory=EngineWork)
    stalls: StallWatch = field(init=False)
    _steps: StepWatch = field(default_factory=StepWatch)
    _readers: ReadersView = field(init=False)
    _waits: RecentMaximum = field(default_factory=lambda: RecentMaximum(WAIT_WINDOW))
    _growth: Growth = field(default_factory=Growth)
    _step_count: float = 0.0
    _decode: NetCounter = field(default_factory=NetCounter)
    _computed: NetCounter = field(default_factory=NetCounter)
    _cached: NetCounter = field(default_factory=NetCounter)
    _preemptions: float = 0.0
    _scraped_at: float | None = None
    _ticked_at: float | None = None

    def __post_init__(self) -> None:
        lengths = (LATENCY_WINDOW, SHORT_WINDOW) if self.persistent else (LATENCY_WINDOW,)
        windows = tuple(GapWindow(seconds) for seconds in lengths)
        self.streams = StreamsWatch(self.objectives, self.indicator, self.observer, windows)
        self._readers = ReadersView(LATENCY_WINDOW, self.objectives.itl)
        self.stalls = StallWatch(self.engine, self.limits, self.around, self.work.baseline.seconds)

    def scraped(self, sample: EngineSample, counters: EngineCounters) -> None:
        """Takes what one scrape said of this engine."""
        if self.known is not None and was_reset(self.known, counters):
            self.restart(sample.at)
        interval = self._steps.scraped(counters, sample.sent_at, sample.at)
        self.known = counters if self.known is None else _updated(self.known, counters)
        self._scraped_at = sample.at
        self._count(counters)
        self._readers.scraped(sample.at, counters.itl_buckets)
        prefill = self.work.last
        self.work.scraped(counters, sample.at)
        self.stalls.scraped(
            sample,
            counters,
            interval,
            self.work.last if self.work.last is not prefill else None,
            decoders=self._steps.decoders,
            progressed_at=self._steps.progressed_at,
        )
        self.slow = interval is not None and self._judge(interval, sample)

    def restart(self, at: float) -> None:
        """The server was seen at `at` to be another process: its counters start over, our totals do not."""
        self.stalls.restart(at)
        self.known = None
        self._steps.restart()
        self._growth.forget()
        self.work.restart()

    def stream_opened(self, seen: StreamOpened) -> None:
        """One of our requests was sent to this engine."""
        self.streams.opened(seen)
        self.stalls.stream_opened(seen)
        self.work.stream_opened(seen.stream)

    def stream_tokens(self, seen: StreamTokens) -> None:
        """Tokens of our own arrived."""
        stream = self.streams.open.get(seen.stream)
        if stream is not None and stream.decoding:
            self._decode.own(seen.tokens)
            self._readers.own_gap(Gap(stream.since, seen.at, seen.tokens))
        else:
            self._decode.own(seen.tokens - 1)
        self.work.stream_answered(seen.stream)
        self.stalls.stream_tokens(seen)
        self.streams.tokens(seen)

    def stream_closed(self, seen: StreamClosed) -> None:
        """One of our streams ended."""
        self.streams.closed(seen)
        self.stalls.stream_closed(seen)
        computed = None
        if seen.prompt_tokens is not None:
            cached = min(seen.cached_tokens or 0, seen.prompt_tokens)
            computed = seen.prompt_tokens - cached
            self._computed.own(computed)
            self._cached.own(cached)
        self.work.stream_closed(seen.stream, computed)

    def tick(self, now: float, phase: Phase) -> None:
        """Moves every live number on to `now`."""
        before, self._ticked_at = self._ticked_at, now
        self.streams.tick(now)
        self.stalls.tick(now, phase)
        if before is not None and self._has_verdict(now, phase):
            self.indicator.judge(before, now)

    def findings(self, now: float) -> EngineFindings:
        """What there is to say at `now`."""
        seen_canary = bool(self.streams.open) or self.streams.last_end is not None
        fresh = self._scraped_at is not None and now - self._scraped_at <= self.freshness.scrape
        known = self.known if fresh else None
        age = self._steps.age() if fresh else None
        waits = [wait for wait in (self._waits.at(now), age if self._decoding() else None) if wait is not None]
        readers = self._readers.at(now)
        stalls = self.stalls.view(now)
        frozen = stalls.closed if stalls.open is None else (stalls.open, *stalls.closed)
        judged = self.indicator.judged_within(now - LATENCY_WINDOW, now)
        return EngineFindings(
            engine=self.engine,
            canary=self.streams.view(now) if seen_canary else None,
            readers=readers,
            readers_total=self._readers.total,
            readers_good=self._readers.good if self._readers.edge is not None else None,
            engine_wait_max=max(waits, default=None),
            judged_seconds=self.indicator.judged,
            missed_seconds=self.indicator.missed,
            recently_judged=judged,
            recently_missed=self.indicator.missed_within(now - LATENCY_WINDOW, now),
            just_missed=self.indicator.missed_within(now - WAIT_WINDOW, now),
            step_age=age,
            decoders=self._steps.decoders if known is not None and known.itl_count is not None else None,
            steps=self._step_count,
            decode_tokens=self._decode.total,
            prompt_computed=self._computed.total if self._knows("prompt_local_compute") else None,
            prompt_cached=self._cached.total if self._knows("prompt_local_cache_hit") else None,
            preemptions=self._preemptions if self._knows("preemptions") else None,
            counters=known,
            canary_running=sum(stream.decoding for stream in self.streams.open.values()),
            canary_waiting=sum(not stream.decoding for stream in self.streams.open.values()),
            stalls=stalls,
            work=self.work.view(
                now,
                objective=self.objectives.itl,
                fresh=fresh,
                stalls=[(stall.start, now if stall.end is None else stall.end) for stall in frozen],
                judged=judged,
            ),
        )

    def _judge(self, interval: StepInterval, sample: EngineSample) -> bool:
        """Books what the scrape shows to be missed; returns whether it shows anything of the kind."""
        missed = False
        if interval.mean_itl is not None:
            self._waits.add(sample.at, interval.mean_itl)
            if interval.mean_itl > allowed_gap(interval.tokens_per_sample or 1.0, self.objectives.itl):
                self.indicator.miss(interval.itl_since, interval.until)
                missed = True
        if self._decoding() and interval.silence > 0:
            self._waits.add(sample.at, interval.silence)
            if interval.silence > self.objectives.itl:
                self.indicator.miss(sample.sent_at - interval.silence, sample.sent_at)
                missed = True
        return missed

    def _decoding(self) -> bool:
        # Half a request is less than one: the estimate is a mean over the steps of an interval.
        return self._steps.decoders >= 0.5

    def _has_verdict(self, now: float, phase: Phase) -> bool:
        if phase in {Phase.ASLEEP, Phase.GONE}:
            return False
        if phase is Phase.SERVING and self._scraped_at is not None and now - self._scraped_at <= self.freshness.scrape:
            return True
        # Also without a metrics page: what our own streams get is a verdict.
        ended = self.streams.last_end
        return self.streams.decoding_since() is not None or (ended is not None and now - ended <= self.freshness.canary)

    def _knows(self, name: str) -> bool:
        return self.known is not None and getattr(self.known, name) is not None

    def _count(self, counters: EngineCounters) -> None:
        grew = self._growth.of
        self._step_count += grew(counters, "iterations") or 0.0
        self._preemptions += grew(counters, "preemptions") or 0.0
        first = grew(counters, "first_tokens")
        self._decode.own(first or 0.0)  # a first token is the work of a prefill step
        self._decode.grew(grew(counters, "generation_tokens"))
        self._computed.grew(grew(counters, "prompt_local_compute"))
        self._cached.grew(grew(counters, "prompt_local_cache_hit"))


def _updated(before: EngineCounters, after: EngineCounters) -> EngineCounters:
    changes: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(after, name)
        if value is not None and not (name == "plugin" and not value):
            changes[name] = value
    return replace(before, **changes)
