"""NVIDIA's management library as a script: the functions of `pynvml` that a GPU reader calls, without any GPU.

`ScriptedNvml` takes the place of the `pynvml` module. What it answers is a function of time, so a scenario can let a
clock fall or a power cap show at the moment it wants, and the code that reads GPU counters runs unchanged. It raises
the errors that the real module raises, and offers a figure only where the scenario gives one.
"""

# ruff: noqa: N802, N815, D102  (the functions carry NVML's names, and NVML documents them)

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types

_NOT_SUPPORTED = 3
_INVALID_ARGUMENT = 2
_UNINITIALIZED = 1
_TIMEOUT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedGpu:
    """One GPU at one moment, in NVML's own units; None is answered with "not supported"."""

    uuid: str
    name: str = "Simulated GPU"
    utilization: int | None = None  # percent
    memory_utilization: int = 0  # percent
    sm_clock: int | None = None  # MHz
    memory_clock: int | None = None
    max_sm_clock: int | None = None
    power: int | None = None  # milliwatts
    power_limit: int | None = None
    energy: int | None = None  # millijoules
    temperature: int | None = None  # degrees Celsius
    event_reasons: int | None = None  # bits of nvmlClocksEventReason*
    memory_used: int | None = None  # bytes
    memory_total: int | None = None
    pcie_tx: int | None = None  # KiB/s
    pcie_rx: int | None = None
    nvlink_tx: int | None = None  # KiB since the driver was loaded
    nvlink_rx: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    dram_active: float | None = None  # percent
    sm_occupancy: float | None = None
    xids: Sequence[int] = ()  # every Xid so far, oldest first
    errors: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Functions that fail at this moment, with NVML's error code: `{"nvmlDeviceGetPowerUsage": 15}`."""


class _Rates(NamedTuple):
    gpu: int
    memory: int


class _Memory(NamedTuple):
    total: int
    free: int
    used: int


class _Value(NamedTuple):
    ullVal: int


class _Field(NamedTuple):
    nvmlReturn: int
    valueType: int
    value: _Value


class _Support(NamedTuple):
    isSupportedDevice: int


class _Event(NamedTuple):
    device: int
    eventType: int
    eventData: int


@dataclass(slots=True)
class _Events:
    taken: dict[int, int] = field(default_factory=dict)  # GPU -> how many of its Xids were given out


@dataclass(slots=True)
class _Sample:
    gpu: int = 0
    at: float = 0.0


@dataclass(slots=True)
class _Metric:
    metricId: int = 0
    nvmlReturn: int = 0
    value: float = 0.0


@dataclass(slots=True)
class _MetricsRequest:
    version: int = 0
    numMetrics: int = 0
    sample1: _Sample = field(default_factory=_Sample)
    sample2: _Sample = field(default_factory=_Sample)
    metrics: list[_Metric] = field(default_factory=lambda: [_Metric() for _ in range(16)])


def _fail(code: int) -> NoReturn:
    raise pynvml.NVMLError(code)


def _given(value: Any) -> Any:
    if value is None:
        _fail(_NOT_SUPPORTED)
    return value


