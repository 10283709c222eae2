from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.analysis.paired import PairedInterval, scheduler_number, scheduler_setting
from stallwatch.analysis.prefill import Evidence, ExactSteps, StepSums
from stallwatch.analysis.step_model import LEAST_MIXED, StepModel
from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.load import Arrival, Load, Users
from stallwatch.simulator.scenario import Scenario
from tests.harness import Watched, watch

A, C, B = 0.03, 0.0005, 0.0004  # seconds; a decoder; a token


def step(
    at: float, decoders: float, *, prefill: float = 0.0, cost: float = B, context: float | None = None
) -> PairedInterval:
    """One step, alone in its interval."""
    seconds = A + C * decoders + cost * prefill
    return PairedInterval(
        since=at - 0.25,
        until=at,
        began=at - 0.25 - seconds,
        evidence=Evidence.MFU,
        steps=1.0,
        decoders=decoders,
        seconds=seconds,
        samples=decoders,
        waited=seconds * decoders,
        decoders_beside=decoders,
        prefill=prefill,
        mixed=1.0 if prefill else 0.0,
        context=context,
        decoding_only=not prefill,
        in_flight=False,
        accompanied=True,
        exact=None,
    )


def taught(mixed: int = 60, chunk: float = 2_000.0) -> StepModel:
    """A model that saw 100 decode steps of one to eight decoders, and some with a chunk beside four."""
    model = StepModel()
    for at in range(100):
        model.add(step(at, 1 + at % 8))
    for at in range(100, 100 + mixed):
        model.add(step(at, 4, prefill=chunk))
    return model


def test_recovers_what_made_the_steps() -> None:
    """The terms a and c come from prefill-free steps, b from those with prefill."""
    view = taught().view()

    assert view is not None
    assert view.base == pytest.approx(A)
    assert view.per_decoder == pytest.approx(C)
    assert view.per_token == pytest.approx({0.5: B, 0.9: B, 0.95: B})
    assert view.r2 == pytest.approx(1.0)
    assert view.mixed_steps == 60


def test_unknown_before_enough_steps() -> None:
    """Before thirty prefill-free steps there are no coefficients."""
    model = StepModel()
    for at in range(29):
        model.add(step(at, 4))

    assert model.view() is None
    assert model.budget(0.1) is None


def test_decoders_that_never_vary_have_no_price() -> None:
    """With one number of decoders only their sum with the base is known: c is absent, b is right beside them."""
    model = StepModel()
    for at in range(100):
        model.add(step(at, 4))
    model.add(step(101, 4, prefill=1_000))
    view = model.view()

    assert view is not None
    assert view.per_decoder is None
    assert view.base == pytest.approx(A + 4 * C)
    assert view.per_token[0.95] == pytest.approx(B)


def test_cost_grows_with_context() -> None:
    """Where the context is known, b is told as b0 + b1 * context, and the range seen."""
    model = taught(mixed=0)
    for index in range(60):
        context = 500.0 + 1_000 * index
        model.add(step(200 + index, 4, prefill=1_000, cost=B + 4e-9 * context, context=context))
    view = model.view()

    assert view is not None
    assert view.per_token_start == pytest.approx(B)
    assert view.per_token_context == pytest.approx(4e-9)
    assert (view.context_min, view.context_max) == (500, 59_500)
    assert view.r2 == pytest.approx(1.0)
    assert view.per_token[0.95] == pytest.approx(B + 4e-9 * 56_500)


def test_quantiles_weigh_tokens_not_steps() -> None:
    """Many tiny steps, whose b is mostly noise, do not outweigh the chunks that fill steps."""
    model = taught(mixed=10)
    for at in range(300, 500):
        model.add(step(at, 4, prefill=2, cost=50 * B))
    view = model.view()

    assert view is not None
    assert view.per_token[0.95] == pytest.approx(B)


