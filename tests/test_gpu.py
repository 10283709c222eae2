"""The GPU source over the real pynvml module and a scripted driver."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types
import pytest
from structlog.testing import capture_logs

from stallwatch.observations import CLOCK_EVENT_REASONS, Failure, GpuReading, GpuSample, PollFailure, Source
from stallwatch.scheduling import SourceError, every
from stallwatch.settings import GpuSettings
from stallwatch.simulator.nvml import ScriptedGpu, ScriptedNvml
from stallwatch.sources.blocking import BlockingThread
from stallwatch.sources.gpu import Gpu
from stallwatch.sources.nvml import (
    DEAD,
    EVENT_REASONS,
    LOST,
    NEVER,
    NO_GPU,
    Code,
    Nvml,
    NvmlError,
    explain,
    reason_names,
)
from tests.nvml.fake import HOPPER, FakeNvml, load
from tests.virtual import run

T = TypeVar("T")

ONE = "gpus 1\n" + HOPPER
TWO = "gpus 2\n" + HOPPER


async def inline(work: Callable[[], T]) -> T:
    return work()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNvml]:
    fake = load(tmp_path_factory.mktemp("nvml"))
    yield fake
    fake.unload()


@pytest.fixture
def fake(library: FakeNvml) -> Iterator[FakeNvml]:
    yield library
    library.unload()


def gpu_source(fake: FakeNvml, *, environ: dict[str, str] | None = None, **settings: Any) -> Gpu:
    return Gpu(
        GpuSettings(**settings),
        environ=environ or {},
        clock=lambda: fake.now,
        run_blocking=inline,
        system_memory=lambda: 128 * 10**9,
    )


def poll(source: Gpu) -> GpuSample:
    """One poll of a source whose calls run inline: it never waits, so it needs no loop."""
    polling = source.poll()
    try:
        polling.send(None)
    except StopIteration as done:
        sample: GpuSample = done.value
        return sample
    raise AssertionError("a poll that runs inline has waited for something")


def failure_of(source: Gpu) -> SourceError:
    with pytest.raises(SourceError) as caught:
        poll(source)
    return caught.value


def only(sample: GpuSample) -> GpuReading:
    (reading,) = sample.gpus
    return reading


def absent_lines(logs: list[Any]) -> list[tuple[str, str]]:
    return [(line["gpu"], line["figure"]) for line in logs if line["event"] == "gpu figure is absent"]


def test_every_figure_of_a_hopper_gpu(fake: FakeNvml) -> None:
    """A full reading has every figure in base units."""
    fake.play(ONE + "name 0 NVIDIA H100 80GB HBM3\nat 1 gpu 0 reasons 4\n")
    source = gpu_source(fake)
    poll(source)
    fake.now = 2.0
    expected = GpuReading(
        gpu="0",
        uuid="GPU-00000000-0000-0000-0000-000000000000",
        name="NVIDIA H100 80GB HBM3",
        utilization=0.8,
        memory_utilization=0.4,
        sm_clock=1.98e9,
        memory_clock=2.619e9,
        max_sm_clock=1.98e9,
        power=500.0,
        power_limit=700.0,
        energy=2000.0,
        temperature=60.0,
        clock_event_reasons=frozenset({"sw_power_cap"}),
        memory_used=40e9,
        memory_total=80e9,
        pcie_rx=3 * 2.0**20,
        pcie_tx=4 * 2.0**20,
        nvlink_rx=100 * 1024.0,
        nvlink_tx=200 * 1024.0,
        ecc_corrected=3.0,
        ecc_uncorrected=0.0,
        xid_errors=0.0,
        dram_active=0.55,
        sm_occupancy=0.25,
    )
    sample = poll(source)
    assert (expected, 2.0, "580.126.09") == (only(sample), sample.at, sample.driver)


def test_a_bare_gpu_gives_what_it_has(fake: FakeNvml) -> None:
    """Figures that a device does not support are absent, never zero."""
    fake.play("gpus 1\nat 0 gpu 0 sm_clock 1500\nat 0 gpu 0 power_limit 300000\n")
    expected = GpuReading(
        gpu="0",
        uuid="GPU-00000000-0000-0000-0000-000000000000",
        name="Fake GPU",
        sm_clock=1.5e9,
        power_limit=300.0,
        xid_errors=0.0,
    )
    assert expected == only(poll(gpu_source(fake)))


def test_absent_figures_are_named_once(fake: FakeNvml) -> None:
    """What a device does not give is logged once, also across a reload of the driver, and not asked for again."""
    fake.play("gpus 1\nat 0 gpu 0 sm_clock 1500\nat 0 gpu 0 power_limit 9\nreload 1 2\n")
    source = gpu_source(fake)
    with capture_logs() as logs:
        poll(source)
        asked = fake.calls("nvmlDeviceGetPowerUsage")
        fake.now = 0.5
        poll(source)
        assert asked == fake.calls("nvmlDeviceGetPowerUsage")
        fake.now = 1.5
        failure_of(source)
        fake.now = 9
        poll(source)
    told = absent_lines(logs)
    assert ("0", "power") in told
    assert len(told) == len(set(told))


def test_pcie_is_read_rarely_where_it_blocks(fake: FakeNvml) -> None:
    """Without GPM the blocking PCIe calls are made every five seconds, and not for all GPUs in one poll."""
    fake.play("gpus 8\n" + "\n".join(line for line in HOPPER.splitlines() if "dram" not in line))
    source = gpu_source(fake)
    most = 0
    for tick in range(75):
        fake.now = tick / 5
        before = fake.calls("nvmlDeviceGetPcieThroughput")
        sample = poll(source)
        most = max(most, fake.calls("nvmlDeviceGetPcieThroughput") - before)
    assert (most, fake.calls("nvmlDeviceGetPcieThroughput")) == (2, 8 * 3 * 2)
    assert {(1024000.0, 2048000.0)} == {(reading.pcie_rx, reading.pcie_tx) for reading in sample.gpus}


def test_pcie_falls_back_when_profiling_is_refused(fake: FakeNvml) -> None:
    """Where GPM turns out to be forbidden, its figures are absent and PCIe comes from the slow calls."""
    fake.play(ONE + "error nvmlGpmSampleGet 0 4 0 99\n")
    source = gpu_source(fake)
    poll(source)
    fake.now = 0.2
    reading = only(poll(source))
    assert (reading.dram_active, reading.sm_occupancy, reading.pcie_rx) == (None, None, 1024000.0)


def test_profiling_can_be_left_to_others(fake: FakeNvml) -> None:
    """With `gpu.gpm` off no profiling sample is ever taken."""
    fake.play(ONE)
    source = gpu_source(fake, gpm=False)
    poll(source)
    fake.now = 2.0
    assert only(poll(source)).dram_active is None
    assert fake.calls("nvmlGpmSampleGet") == 0


def test_old_drivers_call_the_reasons_otherwise(fake: FakeNvml) -> None:
    """A driver without the current name of the clock event reasons is asked by the old one."""
    fake.play(ONE + "error nvmlDeviceGetCurrentClocksEventReasons 0 13 0 99\nat 0 gpu 0 reasons 32\n")
    assert frozenset({"sw_thermal_slowdown"}) == only(poll(gpu_source(fake))).clock_event_reasons


def test_reasons_have_one_name_each() -> None:
    """Every bit has its own name, and bits of a newer driver share one."""
    assert frozenset({"gpu_idle", "hw_slowdown", "other"}) == reason_names(0x1 | 0x8 | 1 << 20)


def test_unified_memory_has_no_figures(fake: FakeNvml) -> None:
    """A GPU that repeats the system's memory as its own, and knows no power limit, gives no memory figures."""
    fake.play("gpus 1\nat 0 gpu 0 utilization 90\nat 0 gpu 0 memory_total 128e9\nat 0 gpu 0 memory_used 90e9\n")
    reading = only(poll(gpu_source(fake)))
    assert (
        reading.memory_used,
        reading.memory_total,
        reading.memory_utilization,
        reading.utilization,
    ) == (None, None, None, 0.9)


