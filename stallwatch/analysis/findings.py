"""What analysis has to say at one moment: the values that the exporter, the recorder and the web room consume."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stallwatch.analysis.episodes import StallsView
from stallwatch.analysis.gpu import GpuSpan
from stallwatch.analysis.histogram import HistogramState
from stallwatch.analysis.itl import LatencyWindow
from stallwatch.analysis.phase import Phase
from stallwatch.analysis.work import WorkView
from stallwatch.observations import EngineCounters, GpuSample, HostSample, Outcome, SkipReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryView:
    """What our own streams on one engine felt."""

    inter_chunk: HistogramState
    inter_token: HistogramState
    first_token: HistogramState
    windows: tuple[LatencyWindow, ...]
    open_gap: float | None  # seconds; None while no stream is open
    wait_max: float | None
    stream_seconds: float
    events: int
    events_missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFindings:
    """Everything about one engine (data-parallel rank)."""

    engine: str
    canary: CanaryView | None  # None before the first stream
    readers: LatencyWindow | None  # from the server's own histogram; None when it has none
    readers_total: float
    readers_good: float | None  # None when no bucket edge lies at or below the objective
    engine_wait_max: float | None
    judged_seconds: float
    missed_seconds: float
    recently_judged: float  # of the last 5 min, seconds
    recently_missed: float
    just_missed: float  # of the last 30 s, seconds
    step_age: float | None  # None when no scrape succeeded lately
    decoders: float | None
    steps: float
    decode_tokens: float
    prompt_computed: float | None
    prompt_cached: float | None
    preemptions: float | None
    counters: EngineCounters | None  # the last values known, field by field; None when no scrape succeeded lately
    canary_running: int
    canary_waiting: int
    stalls: StallsView
    work: WorkView | None = None  # None while the engine was not seen to work

    @property
    def requests(self) -> Mapping[str, float]:
        """Requests by state, our own streams taken out; a state that the server does not tell is left out.

        A stream of ours without a token waits for capacity or is being prefilled: it is taken out where it can be.
        """
        known = self.counters
        if known is None or known.running is None:
            return {}
        states = {}
        waiting = known.waiting_capacity if known.waiting_capacity is not None else known.waiting
        ours_queued = 0.0
        if waiting is not None:
            ours_queued = min(waiting, self.canary_waiting)
            states["waiting_capacity"] = waiting - ours_queued
        if known.waiting_deferred is not None:
            states["waiting_deferred"] = known.waiting_deferred
        ours_running = self.canary_running + self.canary_waiting - ours_queued
        states["running"] = max(0.0, known.running - ours_running)
        return states


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything, at one moment of the monotonic clock."""

    at: float
    phase: Phase
    restarts: int
    version: str | None
    model_name: str | None
    engines: tuple[EngineFindings, ...]
    missing_fields: frozenset[str]
    canary_requests: Mapping[Outcome, int] = field(default_factory=dict)
    canary_skipped: Mapping[SkipReason, int] = field(default_factory=dict)
    canary_tokens: int = 0
    canary_last_success: float | None = None  # monotonic
    observer_lag: float | None = None  # worst of the last 30 s
    observer_excluded: int = 0
    observer_throttled: float | None = None  # seconds, total
    gpus: GpuSample | None = None  # the last poll, if it is recent
    gpu_spans: tuple[GpuSpan, ...] = ()  # the second that ended with it
    host: HostSample | None = None
