import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout

from stallwatch.simulator.cost import Cause
from stallwatch.simulator.drive import play, poll_times, record_polls, simulate
from stallwatch.simulator.driver import driver_of
from stallwatch.simulator.gpu import REASON_GPU_IDLE, REASON_SW_POWER_CAP, REASON_SW_THERMAL, gpu_script, gpu_timeline
from stallwatch.simulator.load import Arrival, Load, Users
from stallwatch.simulator.scenario import Scenario, StallKind
from stallwatch.simulator.scenarios import SCENARIOS
from stallwatch.simulator.server import Serving, serve
from stallwatch.simulator.truth import true_cause, true_stalls
from tests import virtual

ASKED_FOR = frozenset(
    {
        *("quiet", "long-prefill", "long-prefill-cached", "medium-prompts", "kv-preemption", "kv-offload-wait"),
        *("queue-full", "gpu-clock-drop", "power-cap-harmless", "engine-hang", "engine-restart", "jit-pause"),
        *("frontend-bound", "proxy-buffering", "spec-decode", "stream-interval", "dp-rank-frozen", "retry-storm"),
        *("latch", "idle", "prefill-only", "whole-prompt-repeats", "abort-in-prefill", "first-step-open", "degraded"),
        *("pd-decode-worker", "asleep", "metrics-down", "observer-late"),
    }
)

every_scenario = pytest.mark.parametrize("scenario", [pytest.param(s, id=s.name) for s in SCENARIOS.values()])


def test_every_named_scenario_exists() -> None:
    """The set holds at least the cases that a detector is asked to judge."""
    assert set(SCENARIOS) >= ASKED_FOR


@every_scenario
def test_the_verdict_is_what_the_steps_say(scenario: Scenario) -> None:
    """The stalls computed from the ground truth have the declared cause and kind; look-alikes have none."""
    stalls = true_stalls(play(scenario))

    if scenario.kind is StallKind.NONE:
        assert stalls == []
        assert scenario.cause in {Cause.NONE, Cause.OBSERVER}
    else:
        assert {s.cause for s in stalls} == {scenario.cause}
        assert scenario.kind in {s.kind for s in stalls}


@every_scenario
def test_a_scenario_describes_itself(scenario: Scenario) -> None:
    """One plain sentence, and a length that a test can afford."""
    assert scenario.sentence.endswith(".")
    assert len(scenario.sentence.split()) < 30
    assert 30 <= scenario.duration <= 180


@pytest.mark.parametrize("name", ["long-prefill", "kv-preemption", "retry-storm", "spec-decode", "engine-restart"])
def test_two_runs_are_equal(name: str) -> None:
    """The same scenario gives the same steps and the same page, number for number."""
    first, second = play(SCENARIOS[name]), play(SCENARIOS[name])

    assert first.steps() == second.steps()
    assert first.page.render() == second.page.render()


@pytest.mark.parametrize("name", ["long-prefill", "kv-preemption", "kv-offload-wait", "dp-rank-frozen", "asleep"])
def test_time_may_pass_in_any_portions(name: str) -> None:
    """Whoever drives the world, in one go or poll by poll, gets the same steps."""
    scenario = replace(SCENARIOS[name], duration=50.0)
    at_once = play(scenario)

    in_portions = play(scenario, until=0.0)
    for at in poll_times(50.0, interval=0.37, phase=0.11):
        in_portions.advance(at)
    in_portions.advance(50.0)

    assert at_once.steps() == in_portions.steps()
    assert at_once.page.render() == in_portions.page.render()


def test_long_prefill_has_the_shape_of_the_public_report() -> None:
    """Running 4, waiting 0, KV far from full, nothing preempted, and 0.5 to 5 tokens a second in sum while it lasts."""
    steps = [s for s in simulate(SCENARIOS["long-prefill"]) if s.prefill_tokens > 1000]

    assert {s.running for s in steps} == {4}
    assert {s.waiting for s in steps} == {0}
    assert max(s.kv_used_blocks for s in steps) < 0.3 * 16384
    assert not any(s.preempted for s in steps)
    pace = sum(s.emitted_tokens for s in steps) / sum(s.seconds for s in steps)
    assert 0.5 < pace < 5


