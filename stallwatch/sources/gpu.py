"""GPU counters through NVML, the driver's management library.

Evidence only, and never in anyone's way: every call runs in one thread that may hang without hurting anybody; a figure
that a device, a driver or our rights do not give is absent and named once; a lost GPU or a reloaded driver is opened
anew. Cheap figures are read at every poll, dear ones less often, and keep their last value in between.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types; `Nvml` states what we use of it
import structlog

from stallwatch.observations import Failure, GpuReading, GpuSample
from stallwatch.scheduling import SourceError
from stallwatch.settings import GpuSettings
from stallwatch.sources import nvml as border
from stallwatch.sources.blocking import BlockingThread, RunBlocking
from stallwatch.sources.nvml import Code, Figures, Handle, Nvml, NvmlError

log = structlog.get_logger()

_SECOND = 1.0
_PCIE_SECONDS = 5.0  # its two calls block for 20 ms each
_SLOW_SECONDS = 10.0
_REOPEN_FIRST_SECONDS = 1.0
_REOPEN_LAST_SECONDS = 30.0  # opening a broken driver may load kernel modules
_REOPEN_LOST_MAX_SECONDS = 480.0
_SILENT_POLLS = 3


class Read(NamedTuple):
    """One call, or a few that belong together: which fields of `GpuReading` it gives, and how often it is made."""

    name: str
    call: Callable[[Nvml, Handle], Figures]
    fields: tuple[str, ...]
    period: float = 0.0  # seconds; 0 is every poll
    unless: str = ""  # another read that makes this one needless while it works


_UTILIZATION = Read("utilization", border.utilization, ("utilization", "memory_utilization"))
_MEMORY = Read("memory", border.memory, ("memory_used", "memory_total"), _SECOND)
_PCIE = Read("pcie", border.pcie, ("pcie_tx", "pcie_rx"), _PCIE_SECONDS)
_GPM_FIELDS = ("dram_active", "sm_occupancy")
_CLOCKS_AND_POWER = (
    Read("sm_clock", border.sm_clock, ("sm_clock",)),
    Read("memory_clock", border.memory_clock, ("memory_clock",)),
    Read("power", border.power, ("power",)),
    Read("energy", border.energy, ("energy",)),
    Read("clock_event_reasons", border.event_reasons, ("clock_event_reasons",)),
    Read("temperature", border.temperature, ("temperature",), _SECOND),
    Read("power_limit", border.power_limit, ("power_limit",), _SECOND),
    Read("max_sm_clock", border.max_sm_clock, ("max_sm_clock",), _SLOW_SECONDS),
    Read("nvlink", border.nvlink, ("nvlink_tx", "nvlink_rx"), _SECOND),
    Read("ecc", border.ecc, ("ecc_corrected", "ecc_uncorrected"), _SLOW_SECONDS),
)


@dataclass(slots=True)
class _Device:
    """One GPU, or one MIG instance, of an open session."""

    gpu: str
    uuid: str
    name: str | None
    handle: Handle
    reads: list[Read]
    gpm: border.Gpm
    figures: Figures = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # read -> why it will never be there
    lost: bool = False
    silent_polls: int = 0
    counts_xids: bool = False

    def read(self, nvml: Nvml, now: float, calling: Callable[[str], None]) -> int | None:
        """Brings the figures up to date. A failing call takes its own figures away, and nothing else.

        Gives the error of which the whole session or this device died, if one did.
        """
        answered, failed = False, None
        for read in self.reads:
            if read.name in self.absent or (read.unless and read.unless not in self.absent):
                continue
            if read.period and self.due.get(read.name, now) > now:
                continue
            calling(f"{read.name} of GPU {self.gpu}")
            try:
                figures = read.call(nvml, self.handle)
            except NvmlError as error:
                code = error.value
                for name in read.fields:
                    self.figures.pop(name, None)
                if code in border.DEAD:
                    return int(code)
                if code in border.LOST:
                    self.lost = True
                    return int(code)
                if code in border.NEVER:
                    self.absent[read.name] = border.words(error)
                if read.period:
                    self.due[read.name] = now + min(read.period, _SECOND)
                failed = code
            else:
                answered = True
                self.figures.update(figures)
                if read.period:
                    self.due[read.name] = now + read.period
        if answered or failed is None:
            self.silent_polls = 0
            return None
        # A stale handle answers every call with errors that one by one would be forgiven.
        self.silent_polls += 1
        return int(failed) if self.silent_polls >= _SILENT_POLLS else None

    def reading(self, xids: Mapping[str, int]) -> GpuReading:
        return GpuReading(
            gpu=self.gpu,
            uuid=self.uuid,
            name=self.name,
            xid_errors=float(xids.get(self.uuid, 0)) if self.counts_xids else None,
            **self.figures,
        )


class _Seen(NamedTuple):
    """What one poll brought out of the thread."""

    sample: GpuSample
    xids: dict[str, int]  # seen so far, by UUID
    new_xids: list[tuple[str, int]]
    absent: dict[str, dict[str, str]]  # GPU -> what it does not give -> why
    lost: list[str]
    missing: list[str]  # named in `gpu.devices` and not visible


class _Session:
    """The library between its start and its shutdown: handles, event set, samples. Lives in one thread."""

    def __init__(
        self,
        nvml: Nvml,
        settings: GpuSettings,
        *,
        environ: Mapping[str, str],
        system_memory: Callable[[], int | None],
        xids: Mapping[str, int],
        now: float,
    ) -> None:
        self._nvml = nvml
        self._settings = settings
        self._system_memory = system_memory
        self._xids = dict(xids)
        self._devices: list[_Device] = []
        self._unopened: list[str] = []
        self._missing: list[str] = []
        self._events = border.XidEvents(nvml)
        nvml.nvmlInit()
        try:
            self.driver = _optional(nvml.nvmlSystemGetDriverVersion)
            self.scope = self._open(environ, now)
        except BaseException:
            self.close()
            raise

    def read(self, now: Callable[[], float], calling: Callable[[str], None]) -> _Seen:
        """Raises `NvmlError` when the driver is gone or no GPU answers."""
        worst: int | None = None
        for device in self._devices:
            if device.lost:
                worst = worst or Code.GPU_IS_LOST
                continue
            code = device.read(self._nvml, now(), calling)
            if code in border.DEAD:
                raise NvmlError(code)
            if code is not None:
                worst = code
                device.figures.clear()
        answering = [device for device in self._devices if device.figures]
        if not answering:
            raise NvmlError(worst or Code.GPU_NOT_FOUND)
        calling("xid events")
        new_xids = self._take_xids()
        return _Seen(
            sample=GpuSample(
                at=now(),
                gpus=tuple(device.reading(self._xids) for device in answering),
                scope=self.scope,
                driver=self.driver,
            ),
            xids=dict(self._xids),
            new_xids=new_xids,
            absent={device.gpu: dict(device.absent) for device in self._devices if device.absent},
            lost=self._unopened + [device.gpu for device in self._devices if not device.figures],
            missing=self._missing,
        )

    def close(self) -> None:
        """Gives everything back, also to a driver that is not there any more."""
        self._events.close()
        for device in self._devices:
            device.gpm.close()
        self._devices.clear()
        border.quietly(self._nvml.nvmlShutdown)

    def _take_xids(self) -> list[tuple[str, int]]:
        try:
            new = list(self._events.take())
        except NvmlError as error:
            if error.value in border.NEVER:
                self._events.close()
                for device in self._devices:
                    device.counts_xids = False
                    device.absent["xid_errors"] = border.words(error)
            return []
        for uuid, _ in new:
            self._xids[uuid] = self._xids.get(uuid, 0) + 1
        return new

    def _open(self, environ: Mapping[str, str], now: float) -> str:
        count = self._nvml.nvmlDeviceGetCount()
        if count == 0:
            raise NvmlError(Code.GPU_NOT_FOUND)
        names = self._settings.device_names
        wanted = None if names is None else frozenset(names)
        found: set[str] = set()
        visible: list[str] = []
        error_seen: NvmlError | None = None
        for index in range(count):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = self._nvml.nvmlDeviceGetUUID(handle)
            except NvmlError as error:
                if error.value in border.DEAD:
                    raise
                # A GPU that is lost or not ours to open keeps its index; the others are still worth watching.
                error_seen = error
                if error.value not in border.NEVER:
                    self._unopened.append(str(index))
                continue
            visible.append(f"{index} ({uuid})")
            instances = self._instances(handle)
            mine = [instance for instance in instances if wanted is None or instance[1] in wanted]
            whole = wanted is None or str(index) in wanted or uuid in wanted
            found |= {str(index), uuid, *(instance[1] for instance in instances)}
            if not whole and not mine:
                continue
            # Clocks and power belong to the whole GPU also where only one of its instances was named.
            self._devices.append(self._device(str(index), uuid, handle, now, stagger=index / count))
            for part, part_uuid, part_handle in instances if whole else mine:
                self._devices.append(self._instance(f"{index}:{part}", part_uuid, part_handle, handle))
        if wanted is not None:
            self._missing = sorted(wanted - found - set(self._unopened))
            # A GPU that cannot be opened has no UUID: it may be the one that was named by it.
            if not self._missing:
                self._unopened = [index for index in self._unopened if index in wanted]
        if self._devices:
            return _scope(wanted, len(visible), environ)
        if error_seen is not None:
            raise error_seen
        raise SourceError(
            Failure.UNAVAILABLE, f"gpu.devices names {', '.join(self._missing)}; visible are {', '.join(visible)}"
        )

    def _device(self, gpu: str, uuid: str, handle: Handle, now: float, *, stagger: float) -> _Device:
        gpm = border.Gpm(self._nvml)
        reads = [_UTILIZATION, *_CLOCKS_AND_POWER, _MEMORY]
        device = _Device(gpu=gpu, uuid=uuid, name=self._name(handle), handle=handle, reads=reads, gpm=gpm)
        if self._settings.gpm and self._gpm_works(handle):
            reads.append(Read("gpm", gpm, (*_GPM_FIELDS, *_PCIE.fields), _SECOND))
            reads.append(_PCIE._replace(unless="gpm"))
        else:
            reads.append(_PCIE)
        # Spread over the GPUs, so that no poll of eight of them takes eight times 40 ms.
        device.due[_PCIE.name] = now + stagger * _PCIE_SECONDS
        if self._is_unified(handle):
            # Such a GPU uses the system's memory: its own figures are refused or repeat the system's.
            reads.remove(_MEMORY)
            reads[0] = Read("utilization", _without_memory, _UTILIZATION.fields)
            device.absent["memory"] = "unified memory"
        try:
            self._events.register(handle, uuid)
        except NvmlError as error:
            device.absent["xid_errors"] = border.words(error)
        else:
            device.counts_xids = True
        return device

    def _instance(self, gpu: str, uuid: str, handle: Handle, parent: Handle) -> _Device:
        instance = _optional(lambda: self._nvml.nvmlDeviceGetGpuInstanceId(handle))
        gpm = border.Gpm(self._nvml, instance=instance)
        reads = [_UTILIZATION, _MEMORY]
        if self._settings.gpm and instance is not None and self._gpm_works(parent):
            # The samples are the whole GPU's, narrowed to the instance.
            reads.append(Read("gpm", lambda nvml, _: gpm(nvml, parent), _GPM_FIELDS, _SECOND))
        return _Device(gpu=gpu, uuid=uuid, name=self._name(handle), handle=handle, reads=reads, gpm=gpm)

    def _instances(self, handle: Handle) -> list[tuple[int, str, Handle]]:
        """The MIG instances of a GPU that this container sees, as (place, UUID, handle)."""
        try:
            if not self._nvml.nvmlDeviceGetMigMode(handle)[0]:
                return []
            places = self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except NvmlError as error:
            if error.value in border.DEAD:
                raise
            return []
        seen = []
        for place in range(places):
            try:
                part = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                seen.append((place, self._nvml.nvmlDeviceGetUUID(part), part))
            except NvmlError as error:  # an empty place
                if error.value in border.DEAD:
                    raise
        return seen

    def _name(self, handle: Handle) -> str | None:
        name: str | None = _optional(lambda: self._nvml.nvmlDeviceGetName(handle))
        return name

    def _gpm_works(self, handle: Handle) -> bool:
        support = _optional(lambda: self._nvml.nvmlGpmQueryDeviceSupport(handle))
        return support is not None and bool(support.isSupportedDevice)

    def _is_unified(self, handle: Handle) -> bool:
        try:
            total = self._nvml.nvmlDeviceGetMemoryInfo(handle).total
        except NvmlError as error:
            refused = error.value == Code.NOT_SUPPORTED
            total = None
        else:
            refused = False
        system = self._system_memory()
        same = total is not None and system is not None and abs(total - system) <= 0.02 * system
        if not refused and not same:
            return False
        # A card of its own may happen to be as large as the system's memory, but then it has a power limit.
        return _optional(lambda: self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) is None


def _without_memory(nvml: Nvml, handle: Handle) -> Figures:
    return {"utilization": border.utilization(nvml, handle)["utilization"]}


def _optional(call: Callable[[], Any]) -> Any:
    """What a call that nothing depends on gives, or None."""
    try:
        return call()
    except NvmlError as error:
        if error.value in border.DEAD:
            raise
        return None


def _scope(wanted: frozenset[str] | None, visible: int, environ: Mapping[str, str]) -> str:
    if wanted is not None:
        return "selected"
    restricted = environ.get("NVIDIA_VISIBLE_DEVICES", "all") not in ("", "all", "none", "void")
    return "container" if visible == 1 or restricted else "node"


def _system_memory(proc_path: Path = Path("/proc")) -> int | None:
    """Bytes of memory of this machine."""
    try:
        for line in (proc_path / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """What is visible, what is missing and why; for people."""

    off: str | None  # the reason why this source is off for good
    problem: str | None  # the present failure, with its remedy where one is known
    driver: str | None
    scope: str | None
    gpus: tuple[tuple[str, str, str | None], ...]  # index, UUID, name
    absent: Mapping[str, Mapping[str, str]]  # GPU -> figure -> why
    lost: tuple[str, ...]
    hanging_calls: int


class Gpu:
    """The GPUs that this container sees, or those that `gpu.devices` names."""

    def __init__(
        self,
        settings: GpuSettings,
        *,
        environ: Mapping[str, str],
        nvml: Nvml = pynvml,
        clock: Callable[[], float] = time.monotonic,
        run_blocking: RunBlocking | None = None,
        system_memory: Callable[[], int | None] = _system_memory,
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._nvml = nvml
        self._clock = clock
        self._system_memory = system_memory
        self._thread: BlockingThread | None = None
        if run_blocking is None:
            self._thread = BlockingThread(
                "nvml",
                deadline_seconds=settings.timeout_seconds,
                on_leave=self._close_session,
            )
            run_blocking = self._thread
        self._run_blocking = run_blocking
        # Of a thread each: one that was given up in a hanging call must not share handles with its successor.
        self._local = threading.local()
        self._calling = ""
        self._xids: dict[str, int] = {}
        self._off: str | None = None
        self._ever_worked = False
        self._failure: SourceError | None = None
        self._retry_at = 0.0
        self._backoff = _REOPEN_FIRST_SECONDS
        self._up_since = 0.0
        self._reopen_at: float | None = None  # while a GPU is lost and others still answer
        self._reopen_backoff = _REOPEN_LAST_SECONDS
        self._seen: _Seen | None = None
        self._told: set[tuple[str, str, str]] = set()
        self._lost: tuple[str, ...] = ()

    @property
    def off(self) -> str | None:
        """Why there is nothing to watch here, once a poll found that out; only with `gpu.enabled` = auto."""
        return self._off

    async def poll(self) -> GpuSample:
        """One reading of every watched GPU.

        Raises `SourceError`: `TIMEOUT` when the driver hangs, `UNAVAILABLE` when it is gone or no GPU answers. After a
        failed start the driver is asked again after 1 s, 2 s, and so on up to 30 s; polls in between fail at once.
        """
        if self._off is not None:
            raise SourceError(Failure.UNAVAILABLE, self._off)
        if self._failure is not None and self._clock() < self._retry_at:
            raise SourceError(self._failure.reason, self._failure.detail)
        reopen = self._reopen_at is not None and self._clock() >= self._reopen_at
        if reopen:
            self._reopen_at = None
        try:
            seen = await self._run_blocking(lambda: self._read(reopen=reopen))
        except NvmlError as error:
            raise self._failed(error) from error
        except SourceError as error:
            if error.reason is Failure.TIMEOUT:
                detail = f"{error.detail}: {self._calling}"
                self._failure = SourceError(error.reason, detail)
                raise self._failure from error
            self._wait_before_reopening(error)
            raise
        self._ever_worked = True
        self._take(seen)
        return seen.sample

    async def close(self) -> None:
        """Shuts the library down, unless a call hangs in it: then it is left to the end of the process."""
        if self._thread is not None:
            self._thread.close()
            return
        await self._run_blocking(self._close_session)

    def status(self) -> GpuStatus:
        """What was seen last."""
        seen = self._seen
        return GpuStatus(
            off=self._off,
            problem=self._failure.detail if self._failure is not None else None,
            driver=seen.sample.driver if seen else None,
            scope=seen.sample.scope if seen else None,
            gpus=tuple((reading.gpu, reading.uuid, reading.name) for reading in seen.sample.gpus) if seen else (),
            absent=seen.absent if seen else MappingProxyType({}),
            lost=self._lost,
            hanging_calls=self._thread.left_behind if self._thread is not None else 0,
        )

    # in the thread

    def _read(self, *, reopen: bool) -> _Seen:
        if reopen:
            self._close_session()
        session: _Session | None = getattr(self._local, "session", None)
        if session is None:
            self._call("start of the library")
            session = _Session(
                self._nvml,
                self._settings,
                environ=self._environ,
                system_memory=self._system_memory,
                xids=self._xids,
                now=self._clock(),
            )
            self._local.session = session
        try:
            return session.read(self._clock, self._call)
        except NvmlError:
            self._close_session()
            raise

    def _close_session(self) -> None:
        session: _Session | None = getattr(self._local, "session", None)
        self._local.session = None
        if session is not None:
            session.close()

    def _call(self, name: str) -> None:
        self._calling = name

    # on the loop

    def _failed(self, error: NvmlError) -> SourceError:
        reason = border.explain(error, self._environ)
        failure = SourceError(Failure.UNAVAILABLE, reason)
        if self._settings.enabled == "auto" and not self._ever_worked and error.value in border.NO_GPU:
            self._off = reason
            log.info("gpu counters are off", reason=reason)
        self._wait_before_reopening(failure)
        return failure

    def _wait_before_reopening(self, failure: SourceError) -> None:
        self._failure = failure
        self._retry_at = self._clock() + self._backoff
        self._backoff = min(2 * self._backoff, _REOPEN_LAST_SECONDS)

    def _take(self, seen: _Seen) -> None:
        if self._failure is not None:
            self._failure = None
            self._up_since = self._clock()
        # A driver that answers once after every start, and dies of it, is not opened every second.
        elif self._clock() - self._up_since >= self._backoff:
            self._backoff = _REOPEN_FIRST_SECONDS
        self._seen = seen
        self._xids = seen.xids
        for uuid, number in seen.new_xids:
            log.warning("gpu reported an error", uuid=uuid, xid=number)
        for gpu, figures in seen.absent.items():
            for figure, why in figures.items():
                if (gpu, figure, why) not in self._told:
                    self._told.add((gpu, figure, why))
                    log.info("gpu figure is absent", gpu=gpu, figure=figure, reason=why)
        for name in seen.missing:
            if ("", name, "") not in self._told:
                self._told.add(("", name, ""))
                log.warning("named gpu is not visible", device=name)
        for gpu in sorted(set(seen.lost) - set(self._lost)):
            log.warning("gpu stopped answering", gpu=gpu)
        self._lost = tuple(seen.lost)
        if not self._lost:
            self._reopen_at, self._reopen_backoff = None, _REOPEN_LAST_SECONDS
        elif self._reopen_at is None:
            # Only a new start of the library brings a GPU back that was reset; it costs the others one slow poll.
            self._reopen_at = self._clock() + self._reopen_backoff
            self._reopen_backoff = min(2 * self._reopen_backoff, _REOPEN_LOST_MAX_SECONDS)
