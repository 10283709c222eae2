from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families as text_families

from stallwatch.analysis.prefill import Evidence, PrefillLadder
from stallwatch.observations import EngineCounters
from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.drive import play
from stallwatch.simulator.load import Arrival, Load, Users
from stallwatch.simulator.scenario import Scenario, ServerConfig
from stallwatch.simulator.scenarios import SCENARIOS
from stallwatch.simulator.step import Step
from stallwatch.simulator.world import World
from stallwatch.vllm_plugin import PREFIX, Board, StepLogger

MIXED = Scenario(
    name="mixed",
    sentence="",
    duration=20.0,
    server=ServerConfig(plugin=True),
    load=Load(
        (
            Arrival(at=5.0, prompt_tokens=9_000, output_tokens=5),
            Arrival(at=11.0, prompt_tokens=9_000, output_tokens=5, abort_after=0.7),
        ),
        (Users(count=2, prompt_tokens=50, output_tokens=100, start=1.0, end=10.0),),
    ),
)


def _given(steps: list[Step]) -> Iterator[SimpleNamespace]:
    """What vLLM 0.32 would have handed to its stat loggers for these steps."""
    for step in steps:
        prompt = step.told_prefill_tokens
        details = SimpleNamespace(
            num_ctx_requests=step.told_prefill_requests,
            num_ctx_tokens=prompt,
            num_generation_tokens=step.prefill_tokens + step.decode_tokens - prompt,
            elapsed_ms=1000.0 * step.seconds,
            is_dummy=False,
        )
        yield SimpleNamespace(iteration_details=details, num_running_reqs=step.running)


def _configuration(engine: EngineConfig) -> SimpleNamespace:
    """The parts of vLLM's configuration that the plugin reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            long_prefill_token_threshold=engine.long_prefill_token_threshold,
            enable_chunked_prefill=engine.enable_chunked_prefill,
            async_scheduling=engine.async_scheduling,
            policy=str(engine.policy),
        ),
        cache_config=SimpleNamespace(block_size=engine.block_size, enable_prefix_caching=engine.enable_prefix_caching),
        observability_config=SimpleNamespace(enable_logging_iteration_details=True),
    )


def _real(world: World, *, ranks: int) -> list[Metric]:
    """The families of the real plugin after the same steps."""
    registry = CollectorRegistry()
    board = Board(registry, multiprocess=False)
    for rank in range(ranks):
        logger = StepLogger(_configuration(world.scenario.engine), rank, board=board)
        for stats in _given(world.steps(rank)):
            logger.record(stats)
    return list(text_families(generate_latest(registry).decode()))


def _simulated(world: World) -> list[Metric]:
    return [family for family in text_families(world.page.render()) if family.name.startswith(PREFIX)]


def _samples(families: list[Metric]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [
        pytest.param(MIXED, 1, id="prompts, decodes and an abort"),
        pytest.param(SCENARIOS["kv-preemption"], 1, id="preemptions"),
        pytest.param(SCENARIOS["dp-rank-frozen"], 2, id="two ranks"),
    ],
)
def test_the_families_are_those_of_the_plugin(scenario: Scenario, ranks: int) -> None:
    """Names, types, help, labels and values are what the real plugin makes of the same steps, `model_name` nowhere."""
    server = ServerConfig(plugin=True, data_parallel_size=ranks)
    world = play(
        Scenario(name="x", sentence="", duration=40.0, engine=scenario.engine, load=scenario.load, server=server)
    )

    real, simulated = _real(world, ranks=ranks), _simulated(world)

    assert [(f.name, f.type, f.documentation) for f in simulated] == [(f.name, f.type, f.documentation) for f in real]
    assert _samples(simulated) == pytest.approx(_samples(real))
    assert not any("model_name" in sample.labels for family in simulated for sample in family.samples)


@pytest.mark.parametrize(("newer", "told"), [(True, [256, 0, 0, 0]), (False, [0, 0, 0, 0])])
def test_what_is_computed_again_is_told_as_vllm_tells_it(newer: bool, told: list[int]) -> None:  # noqa: FBT001
    """After a preemption the newer model runner counts the first chunk as prompt, the older one none of it."""
    engine = EngineConfig(
        max_num_batched_tokens=256,
        num_gpu_blocks=129,
        max_model_len=2048,
        enable_prefix_caching=False,
        model_runner_v2=newer,
    )
    load = Load(
        (
            Arrival(at=0.0, prompt_tokens=400, output_tokens=700),
            Arrival(at=1.0, prompt_tokens=400, output_tokens=700),
        )
    )
    world = play(Scenario(name="x", sentence="", duration=60.0, engine=engine, load=load))
    again = [step for step in world.steps() if step.recompute_tokens]

    assert [step.recompute_tokens for step in again][:3] == [256, 256, 256]
    assert [step.told_prefill_tokens for step in again] == told


def test_a_simulated_plugin_is_the_best_evidence() -> None:
    """The prefill ladder takes the simulated families for what they stand for, and counts every prompt token."""
    world = World(MIXED)
    ladder = PrefillLadder()
    seen = []
    for poll in range(80):
        world.advance(poll * 0.25)
        found = ladder.scraped(_counters(world), poll * 0.25)
        seen += [found] if found is not None else []

    counted = [i for i in seen if i.evidence is Evidence.PLUGIN]
    assert {i.evidence for i in seen[8:]} == {Evidence.PLUGIN}
    assert sum(i.prefill_tokens or 0 for i in counted) == sum(step.prefill_tokens for step in world.steps())


def _counters(world: World) -> EngineCounters:
    """What the sidecar reads of the page: the plugin's samples, without the engine's number."""
    plugin = {}
    values: dict[str, float] = {}
    for family in text_families(world.page.render()):
        for sample in family.samples:
            values.setdefault(sample.name, sample.value)
            if family.name.startswith(PREFIX):
                pairs = ",".join(f'{name}="{value}"' for name, value in sample.labels.items() if name != "engine")
                plugin[f"{sample.name}{{{pairs}}}"] = sample.value
    return EngineCounters(
        generation_tokens=values["vllm:generation_tokens_total"],
        iterations=values["vllm:iteration_tokens_total_count"],
        first_tokens=values["vllm:time_to_first_token_seconds_count"],
        plugin=plugin,
    )
