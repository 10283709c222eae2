"""Every setting, one frozen model a room; each room receives only its own.

Names carry their units. A value that loads is a value that works: bounds and impossible combinations are refused here.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, UrlConstraints

TargetUrl = Annotated[HttpUrl, UrlConstraints(allowed_schemes=["http", "https"])]


class Room(BaseModel):
    """Base of every room's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineSettings(Room):
    """The vLLM server that is watched."""

    url: TargetUrl = HttpUrl("http://127.0.0.1:8000")
    interval_seconds: float = Field(0.25, ge=0.05, le=60)
    timeout_seconds: float = Field(2.0, gt=0)
    full_interval_seconds: float = Field(30.0, ge=1)
    max_scrape_duty: float = Field(0.02, gt=0, le=1)
    start_timeout_seconds: float = Field(1800.0, gt=0)
    api_key_file: Path | None = None
    ca_file: Path | None = None
    server_name: str | None = None
    insecure_skip_verify: bool = False


class CanarySettings(Room):
    """The synthetic reader."""

    enabled: bool = True
    url: TargetUrl | None = None  # engine.url when not set
    mode: Literal["pulse", "persistent"] = "pulse"
    api: Literal["completions", "chat"] = "completions"
    model: str | None = None
    interval_seconds: float = Field(15.0, ge=1)
    tokens: int | None = Field(None, ge=2)  # 64 in pulse mode, 2048 in persistent mode
    tokens_per_minute: int | None = Field(None, ge=1)  # 600 in pulse mode, unbounded in persistent mode
    timeout_seconds: float = Field(120.0, gt=0)
    skip_when_waiting: int = Field(32, ge=1)
    only_when_busy: bool = False
    pause_file: Path | None = None
    api_key_file: Path | None = None
    ca_file: Path | None = None
    server_name: str | None = None
    insecure_skip_verify: bool = False


class GpuSettings(Room):
    """GPU counters through NVML."""

    enabled: Literal["auto", "true", "false"] = "auto"
    interval_seconds: float = Field(0.2, ge=0.05, le=60)
    timeout_seconds: float = Field(5.0, gt=0)
    devices: str = "all"  # "all", or indices and UUIDs separated by commas


class HostSettings(Room):
    """Pressure, throttling and network counters of the host."""

    enabled: bool = True
    interval_seconds: float = Field(1.0, ge=0.1, le=60)
    proc_path: Path = Path("/proc")
    sys_path: Path = Path("/sys")
    engine_cgroup: Path | None = None  # vLLM's container's cgroup directory, where it can be read


class SloSettings(Room):
    """What readers were promised."""

    itl_seconds: float = Field(0.1, gt=0)
    ttft_seconds: float = Field(5.0, gt=0)
    target: float = Field(0.99, gt=0, lt=1)


class StallSettings(Room):
    """When a gap is a stall."""

    floor_seconds: float = Field(0.5, gt=0)
    factor: float = Field(8.0, gt=1)
    ttft_seconds: float = Field(10.0, gt=0)
    hang_seconds: float = Field(30.0, gt=0)


class RecorderSettings(Room):
    """The flight recorder."""

    minutes: float = Field(15.0, gt=0, le=120)
    directory: Path | None = None
    max_bytes: int = Field(256 * 1024 * 1024, ge=1024 * 1024)


class WebSettings(Room):
    """Our own listener."""

    host: str = "::"
    port: int = Field(9709, ge=0, le=65535)


class LogSettings(Room):
    """Our own log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class Settings(Room):
    """All rooms."""

    engine: EngineSettings = EngineSettings()
    canary: CanarySettings = CanarySettings()
    gpu: GpuSettings = GpuSettings()
    host: HostSettings = HostSettings()
    slo: SloSettings = SloSettings()
    stall: StallSettings = StallSettings()
    recorder: RecorderSettings = RecorderSettings()
    web: WebSettings = WebSettings()
    log: LogSettings = LogSettings()
