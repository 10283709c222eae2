from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.analysis.baseline import LEAST_SAMPLES, MEMORY, DecodeBaseline, DecodeLine, DecodeSums, bucket_of
from stallwatch.analysis.interference import WINDOW, Interference, share
from stallwatch.analysis.paired import PairedInterval
from stallwatch.analysis.prefill import Evidence
from stallwatch.analysis.spans import SpanUnion
from stallwatch.analysis.work import WorkView
from stallwatch.simulator.cost import Cause, Pause, Slowdown
from stallwatch.simulator.load import Arrival, Load, Users, every
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.scenarios import SCENARIOS
from tests.harness import Watched, watch

USUAL = 0.03
RATES = [pytest.param(0.25, id="4Hz"), pytest.param(1.0, id="1Hz")]
CALM = 25.0  # seconds without a prompt before the first of the scenarios here
READERS = Users(count=3, prompt_tokens=64, output_tokens=4_000, stagger=1.0)
LONG = Scenario(
    name="long-after-calm",
    sentence="One prompt of 40,000 tokens beside three readers.",
    duration=80.0,
    load=Load((Arrival(at=CALM, prompt_tokens=40_000, output_tokens=20),), (READERS,)),
)
STEADY = Scenario(
    name="steady-prompts",
    sentence="Prompts of 900 tokens come all the time beside three readers.",
    duration=70.0,
    load=Load(
        tuple(Arrival(at=CALM + 0.9 * i, prompt_tokens=900, output_tokens=8) for i in range(45)),
        (READERS,),
    ),
)


def interval(
    at: float, steps: float, seconds: float, *, prefill: float | None = 0.0, decoders: float = 4.0
) -> PairedInterval:
    """Steps that ended within the quarter of a second up to `at`, or within what they took."""
    return PairedInterval(
        since=at - 0.25,
        until=at,
        began=at - max(0.25, seconds),
        evidence=Evidence.BALANCE if prefill is not None else Evidence.COMPLETION,
        steps=steps,
        decoders=decoders,
        seconds=seconds,
        samples=steps * decoders,
        waited=seconds * decoders,
        decoders_beside=decoders,
        prefill=prefill,
        mixed=1.0 if prefill else 0.0,
        context=None,
        decoding_only=prefill == 0,
        in_flight=False,
        accompanied=True,
        exact=None,
    )


def followed(intervals: Iterable[PairedInterval], usual: float = USUAL) -> Interference:
    watching = Interference()
    for seen in intervals:
        watching.add(seen, beside=bool(seen.prefill), baseline=usual)
    return watching