def test_the_latch_shifts_the_baseline_and_stalls_nobody() -> None:
    """Every step takes fifty milliseconds more from one moment on."""
    steps = [s for s in simulate(SCENARIOS["latch"]) if not s.prefill_tokens and s.decode_requests == 3]

    before = max(s.seconds for s in steps if s.end < 45)
    after = min(s.seconds for s in steps if s.start > 45)
    assert after - before == pytest.approx(0.05, abs=0.001)


def test_a_victim_of_preemption_has_its_own_truth() -> None:
    """The gap of a request that was thrown out is caused by that, whatever the others did meanwhile."""
    world = play(SCENARIOS["kv-preemption"])

    causes = set()
    for answer in world.answers:
        if answer.request.preemptions and len(answer.times) > 1:
            start, end = max(pairwise(answer.times), key=lambda pair: pair[1] - pair[0])
            causes.add(true_cause(world, start, end, request_id=answer.request.id).cause)
    assert causes == {Cause.PREEMPTION}


def test_the_first_step_explains_itself_only_when_it_ends() -> None:
    """While one enormous step is open no counter moves; its end brings everything at once."""
    rows = record_polls(SCENARIOS["first-step-open"], [26.0, 40.0, 50.0, 60.0])

    moving = ("vllm:kv_cache_usage_perc", "vllm:iteration_tokens_total_count", "vllm:generation_tokens_total")
    assert len({tuple(row[2][name] for name in moving) for row in rows[:3]}) == 1
    assert rows[3][2]["vllm:iteration_tokens_total_count"] > rows[2][2]["vllm:iteration_tokens_total_count"]


def test_polled_rows_are_counters_with_the_truth_beside_them() -> None:
    """Rows have the time before and after, samples by family and label, and sums over the steps that ended."""
    scenario = Scenario(
        name="rows",
        sentence="",
        load=Load(
            (Arrival(at=3.0, prompt_tokens=9_000, output_tokens=20),),
            (Users(count=2, prompt_tokens=50, output_tokens=300),),
        ),
    )

    rows = record_polls(scenario, poll_times(30.0, phase=0.1))

    before, after, last = rows[-1]
    assert after > before
    assert last["vllm:prompt_tokens_by_source_total|local_compute"] == last["vllm:prompt_tokens_total"]
    assert last["vllm:request_success_total|length"] > 0
    assert "vllm:num_requests_waiting_by_reason|capacity" in last
    truth = last["stallwatch_engine_step_prefill_tokens_sum"]
    assert truth == last["vllm:prompt_tokens_by_source_total|local_compute"]
    mixed, plain = (last[f"stallwatch_engine_step_duration_seconds_count|{m}"] for m in ("true", "false"))
    assert mixed + plain == last["stallwatch_engine_step_prefill_tokens_count"]
    assert json.loads(gzip.decompress(gzip.compress(json.dumps(rows).encode()))) == [list(row) for row in rows]


def test_no_page_shows_the_truth() -> None:
    """What the recorder adds for the judge is on no page that a sidecar can read."""
    page = play(SCENARIOS["long-prefill"], until=40.0).page.render()

    assert "stallwatch" not in page


def test_a_falling_clock_shows_with_no_thermal_flag() -> None:
    """The SM clock falls to a quarter of its own past; no reason bit says so; the memory clock stays."""
    samples = gpu_timeline(SCENARIOS["gpu-clock-drop"], 50.0)
    before, during = samples[249], samples[449]

    assert (before.sm_clock_mhz, during.sm_clock_mhz) == (1980, 495)
    assert during.reasons & REASON_SW_THERMAL == 0
    assert before.memory_clock_mhz == during.memory_clock_mhz


def test_a_power_cap_is_always_set_and_means_nothing() -> None:
    """The bit is there in nearly every busy sample, at a steady clock."""
    samples = gpu_timeline(SCENARIOS["power-cap-harmless"], 30.0)

    capped = [s for s in samples if s.reasons & REASON_SW_POWER_CAP]
    assert len(capped) > 0.95 * len(samples)
    assert len({s.sm_clock_mhz for s in capped}) == 1


