"""The sidecar as it is wired, beside a simulated vLLM: what it exports against what readers really waited."""

from itertools import pairwise

import pytest

from stallwatch.analysis.phase import Phase
from stallwatch.analysis.slo import allowed_gap
from stallwatch.analysis.spans import SpanUnion
from stallwatch.observations import ObserverSample, Outcome, PollFailure, SkipReason, Source, StreamTokens
from stallwatch.simulator.scenarios import SCENARIOS
from tests.harness import Watched, watch

MODES = [pytest.param("pulse", id="pulse"), pytest.param("persistent", id="persistent")]
ITL, TTFT = 0.1, 5.0


def truly_missed(watched: Watched, rank: int | None = None) -> float:
    """Seconds in which somebody waited longer than the default objectives, from the world's own record.

    Counted are the gaps of everybody who decodes and our canary's waits for a first token; how long the load waits for
    its first tokens nobody but its own clients can know.
    """
    union = SpanUnion()
    for answer in watched.simulated.world.answers:
        if rank is not None and answer.request.rank != rank:
            continue
        if not answer.request.background and answer.times and answer.times[0] - answer.arrival > TTFT:
            union.add(answer.arrival, answer.times[0])
        now = watched.simulated.world.now
        for before, after in pairwise(answer.times if answer.ended is not None else [*answer.times, now]):
            if after - before > allowed_gap(1, ITL):
                union.add(before, after)
    return union.total


def test_persistent_canary_tells_a_freeze_as_it_happens() -> None:
    """Open gap and reader wait grow while a gap is open, the time-weighted p95 tells the freeze, p50 does not."""
    watched = watch("long-prefill", canary={"mode": "persistent"}, sample_every=0.1)
    views = [(seen.at - watched.origin, seen.engines[0].canary) for seen in watched.findings if seen.engines]
    during = [view for at, view in views if view is not None and 30 < at < 55]
    gaps = [view.open_gap for view in during if view.open_gap is not None]
    last = watched.engine().canary

    assert max(gaps) > 0.9
    assert all(b > a or b < 0.2 for a, b in pairwise(gaps))
    assert all(view.wait_max is not None and view.wait_max >= (view.open_gap or 0) for view in during)
    assert last is not None
    window = last.windows[0]
    assert window.itl[0.5] < 0.05
    assert window.time_weighted[0.95] > 1.0


@pytest.mark.parametrize("mode", MODES)
def test_a_freeze_is_missed_seconds(mode: str) -> None:
    """Missed seconds agree with what readers really waited: 5 % with a persistent canary, 15 % with pulses."""
    watched = watch("long-prefill", canary={"mode": mode})
    truth = truly_missed(watched)
    missed = watched.engine().missed_seconds
    print(f"{mode}: readers missed {truth:.2f} s, exported {missed:.2f} s, {missed / truth - 1:+.1%}")

    assert truth > 20
    assert missed == pytest.approx(truth, rel=0.05 if mode == "persistent" else 0.15)


def test_pulses_claim_no_gap_that_they_did_not_see() -> None:
    """Every canary sample in the window is a gap of an observed stream."""
    watched = watch("long-prefill", canary={"mode": "pulse"})
    tokens: dict[int, list[float]] = {}
    for seen in watched.observations:
        if isinstance(seen, StreamTokens):
            tokens.setdefault(seen.stream, []).append(seen.at)
    judged_until = max(seen.at for seen in watched.observations if isinstance(seen, ObserverSample))
    seen_gaps = sum(sum(at <= judged_until for at in times[1:]) for times in tokens.values())
    canary = watched.engine().canary

    assert canary is not None
    assert sum(canary.inter_chunk.counts) == seen_gaps


@pytest.mark.parametrize(
    "name", ["quiet", "idle", "long-prefill-cached", "whole-prompt-repeats", "asleep", "metrics-slow"]
)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_missed_where_nobody_waits(name: str, mode: str) -> None:
    """A quiet, idle, sleeping or well cached server misses no second, and is judged."""
    watched = watch(name, canary={"mode": mode})
    truth = truly_missed(watched)
    engine = watched.engine()
    print(f"{name}, {mode}: missed {engine.missed_seconds:.2f} of {engine.judged_seconds:.1f} s, truth {truth:.2f} s")

    assert engine.missed_seconds <= truth * 1.05 + 0.01
    assert engine.judged_seconds > 0.4 * SCENARIOS[name].duration


