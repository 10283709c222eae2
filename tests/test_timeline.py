import json
import math
import random
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stallwatch.analysis.causes import Cause, StallKind
from stallwatch.analysis.episodes import Stall
from stallwatch.observations import (
    EngineCounters,
    EngineSample,
    Failure,
    GpuReading,
    GpuSample,
    HostSample,
    Lane,
    Observation,
    ObserverSample,
    Outcome,
    PollFailure,
    Source,
    StreamClosed,
    StreamOpened,
    StreamTokens,
)
from stallwatch.recorder.columns import Columns, Name
from stallwatch.recorder.timeline import Timeline
from stallwatch.simulator.cost import Cause as SimulatedCause
from stallwatch.simulator.load import Arrival, Load, Users
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.scenario import StallKind as SimulatedKind
from tests.harness import watch

RUNNING = Name("engines", "0", "running")


def drawn(*seen: Observation, seconds: float = 60.0) -> dict[str, Any]:
    """What a timeline of a minute shows of these observations."""
    timeline = Timeline(60.0)
    for one in seen:
        timeline.observe(one)
    return dict(timeline.document(seconds, unix_offset=1000.0)())


def scraped(at: float, **counters: float) -> EngineSample:
    return EngineSample(
        sent_at=at - 0.01,
        at=at,
        lane=Lane.ESTIMATOR,
        engines={"0": EngineCounters(**counters)},  # type: ignore[arg-type]
    )


def test_the_ring_forgets_the_oldest() -> None:
    """As many slots are kept as there are, a slot that was skipped is unknown, and a late value finds its slot."""
    columns = Columns(4, most=8)
    for at in (0.0, 0.25, 0.5, 0.75, 1.0):
        columns.put(RUNNING, at, at)
    columns.put(RUNNING, 1.5, 1.5)
    columns.put(RUNNING, 0.8, 9.0)
    columns.put(RUNNING, 0.1, 9.0)  # long gone
    cut = columns.cut(10.0)

    assert (cut.start, cut.slots) == (0.75, 4)
    assert [None if math.isnan(one) else one for one in cut.columns[RUNNING]] == [9.0, 1.0, None, 1.5]


def test_a_long_silence_empties_the_ring() -> None:
    """After a pause longer than the ring nothing old is shown as new."""
    columns = Columns(4, most=8)
    columns.put(RUNNING, 0.0, 1.0)
    columns.advance(1e6)

    assert all(math.isnan(one) for one in columns.cut(10.0).columns[RUNNING])


def test_a_short_cut_is_the_newest_part() -> None:
    """Who asks for less gets the newest slots; who asks before anything was seen gets none."""
    columns = Columns(8, most=8)
    assert columns.cut(1.0).slots == 0
    for slot in range(6):
        columns.put(RUNNING, slot / 4, float(slot))

    assert list(columns.cut(0.5).columns[RUNNING]) == [4.0, 5.0]
    assert list(columns.cut(99.0).columns[RUNNING]) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_gaps_of_streams() -> None:
    """A slot shows its longest gap, how many there were, and the wait that was open then; first tokens stand apart."""
    shown = drawn(
        StreamOpened(0.0, 1, "0", "canary-1"),
        ObserverSample(0.25, 0.0),
        StreamTokens(0.3, 1, 1),
        StreamTokens(0.32, 1, 1),
        StreamTokens(0.4, 1, 2),
        ObserverSample(0.75, 0.002),
        ObserverSample(1.0, 0.0),
        StreamTokens(1.1, 1, 1),
        StreamClosed(1.2, 1, Outcome.COMPLETED),
        ObserverSample(1.3, 0.0),
    )
    engine = shown["engines"]["0"]

    assert engine["first_token_seconds"] == [None, 0.3, None, None, None, None]
    assert engine["gap_seconds"] == [None, 0.08, None, None, 0.7, None]
    assert engine["gaps"] == [None, 2, None, None, 1, None]
    assert engine["open_gap_seconds"] == [None, 0.25, None, 0.35, 0.6, None]
    assert shown["sidecar"]["lag_seconds"][3] == 0.002
    assert (shown["start_unix"], shown["slot_seconds"], shown["slots"]) == (1000.0, 0.25, 6)


