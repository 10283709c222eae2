from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import correlation

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric

from stallwatch.analysis.own_prefill import UNKNOWN_PROMPT, OwnPrefill
from stallwatch.analysis.prefill import Evidence, PrefillInterval, PrefillLadder
from stallwatch.analysis.work import EngineWork, WorkView
from stallwatch.observations import CacheFacts, EngineCounters, EngineSample
from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.load import Arrival, Load, Users, every, poisson
from stallwatch.simulator.scenario import Scenario, ServerConfig
from stallwatch.simulator.scenarios import SCENARIOS
from tests.harness import Watched, watch

OURS = (
    *("scheduled_prefill_tokens", "scheduled_prefill_tokens_per_step", "step_prefill_tokens", "step_duration_seconds"),
    *("decode_baseline_seconds", "decode_baseline_reference_seconds", "interference_ratio", "interference_share_ratio"),
    *("interference_seconds", "prefill_backlog_tokens", "prefill_backlog_eta_seconds", "step_model_coefficient"),
    *("step_model_r2", "prefill_budget_tokens", "prefill_budget_context_tokens", "engine_spec_acceptance_ratio"),
)


def observed(scenario: str | Scenario, *, seconds: float | None = None, sample_every: float = 1.0) -> Watched:
    """The sidecar beside a scenario, without canary and GPUs."""
    off = {"canary": {"enabled": False}, "gpu": {"enabled": "false"}}
    return watch(scenario, seconds=seconds, sample_every=sample_every, canary=off["canary"], gpu=off["gpu"])


def shown(watched: Watched) -> dict[str, Metric]:
    """Families of this part on the page at the end."""
    families = {family.name.removeprefix("stallwatch_"): family for family in watched.sidecar.families()}
    return {name: families[name] for name in OURS if name in families}


def works(watched: Watched) -> list[tuple[float, WorkView]]:
    """What was said, with the scenario's time."""
    return [
        (found.at - watched.origin, found.engines[0].work)
        for found in watched.findings
        if found.engines and found.engines[0].work is not None
    ]


class TestOwnPrefill:
    def test_takes_out_what_a_canary_of_known_length_computes(self) -> None:
        """Once a stream has told its prompt's length, just as much is taken out of what comes next."""
        own = OwnPrefill()
        own.opened(1)
        assert own.take(35) == 35
        own.answered(1)
        own.closed(1, 35)
        assert own.take(500) <= UNKNOWN_PROMPT - 35
        own.take(0)
        own.take(0)
        own.opened(2)

        assert own.take(2_048) == 35
        assert own.take(2_048) == 0

    def test_waits_while_the_prompt_waits(self) -> None:
        """Behind a long prompt ours is computed late, and is still ours."""
        own = OwnPrefill(typical=35)
        own.opened(1)
        assert [own.take(0) for _ in range(50)] == [0] * 50

        assert own.take(40) == 35

    def test_a_refused_stream_takes_nothing_for_long(self) -> None:
        """A request that was never computed is forgotten after its end."""
        own = OwnPrefill(typical=35)
        own.opened(1)
        own.closed(1, None)
        for _ in range(4):
            own.take(0)

        assert own.take(1_000) == 0
        assert own.expected == 0

    @given(st.lists(st.tuples(st.sampled_from("oactr"), st.integers(0, 3), st.floats(0, 3_000)), max_size=60))
    def test_never_takes_more_than_there_is(self, made: list[tuple[str, int, float]]) -> None:
        """Whatever the order of events, what is taken is between nothing and what was computed."""
        own = OwnPrefill()
        for what, stream, tokens in made:
            match what:
                case "o":
                    own.opened(stream)
                case "a":
                    own.answered(stream)
                case "c":
                    own.closed(stream, int(tokens))
                case _:
                    assert 0 <= own.take(tokens) <= tokens
            assert own.expected >= 0


CACHE = CacheFacts(block_size=16, num_gpu_blocks=4_096, prefix_caching=True, hybrid=False)
CAPACITY = 4_095 * 16


