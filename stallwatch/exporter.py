"""Findings -> the metrics page, through the catalogue.

Families are built anew for every scrape from what is true now, so that nothing stale can stay on the page; an unknown
value has no series. Building is cheap and happens on the loop; rendering text is not, and happens in a thread.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

import stallwatch
from stallwatch import catalogue as c
from stallwatch.analysis.causes import Cause, StallKind
from stallwatch.analysis.episodes import StallsView
from stallwatch.analysis.findings import CanaryView, EngineFindings, Findings
from stallwatch.analysis.histogram import HistogramState
from stallwatch.analysis.itl import LatencyWindow
from stallwatch.analysis.phase import Phase
from stallwatch.analysis.prefill import LADDER, Evidence
from stallwatch.analysis.work import WorkView
from stallwatch.catalogue import Kind, Spec
from stallwatch.health import Health
from stallwatch.observations import CLOCK_EVENT_REASONS, Failure, Outcome, SkipReason
from stallwatch.settings import Settings


@dataclass(slots=True)
class Page:
    """Families under construction; a value of None adds nothing."""

    families: dict[str, Metric] = field(default_factory=dict)

    def put(self, spec: Spec, value: float | None, *labels: str) -> None:
        """Adds a sample of a gauge or counter; `labels` in the order of the spec."""
        if value is None or math.isnan(value):
            return
        family = self._family(spec)
        family.add_sample(spec.name, dict(zip(spec.labels, labels, strict=True)), float(value))

    def put_histogram(self, spec: Spec, state: HistogramState, *labels: str) -> None:
        """Adds a histogram."""
        family = self._family(spec)
        named = dict(zip(spec.labels, labels, strict=True))
        total = 0
        for edge, count, exemplar in zip((*state.edges, math.inf), state.counts, state.exemplars, strict=True):
            total += count
            shown = Exemplar({"request_id": exemplar[0]}, exemplar[1]) if exemplar else None
            bound = "+Inf" if math.isinf(edge) else repr(edge)
            family.add_sample(f"{spec.name}_bucket", {**named, "le": bound}, total, exemplar=shown)
        family.add_sample(f"{spec.name}_count", named, total)
        family.add_sample(f"{spec.name}_sum", named, state.sum)

    def _family(self, spec: Spec) -> Metric:
        if spec.name not in self.families:
            self.families[spec.name] = _FAMILIES[spec.kind](spec.family, spec.help, labels=spec.labels)
        return self.families[spec.name]


_FAMILIES: Mapping[Kind, Callable[..., Metric]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)

    def describe(self) -> Iterator[Metric]:
        return iter(())


def families(findings: Findings, health: Health, settings: Settings, *, wall_offset: float) -> tuple[Metric, ...]:
    """The families that are known now, in the order of the catalogue.

    `wall_offset` is what turns a monotonic time into unix time, in seconds.
    """
    page = Page()
    for engine in findings.engines:
        _put_engine(page, engine, findings)
    _put_objectives(page, settings)
    _put_target(page, findings)
    _put_gpus(page, findings)
    _put_host(page, findings)
    _put_ourselves(page, findings, health, settings, wall_offset)
    return tuple(page.families[spec.name] for spec in c.CATALOGUE if spec.name in page.families)


def render(shown: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """The page in the format that `accept` asks for, and its content type. Takes milliseconds: call it in a thread."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(shown))
    ProcessCollector(registry=registry)
    encoder, content_type = choose_encoder(accept)
    body: bytes = encoder(registry)
    return body, content_type


def _put_engine(page: Page, seen: EngineFindings, findings: Findings) -> None:
    engine = seen.engine
    if seen.canary is not None:
        _put_canary(page, seen.canary, engine)
    if seen.readers is not None:
        _put_window(page, seen.readers, engine, "engine")
        page.put(c.ENGINE_ITL_TOTAL, seen.readers_total, engine)
        page.put(c.ENGINE_ITL_GOOD, seen.readers_good, engine)
    page.put(c.READER_WAIT, seen.engine_wait_max, engine, "engine")
    page.put(c.SLO_SECONDS, seen.judged_seconds, engine)
    page.put(c.SLO_MISSED_SECONDS, seen.missed_seconds, engine)
    _put_stalls(page, seen.stalls, engine)
    page.put(c.STEP_AGE, seen.step_age, engine)
    if seen.work is not None:
        _put_work(page, seen.work, engine)
    page.put(c.ENGINE_STEPS, seen.steps, engine)
    page.put(c.DECODE_TOKENS, seen.decode_tokens, engine)
    page.put(c.ENGINE_PREEMPTIONS, seen.preemptions, engine)
    page.put(c.ENGINE_PROMPT_TOKENS, seen.prompt_computed, engine, "computed")
    page.put(c.ENGINE_PROMPT_TOKENS, seen.prompt_cached, engine, "cached")
    for state, number in seen.requests.items():
        page.put(c.ENGINE_REQUESTS, number, engine, state)
    page.put(c.ENGINE_KV_USAGE, seen.counters.kv_usage if seen.counters else None, engine)
    if findings.model_name is not None or findings.version is not None:
        page.put(c.ENGINE_INFO, 1, engine, findings.version or "", findings.model_name or "")


