"""Pressure on the host and on our own container, and the RDMA network, from procfs and sysfs.

Reads small files and writes nothing. Whatever is not there, not readable or not what the kernel documents is absent.
The reads run in a thread of their own: a network adapter's counters come from its firmware, which may take its time.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from stallwatch.observations import HostSample, RdmaPort
from stallwatch.settings import HostSettings
from stallwatch.sources.blocking import BlockingThread, RunBlocking

_DEADLINE_SECONDS = 2.0
_MAX_BYTES = 64 * 1024
_MAX_PORTS = 32

_RESOURCES = ("cpu", "memory", "io")

RDMA_COUNTERS = (
    # congestion control, as mlx5 and bnxt_re name it: notifications sent as receiver, obeyed as sender
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "rp_cnp_handled",
    "rp_cnp_ignored",
    "tx_cnp_pkts",
    "rx_cnp_pkts",
    "rx_ecn_marked_pkts",
    # loss and repetition
    "out_of_sequence",
    "oos_drop_count",
    "packet_seq_err",
    "implied_nak_seq_err",
    "local_ack_timeout_err",
    "to_retransmits",
    "rnr_nak_retry_err",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "roce_slow_restart",
    "rx_icrc_encapsulated",
    # the link
    "port_xmit_wait",
    "port_xmit_discards",
    "port_rcv_errors",
    "symbol_error",
    "link_error_recovery",
    "link_downed",
)
"""Counters of an RDMA port that tell of congestion, loss or a bad link, under the kernel's own names.

A fixed list: adapters have a hundred more, and each would be a series."""


class HostSource:
    """The host's pressure, our own use and throttling, vLLM's throttling where its cgroup can be read, RDMA ports."""

    def __init__(
        self,
        settings: HostSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        run_blocking: RunBlocking | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._thread: BlockingThread | None = None
        if run_blocking is None:
            self._thread = BlockingThread("host", deadline_seconds=_DEADLINE_SECONDS)
            run_blocking = self._thread
        self._run_blocking = run_blocking
        self._own = OwnCgroup(settings.proc_path, settings.sys_path)

    async def poll(self) -> HostSample:
        """One reading. Raises `SourceError` only when the files do not answer in time."""
        return await self._run_blocking(self._read)

    def close(self) -> None:
        """Lets the thread go."""
        if self._thread is not None:
            self._thread.close()

    def _read(self) -> HostSample:
        own_cpu, own_rss = _own_use(self._settings.proc_path)
        engine = self._settings.engine_cgroup
        throttled = None if engine is None else _throttled(engine / "cpu.stat")
        pressure = dict(_pressure(self._settings.proc_path / "pressure"))
        rdma = tuple(_rdma_ports(self._settings.sys_path / "class" / "infiniband"))
        return HostSample(
            at=self._clock(),
            own_throttled_seconds=self._own.throttled_seconds(),
            own_cpu_seconds=own_cpu,
            own_rss_bytes=own_rss,
            engine_throttled_seconds=throttled,
            pressure_seconds=MappingProxyType(pressure),
            rdma=rdma,
        )


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """A cgroup's CPU limit: `quota` seconds of running in each `period` seconds."""

    quota: float
    period: float

    @property
    def cpus(self) -> float:
        """In the unit in which people set it."""
        return self.quota / self.period

    @property
    def longest_pause(self) -> float:
        """Seconds for which one busy thread is kept from running once the quota of a period is used up."""
        return max(0.0, self.period - self.quota)


class OwnCgroup:
    """The CPU limit and throttling of the cgroup that this process runs in, version 1 or 2."""

    def __init__(self, proc_path: Path = Path("/proc"), sys_path: Path = Path("/sys")) -> None:
        self._proc = proc_path
        self._root = sys_path / "fs" / "cgroup"
        self._file: Path | None = None
        self._looked_for = False

    def throttled_seconds(self) -> float | None:
        """Total for which we were kept from running; None where no cgroup with a limit can be read."""
        if not self._looked_for:
            self._looked_for = True
            self._file = next((path for path in self._candidates() if _throttled(path) is not None), None)
        return None if self._file is None else _throttled(self._file)

    def cpu_limit(self) -> CpuLimit | None:
        """The tightest limit on our own cgroup and on those above it that can be seen; None where there is none."""
        limits = [
            limit
            for mount, inner in self._places()
            for folder in (mount / inner, *(mount / parent for parent in Path(inner).parents))
            if ".." not in folder.parts and (limit := _cpu_limit(folder)) is not None
        ]
        return min(limits, key=lambda limit: limit.cpus, default=None)

    def _candidates(self) -> Iterator[Path]:
        for mount, inner in self._places():
            yield mount / inner / "cpu.stat"
            yield mount / "cpu.stat"

    def _places(self) -> Iterator[tuple[Path, str]]:
        listed = _text(self._proc / "self" / "cgroup") or ""
        for line in listed.splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            # A container sees its own cgroup as the root of the mount, while the path may be the host's.
            inner = path.strip().lstrip("/")
            if number == "0" and not controllers:
                mounts = [self._root, self._root / "unified"]
            elif "cpu" in controllers.split(","):
                mounts = [self._root / controllers, self._root / "cpu"]
            else:
                continue
            for mount in mounts:
                yield mount, inner


