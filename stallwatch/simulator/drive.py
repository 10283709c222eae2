"""Drivers without HTTP: the steps of a scenario, and its counters as a poller would have read them."""

from collections.abc import Iterable

from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.step import Step
from stallwatch.simulator.world import World

Row = tuple[float, float, dict[str, float]]

# The labels that every series of an engine carries, and that a row of polled counters does not repeat.
_COMMON = frozenset({"model_name", "engine"})


def play(scenario: Scenario, until: float | None = None) -> World:
    """Runs a scenario to its end, or to `until`, and returns the world as it is then."""
    world = World(scenario)
    world.advance(0.0)
    world.advance(scenario.duration if until is None else until)
    return world


def simulate(scenario: Scenario, until: float | None = None) -> list[Step]:
    """The ground truth: every step of every rank that ended."""
    return play(scenario, until).steps()


def poll_times(until: float, *, interval: float = 0.25, phase: float = 0.0) -> list[float]:
    """Regular polls."""
    return [phase + i * interval for i in range(int((until - phase) / interval) + 1)]


def record_polls(
    scenario: Scenario, times: Iterable[float], *, rank: int = 0, takes: float = 0.004, buckets: bool = False
) -> list[Row]:
    """Rows of (time before a poll, time after it, counters by `family|label`), with the truth of the steps.

    The truth is kept under names that no server exposes: `stallwatch_engine_step_prefill_tokens_sum` and `_count`,
    `stallwatch_engine_step_duration_seconds_sum|true` for steps with prefill and `|false` for those without.
    """
    world = World(scenario)
    truth = _Truth(rank)
    rows: list[Row] = []
    for at in times:
        world.advance(at)
        rows.append((at, at + takes, counters(world, rank=rank, buckets=buckets) | truth.upto(world)))
    return rows


def counters(world: World, *, rank: int = 0, buckets: bool = False) -> dict[str, float]:
    """Every sample of a rank as it stands, by `family|label`."""
    values: dict[str, float] = {}
    for family in world.page.families:
        for sample in family.samples():
            if not buckets and sample.name.endswith("_bucket"):
                continue
            pairs = dict(sample.labels)
            if pairs.get("engine", str(rank)) != str(rank) or sample.name == "vllm:cache_config_info":
                continue
            key = "|".join([sample.name, *(value for name, value in sample.labels if name not in _COMMON)])
            values[key] = sample.value
    return values


class _Truth:
    """Sums over the steps that ended, kept as they grow."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._engine: object = None
        self._seen = 0
        self._sums = dict.fromkeys(
            (
                "stallwatch_engine_step_prefill_tokens_count",
                "stallwatch_engine_step_prefill_tokens_sum",
                "stallwatch_engine_step_recompute_tokens_sum",
                "stallwatch_engine_step_decode_tokens_sum",
                *(
                    f"stallwatch_engine_step_duration_seconds_{part}|{mixed}"
                    for part in ("count", "sum")
                    for mixed in ("true", "false")
                ),
            ),
            0.0,
        )

    def upto(self, world: World) -> dict[str, float]:
        engine = world.engines[self._rank]
        if engine is not self._engine:
            self._engine, self._seen = engine, 0
        for step in engine.steps[self._seen :]:
            mixed = "true" if step.prefill_tokens else "false"
            self._sums["stallwatch_engine_step_prefill_tokens_count"] += 1
            self._sums["stallwatch_engine_step_prefill_tokens_sum"] += step.prefill_tokens
            self._sums["stallwatch_engine_step_recompute_tokens_sum"] += step.recompute_tokens
            self._sums["stallwatch_engine_step_decode_tokens_sum"] += step.decode_tokens
            self._sums[f"stallwatch_engine_step_duration_seconds_count|{mixed}"] += 1
            self._sums[f"stallwatch_engine_step_duration_seconds_sum|{mixed}"] += step.seconds
        self._seen = len(engine.steps)
        return dict(self._sums)