class TestBudget:
    def test_is_what_the_objective_leaves(self) -> None:
        """floor((D - a - c*d) / b95), with the decodes beside it for the server's setting."""
        budget = taught(chunk=200.0).budget(0.1 + 1e-9)

        assert budget is not None
        assert budget.tokens == int((0.1 - A - 4 * C) / B)
        assert budget.decoders == 4
        assert budget.batched_tokens == budget.tokens + 4

    def test_leaves_headroom_for_chunks_far_smaller_than_those_seen(self) -> None:
        """What a step costs whatever its chunk is shared by fewer tokens then, and was never seen."""
        budget = taught(chunk=2_000.0).budget(0.1)

        assert budget is not None
        assert budget.tokens == int(0.9 * int((0.1 - A - 4 * C) / B))

    def test_not_less_than_vllm_accepts(self) -> None:
        """A token budget below max_num_seqs is refused by vLLM: the advice says so."""
        budget = taught().budget(0.1, max_num_seqs=256)

        assert budget is not None
        assert budget.tokens < 256
        assert budget.batched_tokens == 256
        assert budget.max_num_seqs == 256

    def test_nothing_fits_into_an_objective_below_a_decode_step(self) -> None:
        """An objective that decode steps miss by themselves leaves room for no prefill: 0, which is known."""
        budget = taught().budget(0.02)

        assert budget is not None
        assert budget.tokens == 0

    def test_absent_below_fifty_steps(self) -> None:
        """Too few steps with prefill advise nothing."""
        assert taught(LEAST_MIXED - 1).budget(0.1) is None
        assert taught(LEAST_MIXED).budget(0.1) is not None

    def test_absent_when_the_model_is_poor(self) -> None:
        """Where step times have little to do with prefill, nothing is advised."""
        model = taught(mixed=0)
        for at in range(200, 300):
            model.add(step(at, 4, prefill=100, cost=B * (1 if at % 2 else 40)))
        view = model.view()

        assert view is not None
        assert view.r2 is not None
        assert view.r2 < 0.5
        assert model.budget(0.1) is None

    def test_marked_beyond_what_was_seen(self) -> None:
        """A budget above every chunk seen, or for prompts deeper than any, is an extrapolation."""
        deep = taught(mixed=0)
        for index in range(60):
            deep.add(step(200 + index, 4, prefill=1_000, context=500.0 + 100 * index))
        plain, deeper, larger = deep.budget(0.1, deepest=6_000), deep.budget(0.1, deepest=60_000), deep.budget(5.0)

        assert plain is not None
        assert deeper is not None
        assert larger is not None
        assert (plain.extrapolated, deeper.extrapolated, larger.extrapolated) == (False, True, True)
        assert (plain.context_min, plain.context_max) == (500, 6_400)


def test_a_step_that_hangs_is_not_its_prompts_doing() -> None:
    """A step far too long is held up, one a few times dearer is not, and four in a row are what is usual now."""
    model = taught()

    assert not model.held_up(step(200, 4, prefill=2_000, cost=4 * B))
    assert not model.held_up(step(201, 4, prefill=5, cost=100 * B))
    assert [model.held_up(step(202 + i, 4, prefill=2_000, cost=70 * B)) for i in range(4)] == [True, True, True, False]
    assert not StepModel().held_up(step(300, 4, prefill=2_000, cost=70 * B))
    assert not model.held_up(step(301, 4))


def test_the_plugins_sums_are_used_as_they_are() -> None:
    """With exact sums of each phase, steps that share an interval are told apart."""
    model = StepModel()
    for at in range(20):
        decode, mixed = [(d, 0.0) for d in (1, 2, 3, 4, 5, 6, 7, 8)], [(3, 2_000.0), (4, 1_000.0), (4, 1_500.0)]
        phases = {"decode": _sums(decode), "mixed": _sums(mixed)}
        model.add(replace(step(at, 4, prefill=4_500), steps=11.0, exact=ExactSteps(phases=phases)))
    view = model.view()

    assert view is not None
    assert view.base == pytest.approx(A)
    assert view.per_decoder == pytest.approx(C)
    assert view.per_token[0.5] == pytest.approx(B, rel=0.05)
    assert view.mixed_steps == 60


def _sums(steps: Sequence[tuple[float, float]]) -> StepSums:
    rows = [(d, p, A + C * d + B * p) for d, p in steps]
    return StepSums(
        steps=len(rows),
        prefill=sum(p for _, p, _ in rows),
        decode=sum(d for d, _, _ in rows),
        seconds=sum(t for _, _, t in rows),
        prefill_squares=sum(p * p for _, p, _ in rows),
        decode_squares=sum(d * d for d, _, _ in rows),
        seconds_squares=sum(t * t for _, _, t in rows),
        prefill_decode=sum(p * d for d, p, _ in rows),
        prefill_seconds=sum(p * t for _, p, t in rows),
        decode_seconds=sum(d * t for d, _, t in rows),
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 32), st.sampled_from([0.0, 0.0, 16.0, 2_000.0]), st.floats(0.5, 3.0)),
        min_size=40,
        max_size=90,
    ),
    st.floats(0.01, 1.0),
)
def test_noise_never_makes_a_price_negative(made: list[tuple[int, float, float]], objective: float) -> None:
    """c, b0 and b1 are not negative and a budget is none or not negative, and grows with the objective."""
    model = StepModel()
    for at, (decoders, prefill, factor) in enumerate(made):
        seen = step(at, decoders, prefill=prefill, context=prefill and float(at * 1_000))
        model.add(replace(seen, seconds=seen.seconds * factor, waited=seen.waited * factor))
    view = model.view()
    if view is None:
        return
    assert view.per_decoder is None or view.per_decoder >= 0
    assert view.per_token_start is None or view.per_token_start > 0
    assert view.per_token_context is None or view.per_token_context >= 0
    assert view.r2 is None or 0 <= view.r2 <= 1
    budgets = [model.budget(objective * factor) for factor in (1, 2, 4)]
    known = [budget.tokens for budget in budgets if budget is not None]
    assert all(tokens >= 0 for tokens in known)
    assert all(less <= more for less, more in pairwise(known))