def test_a_card_as_large_as_the_system_keeps_its_memory(fake: FakeNvml) -> None:
    """A GPU with a power limit is a card of its own, even with exactly as much memory as the system."""
    fake.play(ONE + "at 0 gpu 0 memory_total 128e9\n")
    assert only(poll(gpu_source(fake))).memory_total == 128e9


def test_xid_errors_are_counted(fake: FakeNvml) -> None:
    """Xid events count up for their own GPU, keep their count over a reload, and are logged with their number."""
    fake.play(TWO + "xid 1 1 31\nxid 1 1 43\nxid 6 1 79\nreload 3 4\n")
    source = gpu_source(fake)
    poll(source)
    fake.now = 2.0
    with capture_logs() as logs:
        assert [reading.xid_errors for reading in poll(source).gpus] == [0.0, 2.0]
    assert [line["xid"] for line in logs if line["event"] == "gpu reported an error"] == [31, 43]
    fake.now = 3.5
    failure_of(source)
    fake.now = 7.0
    poll(source)
    assert [reading.xid_errors for reading in poll(source).gpus] == [0.0, 3.0]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        pytest.param("all", ["0", "1"], id="all"),
        pytest.param("1", ["1"], id="index"),
        pytest.param("GPU-00000001-0000-0000-0000-000000000000", ["1"], id="uuid"),
        pytest.param("0,GPU-00000001-0000-0000-0000-000000000000", ["0", "1"], id="both"),
        pytest.param("0,5", ["0"], id="one of them is not visible"),
    ],
)
def test_selection(fake: FakeNvml, devices: str, expected: list[str]) -> None:
    """GPUs are chosen by index or UUID."""
    fake.play(TWO)
    assert expected == [reading.gpu for reading in poll(gpu_source(fake, devices=devices)).gpus]