class TestInterference:
    def test_steps_without_prefill_are_none(self) -> None:
        """However slow steps without prefill are, that is no interference."""
        watching = followed(interval(at, 8, 8 * 0.09) for at in range(1, 10))

        assert watching.ratio(10) == 0
        assert watching.seconds_total == 0
        assert watching.p95(10) == 0

    def test_twice_as_slow_is_one(self) -> None:
        """Steps with prefill that take twice the baseline read 1."""
        watching = followed(interval(at, 1, 2 * USUAL, prefill=500) for at in range(1, 10))

        assert watching.ratio(10) == pytest.approx(1.0)
        assert watching.p95(10) == pytest.approx(1.0)
        assert watching.seconds_total == pytest.approx(9 * USUAL)

    def test_what_is_not_known_is_left_out(self) -> None:
        """Without evidence by interval, or without a baseline, nothing is said."""
        watching = Interference()
        watching.add(interval(1, 1, 1.0, prefill=None), beside=False, baseline=USUAL)
        watching.add(interval(2, 1, 1.0, prefill=500), beside=True, baseline=None)

        assert watching.ratio(3) is None
        assert watching.p95(3) is None
        assert watching.judged == 0

    def test_old_intervals_leave_the_ratio_and_stay_in_the_total(self) -> None:
        """The ratio looks back five minutes, the counter for ever."""
        watching = followed([interval(1, 1, 1.0, prefill=500), interval(2 + WINDOW, 8, 8 * USUAL)])

        assert watching.ratio(2 + WINDOW) == 0
        assert watching.ratio(3 + 2 * WINDOW) is None
        assert watching.seconds_total == pytest.approx(1.0 - USUAL)

    def test_p95_needs_single_steps(self) -> None:
        """Where slow steps are known only as sums, and there are enough of them to matter, p95 is absent."""
        known = [interval(at, 1, 0.3, prefill=500) for at in range(1, 10)]
        summed = [interval(at, 4, 0.9, prefill=500) for at in range(10, 20)]

        assert followed(known).p95(20) == pytest.approx(9.0)
        assert followed(known + summed).p95(20) is None
        assert followed(known + summed).ratio(20) is not None

    def test_a_fast_stretch_does_not_swallow_a_real_one(self) -> None:
        """Intervals below the baseline lower the counter's next growth by two steps at most."""
        fast = [interval(at, 8, 4 * USUAL, prefill=16) for at in range(1, 100)]
        watching = followed([*fast, interval(100, 1, 1.0, prefill=2_000)])

        assert watching.seconds_total == pytest.approx(1.0 - 3 * USUAL)

    @given(
        st.lists(
            st.tuples(st.integers(1, 12), st.floats(0.001, 3.0), st.sampled_from([0.0, 16.0, 2_000.0])), max_size=40
        )
    )
    def test_never_negative_and_never_falling(self, made: list[tuple[int, float, float]]) -> None:
        """Whatever comes, the ratio is not negative and the counter does not fall, nor grow faster than time."""
        watching, before = Interference(), 0.0
        for at, (steps, seconds, prefill) in enumerate(made, start=1):
            watching.add(interval(at, steps, seconds, prefill=prefill), beside=prefill > 0, baseline=USUAL)

            assert watching.seconds_total >= before
            assert watching.seconds_total - before <= max(0.25, seconds) + 1e-9
            before = watching.seconds_total
            ratio = watching.ratio(at)
            assert ratio is not None
            assert ratio >= 0

    @given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.03, 1.0)), min_size=1, max_size=20), st.integers(1, 8))
    def test_independent_of_how_intervals_are_cut(self, made: list[tuple[int, float]], grouped: int) -> None:
        """Merging neighbouring intervals, as slower polling does, changes neither ratio nor total."""
        made = [(steps, max(seconds, steps * USUAL)) for steps, seconds in made]
        fine = [interval(at, steps, seconds, prefill=100) for at, (steps, seconds) in enumerate(made, start=1)]
        coarse = [
            interval(at, sum(s for s, _ in group), sum(t for _, t in group), prefill=100)
            for at, group in enumerate((made[i : i + grouped] for i in range(0, len(made), grouped)), start=1)
        ]

        assert followed(coarse).ratio(50) == pytest.approx(followed(fine).ratio(50))
        assert followed(coarse).seconds_total == pytest.approx(followed(fine).seconds_total)

    @given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.01, 1.0)), min_size=1, max_size=20), st.floats(0.1, 10))
    def test_independent_of_the_engines_speed(self, made: list[tuple[int, float]], factor: float) -> None:
        """An engine that does everything `factor` times as slowly has the same ratio."""
        one = [interval(at, steps, seconds, prefill=100) for at, (steps, seconds) in enumerate(made, start=1)]
        other = [
            replace(interval(at, steps, seconds * factor, prefill=100), began=at - factor * max(0.25, seconds))
            for at, (steps, seconds) in enumerate(made, start=1)
        ]

        assert followed(other, USUAL * factor).ratio(50) == pytest.approx(followed(one).ratio(50))


class TestShare:
    def test_stall_seconds_that_prefill_covers(self) -> None:
        """Counted is the part of the stalls in which steps had prefill, against all judged seconds."""
        prefilling = SpanUnion()
        prefilling.add(10, 20)

        assert share([(5, 12), (18, 30)], prefilling, 100) == pytest.approx(0.04)
        assert share([], prefilling, 100) == 0
        assert share([(5, 12)], prefilling, 0) is None


