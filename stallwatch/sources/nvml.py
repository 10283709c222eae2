"""The border to NVIDIA's management library: which of its functions we call, and what its answers mean.

`pynvml` (package nvidia-ml-py) satisfies `Nvml`, and so does anything scripted that offers the same functions. Its
types stop here: the source above deals in our own units, and in `None` for whatever a device does not give.
"""

# ruff: noqa: N802, D102  (the functions of `Nvml` carry NVML's names, and NVML documents them)

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types; `Nvml` states what we use of it

if TYPE_CHECKING:

    class NvmlError(Exception):
        """A call failed; `value` is NVML's own code."""

        def __init__(self, value: int) -> None: ...

        value: int

else:
    NvmlError = pynvml.NVMLError

Handle = Any  # an opaque pointer of the driver's
Figures = dict[str, Any]  # fields of `GpuReading`

_ALL_LINKS = 0xFFFFFFFF  # a field value of scope UINT_MAX is the sum over all links; scope 0 is link 0 alone
_NVLINK_TX = 138  # payload, KiB since the driver was loaded
_NVLINK_RX = 139
_EVENT_XID = 8
_GPM_METRICS = {
    10: ("dram_active", 0.01),  # percent
    3: ("sm_occupancy", 0.01),
    20: ("pcie_tx", 2.0**20),  # MiB/s
    21: ("pcie_rx", 2.0**20),
}


class Code(IntEnum):
    """The error codes of NVML that we tell apart; their numbers are ABI."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    VGPU_ECC_NOT_SUPPORTED = 22
    FREQ_NOT_SUPPORTED = 24
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


NEVER = frozenset(
    {
        Code.INVALID_ARGUMENT,
        Code.NOT_SUPPORTED,
        Code.NO_PERMISSION,
        Code.FUNCTION_NOT_FOUND,
        Code.VGPU_ECC_NOT_SUPPORTED,
        Code.FREQ_NOT_SUPPORTED,
        Code.ARGUMENT_VERSION_MISMATCH,
        Code.DEPRECATED,
    }
)
"""Asking again is of no use: the device, the driver or our rights do not offer this figure."""

LOST = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED})
"""This device answers nothing until it was reset."""

DEAD = frozenset({Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIB_RM_VERSION_MISMATCH})
"""The whole session is over: the driver went away, or was exchanged beneath us."""

NO_GPU = frozenset({Code.LIBRARY_NOT_FOUND, Code.DRIVER_NOT_LOADED, Code.NO_PERMISSION, Code.GPU_NOT_FOUND})
"""At the start: there is nothing here for us to watch, as opposed to something that is broken."""


class Nvml(Protocol):
    """The functions of `pynvml` that are called; each raises `pynvml.NVMLError`."""

    def nvmlInit(self) -> Any: ...
    def nvmlShutdown(self) -> Any: ...
    def nvmlSystemGetDriverVersion(self) -> Any: ...
    def nvmlDeviceGetCount(self) -> Any: ...
    def nvmlDeviceGetHandleByIndex(self, index: Any, /) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetClockInfo(self, handle: Any, clock: Any, /) -> Any: ...
    def nvmlDeviceGetMaxClockInfo(self, handle: Any, clock: Any, /) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, /) -> Any: ...
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetPcieThroughput(self, handle: Any, counter: Any, /) -> Any: ...
    def nvmlDeviceGetFieldValues(self, handle: Any, fields: Any, /) -> Any: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: Any, error: Any, counter: Any, /) -> Any: ...
    def nvmlDeviceGetMigMode(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, /) -> Any: ...
    def nvmlDeviceGetGpuInstanceId(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetSupportedEventTypes(self, handle: Any, /) -> Any: ...
    def nvmlDeviceRegisterEvents(self, handle: Any, types: Any, events: Any, /) -> Any: ...
    def nvmlEventSetCreate(self) -> Any: ...
    def nvmlEventSetWait(self, events: Any, timeout_ms: Any, /) -> Any: ...
    def nvmlEventSetFree(self, events: Any, /) -> Any: ...
    def nvmlGpmQueryDeviceSupport(self, handle: Any, /) -> Any: ...
    def nvmlGpmSampleAlloc(self) -> Any: ...
    def nvmlGpmSampleGet(self, handle: Any, sample: Any, /) -> Any: ...
    def nvmlGpmMigSampleGet(self, handle: Any, instance: Any, sample: Any, /) -> Any: ...
    def nvmlGpmSampleFree(self, sample: Any, /) -> Any: ...
    def nvmlGpmMetricsGet(self, request: Any, /) -> Any: ...
    @property
    def c_nvmlGpmMetricsGet_t(self) -> Callable[[], Any]: ...


EVENT_REASONS: Mapping[int, str] = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""NVML's clock event reasons by bit, in its current words."""