def scraped(
    at: int, *, done: float, booked: float = 0.0, admitted: float = 0.0, caching: bool = True
) -> EngineCounters:
    """A reader and a prompt of which `done` tokens are computed; `booked` once it has ended."""
    return EngineCounters(
        running=1.0 if booked or not admitted else 2.0,
        waiting=0.0,
        kv_usage=(64 + at + done) / CAPACITY,
        prefix_queries=64 + admitted if caching else None,
        prefix_hits=0.0 if caching else None,
        iterations=float(at),
        generation_tokens=float(at),
        itl_count=float(at),
        itl_sum=0.03 * at,
        first_tokens=1.0 + (booked > 0),
        prompt_local_compute=64 + booked,
        prompt_local_cache_hit=0.0,
        finished_count=0.0,
        finished_prompt_tokens=0.0,
        finished_generation_tokens=0.0,
        finished_prefill_computed_tokens=0.0,
        preemptions=0.0,
    )


def test_a_change_of_evidence_counts_no_token_twice() -> None:
    """When better evidence goes away in the middle of a prompt, its end is counted less what was counted already."""
    work = EngineWork(cache=CACHE)
    for at in range(1, 20):
        work.scraped(scraped(at, done=0), at * 0.25)
    for chunk in range(1, 4):
        work.scraped(scraped(20 + chunk, done=512 * chunk, admitted=2_048), 5 + chunk * 0.25)
    counted = work.view(6.0, objective=0.1, fresh=True)
    assert counted is not None
    for at in range(24, 28):
        work.scraped(scraped(at, done=2_048, booked=2_048 if at > 24 else 0, admitted=2_048, caching=False), at * 0.25)
    found = work.view(7.0, objective=0.1, fresh=True)
    assert found is not None
    print(counted.prefill_totals, found.prefill_totals)

    assert counted.prefill_totals[Evidence.BALANCE] == pytest.approx(1_536, abs=32)
    assert found.evidence is Evidence.COMPLETION
    assert found.prefill_totals[Evidence.BALANCE] == counted.prefill_totals[Evidence.BALANCE]
    assert sum(found.prefill_totals.values()) == pytest.approx(2_048, abs=1)


def test_everything_is_absent_on_a_server_that_was_never_used() -> None:
    """No figure of this part is on the page of an idle server: not a zero either."""
    watched = observed("idle", seconds=30)

    assert watched.engine().work is None
    assert shown(watched) == {}


@pytest.mark.parametrize("plugin", [pytest.param(False, id="balance"), pytest.param(True, id="plugin")])
def test_the_page_tells_what_the_steps_did(*, plugin: bool) -> None:
    """Counters and histograms agree with the steps; gauges have one evidence; totals only grow."""
    scenario = SCENARIOS["degraded"]
    watched = observed(replace(scenario, server=replace(scenario.server, plugin=plugin)))
    steps = watched.simulated.world.steps()
    page = shown(watched)
    counted = {s.labels["evidence"]: s.value for s in page["scheduled_prefill_tokens"].samples}
    per_step = page["scheduled_prefill_tokens_per_step"].samples
    totals = [sum(view.prefill_totals.values()) for _, view in works(watched)]
    interference = [view.interference_seconds or 0.0 for _, view in works(watched)]
    evidence = "plugin" if plugin else "balance"

    assert set(counted) == {"plugin", "mfu", "balance", "completion"}
    assert counted[evidence] == pytest.approx(sum(step.prefill_tokens for step in steps), rel=0.01)
    assert sum(counted.values()) == pytest.approx(counted[evidence])
    assert {sample.labels["evidence"] for sample in per_step} <= {evidence}
    assert totals == sorted(totals)
    assert interference == sorted(interference)
    view = watched.engine().work
    assert view is not None
    if plugin:
        assert view.step_prefill is not None
        assert sum(view.step_prefill.counts) == len(steps)
        assert view.step_prefill.sum == sum(step.prefill_tokens for step in steps)
        for phase, durations in view.step_seconds.items():
            true = [s.seconds for s in steps if _phase(s.prefill_tokens, s.decode_tokens) == phase]
            assert sum(durations.counts) == len(true)
            assert durations.sum == pytest.approx(sum(true))
    else:
        assert set(view.step_seconds) <= {"decode", "mixed"}
        assert view.step_prefill is not None


def _phase(prefill: int, decode: int) -> str:
    return "decode" if not prefill else "mixed" if decode else "prefill"


def test_tokens_per_step_over_fifteen_seconds() -> None:
    """A scrape every 15 s sees the fullest step of a long prompt and their mean, and nothing when it is over."""
    watched = observed("long-prefill")
    views = dict(works(watched))
    during = [view for at, view in views.items() if 45 < at < 55]
    after = [view for at, view in views.items() if 74 < at < 80]

    assert all(view.per_step_max == pytest.approx(2_045, rel=0.02) for view in during)
    assert all(view.per_step_mean is not None and view.per_step_mean > 1_500 for view in during)
    assert [view.per_step_max for view in after] == [0.0] * len(after)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, id="sync"), pytest.param(True, id="async")])