def test_settings_of_the_scheduler_are_read_from_the_plugins_labels() -> None:
    """A number is read; what is not there or is none is unknown."""
    plugin = {'stallwatch_plugin_scheduler_info{policy="fcfs",max_num_seqs="256",chunked_prefill="true"}': 1.0}

    assert scheduler_number(plugin, "max_num_seqs") == 256
    assert scheduler_number(plugin, "policy") is None
    assert scheduler_setting(plugin, "policy") == "fcfs"
    assert scheduler_number(plugin, "block_size") is None
    assert scheduler_setting({}, "policy") is None


PROMPTS = Scenario(
    name="prompts-to-budget",
    sentence="Two prompts of 60,000 tokens come one after the other beside three readers.",
    duration=110.0,
    engine=EngineConfig(max_num_batched_tokens=2048, max_num_seqs=16),
    load=Load(
        tuple(Arrival(at=at, prompt_tokens=60_000, output_tokens=20) for at in (20.0, 60.0)),
        (Users(count=3, prompt_tokens=64, output_tokens=8_000, stagger=1.0),),
    ),
)


def observed(scenario: Scenario, objective: float) -> Watched:
    """The sidecar beside a scenario, without canary and GPUs."""
    off: dict[str, object] = {"enabled": False}
    return watch(scenario, sample_every=10.0, canary=off, gpu={"enabled": "false"}, slo={"itl_seconds": objective})


def beside(watched: Watched) -> list[float]:
    """Durations of the steps in which readers decoded beside prefill, once the readers themselves are in."""
    steps = watched.simulated.world.steps()
    return [s.seconds for s in steps if s.prefill_tokens and s.decode_requests and s.start > 20]


@pytest.mark.parametrize(
    ("asynchronous", "evidence"),
    [
        pytest.param(False, "balance", id="sync-balance"),
        pytest.param(True, "plugin", id="async-plugin"),
        pytest.param(True, "balance", id="async-balance", marks=pytest.mark.long),
        pytest.param(False, "plugin", id="sync-plugin", marks=pytest.mark.long),
    ],
)
def test_the_advised_budget_keeps_the_objective(evidence: str, *, asynchronous: bool) -> None:
    """Restarted with the advice, at most a tenth of the steps with prefill miss the objective that most had missed."""
    objective = 0.1
    server = replace(PROMPTS.server, plugin=evidence == "plugin")
    engine = replace(PROMPTS.engine, async_scheduling=asynchronous)
    watched = observed(replace(PROMPTS, engine=engine, server=server), objective)
    work = watched.engine().work
    assert work is not None
    assert work.budget is not None
    advised = replace(engine, max_num_batched_tokens=work.budget.batched_tokens)
    again = observed(replace(PROMPTS, engine=advised, duration=160.0), objective)
    old, new = beside(watched), beside(again)
    missed = [sum(seconds > objective for seconds in steps) / len(steps) for steps in (old, new)]
    print(
        f"{evidence:8} {'async' if asynchronous else 'sync':6} budget {work.budget.tokens} tokens, "
        f"--max-num-batched-tokens {work.budget.batched_tokens}, context {work.budget.context_min:.0f} to "
        f"{work.budget.context_max:.0f}; steps with prefill above {objective:g} s: {missed[0]:.0%} of {len(old)} before"
        f", {missed[1]:.1%} of {len(new)} with it (longest {max(old):.2f} and {max(new):.3f} s)"
    )

    assert missed[0] > 0.9
    assert missed[1] <= 0.1
    assert max(new) > 0.8 * objective  # the budget gives nothing away
    assert work.budget.batched_tokens == work.budget.tokens + ceil(work.budget.decoders)