_KNOWN_REASONS = sum(EVENT_REASONS)


def utilization(nvml: Nvml, handle: Handle) -> Figures:
    """Shares of the driver's own sampling period, which is up to a second long."""
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return {"utilization": rates.gpu / 100, "memory_utilization": rates.memory / 100}


def sm_clock(nvml: Nvml, handle: Handle) -> Figures:
    """Present clock of the streaming multiprocessors."""
    return {"sm_clock": nvml.nvmlDeviceGetClockInfo(handle, 1) * 1e6}


def memory_clock(nvml: Nvml, handle: Handle) -> Figures:
    """Present clock of the memory."""
    return {"memory_clock": nvml.nvmlDeviceGetClockInfo(handle, 2) * 1e6}


def max_sm_clock(nvml: Nvml, handle: Handle) -> Figures:
    """Highest clock the device could ever run at; no promise that it may."""
    return {"max_sm_clock": nvml.nvmlDeviceGetMaxClockInfo(handle, 1) * 1e6}


def power(nvml: Nvml, handle: Handle) -> Figures:
    """Draw of the board; averaged over a second on recent devices."""
    return {"power": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3}


def power_limit(nvml: Nvml, handle: Handle) -> Figures:
    """The limit in force, the lowest of all that apply."""
    return {"power_limit": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3}


def energy(nvml: Nvml, handle: Handle) -> Figures:
    """Energy since the driver was loaded."""
    return {"energy": nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3}


def temperature(nvml: Nvml, handle: Handle) -> Figures:
    """Temperature of the die."""
    return {"temperature": float(nvml.nvmlDeviceGetTemperature(handle, 0))}


def event_reasons(nvml: Nvml, handle: Handle) -> Figures:
    """Why the clocks are what they are, as a set of names; drivers before 535 know the call by its old name."""
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except NvmlError as error:
        if error.value != Code.FUNCTION_NOT_FOUND:
            raise
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {"clock_event_reasons": reason_names(bits)}


def reason_names(bits: int) -> frozenset[str]:
    """The names of the set bits; bits that we have no name for share one."""
    names = {name for bit, name in EVENT_REASONS.items() if bits & bit}
    if bits & ~_KNOWN_REASONS:
        names.add("other")
    return frozenset(names)


def memory(nvml: Nvml, handle: Handle) -> Figures:
    """Device memory; what the driver reserves for itself counts as used."""
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used": float(info.used), "memory_total": float(info.total)}


def pcie(nvml: Nvml, handle: Handle) -> Figures:
    """Rates over the driver's own 20 ms, for which each of the two calls blocks."""
    return {
        "pcie_tx": nvml.nvmlDeviceGetPcieThroughput(handle, 0) * 1024.0,
        "pcie_rx": nvml.nvmlDeviceGetPcieThroughput(handle, 1) * 1024.0,
    }