def test_figures_of_the_engine() -> None:
    """Gauges stand as read, counters as what they grew by; a restart of the server is no growth."""
    shown = drawn(
        scraped(0.1, running=2, waiting=1, waiting_capacity=1, waiting_deferred=0, kv_usage=0.5, iterations=10,
                generation_tokens=20, itl_count=20, itl_sum=1.0, prompt_local_compute=100, prompt_local_cache_hit=50,
                preemptions=0),
        scraped(0.3, running=2, waiting=0, kv_usage=0.6, iterations=14, generation_tokens=28, itl_count=28,
                itl_sum=1.4, prompt_local_compute=612, prompt_local_cache_hit=50, preemptions=1),
        scraped(0.6, running=1, kv_usage=0.1, iterations=1, generation_tokens=1, itl_count=1, itl_sum=0.1),
    )["engines"]["0"]  # fmt: skip

    assert shown["running"] == [2, 2, 1]
    assert shown["waiting_capacity"] == [1, None, None]
    assert shown["steps"] == [None, 4, None]
    assert shown["step_seconds"] == [None, 0.05, None]
    assert shown["generation_tokens"] == [None, 8, None]
    assert shown["prompt_computed_tokens"] == [None, 512, None]
    assert shown["prompt_cached_tokens"] == [None, 0, None]
    assert shown["preemptions"] == [None, 1, None]
    assert shown["kv_usage"] == [0.5, 0.6, 0.1]


def test_figures_of_the_machine() -> None:
    """Counters of links and of pressure become rates; what a device does not tell has no column."""
    before = GpuReading(gpu="0", uuid="GPU-1", utilization=0.5, sm_clock=1.98e9, power=300.0, nvlink_rx=1e9)
    shown = drawn(
        GpuSample(at=0.1, gpus=(before,), scope="node"),
        HostSample(at=0.1, pressure_seconds={("memory", "full"): 1.0}, engine_throttled_seconds=0.0),
        GpuSample(at=0.3, gpus=(replace(before, nvlink_rx=1.5e9),), scope="node"),
        GpuSample(at=0.6, gpus=(replace(before, uuid="GPU-2", nvlink_rx=9e9),), scope="node"),
        HostSample(at=1.1, pressure_seconds={("memory", "full"): 1.25}, engine_throttled_seconds=0.5),
        PollFailure(1.2, Source.ENGINE, Failure.TIMEOUT),
    )

    assert shown["gpus"]["0"]["sm_clock_hertz"][:3] == [1.98e9, 1.98e9, 1.98e9]
    assert shown["gpus"]["0"]["nvlink_rx_bytes_per_second"] == [None, pytest.approx(2.5e9), None, None, None]
    assert "pcie_rx_bytes_per_second" not in shown["gpus"]["0"]
    assert shown["host"]["memory_full_ratio"][4] == 0.25
    assert shown["host"]["engine_throttled_ratio"][4] == 0.5
    assert shown["sidecar"]["engine_failures"][4] == 1


def test_stalls_lie_on_it() -> None:
    """A stall is shown while it is open and as it was judged in the end, and goes when it is out of sight."""
    timeline = Timeline(60.0)
    stall = Stall(
        id="0-1", engine="0", kind=StallKind.DECODE, start=10.0, end=None, detected=10.5, seconds=0.5,
        reader_seconds=1.0, longest=0.5, cause=Cause.UNKNOWN, evidence=(),
    )  # fmt: skip
    timeline.observe(ObserverSample(11.0, 0.0))
    timeline.stall(stall)
    timeline.stall(replace(stall, cause=Cause.PREFILL, end=12.0, seconds=1.5))
    timeline.observe(ObserverSample(13.0, 0.0))

    assert timeline.document(60.0, unix_offset=1000.0)()["stalls"] == [
        {
            "id": "0-1", "engine": "0", "kind": "decode", "cause": "prefill", "start_unix": 1010.0,
            "end_unix": 1012.0, "stall_seconds": 1.5,
        }
    ]  # fmt: skip
    timeline.observe(ObserverSample(80.0, 0.0))
    assert timeline.document(60.0, unix_offset=1000.0)()["stalls"] == []


def test_a_freeze_is_seen_from_every_side() -> None:
    """Beside a long prompt the timeline of the whole sidecar shows gaps, step times and prefill at the same time."""
    watched = watch("long-prefill", canary={"mode": "persistent"})
    shown = watched.sidecar.timeline(900.0)()
    engine = shown["engines"]["0"]
    stall = shown["stalls"][0]
    first, last = (int((stall[end] - shown["start_unix"]) / 0.25) for end in ("start_unix", "end_unix"))

    def largest(figure: str, begin: int, end: int) -> float:
        return float(max(one for one in engine[figure][begin:end] if one is not None))

    for figure, quiet, busy in (("gap_seconds", 0.15, 0.5), ("step_seconds", 0.15, 0.5), ("prefill_tokens", 100, 1000)):
        assert largest(figure, 12, first - 4) < quiet, figure
        assert largest(figure, first, last) > busy, figure
    assert largest("prefill_backlog_tokens", first, last) > 30_000
    assert json.dumps(shown, allow_nan=False)


