from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from stallwatch.analysis.prefill import CLIMBS, LADDER, Evidence, PrefillInterval, PrefillLadder
from stallwatch.observations import CacheFacts, EngineCounters
from tests.test_balance import CACHE, Poll, recorded, score
from tests.test_mfu import Model, warm_up

PLUGIN = "stallwatch_plugin_step_moments_total"


def follow(
    run: Sequence[Poll], *, cache: CacheFacts | None = CACHE, ladder: PrefillLadder | None = None
) -> list[PrefillInterval]:
    ladder = ladder or PrefillLadder()
    seen = [ladder.scraped(poll.counters, poll.at, cache=cache) for poll in run]
    return [interval for interval in seen if interval is not None]


def without_plugin(run: Sequence[Poll]) -> list[Poll]:
    return [replace(poll, counters=replace(poll.counters, plugin={})) for poll in run]


def without_flags(run: Sequence[Poll]) -> list[Poll]:
    return [replace(poll, counters=replace(poll.counters, plugin={}, write_bytes=None)) for poll in run]


def test_the_best_evidence_that_moves_is_taken() -> None:
    """With plugin and flag the plugin wins, without it the write counter, without both the balance."""
    run = recorded("plugin-abort")
    assert follow(run)[-1].evidence is Evidence.PLUGIN
    assert follow(without_plugin(run))[-1].evidence is Evidence.MFU
    assert follow(without_flags(run))[-1].evidence is Evidence.BALANCE


def test_without_a_cache_layout_only_completions_are_left() -> None:
    """When the balance cannot be drawn, what is known is what was booked at the end of a prompt."""
    assert follow(without_flags(recorded("mixed")), cache=None)[-1].evidence is Evidence.COMPLETION
    assert follow(without_flags(recorded("mixed")), cache=replace(CACHE, hybrid=True))[-1].evidence is (
        Evidence.COMPLETION
    )


def test_an_empty_page_is_unknown() -> None:
    """A server that offers nothing gets no figure at all."""
    nothing = Poll(0.0, EngineCounters(), 0.0)
    seen = follow([nothing, replace(nothing, at=1.0)])
    assert [(i.evidence, i.prefill_tokens, i.backlog_tokens) for i in seen] == [(Evidence.UNKNOWN, None, None)]


def test_every_rung_is_kept_for_comparison() -> None:
    """All levels are estimated side by side; the table shows what each is worth against the plugin's truth."""
    for name in ("plugin-abort", "plugin-mixed", "plugin-long"):
        run = recorded(name)
        truth = {after.at: after.truth - before.truth for before, after in pairwise(run)}
        seen = follow(run)
        for rung in LADDER[:-1]:
            pairs = [(i.estimates[rung], truth[i.until]) for i in seen if rung in i.estimates]
            if len(pairs) > 10:
                got = score([e for e, _ in pairs], [t for _, t in pairs])
                print(f"\n{name:13} {rung:10} n {len(pairs):4}  mean {got.mean:6.1f}  {got}", end="")
                assert got.error < (1e-9 if rung is Evidence.PLUGIN else 1 if rung is Evidence.MFU else got.mean * 3)
    print()


def test_a_better_rung_never_enters_a_worse_one() -> None:
    """The balance says the same whether or not plugin and flag are there."""
    run = recorded("plugin-mixed")
    rich = [i.estimates.get(Evidence.BALANCE) for i in follow(run)]
    poor = [i.estimates.get(Evidence.BALANCE) for i in follow(without_flags(run))]
    assert rich == poor


def test_a_plugin_that_falls_silent_is_given_up() -> None:
    """When the engine works on and the plugin's sums stand still, the next rung takes over."""
    run = recorded("plugin-abort")
    middle = next(i for i in range(60, len(run)) if (run[i].counters.running or 0) > 0)
    frozen = run[middle].counters.plugin
    silent = run[:middle] + [replace(p, counters=replace(p.counters, plugin=frozen)) for p in run[middle:]]
    assert follow(silent)[-1].evidence is not Evidence.PLUGIN


def test_a_plugin_that_counts_nothing_is_not_taken() -> None:
    """Where the flag for step details is missing the plugin's families are there and stay at 0."""
    key = f'{PLUGIN}{{phase="decode",term="n"}}'
    run = [replace(p, counters=replace(p.counters, plugin={key: 0.0})) for p in recorded("mixed")]
    assert follow(run)[-1].evidence is Evidence.BALANCE