def nvlink(nvml: Nvml, handle: Handle) -> Figures:
    """Payload over all links since the driver was loaded."""
    transmitted, received = nvml.nvmlDeviceGetFieldValues(handle, [(_NVLINK_TX, _ALL_LINKS), (_NVLINK_RX, _ALL_LINKS)])
    return {"nvlink_tx": _field(transmitted) * 1024, "nvlink_rx": _field(received) * 1024}


def _field(value: Any) -> float:
    if value.nvmlReturn != 0:
        raise NvmlError(value.nvmlReturn)
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if not 0 <= value.valueType < len(members):
        raise NvmlError(Code.NOT_SUPPORTED)
    return float(getattr(value.value, members[value.valueType]))


def ecc(nvml: Nvml, handle: Handle) -> Figures:
    """Memory errors since the driver was loaded."""
    return {
        "ecc_corrected": float(nvml.nvmlDeviceGetTotalEccErrors(handle, 0, 0)),
        "ecc_uncorrected": float(nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0)),
    }


class Gpm:
    """Hardware profiling counters (Hopper and later): averages between two samples, no root needed.

    Holds two samples of the driver's memory until `close`. The counters are shared with every other profiler on the
    GPU, such as DCGM's profiling fields.
    """

    def __init__(self, nvml: Nvml, *, instance: int | None = None) -> None:
        self._nvml = nvml
        self._instance = instance  # of a MIG partition; the handle then is the whole GPU's
        # The bus is the whole GPU's.
        self._wanted = _GPM_METRICS if instance is None else dict(list(_GPM_METRICS.items())[:2])
        self._samples: list[Any] = []
        self._taken = False
        self._request: Any = None

    def __call__(self, nvml: Nvml, handle: Handle) -> Figures:
        """Nothing at the first call; then the averages since the call before."""
        while len(self._samples) < 2:
            self._samples.append(nvml.nvmlGpmSampleAlloc())
        newer = self._samples[1]
        if self._instance is None:
            nvml.nvmlGpmSampleGet(handle, newer)
        else:
            nvml.nvmlGpmMigSampleGet(handle, self._instance, newer)
        self._samples.reverse()
        if not self._taken:
            self._taken = True
            return {}
        older = self._samples[1]
        if self._request is None:
            # 19 kB: room for every metric there is, of which we ask a few.
            self._request = nvml.c_nvmlGpmMetricsGet_t()
            self._request.version = 1
        request = self._request
        request.numMetrics = len(self._wanted)
        request.sample1, request.sample2 = older, newer
        for place, metric in enumerate(self._wanted):
            request.metrics[place].metricId = metric
        nvml.nvmlGpmMetricsGet(request)
        figures: Figures = {}
        for place, (name, factor) in enumerate(self._wanted.values()):
            metric = request.metrics[place]
            if metric.nvmlReturn == 0 and math.isfinite(metric.value):
                figures[name] = metric.value * factor
        return figures

    def close(self) -> None:
        """Gives the samples back; whatever the driver says to that."""
        while self._samples:
            quietly(self._nvml.nvmlGpmSampleFree, self._samples.pop())