def test_the_backlog_falls_and_its_eta_is_right(*, asynchronous: bool) -> None:
    """From the fourth step on, the time to go of a first long prompt is right within a quarter until its last steps."""
    scenario = SCENARIOS["long-prefill"]
    engine = replace(scenario.engine, async_scheduling=asynchronous)
    watched = observed(replace(scenario, engine=engine), sample_every=0.5)
    chunks = [s for s in watched.simulated.world.steps() if s.prefill_tokens > 64 and s.start > 24]
    fourth, end = chunks[3].end, chunks[-1].end
    longest = max(step.seconds for step in chunks)
    during = [(at, view) for at, view in works(watched) if fourth + 0.5 < at < end - 2 * longest]
    errors = [view.backlog_eta / (end - at) - 1 for at, view in during if view.backlog_eta is not None]
    backlogs = [view.backlog for _, view in during]
    print(
        f"{'async' if asynchronous else 'sync'}: backlog {backlogs[0]:.0f} to {backlogs[-1]:.0f} in {len(during)} "
        f"samples, ETA wrong by {min(errors):+.1%} to {max(errors):+.1%}"
    )

    assert len(errors) == len(during) > 40
    assert all(a is not None and b is not None and a >= b for a, b in pairwise(backlogs))
    assert all(abs(error) <= 0.25 for error in errors)
    assert works(watched)[-1][1].backlog == 0


def test_a_restart_forgets_what_was_learned_and_keeps_totals() -> None:
    """After a restart baseline and model are absent until learned anew; counters go on."""
    watched = observed("engine-restart", sample_every=0.5)
    views = works(watched)
    before = [view for at, view in views if at < 30][-1]
    fresh = [view for at, view in views if 45 < at < 46.2]
    totals = [sum(view.prefill_totals.values()) for _, view in views]

    assert before.baseline is not None
    assert all(view.baseline is None and view.model is None for view in fresh)
    assert views[-1][1].baseline == pytest.approx(before.baseline, rel=0.05)
    assert totals == sorted(totals)


def test_acceptance_of_drafts_falls_when_it_collapses() -> None:
    """The share of accepted drafts of the last minute follows the server's; without drafts there is none."""
    watched = observed("acceptance-collapse")
    views = works(watched)
    early = [view.acceptance for at, view in views if 20 < at < 44]
    last = views[-1][1].acceptance

    assert min(value for value in early if value is not None) > 0.6
    assert last is not None
    assert last < 0.5
    assert observed("quiet", seconds=20).engine().work.acceptance is None  # type: ignore[union-attr]


def test_status_has_the_same_figures() -> None:
    """The JSON document tells evidence, interference, model and budget; the budget with what vLLM is set to."""
    scenario = SCENARIOS["degraded"]
    watched = observed(replace(scenario, server=replace(scenario.server, plugin=True)))
    told = watched.sidecar.status()["engines"]["0"]["steps"]
    view = watched.engine().work
    assert view is not None
    assert view.budget is not None

    assert told["evidence"] == "plugin"
    assert told["interference"]["ratio"]["mean"] == pytest.approx(view.interference_mean)
    assert told["prefill_budget"]["tokens"] == view.budget.tokens
    assert told["prefill_budget"]["max_num_batched_tokens"] == {
        "advised": 256,
        "now": 2_048,
        "at_least_max_num_seqs": 256,
    }


# After it the server idles once, so that what the bytes written mean can be learned.
FIRST = Arrival(at=0.3, prompt_tokens=64, output_tokens=30)
MIXES = {
    "random": Load(
        poisson(0.5, Arrival(at=3.0, prompt_tokens=3_000, output_tokens=40), until=60, seed=1),
        (Users(count=3, prompt_tokens=64, output_tokens=400, stagger=1.0, start=2.0),),
    ),
    "shared-prefix": Load(
        every(2.0, Arrival(at=3.0, prompt_tokens=4_000, output_tokens=40, prefix=9, prefix_tokens=2_000), times=28),
        (Users(count=3, prompt_tokens=64, output_tokens=400, stagger=1.0, start=2.0),),
    ),
    "whole-repeats": Load(
        every(2.0, Arrival(at=2.0, prompt_tokens=2_000, output_tokens=20, identity=5), times=28),
        (Users(count=3, prompt_tokens=64, output_tokens=400, stagger=3.0, start=6.0),),
    ),
    "aborts": replace(
        SCENARIOS["retry-storm"].load, users=(Users(count=3, prompt_tokens=64, output_tokens=400, start=2.0),)
    ),
}