class ScriptedNvml:
    """Answers like a driver whose GPUs are at `timeline(clock())`; a handle is the GPU's index."""

    c_nvmlGpmMetricsGet_t = _MetricsRequest

    def __init__(
        self,
        timeline: Callable[[float], Sequence[ScriptedGpu]],
        clock: Callable[[], float],
        *,
        driver: str = "simulated",
    ) -> None:
        self._timeline = timeline
        self._clock = clock
        self._driver = driver
        self._started = 0

    def nvmlInit(self) -> None:
        self._started += 1

    def nvmlShutdown(self) -> None:
        self._running()
        self._started -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._running()
        return self._driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < len(self._gpus()):
            _fail(_INVALID_ARGUMENT)
        self._gpu(index, "nvmlDeviceGetHandleByIndex")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self._gpu(handle, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._gpu(handle, "nvmlDeviceGetName").name

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> _Rates:
        gpu = self._gpu(handle, "nvmlDeviceGetUtilizationRates")
        return _Rates(_given(gpu.utilization), gpu.memory_utilization)

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> Any:
        gpu = self._gpu(handle, "nvmlDeviceGetClockInfo")
        return _given({1: gpu.sm_clock, 2: gpu.memory_clock}.get(clock))

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> Any:
        gpu = self._gpu(handle, "nvmlDeviceGetMaxClockInfo")
        return _given(gpu.max_sm_clock if clock == 1 else None)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:
        return _given(self._gpu(handle, "nvmlDeviceGetPowerUsage").power)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> Any:
        return _given(self._gpu(handle, "nvmlDeviceGetEnforcedPowerLimit").power_limit)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> Any:
        return _given(self._gpu(handle, "nvmlDeviceGetTotalEnergyConsumption").energy)

    def nvmlDeviceGetTemperature(self, handle: int, _sensor: int) -> Any:
        return _given(self._gpu(handle, "nvmlDeviceGetTemperature").temperature)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> Any:
        return _given(self._gpu(handle, "nvmlDeviceGetCurrentClocksEventReasons").event_reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> Any:
        return _given(self._gpu(handle, "nvmlDeviceGetCurrentClocksThrottleReasons").event_reasons)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> _Memory:
        gpu = self._gpu(handle, "nvmlDeviceGetMemoryInfo")
        total, used = _given(gpu.memory_total), _given(gpu.memory_used)
        return _Memory(total, total - used, used)

    def nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> Any:
        gpu = self._gpu(handle, "nvmlDeviceGetPcieThroughput")
        return _given(gpu.pcie_tx if counter == 0 else gpu.pcie_rx)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: Sequence[Any]) -> list[_Field]:
        gpu = self._gpu(handle, "nvmlDeviceGetFieldValues")
        answers = []
        for asked in fields:
            number = asked[0] if isinstance(asked, tuple) else asked
            value = {138: gpu.nvlink_tx, 139: gpu.nvlink_rx}.get(number)
            answers.append(_Field(_NOT_SUPPORTED if value is None else 0, 3, _Value(value or 0)))
        return answers

    def nvmlDeviceGetTotalEccErrors(self, handle: int, error: int, _counter: int) -> Any:
        gpu = self._gpu(handle, "nvmlDeviceGetTotalEccErrors")
        return _given(gpu.ecc_corrected if error == 0 else gpu.ecc_uncorrected)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        self._gpu(handle, "nvmlDeviceGetMigMode")
        return [0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        self._gpu(handle, "nvmlDeviceGetMaxMigDeviceCount")
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _handle: int, _index: int) -> NoReturn:
        _fail(_NOT_SUPPORTED)

    def nvmlDeviceGetGpuInstanceId(self, _handle: int) -> NoReturn:
        _fail(_NOT_SUPPORTED)

    def nvmlDeviceGetSupportedEventTypes(self, handle: int) -> int:
        self._gpu(handle, "nvmlDeviceGetSupportedEventTypes")
        return 8

    def nvmlDeviceRegisterEvents(self, handle: int, _types: int, events: _Events) -> None:
        # What happened before the registration is not told, as with a driver.
        events.taken[handle] = len(self._gpu(handle, "nvmlDeviceRegisterEvents").xids)

    def nvmlEventSetCreate(self) -> _Events:
        self._running()
        return _Events()

    def nvmlEventSetWait(self, events: _Events, _timeout_ms: int) -> _Event:
        gpus = self._gpus()
        for handle, taken in events.taken.items():
            if handle < len(gpus) and len(gpus[handle].xids) > taken:
                events.taken[handle] = taken + 1
                return _Event(handle, 8, gpus[handle].xids[taken])
        _fail(_TIMEOUT)

    def nvmlEventSetFree(self, events: _Events) -> None:
        events.taken.clear()

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> _Support:
        return _Support(int(self._gpu(handle, "nvmlGpmQueryDeviceSupport").dram_active is not None))

    def nvmlGpmSampleAlloc(self) -> _Sample:
        self._running()
        return _Sample()

    def nvmlGpmSampleGet(self, handle: int, sample: _Sample) -> None:
        self._gpu(handle, "nvmlGpmSampleGet")
        sample.gpu, sample.at = handle, self._clock()

    def nvmlGpmMigSampleGet(self, _handle: int, _instance: int, _sample: _Sample) -> NoReturn:
        _fail(_NOT_SUPPORTED)

    def nvmlGpmSampleFree(self, _sample: _Sample) -> None:
        self._running()

    def nvmlGpmMetricsGet(self, request: _MetricsRequest) -> None:
        gpu = self._gpu(request.sample2.gpu, "nvmlGpmMetricsGet")
        # The rates over PCIe come in MiB/s here, and in KiB/s from the function of their own.
        figures = {
            3: gpu.sm_occupancy,
            10: gpu.dram_active,
            20: None if gpu.pcie_tx is None else gpu.pcie_tx / 1024,
            21: None if gpu.pcie_rx is None else gpu.pcie_rx / 1024,
        }
        for metric in request.metrics[: request.numMetrics]:
            value = figures.get(metric.metricId)
            metric.nvmlReturn = _NOT_SUPPORTED if value is None else 0
            metric.value = 0.0 if value is None else value

    def _running(self) -> None:
        if self._started == 0:
            _fail(_UNINITIALIZED)

    def _gpus(self) -> Sequence[ScriptedGpu]:
        self._running()
        return self._timeline(self._clock())

    def _gpu(self, handle: int, function: str) -> ScriptedGpu:
        gpus = self._gpus()
        if not 0 <= handle < len(gpus):
            _fail(_INVALID_ARGUMENT)
        gpu = gpus[handle]
        if function in gpu.errors:
            _fail(gpu.errors[function])
        return gpu