class TestBaseline:
    def test_buckets_are_powers_of_two(self) -> None:
        """1, 2, 3-4, 5-8, 9-16 and so on."""
        assert [bucket_of(n) for n in (0, 1, 1.4, 2, 3, 4, 5, 8, 9, 16, 17)] == [0, 0, 0, 1, 2, 2, 3, 3, 4, 4, 5]

    def test_absent_until_known(self) -> None:
        """A few steps say nothing."""
        baseline = DecodeBaseline()
        assert baseline.seconds(1) is None

        baseline.add(1.0, 1, 0.3, 10)

        assert baseline.seconds(1) is None

    def test_median_of_the_bucket(self) -> None:
        """With thirty clean intervals it is their median: a pause among them does not move it."""
        baseline = DecodeBaseline()
        for at in range(LEAST_SAMPLES):
            baseline.add(at, 4, 8 * 0.032, 8)
        baseline.add(40, 4, 9.0, 1)

        assert baseline.seconds(3) == pytest.approx(0.032)

    def test_line_while_a_bucket_has_too_few(self) -> None:
        """Below thirty clean intervals the line through the sums answers, between the decoders seen and beyond."""
        baseline = DecodeBaseline()
        for at in range(10):
            baseline.add(at, 1, 8 * 0.031, 8)
            baseline.add(at + 0.5, 4, 8 * 0.034, 8)

        assert baseline.seconds(1) == pytest.approx(0.031)
        assert baseline.seconds(8) == pytest.approx(0.038)

    def test_one_number_of_decoders_tells_nothing_of_others(self) -> None:
        """A line through one point has no slope: other buckets stay unknown."""
        baseline = DecodeBaseline()
        for at in range(10):
            baseline.add(at, 1, 8 * 0.031, 8)

        assert baseline.seconds(1) == pytest.approx(0.031)
        assert baseline.seconds(16) is None

    def test_forgotten_over_a_quarter_of_an_hour(self) -> None:
        """A slower engine is the new level once the old one is forgotten, and the past shows the difference."""
        baseline = DecodeBaseline()
        for at in range(0, 1000, 2):
            baseline.add(at, 1, 8 * 0.03, 8)
        for at in range(1000, 1000 + int(MEMORY) + 2, 2):
            baseline.add(at, 1, 8 * 0.08, 8)

        assert baseline.seconds(1) == pytest.approx(0.08)
        assert baseline.reference(1) is not None
        assert baseline.reference(1) < 0.06  # type: ignore[operator]

    def test_a_restart_drops_the_level_and_keeps_the_past(self) -> None:
        """Another process may have another model: its level is learned anew."""
        baseline = DecodeBaseline()
        for at in range(0, int(MEMORY) + 10, 2):
            baseline.add(at, 1, 8 * 0.03, 8)
        baseline.restart()

        assert baseline.seconds(1) is None
        assert baseline.reference(1) == pytest.approx(0.03)

    @given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 20), st.floats(0.001, 5.0)), min_size=1, max_size=50))
    def test_the_line_never_falls_with_decoders(self, made: list[tuple[int, int, float]]) -> None:
        """More decoders never make a step shorter, whatever the noise, and no step takes less than nothing."""
        line = DecodeLine()
        for at, (decoders, steps, seconds) in enumerate(made):
            line.add(at, DecodeSums.of_interval(steps, decoders, seconds))
        fit = line.fit

        if fit is not None:
            assert fit[1] is None or fit[1] >= 0
            expected = line.seconds(8)
            assert expected is None or expected > 0

    @settings(max_examples=30)
    @given(
        st.lists(st.tuples(st.integers(1, 40), st.floats(0.005, 2.0)), min_size=40, max_size=80),
        st.floats(0.1, 10.0),
    )
    def test_scales_with_the_engine(self, made: list[tuple[int, float]], factor: float) -> None:
        """An engine that takes `factor` times as long has `factor` times the baseline."""
        one, other = DecodeBaseline(), DecodeBaseline()
        for at, (decoders, seconds) in enumerate(made):
            one.add(at, decoders, seconds, 1)
            other.add(at, decoders, seconds * factor, 1)
        for decoders in (1, 3, 20):
            expected, found = one.seconds(decoders), other.seconds(decoders)

            assert found == (None if expected is None else pytest.approx(expected * factor))