def _put_stalls(page: Page, seen: StallsView, engine: str) -> None:
    for kind in StallKind:
        page.put(c.STALL_ACTIVE, seen.open is not None and seen.open.kind is kind, engine, kind)
        page.put_histogram(c.STALL_DURATION, seen.durations[kind], engine, kind)
    page.put(c.STALL_ACTIVE_SECONDS, seen.active_seconds, engine)
    for cause in Cause:
        if seen.open is not None:
            page.put(c.STALL_CURRENT_CAUSE, seen.open.cause is cause, engine, cause)
        page.put(c.STALL_SECONDS, seen.seconds[cause], engine, cause)
    for (kind, cause), count in seen.counts.items():
        page.put(c.STALLS, count, engine, kind, cause)
    page.put(c.READER_SECONDS_LOST, seen.reader_seconds, engine)


def _put_work(page: Page, seen: WorkView, engine: str) -> None:
    for evidence in LADDER:
        if evidence is not Evidence.UNKNOWN and seen.prefill_totals:
            page.put(c.PREFILL_TOKENS, seen.prefill_totals.get(evidence, 0.0), engine, evidence)
    page.put(c.PREFILL_PER_STEP, seen.per_step_mean, engine, seen.evidence, "mean")
    page.put(c.PREFILL_PER_STEP, seen.per_step_max, engine, seen.evidence, "max")
    if seen.step_prefill is not None:
        page.put_histogram(c.STEP_PREFILL, seen.step_prefill, engine)
    for phase, durations in seen.step_seconds.items():
        page.put_histogram(c.STEP_DURATION, durations, engine, phase)
    page.put(c.DECODE_BASELINE, seen.baseline, engine)
    page.put(c.DECODE_BASELINE_REFERENCE, seen.baseline_reference, engine)
    page.put(c.INTERFERENCE_RATIO, seen.interference_mean, engine, "mean")
    page.put(c.INTERFERENCE_RATIO, seen.interference_p95, engine, "p95")
    page.put(c.INTERFERENCE_SHARE, seen.interference_share, engine)
    page.put(c.INTERFERENCE_SECONDS, seen.interference_seconds, engine)
    page.put(c.PREFILL_BACKLOG, seen.backlog, engine)
    page.put(c.PREFILL_BACKLOG_ETA, seen.backlog_eta, engine)
    page.put(c.SPEC_ACCEPTANCE, seen.acceptance, engine)
    model, budget = seen.model, seen.budget
    if model is not None:
        page.put(c.STEP_MODEL, model.base, engine, "a")
        page.put(c.STEP_MODEL, model.per_decoder, engine, "c")
        for q, seconds in model.per_token.items():
            page.put(c.STEP_MODEL, seconds, engine, f"b{q * 100:.0f}")
        page.put(c.STEP_MODEL, model.per_token_start, engine, "b0")
        page.put(c.STEP_MODEL, model.per_token_context, engine, "b1")
        page.put(c.STEP_MODEL_R2, model.r2, engine)
    if budget is not None:
        page.put(c.PREFILL_BUDGET, budget.tokens, engine)
        page.put(c.PREFILL_BUDGET_CONTEXT, budget.context_min, engine, "min")
        page.put(c.PREFILL_BUDGET_CONTEXT, budget.context_max, engine, "max")


def _put_canary(page: Page, seen: CanaryView, engine: str) -> None:
    page.put_histogram(c.CANARY_ICL, seen.inter_chunk, engine)
    page.put_histogram(c.CANARY_ITL, seen.inter_token, engine)
    page.put_histogram(c.CANARY_TTFT, seen.first_token, engine)
    for window in seen.windows:
        _put_window(page, window, engine, "canary")
    page.put(c.OPEN_GAP, seen.open_gap, engine)
    page.put(c.READER_WAIT, seen.wait_max, engine, "canary")
    page.put(c.STREAM_SECONDS, seen.stream_seconds, engine)
    page.put(c.SLO_EVENTS, seen.events, engine)
    page.put(c.SLO_MISSED_EVENTS, seen.events_missed, engine)


def _put_window(page: Page, window: LatencyWindow, engine: str, source: str) -> None:
    length = f"{window.seconds / 60:g}m"
    page.put(c.ITL_SAMPLES, window.tokens, engine, source, length)
    for q, seconds in window.itl.items():
        page.put(c.ITL, seconds, engine, source, f"{q:g}", length)
    for q, seconds in window.time_weighted.items():
        page.put(c.ITL_TIME_WEIGHTED, seconds, engine, f"{q:g}", length)


def _put_objectives(page: Page, settings: Settings) -> None:
    page.put(c.SLO_ITL_OBJECTIVE, settings.slo.itl_seconds)
    page.put(c.SLO_TTFT_OBJECTIVE, settings.slo.ttft_seconds)
    page.put(c.SLO_TARGET, settings.slo.target)


def _put_target(page: Page, findings: Findings) -> None:
    for phase in Phase:
        page.put(c.TARGET_PHASE, phase is findings.phase, phase)
    for name in sorted(findings.missing_fields):
        page.put(c.ENGINE_METRIC_MISSING, 1, name)