def _throttled(cpu_stat: Path) -> float | None:
    for key, value in _pairs(cpu_stat):
        if key == "throttled_usec":  # version 2
            return value / 1e6
        if key == "throttled_time":  # version 1
            return value / 1e9
    return None


def _cpu_limit(folder: Path) -> CpuLimit | None:
    words = (_text(folder / "cpu.max") or "").split()  # version 2: "10000 100000", or "max 100000"
    if not words:
        words = [(_text(folder / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None
    return CpuLimit(int(words[0]) / 1e6, int(words[1]) / 1e6)


def _own_use(proc_path: Path) -> tuple[float | None, float | None]:
    """CPU seconds and resident bytes of this process."""
    stat = _text(proc_path / "self" / "stat")
    if stat is None:
        return None, None
    # The second field is the command in brackets, which may hold spaces and brackets of its own.
    fields = stat.rpartition(")")[2].split()
    try:
        ticks = int(fields[11]) + int(fields[12])
        pages = int(fields[21])
    except (IndexError, ValueError):
        return None, None
    return ticks / os.sysconf("SC_CLK_TCK"), float(pages * os.sysconf("SC_PAGE_SIZE"))


def _pressure(folder: Path) -> Iterator[tuple[tuple[str, str], float]]:
    """Total seconds in which something waited for a resource (some), or everything did (full)."""
    for resource in _RESOURCES:
        for line in (_text(folder / resource) or "").splitlines():
            kind, _, rest = line.partition(" ")
            # For a whole system the kernel does not define it, and prints zeros.
            if (resource, kind) == ("cpu", "full"):
                continue
            for field in rest.split():
                key, _, value = field.partition("=")
                if key == "total" and value.isdigit():
                    yield (resource, kind), int(value) / 1e6


def _rdma_ports(folder: Path) -> Iterator[RdmaPort]:
    found = 0
    for device in _names(folder):
        ports = folder / device / "ports"
        for port in _names(ports):
            found += 1
            if found > _MAX_PORTS:
                return
            yield _rdma_port(device, port, ports / port)


def _rdma_port(device: str, port: str, folder: Path) -> RdmaPort:
    counters: dict[str, float] = {}
    present = {name: folder / part / name for part in ("counters", "hw_counters") for name in _names(folder / part)}
    for name in RDMA_COUNTERS:
        if name in present and (value := _number(present[name])) is not None:
            counters[name] = value
    state = _text(folder / "state")  # "4: ACTIVE"
    return RdmaPort(
        device=device,
        port=port,
        # Data counters are in words of four bytes, whatever the link.
        received_bytes=_times(4, _number(folder / "counters" / "port_rcv_data")),
        transmitted_bytes=_times(4, _number(folder / "counters" / "port_xmit_data")),
        active=None if state is None else state.partition(":")[2].strip() == "ACTIVE",
        rate_gbps=_rate(_text(folder / "rate")),
        congestion=MappingProxyType(counters),
    )


def _rate(text: str | None) -> float | None:
    """Gigabits per second of "200 Gb/sec (4X HDR)"."""
    match = re.match(r"\s*([0-9.]+)\s*Gb/sec", text or "")
    try:
        return float(match[1]) if match else None
    except ValueError:
        return None


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _number(path: Path) -> float | None:
    text = (_text(path) or "").strip()
    return float(text) if text.isdecimal() else None


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in (_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if value.strip().isdecimal():
            yield key, int(value)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  (iterdir makes a Path of each name, which costs more)
    except OSError:
        return []


def _text(path: Path) -> str | None:
    """A small file's text, or None. Plain system calls: of a hundred files a second the buffers would be the cost."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(handle, _MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(handle)