def test_the_gpu_idles_in_a_compile_pause_and_spins_in_a_hang() -> None:
    """Utilisation tells the two apart, and power tells a spinning device from a working one."""
    pause = gpu_timeline(SCENARIOS["jit-pause"], 25.0)
    hang = gpu_timeline(SCENARIOS["engine-hang"], 60.0)

    assert pause[209].utilization < 5
    assert pause[209].reasons & REASON_GPU_IDLE
    assert hang[499].utilization == 100
    assert hang[499].power_milliwatts < 0.6 * hang[199].power_milliwatts


def test_an_idle_gpu_is_idle() -> None:
    """Nobody asks, nothing runs: idle clock, idle power, and a script of few lines."""
    samples = gpu_timeline(SCENARIOS["idle"], 20.0)

    assert {s.utilization for s in samples} == {0}
    assert {s.sm_clock_mhz for s in samples} == {345}
    assert all(set(row) <= {"at", "energy_millijoules"} for row in gpu_script(samples)[1:])


@asynccontextmanager
async def polled(scenario: Scenario) -> AsyncIterator[tuple[Serving, list[str]]]:
    """A server with what a sidecar does to it: polls four times a second, a stream of tokens every fifteen seconds."""
    loop = asyncio.get_running_loop()
    pages: list[str] = []
    names = "&".join(f"name[]=vllm:{n}" for n in ("num_requests_running", "generation_tokens_total"))

    async def poll(serving: Serving, session: ClientSession) -> None:
        while True:
            try:
                async with session.get(f"{serving.url}/metrics/?{names}", timeout=ClientTimeout(2.0)) as response:
                    pages.append(await response.text())
            except (ClientError, TimeoutError):
                pages.append("failed")
            await asyncio.sleep(0.25)

    async def pulse(serving: Serving, session: ClientSession) -> None:
        body = {"prompt": "canary", "max_tokens": 64, "ignore_eos": True, "stream": True}
        while True:
            await asyncio.sleep(15.0)
            try:
                async with session.post(
                    f"{serving.url}/v1/completions", json=body, timeout=ClientTimeout(60.0)
                ) as response:
                    pages.extend([f"{loop.time()} {len(data)}" async for data in response.content.iter_any()])
            except (ClientError, TimeoutError):
                pages.append("no answer")

    async with serve(scenario, clock=loop.time) as serving, ClientSession() as session:
        tasks = [asyncio.create_task(poll(serving, session)), asyncio.create_task(pulse(serving, session))]
        try:
            yield serving, pages
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@every_scenario
def test_every_scenario_runs_over_http_in_virtual_time(scenario: Scenario) -> None:
    """Server, polls and canaries over real sockets reach the scenario's end, and its verdict stands beside them."""

    async def main() -> None:
        async with polled(scenario) as (serving, pages):
            await asyncio.sleep(scenario.duration - 0.01)
            serving.server.pump()
            causes = {s.cause for s in true_stalls(serving.server.world)}
        assert len(pages) > scenario.duration
        expected = {scenario.cause} if scenario.kind is not StallKind.NONE else set()
        assert causes - scenario.probe_causes == expected

    virtual.run(main())


def test_a_gpu_reader_sees_the_scenario_through_nvml() -> None:
    """The functions of NVML answer from the running server, at its own time."""

    async def main() -> tuple[list[int], list[int]]:
        clocks, shares = [], []
        async with serve(SCENARIOS["gpu-clock-drop"], clock=asyncio.get_running_loop().time) as serving:
            driver = driver_of(serving.server)
            driver.nvmlInit()
            handle = driver.nvmlDeviceGetHandleByIndex(0)
            for _ in range(2):
                await asyncio.sleep(20.0)
                clocks.append(driver.nvmlDeviceGetClockInfo(handle, 1))
                shares.append(driver.nvmlDeviceGetUtilizationRates(handle).gpu)
        return clocks, shares

    assert virtual.run(main()) == ([1980, 495], [100, 100])