def test_selecting_nothing_says_what_is_visible(fake: FakeNvml) -> None:
    """When no named GPU is visible, the source is down and names those that are."""
    fake.play(TWO)
    failure = failure_of(gpu_source(fake, devices="7"))
    assert failure.reason is Failure.UNAVAILABLE
    assert "gpu.devices names 7; visible are 0 (GPU-00000000" in failure.detail
    assert fake.references == 0


@pytest.mark.parametrize(
    ("gpus", "devices", "environ", "expected"),
    [
        pytest.param(2, "all", {}, "node", id="several and none named"),
        pytest.param(2, "all", {"NVIDIA_VISIBLE_DEVICES": "all"}, "node", id="asked for all of them"),
        pytest.param(2, "all", {"NVIDIA_VISIBLE_DEVICES": "void"}, "node", id="said nothing"),
        pytest.param(2, "all", {"NVIDIA_VISIBLE_DEVICES": "0,1"}, "container", id="the container was given these"),
        pytest.param(1, "all", {}, "container", id="there is only one"),
        pytest.param(2, "0", {}, "selected", id="named"),
    ],
)
def test_scope(fake: FakeNvml, gpus: int, devices: str, environ: dict[str, str], expected: str) -> None:
    """The scope says how sure it is that these are vLLM's GPUs."""
    fake.play(f"gpus {gpus}\n" + HOPPER)
    assert expected == poll(gpu_source(fake, devices=devices, environ=environ)).scope


def test_mig_instances_have_readings_of_their_own(fake: FakeNvml) -> None:
    """A partitioned GPU gives its clocks, its instances give memory and profiling figures, and nothing is zero."""
    fake.play(
        "gpus 1\nmig 0 2\nat 0 gpu 0 sm_clock 1980\nat 0 gpu 0 power 300000\nat 0 gpu 0 power_limit 700000\n"
        "at 0 gpu 0:1 memory_total 20e9\nat 0 gpu 0:1 memory_used 5e9\nat 0 gpu 0:1 dram_active 30\n"
        "at 0 gpu 0:0 memory_total 20e9\nat 0 gpu 0:0 memory_used 6e9\n"
    )
    source = gpu_source(fake)
    poll(source)
    fake.now = 1.5
    whole, first, second = poll(source).gpus
    assert (whole.gpu, whole.sm_clock, whole.utilization, whole.dram_active) == ("0", 1.98e9, None, None)
    assert (first.gpu, first.memory_used, first.utilization, first.dram_active) == ("0:0", 6e9, None, None)
    assert (second.gpu, second.memory_used, second.dram_active) == ("0:1", 5e9, 0.3)
    assert second.uuid.startswith("MIG-")


def test_a_named_mig_instance_comes_with_its_gpu(fake: FakeNvml) -> None:
    """Naming one instance watches it and the clocks of the GPU around it, and no other instance."""
    fake.play("gpus 2\nmig 1 3\n" + HOPPER + "at 0 gpu 1:1 memory_total 20e9\nat 0 gpu 1:1 memory_used 5e9\n")
    uuid = "MIG-00000001-0000-0000-0000-000000000001"
    assert [reading.gpu for reading in poll(gpu_source(fake, devices=uuid)).gpus] == ["1", "1:1"]