def test_an_hour_takes_the_memory_of_fifteen_minutes() -> None:
    """Eight GPUs and two ranks for an hour stay below 3 MB, four bytes a slot of every figure."""
    timeline = Timeline(15 * 60.0)
    rng = random.Random(1)
    readings = tuple(
        GpuReading(gpu=str(number), uuid=f"GPU-{number}", utilization=0.9, memory_utilization=0.4, sm_clock=1.98e9,
                   power=600.0, temperature=60.0, pcie_rx=1e9, pcie_tx=1e9, nvlink_rx=1e12, nvlink_tx=1e12,
                   memory_used=8e10, dram_active=0.4)
        for number in range(8)
    )  # fmt: skip
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    sizes = []
    for slot in range(3600):
        at = float(slot)
        if slot % 64 == 0:
            timeline.observe(StreamOpened(at, slot, "0", "canary"))
            timeline.observe(StreamClosed(at, slot - 64, Outcome.COMPLETED))
        timeline.observe(StreamTokens(at, slot - slot % 64, 1))
        timeline.observe(ObserverSample(at, 0.001, 0.0))
        figures: dict[str, Any] = {
            name: float(slot + rng.random())
            for name in ("iterations", "generation_tokens", "itl_count", "itl_sum", "prompt_local_compute",
                         "prompt_local_cache_hit", "preemptions")
        }  # fmt: skip
        counters = EngineCounters(running=3, waiting=1, waiting_capacity=1, waiting_deferred=0, kv_usage=0.5, **figures)
        timeline.observe(EngineSample(sent_at=at, at=at, lane=Lane.ESTIMATOR, engines={"0": counters, "1": counters}))
        timeline.observe(GpuSample(at=at, gpus=readings, scope="node"))
        if slot % 2 == 0:
            timeline.observe(HostSample(at=at, pressure_seconds={("memory", "full"): at, ("io", "some"): at}))
        if slot % 900 == 899:
            sizes.append(tracemalloc.get_traced_memory()[0] - base)
    tracemalloc.stop()
    columns = timeline.columns.columns
    exact = sum(sys.getsizeof(column) for column in columns.values())
    print(
        f"{len(columns)} columns, {exact / 1e6:.2f} MB; traced after each quarter: {[f'{s / 1e6:.2f}' for s in sizes]}"
    )

    assert exact <= len(columns) * (4 * 3600 + 100)
    assert sizes[-1] < 3e6
    assert sizes[-1] < sizes[0] * 1.02


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_hour_of_the_whole_sidecar_leaves_fifteen_minutes(tmp_path: Path) -> None:
    """Beside a server that freezes every five minutes, ring and tape hold the last quarter of an hour and no more."""
    prompts = tuple(Arrival(at=60.0 + 300 * number, prompt_tokens=8_000, output_tokens=50) for number in range(12))
    readers = Users(count=3, prompt_tokens=64, output_tokens=2_000, stagger=1.0)
    hour = Scenario(
        name="hour",
        sentence="An hour with a long prompt every five minutes.",
        duration=3600.0,
        cause=SimulatedCause.PREFILL,
        kind=SimulatedKind.DECODE,
        load=Load(prompts, (readers,)),
    )
    watched = watch(hour, sample_every=60.0, canary={"mode": "persistent"}, recorder={"directory": tmp_path})
    recorder = watched.sidecar.recorder
    ring = sum(sys.getsizeof(column) for column in recorder.timeline.columns.columns.values())
    tape = recorder._tape
    assert tape is not None
    chunks = tape.chunks()
    bundles = sorted(path.stat().st_size for path in tmp_path.iterdir())
    print(
        f"ring {ring / 1e6:.2f} MB in {len(recorder.timeline.columns.columns)} columns, tape {tape.size / 1e6:.2f} MB "
        f"over {chunks[-1].last - chunks[0].first:.0f} s, {len(bundles)} bundles of up to {bundles[-1] / 1e6:.2f} MB; "
        f"{len(watched.observations)} observations judged in {watched.wall:.0f} s"
    )

    assert ring < 1e6
    assert tape.size < 4e6
    assert chunks[-1].last - chunks[0].first <= 900 + 20
    assert watched.sidecar.timeline(7200.0)()["slots"] == 3600


def test_columns_are_bounded() -> None:
    """More engines than there is room for cost no more memory."""
    columns = Columns(4, most=3)
    for engine in range(10):
        columns.put(Name("engines", str(engine), "running"), 0.0, 1.0)

    assert len(columns.columns) == 3
