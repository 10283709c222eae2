"""Host evidence read from trees that look like procfs and sysfs."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from stallwatch.observations import HostSample, RdmaPort
from stallwatch.settings import HostSettings
from stallwatch.sources.host import HostSource, OwnCgroup

T = TypeVar("T")

STAT = "7 (a (strange) name) S 1 1 1 0 -1 4194560 500 0 0 0 250 150 0 0 20 0 3 0 900 200000000 12345 184467 1 1"
V2 = "usage_usec 5000000\nuser_usec 4000000\nnr_periods 10\nnr_throttled 4\nthrottled_usec 1500000\n"
V1 = "nr_periods 10\nnr_throttled 4\nthrottled_time 1500000000\n"
PRESSURE = (
    "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1250000\n"
)


async def inline(work: Callable[[], T]) -> T:
    return work()


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def poll(root: Path, engine_cgroup: Path | None = None) -> HostSample:
    settings = HostSettings(proc_path=root / "proc", sys_path=root / "sys", engine_cgroup=engine_cgroup)
    polling = HostSource(settings, clock=lambda: 42.0, run_blocking=inline).poll()
    try:
        polling.send(None)
    except StopIteration as done:
        sample: HostSample = done.value
        return sample
    raise AssertionError("a poll that runs inline has waited for something")


def test_nothing_is_there(tmp_path: Path) -> None:
    """On a machine without any of the files everything is absent and nothing fails."""
    assert HostSample(at=42.0) == poll(tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        pytest.param("0::/\n", "cpu.stat", V2, id="v2 in a container"),
        pytest.param("0::/kubepods/pod1\n", "kubepods/pod1/cpu.stat", V2, id="v2 on a host"),
        pytest.param("0::/host/path\n", "cpu.stat", V2, id="v2 with the host's path"),
        pytest.param("4:cpu,cpuacct:/docker/1\n0::/\n", "cpu,cpuacct/docker/1/cpu.stat", V1, id="v1 on a host"),
        pytest.param("4:cpu,cpuacct:/docker/1\n", "cpu,cpuacct/cpu.stat", V1, id="v1 in a container"),
        pytest.param("4:cpuacct,cpu:/a\n", "cpu/a/cpu.stat", V1, id="v1 linked"),
        pytest.param("1:cpuset:/\n0::/a\n", "unified/a/cpu.stat", V2, id="hybrid"),
    ],
)
def test_own_throttling(tmp_path: Path, cgroup: str, file: str, text: str) -> None:
    """Our own throttled time is found in either version of cgroups, inside and outside a container."""
    plant(tmp_path, {"proc/self/cgroup": cgroup, f"sys/fs/cgroup/{file}": text})
    assert poll(tmp_path).own_throttled_seconds == 1.5


def test_no_limit_is_not_zero(tmp_path: Path) -> None:
    """A cgroup without a CPU limit counts no throttling at all."""
    plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.stat": "usage_usec 5000000\n"})
    assert poll(tmp_path).own_throttled_seconds is None


@pytest.mark.parametrize("text", [pytest.param(V1, id="v1"), pytest.param(V2, id="v2")])
def test_the_engines_throttling(tmp_path: Path, text: str) -> None:
    """The throttled time of vLLM is read from the directory that was named."""
    plant(tmp_path, {"vllm/cpu.stat": text})
    assert poll(tmp_path, tmp_path / "vllm").engine_throttled_seconds == 1.5


def test_own_use(tmp_path: Path) -> None:
    """CPU and memory are our own process's, whatever the command is called."""
    plant(tmp_path, {"proc/self/stat": STAT})
    sample = poll(tmp_path)
    expected = (400 / os.sysconf("SC_CLK_TCK"), 12345.0 * os.sysconf("SC_PAGE_SIZE"))
    assert expected == (sample.own_cpu_seconds, sample.own_rss_bytes)


def test_pressure(tmp_path: Path) -> None:
    """Pressure totals are in seconds; the kernel's meaningless full line of the CPU is left out."""
    plant(tmp_path, {f"proc/pressure/{name}": PRESSURE for name in ("cpu", "memory", "io")})
    expected = {
        ("cpu", "some"): 2.5,
        ("memory", "some"): 2.5,
        ("memory", "full"): 1.25,
        ("io", "some"): 2.5,
        ("io", "full"): 1.25,
    }
    assert expected == dict(poll(tmp_path).pressure_seconds)


def test_some_pressure_is_missing(tmp_path: Path) -> None:
    """A resource without a pressure file, or with garbage in it, is absent; the others are there."""
    plant(tmp_path, {"proc/pressure/memory": PRESSURE, "proc/pressure/io": "some total=x\n\nnonsense\n"})
    assert {("memory", "some"), ("memory", "full")} == set(poll(tmp_path).pressure_seconds)


