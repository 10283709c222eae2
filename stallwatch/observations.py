"""The typed values that cross rooms: what a source saw, and when.

Sources make them, analysis consumes them, the recorder writes them down. Every time is in seconds of one monotonic
clock unless its name says `unix`. `None` means "not known": not asked for in this poll, or not offered by the server;
it never means zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Source(StrEnum):
    """Where observations come from; the `source` label of the sidecar's own health metrics."""

    ENGINE = "engine"
    CANARY = "canary"
    GPU = "gpu"
    HOST = "host"


class Failure(StrEnum):
    """Why a poll brought nothing; the `reason` label of `source_failures_total`."""

    REFUSED = "refused"  # nothing listens, or the connection was reset before an answer
    TIMEOUT = "timeout"
    DNS = "dns"
    TLS = "tls"
    REDIRECT = "redirect"  # never followed: the key must not travel to another host
    AUTH = "auth"  # 401 or 403
    BUSY = "busy"  # 429 or 503 from admission control
    REJECTED = "rejected"  # any other 4xx: the request itself is wrong for this server
    SERVER_ERROR = "server_error"  # 5xx, or an error object inside a stream
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"  # an answer that is not what the endpoint must give
    CUT = "cut"  # the answer broke off
    UNAVAILABLE = "unavailable"  # the source itself is gone (driver lost, file unreadable)


@dataclass(frozen=True, slots=True)
class PollFailure:
    """An expected failure of one poll, as a value."""

    at: float
    source: Source
    reason: Failure
    detail: str = ""