def _put_gpus(page: Page, findings: Findings) -> None:
    sample = findings.gpus
    if sample is None:
        return
    for seen in sample.gpus:
        gpu = (seen.gpu, seen.uuid)
        page.put(c.GPU_INFO, 1, *gpu, seen.name or "", sample.driver or "", sample.scope)
        for spec, value in (
            (c.GPU_UTILIZATION, seen.utilization),
            (c.GPU_MEMORY_UTILIZATION, seen.memory_utilization),
            (c.GPU_MEMORY_CLOCK, seen.memory_clock),
            (c.GPU_POWER_LIMIT, seen.power_limit),
            (c.GPU_ENERGY, seen.energy),
            (c.GPU_TEMPERATURE, seen.temperature),
            (c.GPU_MEMORY_USED, seen.memory_used),
            (c.GPU_MEMORY_TOTAL, seen.memory_total),
            (c.GPU_DRAM_ACTIVE, seen.dram_active),
            (c.GPU_SM_OCCUPANCY, seen.sm_occupancy),
            (c.GPU_XID, seen.xid_errors),
        ):
            page.put(spec, value, *gpu)
        page.put(c.GPU_PCIE, seen.pcie_rx, *gpu, "rx")
        page.put(c.GPU_PCIE, seen.pcie_tx, *gpu, "tx")
        page.put(c.GPU_NVLINK, seen.nvlink_rx, *gpu, "rx")
        page.put(c.GPU_NVLINK, seen.nvlink_tx, *gpu, "tx")
        page.put(c.GPU_ECC, seen.ecc_corrected, *gpu, "corrected")
        page.put(c.GPU_ECC, seen.ecc_uncorrected, *gpu, "uncorrected")
        if seen.clock_event_reasons is not None:
            for reason in CLOCK_EVENT_REASONS:
                page.put(c.GPU_CLOCK_EVENT, reason in seen.clock_event_reasons, *gpu, reason)
    for span in findings.gpu_spans:
        gpu = (span.gpu, span.uuid)
        if span.sm_clock is not None:
            page.put(c.GPU_SM_CLOCK, span.sm_clock.low, *gpu, "min")
            page.put(c.GPU_SM_CLOCK, span.sm_clock.mean, *gpu, "mean")
            page.put(c.GPU_SM_CLOCK, span.sm_clock.high, *gpu, "max")
        page.put(c.GPU_SM_CLOCK_RATIO, span.clock_ratio, *gpu)
        page.put(c.GPU_POWER, span.power, *gpu)


def _put_host(page: Page, findings: Findings) -> None:
    seen = findings.host
    if seen is None:
        return
    for (resource, kind), seconds in seen.pressure_seconds.items():
        page.put(c.PRESSURE, seconds, resource, kind)
    page.put(c.ENGINE_THROTTLED, seen.engine_throttled_seconds)
    for link in seen.rdma:
        port = (link.device, link.port)
        page.put(c.RDMA_BYTES, link.received_bytes, *port, "received")
        page.put(c.RDMA_BYTES, link.transmitted_bytes, *port, "transmitted")
        page.put(c.RDMA_ACTIVE, link.active, *port)
        page.put(c.RDMA_RATE, None if link.rate_gbps is None else link.rate_gbps * 1e9 / 8, *port)
        for counter, count in link.congestion.items():
            page.put(c.RDMA_CONGESTION, count, *port, counter)


def _put_ourselves(page: Page, findings: Findings, health: Health, settings: Settings, wall_offset: float) -> None:
    page.put(c.BUILD_INFO, 1, stallwatch.__version__)
    for source, state in health.sources.items():
        page.put(c.SOURCE_UP, state.up, source)
        page.put(c.SOURCE_DURATION, state.duration, source)
        if state.last_success is not None:
            page.put(c.LAST_SUCCESS, state.last_success + wall_offset, source)
        for reason in Failure:
            page.put(c.SOURCE_FAILURES, health.failures[source, reason], source, reason)
    page.put(c.OBSERVER_LAG, findings.observer_lag)
    page.put(c.OBSERVER_EXCLUDED, findings.observer_excluded)
    page.put(c.OBSERVER_THROTTLED, findings.observer_throttled)
    page.put(c.INCIDENTS_WRITTEN, health.writing.incidents_written)
    page.put(c.INCIDENTS_FAILED, health.writing.incidents_failed)
    page.put(c.RECORDING_FAILURES, health.writing.recording_failures)
    page.put(c.CANARY_ENABLED, settings.canary.enabled)
    if settings.canary.enabled:
        for outcome in Outcome:
            page.put(c.CANARY_REQUESTS, findings.canary_requests.get(outcome, 0), outcome)
        for skip in SkipReason:
            page.put(c.CANARY_SKIPPED, findings.canary_skipped.get(skip, 0), skip)
        page.put(c.CANARY_TOKENS, findings.canary_tokens)
        if findings.canary_last_success is not None:
            page.put(c.CANARY_LAST_SUCCESS, findings.canary_last_success + wall_offset)