MLX5 = "sys/class/infiniband/mlx5_0/ports/1"
ROCE = "sys/class/infiniband/rocep1s0/ports/1"


def test_rdma_ports(tmp_path: Path) -> None:
    """Two devices give their bytes, link and congestion counters; what a port lacks is absent."""
    plant(
        tmp_path,
        {
            f"{MLX5}/counters/port_rcv_data": "1000\n",
            f"{MLX5}/counters/port_xmit_data": "2000\n",
            f"{MLX5}/counters/link_downed": "1\n",
            f"{MLX5}/counters/port_rcv_constraint_errors": "9\n",
            f"{MLX5}/hw_counters/np_cnp_sent": "11\n",
            f"{MLX5}/hw_counters/rp_cnp_handled": "12\n",
            f"{MLX5}/hw_counters/out_of_sequence": "13\n",
            f"{MLX5}/hw_counters/local_ack_timeout_err": "14\n",
            f"{MLX5}/hw_counters/lifespan": "10\n",
            f"{MLX5}/state": "4: ACTIVE\n",
            f"{MLX5}/rate": "200 Gb/sec (4X HDR)\n",
            f"{ROCE}/counters/port_rcv_data": "N/A (no PMA)\n",
            f"{ROCE}/state": "1: DOWN\n",
            f"{ROCE}/rate": "2.5 Gb/sec (1X SDR)\n",
        },
    )
    first, second = poll(tmp_path).rdma
    expected = RdmaPort(
        device="mlx5_0",
        port="1",
        received_bytes=4000.0,
        transmitted_bytes=8000.0,
        active=True,
        rate_gbps=200.0,
        congestion={
            "np_cnp_sent": 11.0,
            "rp_cnp_handled": 12.0,
            "out_of_sequence": 13.0,
            "local_ack_timeout_err": 14.0,
            "link_downed": 1.0,
        },
    )
    assert expected == first
    assert RdmaPort(device="rocep1s0", port="1", active=False, rate_gbps=2.5) == second


def test_ports_are_bounded(tmp_path: Path) -> None:
    """A machine with a hundred ports does not become a hundred times as many series."""
    plant(tmp_path, {f"sys/class/infiniband/mlx5_{k}/ports/1/state": "4: ACTIVE\n" for k in range(100)})
    assert len(poll(tmp_path).rdma) == 32


def test_unreadable_files_are_absent(tmp_path: Path) -> None:
    """A directory in a file's place stands for everything that opens and cannot be read."""
    for name in ("proc/self/stat", "proc/pressure/io", f"{MLX5}/state", f"{MLX5}/counters/port_rcv_data"):
        (tmp_path / name).mkdir(parents=True)
    sample = poll(tmp_path)
    assert (None, {}, (RdmaPort(device="mlx5_0", port="1"),)) == (
        sample.own_cpu_seconds,
        dict(sample.pressure_seconds),
        sample.rdma,
    )


def test_a_thread_of_its_own(tmp_path: Path) -> None:
    """By default the files are read beside the loop."""

    async def scenario() -> HostSample:
        source = HostSource(HostSettings(proc_path=tmp_path / "proc", sys_path=tmp_path / "sys"))
        try:
            return await source.poll()
        finally:
            source.close()

    plant(tmp_path, {"proc/self/stat": STAT})
    assert asyncio.run(scenario()).own_cpu_seconds == 400 / os.sysconf("SC_CLK_TCK")


def test_this_machine() -> None:
    """The real kernel's files are read: this process has used CPU time and memory."""
    sample = poll(Path("/"))
    assert (sample.own_cpu_seconds or 0) > 0
    assert (sample.own_rss_bytes or 0) > 10e6


def test_reads_are_cheap(tmp_path: Path) -> None:
    """A poll with eight adapters stays within milliseconds, and the part read on the loop within a fraction of one."""
    for k in range(8):
        port = f"sys/class/infiniband/mlx5_{k}/ports/1"
        plant(tmp_path, {f"{port}/hw_counters/{name}": "1\n" for name in ("np_cnp_sent", "out_of_sequence")})
        plant(tmp_path, {f"{port}/counters/{name}": "1\n" for name in ("port_rcv_data", "port_xmit_data")})
    plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.stat": V2})
    own = OwnCgroup(tmp_path / "proc", tmp_path / "sys")
    own.throttled_seconds()
    started = time.process_time()
    for _ in range(100):
        own.throttled_seconds()
    on_the_loop = (time.process_time() - started) / 100
    started = time.process_time()
    for _ in range(20):
        poll(tmp_path)
    whole = (time.process_time() - started) / 20
    print(f"own throttling {1e6 * on_the_loop:.0f} us, a poll with eight adapters {1e3 * whole:.2f} ms")
    assert on_the_loop < 0.001
    assert whole < 0.05