class Lane(StrEnum):
    """How much of the metrics page a scrape asked for."""

    DETECTION = "detection"
    ESTIMATOR = "estimator"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Buckets:
    """A cumulative histogram as exposed: `counts[i]` observations were at most `edges[i]`; the last edge is +Inf."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """What one scrape said of one engine (data-parallel rank), in the words of vLLM's own metrics.

    Counters are cumulative since the server's start. `sources/engine.py` holds the table of vLLM names by version.
    """

    # gauges, changed only when a step ends
    running: float | None = None
    waiting: float | None = None
    waiting_capacity: float | None = None
    waiting_deferred: float | None = None
    kv_usage: float | None = None  # ratio 0..1
    kv_fetch_waiting: float | None = None  # requests in any stage of fetching KV from elsewhere
    # booked at admission
    prefix_queries: float | None = None  # tokens
    prefix_hits: float | None = None
    external_queries: float | None = None
    external_hits: float | None = None
    # booked with an output
    iterations: float | None = None  # steps that produced an output
    iteration_tokens: float | None = None
    generation_tokens: float | None = None
    itl_count: float | None = None
    itl_sum: float | None = None  # seconds
    itl_buckets: Buckets | None = None
    preemptions: float | None = None
    # booked with a request's first output
    first_tokens: float | None = None  # count of TTFT
    ttft_sum: float | None = None  # seconds
    ttft_buckets: Buckets | None = None
    prompt_tokens: float | None = None
    prompt_local_compute: float | None = None
    prompt_local_cache_hit: float | None = None
    prompt_external: float | None = None
    # booked when a request finishes; client disconnects are never booked
    finished: float | None = None  # all reasons
    finished_count: float | None = None  # count of request_prompt_tokens
    finished_prompt_tokens: float | None = None
    finished_generation_tokens: float | None = None
    finished_prefill_computed_tokens: float | None = None
    queue_seconds: float | None = None
    # with a flag or a plugin only
    write_bytes: float | None = None  # estimated_write_bytes_per_gpu
    spec_draft_tokens: float | None = None
    spec_accepted_tokens: float | None = None
    kv_load_seconds: float | None = None  # time spent loading KV from a connector
    plugin: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Samples of the families `stallwatch_plugin_*`, keyed `name{label="value",...}` without the engine label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One successful scrape of the metrics page."""

    sent_at: float  # just before the request was written
    at: float  # right after the last byte of the answer was read
    lane: Lane
    engines: Mapping[str, EngineCounters]
    missing: frozenset[str] = frozenset()  # fields of EngineCounters that were asked for and that no engine has
    filtered: bool = True  # the server honoured the filter
    asleep: bool | None = None
    process_start_unix: float | None = None
    bytes: int = 0
    garbage_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """KV cache layout of one engine, from `cache_config_info`."""

    block_size: int | None = None  # tokens
    num_gpu_blocks: int | None = None
    prefix_caching: bool | None = None
    hybrid: bool | None = None  # sliding window or state-space groups beside full attention

    @property
    def capacity_tokens(self) -> float | None:
        """Tokens that the usage ratio 1.0 stands for: one block is vLLM's null block."""
        if self.block_size is None or self.num_gpu_blocks is None or self.num_gpu_blocks < 2:
            return None
        return float((self.num_gpu_blocks - 1) * self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Slow facts about the server, read with the full page."""

    at: float
    version: str | None = None
    model_name: str | None = None  # the served base model
    process_start_unix: float | None = None
    caches: Mapping[str, CacheFacts] = field(default_factory=lambda: MappingProxyType({}))


class Outcome(StrEnum):
    """How a canary stream ended; the `outcome` label of `canary_requests_total`."""

    COMPLETED = "completed"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    REJECTED = "rejected"
    BUSY = "busy"
    AUTH = "auth"
    SERVER_ERROR = "server_error"
    CUT = "cut"
    MALFORMED = "malformed"
    ROTATED = "rotated"  # persistent mode: handed over to the next stream
    CANCELLED = "cancelled"  # our own shutdown or a drain of the server


class SkipReason(StrEnum):
    """Why no canary was sent; the `reason` label of `canary_skipped_total`."""

    BUSY = "busy"
    BUDGET = "budget"
    PAUSED = "paused"
    ASLEEP = "asleep"
    NOT_SERVING = "not_serving"
    IDLE = "idle"  # `canary.only_when_busy` and nothing else runs


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A canary request was sent."""

    at: float
    stream: int
    engine: str
    request_id: str


@dataclass(frozen=True, slots=True)
class StreamTokens:
    """One socket read of a canary stream that carried at least one new token; `at` was stamped right after the read."""

    at: float
    stream: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A canary stream ended."""

    at: float
    stream: int
    outcome: Outcome
    detail: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CanarySkipped:
    """A canary was due and was not sent."""

    at: float
    reason: SkipReason


@dataclass(frozen=True, slots=True)
class ObserverSample:
    """How late our own loop ran since the last sample; it also is the heartbeat that moves every live number on."""

    at: float
    lag: float  # worst overshoot of a short sleep, seconds
    throttled: float | None = None  # seconds that our own cgroup was throttled since the last sample


CLOCK_EVENT_REASONS = (
    *("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown"),
    *("hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting", "board_limit", "reliability", "other"),
)
"""NVML's clock event reasons in its current words; "other" stands for any that is newer than this list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One poll of one GPU through NVML; a figure that the device does not give is None."""

    gpu: str  # index as NVML counts
    uuid: str
    name: str | None = None
    utilization: float | None = None  # ratio
    memory_utilization: float | None = None  # ratio: share of time in which memory was read or written
    sm_clock: float | None = None  # hertz
    memory_clock: float | None = None
    max_sm_clock: float | None = None
    power: float | None = None  # watts
    power_limit: float | None = None
    energy: float | None = None  # joules since the driver was loaded
    temperature: float | None = None  # degrees Celsius
    clock_event_reasons: frozenset[str] | None = None
    memory_used: float | None = None  # bytes
    memory_total: float | None = None
    pcie_rx: float | None = None  # bytes per second
    pcie_tx: float | None = None
    nvlink_rx: float | None = None  # bytes since the driver was loaded
    nvlink_tx: float | None = None
    ecc_corrected: float | None = None
    ecc_uncorrected: float | None = None
    xid_errors: float | None = None  # seen by this process
    dram_active: float | None = None  # ratio
    sm_occupancy: float | None = None  # ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One poll of all watched GPUs."""

    at: float
    gpus: tuple[GpuReading, ...]
    scope: str  # "selected" | "container" | "node": how sure it is that these are vLLM's GPUs
    driver: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """Counters of one RDMA port from sysfs, cumulative."""

    device: str
    port: str
    received_bytes: float | None = None
    transmitted_bytes: float | None = None
    active: bool | None = None
    rate_gbps: float | None = None
    congestion: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """One reading of the host's and our own container's pressure; counters are cumulative."""

    at: float
    own_throttled_seconds: float | None = None
    own_cpu_seconds: float | None = None
    own_rss_bytes: float | None = None
    engine_throttled_seconds: float | None = None  # vLLM's container, where its cgroup can be read
    pressure_seconds: Mapping[tuple[str, str], float] = field(default_factory=lambda: MappingProxyType({}))
    """PSI totals keyed (resource, kind): ("memory", "full") and so on."""
    rdma: tuple[RdmaPort, ...] = ()


CanaryObservation = StreamOpened | StreamTokens | StreamClosed | CanarySkipped
Observation = EngineSample | ServerFacts | CanaryObservation | ObserverSample | GpuSample | HostSample | PollFailure