def test_a_lost_gpu_leaves_the_others(fake: FakeNvml) -> None:
    """One GPU that falls off the bus is said once; the other is read on; after its reset it comes back."""
    fake.play(TWO + "lost 1 5 20\n")
    source = gpu_source(fake)
    with capture_logs() as logs:
        for tick in range(100):
            fake.now = tick
            sample = poll(source)
            if tick == 10:
                assert [reading.gpu for reading in sample.gpus] == ["0"]
                assert source.status().lost == ("1",)
    assert [reading.gpu for reading in sample.gpus] == ["0", "1"]
    assert len([line for line in logs if line["event"] == "gpu stopped answering"]) == 1
    assert fake.references == 1


def test_a_gpu_named_by_uuid_comes_back(fake: FakeNvml) -> None:
    """A named GPU that is lost at the start cannot tell its UUID, and is found once it was reset."""
    uuid = "GPU-00000001-0000-0000-0000-000000000000"
    fake.play(TWO + "lost 1 0 20\n")
    source = gpu_source(fake, devices=f"0,{uuid}")
    assert [reading.gpu for reading in poll(source).gpus] == ["0"]
    assert [reading.gpu for answer in polls(source, fake, range(40))[-1:] if answer for reading in answer.gpus] == [
        "0",
        "1",
    ]


def test_all_gpus_lost_is_a_failure(fake: FakeNvml) -> None:
    """With every GPU lost the source is down, tries again ever less often, and recovers."""
    fake.play(TWO + "lost * 5 60\n")
    source = gpu_source(fake)
    poll(source)
    fake.now = 5.0
    assert "lost" in failure_of(source).detail
    starts = fake.calls("nvmlInitWithFlags")
    for tick in range(26, 300):
        fake.now = tick / 5
        failure_of(source)
    assert fake.calls("nvmlInitWithFlags") - starts <= 6
    fake.now = 100.0
    assert len(poll(source).gpus) == 2
    assert fake.references == 1


def test_a_reloaded_driver_is_opened_anew_without_leaks(fake: FakeNvml) -> None:
    """Over ten reloads the source goes down and comes back, and gives back what it took."""
    reloads = "".join(f"reload {10 * k + 5} {10 * k + 6}\n" for k in range(10))
    fake.play(ONE + reloads)
    source = gpu_source(fake)
    downs = 0
    for tick in range(1000):
        fake.now = tick / 10
        try:
            poll(source)
        except SourceError:
            downs += 1
    assert downs >= 10
    poll(source)
    run(source.close())
    assert fake.references == 0
    assert fake.calls("nvmlEventSetCreate") == fake.calls("nvmlEventSetFree") > 10
    assert fake.calls("nvmlGpmSampleAlloc") == fake.calls("nvmlGpmSampleFree") > 10