def test_a_prefill_only_server_misses_nothing_by_engine_evidence() -> None:
    """Without decoders a long step is nobody's gap."""
    watched = watch("prefill-only", canary={"enabled": False})

    assert watched.engine().missed_seconds == 0
    assert watched.engine().judged_seconds > 50


@pytest.mark.parametrize("mode", MODES)
def test_a_restart_is_seen_and_survived(mode: str) -> None:
    """Phases follow the server down and up, counters do not go backwards, and latencies are right afterwards."""
    watched = watch("engine-restart", canary={"mode": mode})
    phases = [seen.phase for seen in watched.findings]
    changes = [phases[0]] + [after for before, after in pairwise(phases) if after is not before]
    totals = [seen.engines[0].judged_seconds for seen in watched.findings if seen.engines]
    window = watched.engine().readers

    assert Phase.GONE in changes
    assert changes[-1] is Phase.SERVING
    assert totals == sorted(totals)
    assert watched.last.restarts == 1
    assert window is not None
    assert window.itl[0.5] < 0.1
    failures = [seen for seen in watched.observations if isinstance(seen, PollFailure) and seen.source is Source.ENGINE]
    assert failures
    assert watched.sidecar.health.sources[Source.ENGINE].up


def test_a_frozen_process_is_serving_and_missing() -> None:
    """A server that accepts and answers nothing is not gone: its readers wait, and the canary tells."""
    watched = watch("process-frozen", canary={"mode": "persistent"})
    truth = truly_missed(watched)
    missed = watched.engine().missed_seconds
    print(f"process-frozen: truth {truth:.2f} s, exported {missed:.2f} s")

    assert all(seen.phase is not Phase.GONE for seen in watched.findings)
    assert missed == pytest.approx(truth, rel=0.05)


def test_a_metrics_page_that_is_down_leaves_the_canary_to_judge() -> None:
    """Seconds go on being judged by what our own streams get."""
    watched = watch("metrics-down", canary={"mode": "persistent"})

    assert watched.engine().judged_seconds > 50
    assert watched.engine().missed_seconds <= truly_missed(watched) + 0.01
    assert watched.engine().canary is not None


def test_a_sleeping_server_gets_no_canary() -> None:
    """While the engine sleeps canaries are skipped, and nothing is judged."""
    watched = watch("asleep", canary={"mode": "pulse", "interval_seconds": 5})

    assert Phase.ASLEEP in {seen.phase for seen in watched.findings}
    assert watched.last.canary_skipped[SkipReason.ASLEEP] >= 3
    assert watched.last.phase is Phase.SERVING


def test_ranks_are_judged_each_on_its_own() -> None:
    """With two data-parallel ranks a freeze of one is missed seconds of that one."""
    watched = watch("dp-rank-frozen", canary={"mode": "pulse"})
    missed = {engine.engine: engine.missed_seconds for engine in watched.last.engines}
    truth = {str(rank): truly_missed(watched, rank) for rank in (0, 1)}
    print(f"dp-rank-frozen: truth {truth}, exported {missed}")

    frozen, healthy = sorted(missed, key=lambda engine: -missed[engine])
    assert missed[frozen] == pytest.approx(truth[frozen], rel=0.15)
    assert missed[healthy] <= truth[healthy] + 0.5


def test_what_is_sent_stays_inside_the_budget() -> None:
    """Pulses on a server that is always slow do not spend more than their tokens a minute."""
    watched = watch("medium-prompts", canary={"mode": "pulse", "tokens_per_minute": 128}, seconds=80)

    assert watched.last.canary_tokens <= 128 * 80 / 60 + 128
    assert watched.last.canary_requests[Outcome.COMPLETED] >= 2
    assert watched.last.canary_skipped[SkipReason.BUDGET] >= 1


def test_our_own_traffic_is_not_counted_as_the_servers() -> None:
    """On an idle server the canary is the only reader, and the readers' figures stay empty."""
    watched = watch("idle", canary={"mode": "persistent"})
    engine = watched.engine()

    assert engine.readers_total <= 2
    assert engine.decode_tokens <= 2
    assert engine.requests["running"] == 0


def test_the_same_run_gives_the_same_findings() -> None:
    """In virtual time two runs agree to the last bit."""
    first, second = watch("medium-prompts", seconds=30), watch("medium-prompts", seconds=30)

    assert [repr(seen.engines) for seen in first.findings] == [repr(seen.engines) for seen in second.findings]
