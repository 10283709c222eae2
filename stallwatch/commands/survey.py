"""What `stallwatch check` found out, before anybody judges it: values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from stallwatch.observations import (
    EngineCounters,
    EngineSample,
    Failure,
    GpuSample,
    HostSample,
    Lane,
    Outcome,
    ServerFacts,
)
from stallwatch.sources.gpu import GpuStatus
from stallwatch.sources.host import CpuLimit
from stallwatch.sources.served import Model


@dataclass(frozen=True, slots=True)
class Trouble:
    """An expected failure."""

    reason: Failure
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrapes:
    """The engine's metrics page, asked a few times in each of the ways in which `run` asks."""

    seconds: Mapping[Lane, tuple[float, ...]]
    page: EngineSample  # the last full page
    filter_works: bool | None
    facts: ServerFacts | None
    failed: tuple[Trouble, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTry:
    """One short stream, or why there was none."""

    skipped: str = ""
    models: tuple[Model, ...] | None = None  # None where the list could not be read
    model: Model | None = None
    asked: int = 0
    tokens: int = 0
    outcome: Outcome | None = None  # None while none was sent
    trouble: Trouble | None = None
    ttft: float | None = None  # seconds
    mean_gap: float | None = None  # seconds a token after the first
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    usage_in_chunks: bool | None = None  # None when no chunk before the last was seen
    waited: float = 0.0  # seconds from sending to the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How late our own loop ran while the server was asked."""

    worst: float
    seconds: float
    throttled: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What there is on our own side of the wire."""

    gpu: GpuSample | None = None
    gpu_status: GpuStatus | None = None  # None when it was not asked for
    host: HostSample | None = None
    host_trouble: Trouble | None = None
    cpu_limit: CpuLimit | None = None
    lateness: Lateness | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Everything that was found out."""

    waited: float = 0.0  # seconds for which `--wait` waited
    trouble: Trouble | None = None  # why the metrics page could not be read at all
    scrapes: Scrapes | None = None
    canary: CanaryTry = field(default_factory=CanaryTry)
    local: Local = field(default_factory=Local)
    wall_time: float = 0.0  # unix time of the survey

    @property
    def engines(self) -> Mapping[str, EngineCounters]:
        """Engines on the last full page."""
        return self.scrapes.page.engines if self.scrapes is not None else MappingProxyType({})