@dataclass(slots=True)
class Accuracy:
    """Estimates beside the truth, interval by interval, tokens."""

    pairs: list[tuple[float, float]]

    def __str__(self) -> str:
        if len(self.pairs) < 10:
            return "-".rjust(22)
        estimates, truth = zip(*self.pairs, strict=True)
        error = sum(abs(a - b) for a, b in self.pairs) / len(self.pairs)
        varied = len(set(estimates)) > 1 and len(set(truth)) > 1
        r = f"{correlation(estimates, truth):.3f}" if varied else "-"
        return f"{error:8.1f} {r:>6} {self.bias:+6.1%}"

    @property
    def bias(self) -> float:
        """Of the sum."""
        truth = sum(b for _, b in self.pairs)
        return sum(a for a, _ in self.pairs) / truth - 1 if truth else 0.0

    @property
    def r(self) -> float:
        """Correlation."""
        return correlation(*zip(*self.pairs, strict=True))


def intervals(watched: Watched) -> Iterator[tuple[PrefillInterval, EngineCounters, EngineCounters]]:
    """What the ladder makes of what was scraped, from one scrape of the estimator's fields to the next."""
    ladder, before = PrefillLadder(), None
    facts = watched.sidecar.monitor.facts
    assert facts is not None
    for seen in watched.observations:
        if isinstance(seen, EngineSample) and seen.engines["0"].first_tokens is not None:
            after = seen.engines["0"]
            made = ladder.scraped(after, seen.at, cache=facts.caches["0"])
            if made is not None and before is not None:
                yield made, before, after
            before = after


@pytest.mark.parametrize("asynchronous", [pytest.param(False, id="sync"), pytest.param(True, id="async")])
@pytest.mark.parametrize("name", MIXES)
def test_accuracy_of_each_evidence(name: str, *, asynchronous: bool) -> None:
    """Every rung against the steps themselves and against the rate of prompt tokens that everybody plots."""
    scenario = Scenario(
        name=name,
        sentence="A mix of traffic.",
        engine=EngineConfig(async_scheduling=asynchronous),
        server=ServerConfig(plugin=True, mfu_metrics=True),
        load=replace(MIXES[name], arrivals=(FIRST, *MIXES[name].arrivals)),
    )
    watched = observed(scenario, sample_every=10.0)
    steps = watched.simulated.world.steps()
    ends = {step.end for step in steps}
    told = [(step.start if step.start in ends else step.end, step.prefill_tokens) for step in steps]
    rungs = {rung: Accuracy([]) for rung in ("plugin", "mfu", "balance", "scheduled", "naive")}
    for made, before, after in intervals(watched):
        begun, end = made.since - watched.origin, made.until - watched.origin
        true = float(sum(s.prefill_tokens for s in steps if begun < s.end <= end))
        estimates = {rung.value: tokens for rung, tokens in made.estimates.items()}
        if made.balance is not None:
            estimates["balance"] = made.balance.completed_tokens
            if asynchronous:
                # The same estimate as what was scheduled: the end of a step tells of the one that begins with it.
                planned = float(sum(tokens for at, tokens in told if begun < at <= end))
                rungs["scheduled"].pairs.append((made.balance.prefill_tokens, planned))
        estimates["naive"] = (after.prompt_tokens or 0.0) - (before.prompt_tokens or 0.0)
        for rung, tokens in estimates.items():
            if rung in rungs:
                rungs[rung].pairs.append((tokens, true))
    mean = sum(true for _, true in rungs["naive"].pairs) / len(rungs["naive"].pairs)
    print(f"{name:14} {'async' if asynchronous else 'sync':6}({mean:4.0f})", *(f"{k} {v}" for k, v in rungs.items()))

    assert rungs["plugin"].r > 0.999
    assert not rungs["mfu"].pairs or rungs["mfu"].r > 0.999
    best = rungs["scheduled"] if asynchronous else rungs["balance"]
    assert best.r > (0.95 if name != "aborts" else 0.75)
    assert abs(best.bias) < (0.05 if name != "aborts" else 0.15)
    assert best.r > rungs["naive"].r