class XidEvents:
    """Critical errors as the driver reports them, for the devices that were registered."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._set: Any = None
        self._names: dict[object, str] = {}

    def register(self, handle: Handle, uuid: str) -> None:
        """Raises `NvmlError` when the device or our rights do not allow it."""
        if not self._nvml.nvmlDeviceGetSupportedEventTypes(handle) & _EVENT_XID:
            raise NvmlError(Code.NOT_SUPPORTED)
        if self._set is None:
            self._set = self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(handle, _EVENT_XID, self._set)
        self._names[_identity(handle)] = uuid

    def take(self, most: int = 32) -> Sequence[tuple[str, int]]:
        """What was reported since the last call as (uuid, Xid number), without waiting. Raises `NvmlError`."""
        seen: list[tuple[str, int]] = []
        if not self._names:
            return seen
        while len(seen) < most:
            try:
                event = self._nvml.nvmlEventSetWait(self._set, 0)
            except NvmlError as error:
                # The queue is empty; or it broke, and what it gave before must not be lost with it.
                if error.value == Code.TIMEOUT or seen:
                    break
                raise
            # Xid 79 is "the GPU has fallen off the bus": it cannot be asked for its UUID any more.
            if event.eventType & _EVENT_XID:
                seen.append((self._names.get(_identity(event.device), ""), int(event.eventData)))
        return seen

    def close(self) -> None:
        """Gives the event set back."""
        if self._set is not None:
            quietly(self._nvml.nvmlEventSetFree, self._set)
            self._set = None
            self._names.clear()


def _identity(handle: Handle) -> object:
    if isinstance(handle, pynvml.c_nvmlDevice_t):
        return ctypes.cast(handle, ctypes.c_void_p).value
    return handle


def quietly(call: Callable[..., Any], *arguments: Any) -> None:
    """Calls something whose failure changes nothing: giving back what a broken driver may have lost anyway."""
    try:
        call(*arguments)
    except NvmlError:
        return


def words(error: NvmlError) -> str:
    """What an error is called, without asking the library that may be missing."""
    try:
        return Code(error.value).name.lower()
    except ValueError:
        return f"error {error.value}"


def explain(error: NvmlError | int, environ: Mapping[str, str]) -> str:
    """Why there are no GPU counters, in a sentence that names the remedy."""
    code = error if isinstance(error, int) else int(error.value)
    visible = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    capabilities = environ.get("NVIDIA_DRIVER_CAPABILITIES", "")
    granted = {part.strip() for part in capabilities.split(",") if part.strip()}
    match code:
        case Code.LIBRARY_NOT_FOUND if granted and not granted & {"utility", "all"}:
            return (
                f"NVIDIA_DRIVER_CAPABILITIES={capabilities} leaves out `utility`, so the driver's libnvidia-ml.so.1"
                " is not mounted: set it to `utility`"
            )
        case Code.LIBRARY_NOT_FOUND if visible in ("", "void", "none"):
            said = f"NVIDIA_VISIBLE_DEVICES={visible}" if visible else "NVIDIA_VISIBLE_DEVICES is not set"
            return (
                f"the driver's libnvidia-ml.so.1 is not here and {said}: give this container GPUs (a shared resource"
                " claim, or NVIDIA_VISIBLE_DEVICES with the NVIDIA runtime), or read a dcgm-exporter instead"
            )
        case Code.LIBRARY_NOT_FOUND:
            return (
                f"NVIDIA_VISIBLE_DEVICES={visible} is set but the driver's libnvidia-ml.so.1 is not mounted: this"
                " container was not started by the NVIDIA runtime (runtimeClassName: nvidia)"
            )
        case Code.DRIVER_NOT_LOADED:
            return (
                "libnvidia-ml.so.1 is here but the kernel driver does not answer: it is not loaded, or /dev/nvidiactl"
                " is not in this container"
            )
        case Code.NO_PERMISSION:
            return "the driver refuses this user: /dev/nvidiactl and /dev/nvidia* must be readable and writable for it"
        case Code.LIB_RM_VERSION_MISMATCH:
            return (
                "the host's kernel driver and this container's libnvidia-ml.so.1 differ in version, as after a driver"
                " upgrade: start the container again"
            )
        case Code.GPU_NOT_FOUND:
            return "the driver answers but shows no GPU: none is passed to this container (/dev/nvidia0 and so on)"
        case Code.GPU_IS_LOST | Code.RESET_REQUIRED:
            return "the GPU is lost and must be reset, or the node rebooted"
        case Code.UNKNOWN | Code.OPERATING_SYSTEM:
            return (
                "the driver gives an unknown error; when it worked before, the container may have lost its device"
                " rights (a `systemctl daemon-reload` on the host does that): start it again"
            )
        case _:
            return f"the driver answers with {words(NvmlError(code))}"