def test_a_restart_chooses_anew() -> None:
    """After a restart without the flags the evidence falls to what the new process offers."""
    ladder = PrefillLadder()
    assert follow(recorded("plugin-abort"), ladder=ladder)[-1].evidence is Evidence.PLUGIN
    zeros: dict[str, Any] = dict.fromkeys(
        (
            *("running", "waiting", "kv_usage", "prefix_queries", "prefix_hits", "iterations", "generation_tokens"),
            *("itl_count", "first_tokens", "prompt_local_compute", "finished_count", "finished_prompt_tokens"),
            "finished_generation_tokens",
        ),
        0.0,
    )
    start = EngineCounters(**zeros)
    assert ladder.scraped(start, 1e6, cache=CACHE) is None
    seen = ladder.scraped(start, 1e6 + 0.25, cache=CACHE)
    assert seen is not None
    assert seen.evidence is Evidence.BALANCE


def test_a_smaller_scrape_is_passed_over() -> None:
    """A poll of the detection lane lacks what is needed: the interval simply becomes longer."""
    run = without_flags(recorded("random"))
    short = [
        replace(p, counters=replace(p.counters, first_tokens=None, prompt_local_compute=None)) if i % 2 else p
        for i, p in enumerate(run)
    ]
    seen = follow(short)
    assert len(seen) == (len(run) - 1) // 2
    assert sum(i.prefill_tokens or 0 for i in seen) == pytest.approx(run[-1].truth - run[0].truth, rel=0.02)


def test_older_servers_book_whole_prompts() -> None:
    """Without a split by source the completion rung takes the cached part out of the booked prompts."""
    counters = EngineCounters(first_tokens=0.0, prompt_tokens=0.0, prefix_hits=0.0)
    ladder = PrefillLadder()
    ladder.scraped(counters, 0.0)
    admitted = ladder.scraped(replace(counters, prefix_hits=640.0), 1.0)
    booked = ladder.scraped(replace(counters, prefix_hits=640.0, prompt_tokens=1000.0, first_tokens=1.0), 2.0)
    assert admitted is not None
    assert booked is not None
    assert (admitted.prefill_tokens, booked.prefill_tokens) == (0.0, 360.0)


def test_exact_steps_come_with_the_plugin_only() -> None:
    """Sums by phase and the buckets of an interval are handed on when the plugin is the evidence."""
    run = recorded("plugin-mixed")
    exact = [i.exact_steps for i in follow(run) if i.exact_steps is not None]
    counts = sum(e.steps for e in exact)
    buckets = [e.prefill_buckets for e in exact]
    assert counts > 1000
    assert all(b is not None and b.counts[-1] == e.steps for b, e in zip(buckets, exact, strict=True))
    assert all(i.exact_steps is None for i in follow(without_plugin(run)))


@pytest.mark.parametrize("strip", [without_flags, without_plugin, list], ids=["balance", "mfu", "plugin"])
def test_the_time_to_go_of_a_long_prompt_is_right(strip: object) -> None:
    """The backlog falls; the ETA of a first long prompt is absent up to the fourth poll, then right within 25 %."""
    assert callable(strip)
    seen = follow(strip(recorded("plugin-long")))
    long = [i for i in seen if (i.backlog_tokens or 0) > 0]
    backlog = [i.backlog_tokens or 0.0 for i in long]
    end = next(i.until for i in seen if i.until > long[-1].until)
    assert backlog == sorted(backlog, reverse=True)
    assert backlog[0] > 9000
    steps = [i for i in long if i.prefill_tokens]
    rows = [(end - i.until, i.backlog_eta) for i in steps[:-2]]
    print("\n" + "  ".join(f"{true:.1f}/{eta and round(eta, 1)}" for true, eta in rows))
    assert all(eta is not None for _, eta in rows[4:])
    for true, eta in rows:
        assert eta is None or eta == pytest.approx(true, rel=0.25, abs=0.5)


def test_every_rung_says_how_to_get_there() -> None:
    """`check` can tell for each rung what it needs, since when, and what it costs."""
    assert [climb.evidence for climb in CLIMBS] == list(LADDER[:-1])
    assert all(climb.needs and climb.since and climb.cost and climb.gives for climb in CLIMBS)


def test_the_write_counter_takes_over_once_it_has_calibrated() -> None:
    """A freshly started watch stands on a lower rung until the two factors are known."""
    polls = list(warm_up(Model(26624, 640)))
    seen = follow([Poll(0.25 * i, counters, 0.0) for i, counters in enumerate(polls)])
    assert seen[0].evidence is Evidence.COMPLETION
    assert seen[-1].evidence is Evidence.MFU