def true_interference(watched: Watched, since: float) -> tuple[float, float]:
    """Seconds and ratio over the world's steps that ended after `since`, from what each would have taken alone."""
    cost = watched.simulated.world.scenario.engine.cost
    excess = base = 0.0
    for step in watched.simulated.world.steps():
        if step.decode_requests and step.end > since:
            alone = cost.decode_seconds(step.decode_requests, step.context)
            base += alone
            excess += step.seconds - alone if step.prefill_tokens else 0.0
    return excess, excess / base


def judged_since(watched: Watched) -> float:
    """When the first interval that was judged began, seconds of the scenario."""
    first = watched.sidecar.monitor.engines["0"].work.interference._entries[0]
    interval_seconds = watched.sidecar.settings.engine.interval_seconds
    return first.at - interval_seconds - watched.origin


def work_of(watched: Watched) -> WorkView:
    work = watched.engine().work
    assert work is not None
    return work


def run(scenario: Scenario, *, interval_seconds: float, canary: bool = False, **engine: object) -> Watched:
    server = replace(scenario.server, plugin=bool(engine.pop("plugin", False)))
    changed = replace(scenario, engine=replace(scenario.engine, **engine), server=server)  # type: ignore[arg-type]
    return watch(
        changed,
        canary={"enabled": canary},
        engine={"interval_seconds": interval_seconds},
        gpu={"enabled": "false"},
        sample_every=5.0,
    )


@pytest.mark.parametrize("interval_seconds", RATES)
@pytest.mark.parametrize("asynchronous", [pytest.param(False, id="sync"), pytest.param(True, id="async")])
@pytest.mark.parametrize("plugin", [pytest.param(False, id="balance"), pytest.param(True, id="plugin")])
@pytest.mark.parametrize("scenario", [LONG, STEADY], ids=lambda s: s.name)
def test_agrees_with_the_steps_themselves(
    scenario: Scenario, interval_seconds: float, *, asynchronous: bool, plugin: bool
) -> None:
    """Beside uncached prompts it is within 10 % of what the single steps say, at 4 Hz and at 1 Hz alike."""
    watched = run(scenario, interval_seconds=interval_seconds, async_scheduling=asynchronous, plugin=plugin)
    seconds, ratio = true_interference(watched, judged_since(watched))
    found = work_of(watched)
    print(
        f"{scenario.name:16} {'plugin' if plugin else 'balance':8} {'async' if asynchronous else 'sync':6}"
        f"{1 / interval_seconds:.0f} Hz: true {seconds:6.2f} s {ratio:.3f}, found {found.interference_seconds:6.2f} s "
        f"{found.interference_mean:.3f} ({found.interference_mean / ratio - 1:+.1%})"  # type: ignore[operator]
    )

    assert seconds > 10
    assert found.interference_mean == pytest.approx(ratio, rel=0.1)
    assert found.interference_seconds == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("interval_seconds", RATES)
@pytest.mark.parametrize("name", ["quiet", "long-prefill-cached", "whole-prompt-repeats", "pd-decode-worker"])
def test_about_nothing_where_little_is_computed(name: str, interval_seconds: float) -> None:
    """Decode-only traffic, cached long prompts and prompts computed elsewhere do not interfere."""
    watched = run(SCENARIOS[name], interval_seconds=interval_seconds)
    found = work_of(watched)
    print(f"{name} {1 / interval_seconds:.0f} Hz: {found.interference_mean}")

    assert found.interference_mean == pytest.approx(0, abs=0.015)