# each call that is made, with the figures that depend on it and nothing else
READS = {
    "nvmlDeviceGetUtilizationRates": {"utilization", "memory_utilization"},
    "nvmlDeviceGetClockInfo": {"sm_clock", "memory_clock"},
    "nvmlDeviceGetMaxClockInfo": {"max_sm_clock"},
    "nvmlDeviceGetPowerUsage": {"power"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit"},
    "nvmlDeviceGetTotalEnergyConsumption": {"energy"},
    "nvmlDeviceGetTemperature": {"temperature"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"clock_event_reasons"},
    "nvmlDeviceGetMemoryInfo": {"memory_used", "memory_total"},
    "nvmlDeviceGetFieldValues": {"nvlink_tx", "nvlink_rx"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected", "ecc_uncorrected"},
    "nvmlGpmSampleGet": {"dram_active", "sm_occupancy", "pcie_tx", "pcie_rx"},
    "nvmlGpmMetricsGet": {"dram_active", "sm_occupancy", "pcie_tx", "pcie_rx"},
    "nvmlEventSetWait_v2": set[str](),
}
OPENINGS = ("nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID")
OPTIONAL_OPENINGS = (
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMigMode",
    "nvmlGpmQueryDeviceSupport",
    "nvmlGpmSampleAlloc",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlEventSetCreate",
    "nvmlDeviceRegisterEvents",
)
CODES = [*range(1, 31), 999]
FIGURES = frozenset().union(*READS.values())


def missing(reading: GpuReading) -> set[str]:
    return {name for name in FIGURES if getattr(reading, name) is None}


PROFILED = {"dram_active", "sm_occupancy", "pcie_tx", "pcie_rx"}


@pytest.mark.parametrize("function", READS)
def test_a_failing_read_takes_its_own_figures_only(fake: FakeNvml, function: str) -> None:
    """Each error of NVML on each read: its figures go and are said once if for good; dead drivers are opened anew."""
    for code in CODES:
        fake.play(ONE + f"error {function} 0 {code} 5 25\n")
        source = gpu_source(fake)
        with capture_logs() as logs:
            before = [only(answer) for answer in polls(source, fake, range(5)) if answer is not None]
            during = polls(source, fake, range(5, 25))[10:]
            after = polls(source, fake, range(100, 110))[-1]
        assert set() == missing(before[-1])
        deadly = function != "nvmlEventSetWait_v2" and code in DEAD | LOST
        # The second half of a profiling sample fails only once the first was taken: up, and down again.
        flaps = function == "nvmlGpmMetricsGet"
        assert deadly == (any if flaps else all)(answer is None for answer in during), (function, code)
        renamed = function == "nvmlDeviceGetCurrentClocksEventReasons" and code == Code.FUNCTION_NOT_FOUND
        for answer in during:
            if answer is None:
                continue
            # With profiling refused, PCIe comes from the calls of its own.
            gone = missing(only(answer)) - {"pcie_tx", "pcie_rx"}
            assert gone == (set() if renamed else READS[function] - {"pcie_tx", "pcie_rx"}), (function, code)
        assert after is not None
        assert missing(only(after)) <= (READS[function] if code in NEVER else set()), (function, code)
        assert (only(after).xid_errors is None) == (function == "nvmlEventSetWait_v2" and code in NEVER), code
        told = absent_lines(logs)
        assert len(told) == len(set(told)), (function, code)
        assert fake.references == 1, (function, code)


def polls(source: Gpu, fake: FakeNvml, seconds: range) -> list[GpuSample | None]:
    """What a poll a second brought; None where it failed."""
    answers: list[GpuSample | None] = []
    for second in seconds:
        fake.now = float(second)
        try:
            answers.append(poll(source))
        except SourceError:
            answers.append(None)
    return answers


@pytest.mark.parametrize("function", OPENINGS)
def test_a_failing_start(fake: FakeNvml, function: str) -> None:
    """Each error of NVML on each call of the start: off if there is nothing here, else down until it passes."""
    for code in CODES:
        fake.play(ONE + f"error {function} * {code} 0 8\n")
        source = gpu_source(fake)
        failure = failure_of(source)
        assert failure.reason is Failure.UNAVAILABLE
        assert failure.detail
        assert fake.references == 0, (function, code)
        assert (code in NO_GPU) == (source.off is not None), (function, code)
        fake.now = 100.0
        if source.off is None:
            assert missing(only(poll(source))) <= PROFILED
        else:
            failure_of(source)


@pytest.mark.parametrize("function", OPTIONAL_OPENINGS)
def test_a_failing_optional_start(fake: FakeNvml, function: str) -> None:
    """Each error of NVML on each call that nothing depends on: the clock is read all the same."""
    for code in set(CODES) - DEAD - LOST:
        fake.play(ONE + f"error {function} * {code} 0 8\n")
        assert only(poll(gpu_source(fake))).sm_clock == 1.98e9, (function, code)


def test_no_gpu_is_off_and_said_once(fake: FakeNvml) -> None:
    """Without a driver the source turns itself off with one line in the log, and never calls NVML again."""
    fake.unload()
    source = gpu_source(fake)
    with capture_logs() as logs:
        for _ in range(10):
            failure_of(source)
    assert [line["event"] for line in logs] == ["gpu counters are off"]
    assert fake.calls("nvmlInitWithFlags") == 1
    off = source.status().off
    assert off is not None
    assert "NVIDIA_VISIBLE_DEVICES is not set" in off


def test_wanted_gpus_are_waited_for(fake: FakeNvml) -> None:
    """With `gpu.enabled` true an absent driver is a failure, and is found once it comes."""
    fake.play(ONE + "error nvmlInitWithFlags * 9 0 50\n")
    source = gpu_source(fake, enabled="true")
    for tick in range(50):
        fake.now = tick
        failure_of(source)
    fake.now = 100.0
    assert only(poll(source)).sm_clock == 1.98e9


@pytest.mark.parametrize(
    ("code", "environ", "expected"),
    [
        pytest.param(12, {"NVIDIA_DRIVER_CAPABILITIES": "compute"}, "leaves out `utility`", id="capabilities"),
        pytest.param(12, {}, "NVIDIA_VISIBLE_DEVICES is not set", id="no gpus asked for"),
        pytest.param(12, {"NVIDIA_VISIBLE_DEVICES": "void"}, "NVIDIA_VISIBLE_DEVICES=void", id="void"),
        pytest.param(
            12,
            {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"},
            "runtimeClassName: nvidia",
            id="wrong runtime",
        ),
        pytest.param(9, {}, "/dev/nvidiactl", id="driver not loaded"),
        pytest.param(4, {}, "refuses this user", id="no permission"),
        pytest.param(18, {}, "driver upgrade", id="version mismatch"),
        pytest.param(28, {}, "shows no GPU", id="no gpu"),
        pytest.param(15, {}, "must be reset", id="lost"),
        pytest.param(999, {}, "daemon-reload", id="unknown"),
        pytest.param(20, {}, "error 20", id="anything else"),
    ],
)
def test_explanations(code: int, environ: dict[str, str], expected: str) -> None:
    """Each way of not having GPU counters names its remedy."""
    assert expected in explain(NvmlError(code), environ)


async def threaded(source: Gpu, seconds: float) -> list[str]:
    """Polls in real time and gives what each poll brought."""
    seen: list[str] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            await source.poll()
            seen.append("up")
        except SourceError as error:
            seen.append(error.detail if error.reason is Failure.TIMEOUT else str(error.reason))
        await asyncio.sleep(0.01)
    return seen


def real_time_source(**thread: Any) -> tuple[Gpu, BlockingThread]:
    blocking = BlockingThread("nvml-test", **thread)
    source = Gpu(GpuSettings(), environ={}, run_blocking=blocking, system_memory=lambda: None)
    return source, blocking


def beside(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on a real loop and asserts that the loop never stood still meanwhile."""

    async def watched() -> T:
        worst = 0.0

        async def nap() -> None:
            nonlocal worst
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                worst = max(worst, time.monotonic() - before)

        napping = asyncio.create_task(nap())
        try:
            return await main
        finally:
            napping.cancel()
            assert worst < 0.25

    return asyncio.run(watched())


def test_a_hanging_call_is_named_and_survived(fake: FakeNvml) -> None:
    """While a driver call hangs polls fail with its name, the loop turns on, and when it returns the source is up."""
    fake.play(ONE + "hang nvmlDeviceGetPowerUsage 0 60 1 2\n", at=0.0)
    source, blocking = real_time_source(deadline_seconds=0.1)

    async def scenario() -> tuple[list[str], list[str]]:
        await source.poll()
        fake.now = 1.0
        hanging = await threaded(source, 0.4)
        fake.now = 3.0
        fake.release()
        await asyncio.sleep(0.05)
        return hanging, await threaded(source, 0.1)

    hanging, after = beside(scenario())
    assert all("power of GPU 0" in line for line in hanging)
    assert {"up"} == set(after)
    assert (blocking.left_behind, fake.references) == (0, 1)


def test_hung_threads_are_left_behind_and_bounded(fake: FakeNvml) -> None:
    """A call that never returns costs one thread each time, three at most; once they return they clean up."""
    fake.play(ONE + "hang nvmlDeviceGetPowerUsage 0 60 1 99\n", at=1.0)
    source, blocking = real_time_source(deadline_seconds=0.03, hang_seconds=0.08, left_behind_max=3)
    before = threading.active_count()

    async def scenario() -> None:
        seen = await threaded(source, 1.0)
        assert "unavailable" in seen[-1]
        assert blocking.left_behind == 3
        fake.now = 100.0
        fake.release()
        await asyncio.sleep(0.2)
        assert blocking.left_behind == 0
        assert "up" in await threaded(source, 1.5)

    asyncio.run(scenario())
    assert threading.active_count() <= before + 1
    blocking.close()


def test_a_hung_driver_does_not_delay_the_exit(fake: FakeNvml, tmp_path: Any) -> None:
    """A process whose driver hangs for a minute still ends at once."""
    script = tmp_path / "hang.txt"
    script.write_text(ONE + "hang nvmlDeviceGetPowerUsage 0 60 0 99\n", encoding="utf-8")
    program = """
import asyncio, sys
from stallwatch.settings import GpuSettings
from stallwatch.scheduling import SourceError
from stallwatch.sources.gpu import Gpu

async def main():
    source = Gpu(GpuSettings(timeout_seconds=0.25), environ={})
    try:
        await source.poll()
    except SourceError as error:
        print(error)
    await source.close()

asyncio.run(main())
"""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"LD_LIBRARY_PATH": str(fake.folder), "FAKE_NVML_SCRIPT": str(script), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "timeout: a call has not come back" in done.stdout
    assert time.monotonic() - started < 10


def test_eight_gpus_at_five_hertz_are_cheap(fake: FakeNvml) -> None:
    """Eight GPUs with every figure cost a few milliseconds of CPU a poll at most, everything of ours included."""
    fake.play("gpus 8\n" + HOPPER)
    blocking = BlockingThread("nvml-test", deadline_seconds=5)
    source = Gpu(GpuSettings(), environ={}, clock=lambda: fake.now, run_blocking=blocking, system_memory=lambda: None)

    async def measured() -> float:
        await source.poll()
        started = time.process_time()
        for tick in range(1, 201):
            fake.now = tick / 5
            await source.poll()
        return (time.process_time() - started) / 200

    seconds = asyncio.run(measured())
    blocking.close()
    print(f"8 GPUs: {1e3 * seconds:.2f} ms CPU a poll, {100 * 5 * seconds:.2f} % of a core at 5 Hz")
    assert seconds < 0.01


def test_the_demo_runs_through_the_same_border() -> None:
    """A scripted library in place of pynvml gives the same readings, errors and Xids included."""
    now = 0.0

    def timeline(at: float) -> list[ScriptedGpu]:
        common: dict[str, Any] = {
            "uuid": "GPU-sim",
            "utilization": 100,
            "dram_active": 50.0,
            "pcie_tx": 1,
            "pcie_rx": 2,
        }
        if at < 5:
            return [ScriptedGpu(sm_clock=1980, power=600_000, **common)]
        return [ScriptedGpu(sm_clock=600, xids=[62], errors={"nvmlDeviceGetPowerUsage": 999}, **common)]

    library: Nvml = ScriptedNvml(timeline, lambda: now)
    source = Gpu(GpuSettings(), environ={}, nvml=library, clock=lambda: now, run_blocking=inline)
    first = only(poll(source))
    assert (
        first.sm_clock,
        first.power,
        first.utilization,
        first.xid_errors,
        first.temperature,
    ) == (1.98e9, 600.0, 1.0, 0.0, None)
    now = 6.0
    poll(source)
    later = only(poll(source))
    assert (
        later.sm_clock,
        later.power,
        later.dram_active,
        later.xid_errors,
        later.pcie_rx,
    ) == (6e8, None, 0.5, 1.0, 2048.0)


def test_through_the_polling_loop(fake: FakeNvml) -> None:
    """In virtual time a reload of the driver is a run of failures between two runs of samples, all of them in time."""
    fake.play(ONE + "reload 1.9 4\n")

    async def scenario() -> list[GpuSample | PollFailure]:
        loop = asyncio.get_running_loop()

        def clock() -> float:
            fake.now = loop.time()
            return fake.now

        source = Gpu(GpuSettings(), environ={}, clock=clock, run_blocking=inline, system_memory=lambda: None)
        seen: list[GpuSample | PollFailure] = []
        polling = every(0.2, 5.0, source=Source.GPU, observe=source.poll, emit=seen.append, clock=clock)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await polling
        return seen

    seen = run(scenario())
    assert all(abs(each.at - k / 5) < 1e-6 for k, each in enumerate(seen))
    down = [each.at for each in seen if isinstance(each, PollFailure)]
    assert down[0] == pytest.approx(2.0)
    assert 4.0 <= down[-1] < 6.0
    assert len(seen) == 50


def test_codes_are_those_of_pynvml() -> None:
    """The numbers that we tell apart are the ones that nvidia-ml-py knows by the same names."""
    assert {code.name: code.value for code in Code} == {
        code.name: getattr(pynvml, f"NVML_ERROR_{code.name}") for code in Code
    }


def test_every_reason_has_a_series() -> None:
    """What the border may name is what the page has a series for."""
    assert (*EVENT_REASONS.values(), "other") == CLOCK_EVENT_REASONS
