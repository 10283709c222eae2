"""Every metric that stallwatch exports, declared once.

The exporter may build only what stands here; the metric reference, the dashboards' and the rules' tests read it too.
Names are stable: a renamed metric is a breaking change and goes into the changelog as old -> new.
"""

import json
from dataclasses import dataclass
from enum import StrEnum

from stallwatch.analysis.histogram import LATENCY_EDGES

PREFIX = "stallwatch_"


class Kind(StrEnum):
    """Prometheus metric types that we use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric family: its name on the page (a counter's ends in `_total`), what it says, and its labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name in HELP and TYPE as prometheus_client wants it: without a counter's `_total`."""
        return self.name.removesuffix("_total") if self.kind is Kind.COUNTER else self.name

    @property
    def series(self) -> frozenset[str]:
        """Sample names of the family."""
        if self.kind is Kind.HISTOGRAM:
            return frozenset({f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count"})
        return frozenset({self.name})


def _spec(kind: Kind, name: str, help_text: str, *labels: str) -> Spec:
    return Spec(PREFIX + name, kind, help_text, labels)


def _counter(name: str, help_text: str, *labels: str) -> Spec:
    return _spec(Kind.COUNTER, name, help_text, *labels)


def _gauge(name: str, help_text: str, *labels: str) -> Spec:
    return _spec(Kind.GAUGE, name, help_text, *labels)


def _histogram(name: str, help_text: str, *labels: str) -> Spec:
    return _spec(Kind.HISTOGRAM, name, help_text, *labels)


# What readers feel
CANARY_ICL = _histogram(
    "canary_inter_chunk_latency_seconds",
    "Time between two socket reads of a canary stream that each carried a token: what a reader feels.",
    "engine",
)
CANARY_ITL = _histogram(
    "canary_inter_token_latency_seconds",
    "Inter-token latency of canary streams: each gap divided by the tokens that ended it, once per token.",
    "engine",
)
CANARY_TTFT = _histogram(
    "canary_time_to_first_token_seconds",
    "Time from sending a canary request to its first token; a stream that timed out counts with the time waited.",
    "engine",
)
ITL = _gauge(
    "itl_seconds",
    "Exact quantile q of inter-token latency in the window: source canary is our own streams weighted by tokens, the "
    "open gap included; source engine is all readers, interpolated in vLLM's buckets. Absent below the minimum count.",
    "engine",
    "source",
    "q",
    "window",
)
ITL_SAMPLES = _gauge(
    "itl_samples",
    "Samples in the window of stallwatch_itl_seconds; q 0.95 needs 60 of them and q 0.99 needs 200.",
    "engine",
    "source",
    "window",
)
ITL_TIME_WEIGHTED = _gauge(
    "itl_time_weighted_seconds",
    "Smallest gap such that gaps up to it make up the share q of the window's time, the open gap included.",
    "engine",
    "q",
    "window",
)
OPEN_GAP = _gauge(
    "open_gap_seconds",
    "Time since the last token of the canary stream that is open now, or since sending while none has come.",
    "engine",
)
READER_WAIT = _gauge(
    "reader_wait_max_seconds",
    "Largest wait of the last 30 s, open or closed: gaps and first-token waits (canary); step age while requests "
    "decode, and mean ITL of a poll interval (engine).",
    "engine",
    "source",
)
STREAM_SECONDS = _counter("stream_seconds_total", "Seconds during which a canary stream was open.", "engine")
SLO_SECONDS = _counter("slo_seconds_total", "Seconds judged while the server serves.", "engine")
SLO_MISSED_SECONDS = _counter(
    "slo_missed_seconds_total",
    "Seconds among them in which a reader waited longer than the objective, seen by the canary or by the engine's "
    "own counters; added live, each second once.",
    "engine",
)
SLO_EVENTS = _counter("slo_events_total", "Tokens that were due on canary streams, for information.", "engine")
SLO_MISSED_EVENTS = _counter("slo_missed_events_total", "Tokens among them that were not there in time.", "engine")
SLO_ITL_OBJECTIVE = _gauge("slo_itl_objective_seconds", "Objective for inter-token latency (slo.itl_seconds).")
SLO_TTFT_OBJECTIVE = _gauge("slo_ttft_objective_seconds", "Objective for the first token (slo.ttft_seconds).")
SLO_TARGET = _gauge("slo_target_ratio", "Share of judged seconds that must not be missed (slo.target).")

# Stalls
STALL_ACTIVE = _gauge("stall_active", "1 while a stall of this kind is going on.", "engine", "kind")
STALL_ACTIVE_SECONDS = _counter(
    "stall_active_seconds_total",
    "Seconds in stalls of any kind, each once, added while they go on. No cause: a counter cannot take one back.",
    "engine",
)
STALL_CURRENT_CAUSE = _gauge(
    "stall_current_cause",
    "1 for what the stall that is going on comes down to so far; absent while there is none.",
    "engine",
    "cause",
)
STALLS = _counter("stalls_total", "Stalls that closed, by kind and cause.", "engine", "kind", "cause")
STALL_SECONDS = _counter(
    "stall_seconds_total",
    "Seconds by which the gaps in closed stalls exceeded what is usual, by cause.",
    "engine",
    "cause",
)
STALL_DURATION = _histogram("stall_duration_seconds", "Closed stalls from begin to end.", "engine", "kind")
READER_SECONDS_LOST = _counter(
    "reader_seconds_lost_total",
    "Stall seconds times the readers that waited, our own streams not counted; added when a stall closes.",
    "engine",
)

# What the engine says
ENGINE_ITL_TOTAL = _counter(
    "engine_itl_total", "ITL samples of vLLM's histogram since stallwatch started, the canary's taken out.", "engine"
)
ENGINE_ITL_GOOD = _counter(
    "engine_itl_good_total",
    "Those at or below the largest bucket edge that is not above the objective; absent when no edge is.",
    "engine",
)
STEP_AGE = _gauge(
    "step_age_seconds",
    "Time for which no engine step was seen to end while requests run: a lower bound, as of the last scrape.",
    "engine",
)
ENGINE_STEPS = _counter("engine_steps_total", "Engine steps that produced output, since stallwatch started.", "engine")
PREFILL_TOKENS = _counter(
    "scheduled_prefill_tokens_total",
    "Prompt tokens computed since stallwatch started, the canary's taken out. Each is counted once, under the evidence "
    "that told it: plugin and mfu are exact, balance is an estimate, completion comes when a prompt has ended.",
    "engine",
    "evidence",
)
PREFILL_PER_STEP = _gauge(
    "scheduled_prefill_tokens_per_step",
    "Prompt tokens in an engine step over the last 15 s, mean and max, by the best evidence there is; absent while no "
    "step ends.",
    "engine",
    "evidence",
    "stat",
)
STEP_PREFILL = _histogram(
    "step_prefill_tokens",
    "Prompt tokens of single engine steps: all with the plugin, else those that ended alone between two polls.",
    "engine",
)
STEP_DURATION = _histogram(
    "step_duration_seconds",
    "Duration of single engine steps by phase (decode, mixed, prefill): all with the plugin, those of one poll with "
    "their mean; else those that ended alone between two polls, which are the long ones, and of phase prefill none.",
    "engine",
    "phase",
)
DECODE_BASELINE = _gauge(
    "decode_baseline_seconds",
    "Usual duration of a step without prefill, for as many decoding requests as there were last; 15 min of memory.",
    "engine",
)
DECODE_BASELINE_REFERENCE = _gauge(
    "decode_baseline_reference_seconds",
    "What that was over the last day of work, restarts included: above it the engine became slower for good.",
    "engine",
)
INTERFERENCE_RATIO = _gauge(
    "interference_ratio",
    "Time that steps took beyond their decode baseline because of prefill, to the baseline, over 5 min: 0 is none, 1 "
    "is twice as slow. stat p95 is that of single steps, absent where too few of them are known.",
    "engine",
    "stat",
)
INTERFERENCE_SHARE = _gauge(
    "interference_share_ratio",
    "Share of the judged seconds of the last 5 min that were stalls with prefill in the engine's steps.",
    "engine",
)
INTERFERENCE_SECONDS = _counter(
    "interference_seconds_total",
    "Seconds by which steps with decoders took longer because prompts were computed in them.",
    "engine",
)
PREFILL_BACKLOG = _gauge(
    "prefill_backlog_tokens", "Prompt tokens of admitted requests that are not computed yet.", "engine"
)
PREFILL_BACKLOG_ETA = _gauge(
    "prefill_backlog_eta_seconds", "Seconds until they are computed, at the pace seen.", "engine"
)
STEP_MODEL = _gauge(
    "step_model_coefficient",
    "A step of d decoders and p prompt tokens takes a + c*d + b*p seconds: terms a and c from steps without prefill; "
    "b50, b90, b95 quantiles of b over prompt tokens; b0 and b1 from b = b0 + b1 * tokens of context.",
    "engine",
    "term",
)
STEP_MODEL_R2 = _gauge(
    "step_model_r2",
    "Share of the variance of step durations that the step model explains; below 0.5 it is poor.",
    "engine",
)
PREFILL_BUDGET = _gauge(
    "prefill_budget_tokens",
    "Largest prefill in a step that keeps 95 % of steps within slo.itl_seconds, for prompts like those seen. "
    "For --max-num-batched-tokens add the decoding requests; absent below 50 steps or when the model is poor.",
    "engine",
)
PREFILL_BUDGET_CONTEXT = _gauge(
    "prefill_budget_context_tokens",
    "Context, in tokens before the prefill, from which the budget was learned: min and max. Deeper prompts cost more.",
    "engine",
    "bound",
)
SPEC_ACCEPTANCE = _gauge(
    "engine_spec_acceptance_ratio", "Share of drafted tokens that were accepted over the last minute.", "engine"
)
DECODE_TOKENS = _counter(
    "scheduled_decode_tokens_total", "Tokens decoded since stallwatch started, the canary's taken out.", "engine"
)
ENGINE_REQUESTS = _gauge(
    "engine_requests",
    "Requests in the engine, the canary's taken out: running, waiting for capacity, or deferred (KV transfer, LoRA, "
    "grammar). Servers before 0.20 do not tell why a request waits: all count as waiting_capacity.",
    "engine",
    "state",
)
ENGINE_KV_USAGE = _gauge("engine_kv_cache_usage_ratio", "Share of KV cache blocks in use.", "engine")
ENGINE_PREEMPTIONS = _counter("engine_preemptions_total", "Preemptions since stallwatch started.", "engine")
ENGINE_PROMPT_TOKENS = _counter(
    "engine_prompt_tokens_total",
    "Prompt tokens of requests that got their first token, the canary's taken out: computed, or cached locally.",
    "engine",
    "source",
)
ENGINE_METRIC_MISSING = _gauge(
    "engine_metric_missing",
    "1 for a figure that stallwatch asked vLLM for and that this server does not have.",
    "field",
)
ENGINE_INFO = _gauge(
    "engine_info", "1; which vLLM and which base model this engine serves.", "engine", "version", "model_name"
)
TARGET_PHASE = _gauge(
    "target_phase", "1 for the phase that the server is in: starting, serving, asleep or gone.", "phase"
)

# The GPUs, each as NVML counts them
_GPU = ("gpu", "uuid")
GPU_INFO = _gauge(
    "gpu_info",
    "1; scope tells how sure it is that this GPU is vLLM's: selected by gpu.devices, the only ones in this container, "
    "or all of the node (then select with gpu.devices).",
    *_GPU,
    "name",
    "driver",
    "scope",
)
GPU_UTILIZATION = _gauge("gpu_utilization_ratio", "Share of the driver's sampling period in which a kernel ran.", *_GPU)
GPU_MEMORY_UTILIZATION = _gauge(
    "gpu_memory_utilization_ratio", "Share of that period in which device memory was read or written.", *_GPU
)
GPU_SM_CLOCK = _gauge("gpu_sm_clock_hertz", "SM clock over the last second: min, mean and max.", *_GPU, "stat")
GPU_SM_CLOCK_RATIO = _gauge(
    "gpu_sm_clock_ratio",
    "SM clock of the last second while busy, to what this GPU usually has when it is busy; absent until known.",
    *_GPU,
)
GPU_MEMORY_CLOCK = _gauge("gpu_memory_clock_hertz", "Present clock of the device memory.", *_GPU)
GPU_POWER = _gauge(
    "gpu_power_watts", "Mean power of the last second, from the energy counter where there is one.", *_GPU
)
GPU_POWER_LIMIT = _gauge("gpu_power_limit_watts", "Power limit that the driver enforces.", *_GPU)
GPU_ENERGY = _counter("gpu_energy_joules_total", "Energy since the driver was loaded.", *_GPU)
GPU_TEMPERATURE = _gauge("gpu_temperature_celsius", "Temperature of the GPU's core.", *_GPU)
GPU_CLOCK_EVENT = _gauge(
    "gpu_clock_event",
    "1 while the driver names this reason for the clock; sw_power_cap is normal under load and proves nothing alone.",
    *_GPU,
    "reason",
)
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", "Device memory in use; absent on unified memory.", *_GPU)
GPU_MEMORY_TOTAL = _gauge("gpu_memory_total_bytes", "Device memory; absent on unified memory.", *_GPU)
GPU_PCIE = _gauge("gpu_pcie_bytes_per_second", "PCIe throughput, as last sampled: rx or tx.", *_GPU, "direction")
GPU_NVLINK = _counter("gpu_nvlink_bytes_total", "NVLink payload since the driver was loaded.", *_GPU, "direction")
GPU_DRAM_ACTIVE = _gauge(
    "gpu_dram_active_ratio", "Share of time in which DRAM moved data (GPM, Hopper and later).", *_GPU
)
GPU_SM_OCCUPANCY = _gauge(
    "gpu_sm_occupancy_ratio", "Resident warps to the most possible (GPM, Hopper and later).", *_GPU
)
GPU_ECC = _counter("gpu_ecc_errors_total", "ECC errors of the device: corrected or uncorrected.", *_GPU, "kind")
GPU_XID = _counter("gpu_xid_errors_total", "Xid errors seen since stallwatch started.", *_GPU)

# The host
PRESSURE = _counter(
    "pressure_waiting_seconds_total",
    "Time for which some or all (kind full) tasks of the host waited for the resource (pressure stall information).",
    "resource",
    "kind",
)
ENGINE_THROTTLED = _counter(
    "engine_throttled_seconds_total", "Time for which vLLM's container was throttled; needs host.engine_cgroup."
)
_PORT = ("device", "port")
RDMA_BYTES = _counter("rdma_bytes_total", "Bytes through the RDMA port: received or transmitted.", *_PORT, "direction")
RDMA_CONGESTION = _counter(
    "rdma_congestion_total", "Congestion and loss counters of the RDMA port, by the driver's name.", *_PORT, "counter"
)
RDMA_ACTIVE = _gauge("rdma_link_active", "1 when the RDMA port's link is active.", *_PORT)
RDMA_RATE = _gauge("rdma_link_bytes_per_second", "Rate that the RDMA port's link negotiated.", *_PORT)

# Ourselves
BUILD_INFO = _gauge("build_info", "1; the version of stallwatch.", "version")
SOURCE_UP = _gauge("source_up", "1 when the last poll of the source succeeded, 0 when it failed.", "source")
SOURCE_DURATION = _gauge("source_poll_duration_seconds", "How long the last poll of the source took.", "source")
SOURCE_FAILURES = _counter("source_failures_total", "Polls of the source that failed.", "source", "reason")
LAST_SUCCESS = _gauge(
    "last_poll_success_timestamp_seconds", "Unix time of the last successful poll of the source.", "source"
)
OBSERVER_LAG = _gauge("observer_lag_seconds", "Worst lateness of our own event loop in the last 30 s.")
OBSERVER_EXCLUDED = _counter(
    "observer_excluded_gaps_total", "Canary gaps that our own lateness explains, kept out of every other figure."
)
OBSERVER_THROTTLED = _counter(
    "observer_throttled_seconds_total", "Seconds for which our own container was throttled by its CPU limit."
)
CANARY_ENABLED = _gauge("canary_enabled", "1 when canary streams are switched on.")
CANARY_REQUESTS = _counter("canary_requests_total", "Canary streams ended, by outcome.", "outcome")
CANARY_SKIPPED = _counter("canary_skipped_total", "Canary streams that were due and not sent, by reason.", "reason")
CANARY_TOKENS = _counter("canary_tokens_total", "Tokens that canary streams received.")
CANARY_LAST_SUCCESS = _gauge(
    "canary_last_success_timestamp_seconds", "Unix time at which a canary stream last ended as it should."
)
INCIDENTS_WRITTEN = _counter(
    "incidents_written_total",
    "Incident bundles written to recorder.directory; one that is written again as its incident goes on counts once.",
)
INCIDENTS_FAILED = _counter(
    "incidents_failed_total", "Incident bundles, or new versions of one, that could not be written."
)
RECORDING_FAILURES = _counter(
    "recording_failures_total", "Parts of a recording (recorder.file) that could not be written and are lost."
)

CATALOGUE: tuple[Spec, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Spec))


def reference(style: str = "text") -> str:
    """The metric reference as `text`, `markdown` or `json`. Raises `ValueError` for another style."""
    if style == "json":
        rows = [
            {"name": spec.name, "type": spec.kind, "labels": list(spec.labels), "help": spec.help} for spec in CATALOGUE
        ]
        return json.dumps({"metrics": rows, "latency_buckets_seconds": LATENCY_EDGES}, indent=2)
    if style == "markdown":
        lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{spec.name}` | {spec.kind} | {' '.join(f'`{label}`' for label in spec.labels)} | {spec.help} |"
            for spec in CATALOGUE
        ]
        return "\n".join(lines)
    if style == "text":
        return "\n".join(
            f"{spec.name}{{{','.join(spec.labels)}}} {spec.kind}\n    {spec.help}" for spec in CATALOGUE
        ).replace("{}", "")
    raise ValueError(f"no such style: {style!r}; one of text, markdown, json")
