"""What a scenario is: an engine, its traffic, what disturbs it, and the verdict that is true of it.

A plain value, so that a new case is a few lines. The stalls themselves are not declared: they are computed from the
steps (`truth`), and a test compares the declared verdict with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.cost import Cause, Disturbances, Pause, Slowdown
from stallwatch.simulator.faults import Fault, FaultKind, Sleep
from stallwatch.simulator.load import Load
from stallwatch.simulator.metrics import Accounting


class StallKind(StrEnum):
    """How a stall shows itself."""

    NONE = "none"
    DECODE = "decode"
    ADMISSION = "admission"
    ENGINE = "engine"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What is served over HTTP, beyond the engine."""

    model: str = "tiny"
    version: str = "0.32.0"
    data_parallel_size: int = 1
    stream_interval: int = 1
    api_key: str | None = None
    mfu_metrics: bool = False
    plugin: bool = False
    kv_connector: bool = False
    load_tracking: bool = False
    max_num_queued_reqs: int | None = None
    """More unfinished requests than this are refused with 503."""
    dev_mode: bool = False
    keep_alive_seconds: float | None = None
    """A comment is sent into streams that have been silent for so long."""
    created_series: bool = True
    accounting: Accounting = field(default_factory=Accounting)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """One kind of GPU, idle and busy."""

    name: str = "NVIDIA H100 80GB HBM3"
    sm_clock_mhz: float = 1980.0
    idle_clock_mhz: float = 345.0
    memory_clock_mhz: float = 2619.0
    power_limit_watts: float = 700.0
    idle_watts: float = 110.0
    busy_watts: float = 560.0
    memory_total_bytes: int = 80 * 1024**3
    memory_used_bytes: int = 72 * 1024**3
    power_capped: bool = False
    thermal_flag: bool = True


@dataclass(frozen=True, slots=True)
class Lag:
    """The observer's own loop stands still at `at` for `seconds`; whoever runs the observer must make it so."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A named case. `cause` and `kind` are the truth a detector is judged by."""

    name: str
    sentence: str
    duration: float = 60.0
    cause: Cause = Cause.NONE
    kind: StallKind = StallKind.NONE
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    load: Load = field(default_factory=Load)
    slowdowns: Sequence[Slowdown] = ()
    pauses: Sequence[Pause] = ()
    faults: Sequence[Fault] = ()
    sleeps: Sequence[Sleep] = ()
    observer_lag: Sequence[Lag] = ()
    probe_causes: frozenset[Cause] = frozenset()
    """Causes that a probe's own stream may truthfully meet although no reader of the load does."""
    gpu: GpuProfile = field(default_factory=GpuProfile)

    @property
    def disturbances(self) -> Disturbances:
        """Slowdowns and pauses; a stopped process stops its engine too."""
        frozen = tuple(
            Pause(at=f.start, seconds=f.end - f.start, cause=Cause.ENGINE_HANG)
            for f in self.faults
            if f.kind is FaultKind.FROZEN
        )
        return Disturbances(tuple(self.slowdowns), (*self.pauses, *frozen))