def test_our_own_prompts_do_not_interfere() -> None:
    """Beside readers whose prompts are long done, pulses every five seconds leave no interference and no prefill."""
    calm = Scenario(name="calm", sentence="One reader.", duration=60, load=Load((), (replace(READERS, count=1),)))
    watched = watch(calm, canary={"interval_seconds": 5.0}, gpu={"enabled": "false"}, lead=0.0)
    found = work_of(watched)
    theirs = sum(
        answer.request.prompt_tokens for answer in watched.simulated.world.answers if answer.request.background
    )
    computed = sum(step.prefill_tokens for step in watched.simulated.world.steps())
    print(f"computed {computed}, theirs {theirs}, exported {sum(found.prefill_totals.values())}")

    assert computed > theirs + 500
    assert sum(found.prefill_totals.values()) <= theirs + 1
    assert found.interference_mean == pytest.approx(0, abs=0.002)


def test_a_slow_clock_is_not_interference() -> None:
    """Steps that are slow for another reason, without prefill, do not count."""
    slow = Scenario(
        name="slow",
        sentence="The clock falls.",
        duration=60,
        load=Load((), (READERS,)),
        slowdowns=(Slowdown(start=30.0, factor=3.0),),
    )
    found = work_of(run(slow, interval_seconds=0.25))

    assert found.interference_mean == pytest.approx(0, abs=0.005)


@pytest.mark.parametrize("plugin", [pytest.param(False, id="balance"), pytest.param(True, id="plugin")])
def test_a_hang_is_not_interference(*, plugin: bool) -> None:
    """Prompts that came while the engine hung are computed in the step that ends it, and did not make it long."""
    calm = Scenario(
        name="calm",
        sentence="Prompts of 3,000 tokens beside readers.",
        duration=120,
        load=Load(every(3.0, Arrival(at=5.0, prompt_tokens=3_000, output_tokens=20), times=38), (READERS,)),
    )
    pause = Pause(at=90.3, seconds=20.0, cause=Cause.ENGINE_HANG)
    usual, hung = (
        work_of(run(each, interval_seconds=0.25, plugin=plugin)) for each in (calm, replace(calm, pauses=(pause,)))
    )

    assert hung.interference_seconds == pytest.approx(usual.interference_seconds, rel=0.1)
    assert hung.model is not None
    assert usual.model is not None
    assert hung.model.r2 == pytest.approx(usual.model.r2, abs=0.1)


@pytest.mark.parametrize("name", ["long-prefill", "degraded"])
def test_p95_tells_the_slow_steps(name: str) -> None:
    """With the plugin p95 is that of the steps themselves."""
    watched = run(SCENARIOS[name], interval_seconds=0.25, plugin=True)
    since = judged_since(watched)
    cost = watched.simulated.world.scenario.engine.cost
    steps = [s for s in watched.simulated.world.steps() if s.decode_requests and s.end > since]
    slower = sorted(s.seconds / cost.decode_seconds(s.decode_requests, s.context) - 1 for s in steps)
    found = work_of(watched).interference_p95
    print(f"{name}: true p95 {slower[int(0.95 * len(slower))]:.2f}, found {found}")

    assert found == pytest.approx(slower[int(0.95 * len(slower))], rel=0.1, abs=0.05)


def test_a_long_prompt_is_a_share_of_the_time() -> None:
    """While a long prompt freezes readers, the share tells the stalls that it covers; in calm it is 0."""
    watched = run(LONG, interval_seconds=0.25)
    steps = [s for s in watched.simulated.world.steps() if s.prefill_tokens > 1_000]
    found = work_of(watched).interference_share
    true = sum(step.seconds for step in steps) / watched.engine().judged_seconds
    print(f"share: true {true:.3f}, found {found}")

    assert found == pytest.approx(true, rel=0.15)
