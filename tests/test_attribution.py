from collections.abc import Sequence

import pytest

from stallwatch.analysis.attribution import RULES, Frozen, Scene, Verdict, attribute
from stallwatch.analysis.attribution.frozen import cut
from stallwatch.analysis.causes import WHAT_TO_TRY, Cause, StallKind, runbook
from stallwatch.analysis.gaps import Gap, Piece, Witness
from stallwatch.analysis.gpu import GpuHistory
from stallwatch.analysis.observer import ObserverHistory
from stallwatch.analysis.surroundings import Surroundings
from stallwatch.analysis.window import EngineWindow, Stretch
from stallwatch.observations import Failure, GpuReading, GpuSample, HostSample, ObserverSample, PollFailure, Source

STEP = 0.03
CAPPED = frozenset({"sw_power_cap"})


class Stage:
    """What surrounds one stall; each part is added where a case needs it."""

    def __init__(self) -> None:
        self.gpus = GpuHistory()
        self.observer = ObserverHistory()
        self.around = Surroundings(self.gpus, self.observer)

    def gpu(
        self,
        start: float,
        end: float,
        *,
        busy: float = 1.0,
        clock: float = 2e9,
        power: float = 500.0,
        scope: str = "selected",
    ) -> None:
        for index in range(int((end - start) / 0.2)):
            reading = GpuReading(
                gpu="0", uuid="u", utilization=busy, sm_clock=clock, power=power, clock_event_reasons=CAPPED
            )
            sample = GpuSample(at=start + 0.2 * (index + 1), gpus=(reading,), scope=scope)
            self.gpus.add(sample)
            self.around.sampled(sample)

    def host(self, start: float, end: float, *, rate: float) -> None:
        total = self.around._last_host.pressure_seconds[("memory", "some")] if self.around._last_host else 0.0
        for second in range(int(end - start)):
            total += rate
            at = start + second + 1
            self.around.read_host(HostSample(at=at, pressure_seconds={("memory", "some"): total}))

    def judge(self, stall: Frozen, *, pace: float | None = None) -> Verdict:
        engine = EngineWindow()
        engine._pace.extend([pace] * 3 if pace is not None else ())
        return attribute(stall, Scene(engine, self.around, 30.0))


def frozen(
    *gaps: Gap, stretches: Sequence[Stretch] = (), ongoing: bool = False, blind: bool = False, end: float | None = None
) -> Frozen:
    pieces = [Piece(gap.start, gap.end, gap) for gap in gaps]
    last = max(gap.end for gap in gaps) if end is None else end
    return Frozen(
        start=gaps[0].start,
        end=last,
        ongoing=ongoing,
        blind=blind,
        slices=tuple(cut(pieces, stretches, end=last)),
        stretches=tuple(stretches),
    )


def gap(start: float, end: float, kind: StallKind = StallKind.ENGINE, witness: Witness = Witness.STEPS) -> Gap:
    return Gap(start=start, end=end, kind=kind, witness=witness, normal=min(STEP, end - start), readers=3.0)


def slow(start: float, end: float, **more: object) -> Stretch:
    """One step that took the whole stretch."""
    values: dict[str, object] = {
        "moved": True,
        "answered": 1 + int((end - start) * 4),
        "steps": 1.0,
        "decoders": 3.0,
        "running": 3.0,
        "lost": end - start - STEP,
        "slow_samples": 3.0,
        "slow_seconds": end - start,
        "prefill": 0.0,
        "backlog": (0.0, 0.0),
    }
    return Stretch(since=start, until=end, **(values | more))  # type: ignore[arg-type]


def healthy(start: float, end: float, **more: object) -> Stretch:
    """Steps as usual."""
    steps = (end - start) / STEP
    return slow(start, end, **{"steps": steps, "lost": 0.0, "slow_samples": 0.0, "slow_seconds": 0.0, **more})


def prompt(start: float, end: float, **more: object) -> Stretch:
    """A chunk of 2,000 tokens of a long prompt."""
    return slow(start, end, **{"prefill": 2_000.0, "backlog": (50_000.0, 48_000.0), "running": 4.0, **more})


def test_rules_are_a_visible_tuple_and_every_cause_has_advice() -> None:
    """Every cause but unknown has a rule, and all have something to try and a place in the runbook."""
    judges = [rule.judge.__name__ for rule in RULES]

    assert set(judges) == {str(cause) for cause in Cause} - {"unknown"}
    assert set(WHAT_TO_TRY) == set(Cause)
    assert runbook(Cause.KV_TRANSFER) == "docs/runbook.md#kv_transfer"


def test_nothing_seen_is_unknown() -> None:
    """A stall that nothing explains has no cause and no evidence."""
    assert Stage().judge(frozen(gap(10, 12), stretches=[slow(10, 12)])) == Verdict(Cause.UNKNOWN, ())


def test_prefill_explains_slow_steps() -> None:
    """Prompt tokens in the same steps."""
    stages = [prompt(10 + i, 11 + i) for i in range(5)]

    verdict = Stage().judge(frozen(*[gap(10 + i, 11 + i) for i in range(5)], stretches=stages))

    assert verdict.cause is Cause.PREFILL
    assert verdict.evidence[0].seconds == pytest.approx(5 * 0.97)


def test_a_queue_beside_prefill_is_not_its_cause() -> None:
    """Waiting for capacity during interference only means that the budget is spent: our own pulse shows up there."""
    wait = gap(10, 25, StallKind.ADMISSION, Witness.STREAM)
    stretches = [prompt(10 + i, 11 + i, waiting=2.0) for i in range(15)]

    assert Stage().judge(frozen(wait, stretches=stretches)).cause is Cause.PREFILL


def test_a_queue_without_prefill_is_admission() -> None:
    """Nothing is computed for those who wait, and steps are as usual."""
    wait = gap(10, 25, StallKind.ADMISSION, Witness.QUEUE)
    stretches = [healthy(10 + i, 11 + i, waiting=4.0) for i in range(15)]

    assert Stage().judge(frozen(wait, stretches=stretches)).cause is Cause.ADMISSION


def test_a_full_cache_is_admission_though_prompts_are_computed() -> None:
    """Above 95 % of the KV cache nobody is let in, whatever else goes on."""
    wait = gap(10, 25, StallKind.ADMISSION, Witness.QUEUE)
    stretches = [prompt(10 + i, 11 + i, waiting=4.0, kv_usage=0.99) for i in range(15)]

    assert Stage().judge(frozen(wait, stretches=stretches)).cause is Cause.ADMISSION


@pytest.mark.parametrize(
    ("connector", "cause"),
    [pytest.param(True, Cause.KV_TRANSFER, id="connector"), pytest.param(False, Cause.ADMISSION, id="no-connector")],
)
def test_deferred_requests_wait_for_their_cache_only_where_there_is_a_connector(
    connector: bool,  # noqa: FBT001  (a parameter of the table)
    cause: Cause,
) -> None:
    """Deferred waiting looks like preemption and is none; without a connector it may be LoRA or grammar."""
    wait = gap(10, 25, StallKind.ADMISSION, Witness.QUEUE)
    stretches = [healthy(10 + i, 11 + i, waiting=4.0, deferred=3.0, connector=connector) for i in range(15)]

    assert Stage().judge(frozen(wait, stretches=stretches)).cause is cause


def test_preemption_is_booked_late_and_found() -> None:
    """The counter moves only in the stretch in which the victim speaks again; the others went on meanwhile."""
    one = gap(10, 15, StallKind.DECODE, Witness.SAMPLES)
    stretches = [healthy(10 + i, 11 + i, kv_usage=0.99) for i in range(5)]
    stretches.append(healthy(15, 15.5, kv_usage=0.97, preemptions=1.0, slow_samples=1.0, slow_seconds=5.0))

    assert Stage().judge(frozen(one, stretches=stretches)).cause is Cause.PREEMPTION


def test_recompute_is_preemption_and_not_prefill() -> None:
    """Tokens that no prompt explains, in a full cache."""
    stretches = [slow(10, 11, kv_usage=0.96, recompute=1_800.0), slow(11, 12, kv_usage=0.97, recompute=900.0)]

    verdict = Stage().judge(frozen(gap(10, 11), gap(11, 12), stretches=stretches))

    assert verdict.cause is Cause.PREEMPTION
    assert Cause.PREFILL not in {evidence.cause for evidence in verdict.evidence}


def test_a_silent_stream_beside_a_healthy_engine_is_delivery() -> None:
    """The engine gave tokens in its usual steps all the while."""
    silent = gap(10, 12, StallKind.DECODE, Witness.STREAM)
    stretches = [healthy(10, 11), healthy(11, 12.4)]

    assert Stage().judge(frozen(silent, stretches=stretches)).cause is Cause.DELIVERY


def test_a_silent_stream_that_the_engine_felt_too_is_not_delivery() -> None:
    """A sample as long as the gap among the engine's own: it was held in the engine."""
    silent = gap(10, 14, StallKind.DECODE, Witness.STREAM)
    stretches = [healthy(10, 14), healthy(14, 14.4, slow_samples=1.0, slow_seconds=4.0)]

    assert Stage().judge(frozen(silent, stretches=stretches)).cause is Cause.UNKNOWN


def test_a_power_cap_proves_nothing() -> None:
    """The bit is set in every sample, the clock stays where it always is."""
    stage = Stage()
    stage.gpu(0, 60)

    verdict = stage.judge(frozen(gap(50, 52), stretches=[slow(50, 52)]))

    assert Cause.GPU_CLOCK not in {evidence.cause for evidence in verdict.evidence}


def test_a_lower_clock_takes_its_share() -> None:
    """At half its usual clock half of a step is lost to it."""
    stage = Stage()
    stage.gpu(0, 60)
    stage.gpu(60, 70, clock=0.8e9)

    verdict = stage.judge(frozen(gap(62, 66), stretches=[slow(62, 66)]))

    assert verdict.cause is Cause.GPU_CLOCK
    assert verdict.evidence[0].seconds == pytest.approx(4 * 0.6, rel=0.05)


def test_of_two_causes_the_greater_wins_and_the_other_is_kept() -> None:
    """A prompt at a clock a third lower."""
    stage = Stage()
    stage.gpu(0, 60)
    stage.gpu(60, 70, clock=1.32e9)

    verdict = stage.judge(frozen(gap(62, 63), stretches=[prompt(62, 63)]))

    assert verdict.cause is Cause.PREFILL
    assert {evidence.cause for evidence in verdict.evidence} == {Cause.PREFILL, Cause.GPU_CLOCK}


def test_an_idle_gpu_under_load_is_named() -> None:
    """Requests ran and no kernel did."""
    stage = Stage()
    stage.gpu(0, 40)
    stage.gpu(40, 42, busy=0.0)

    assert stage.judge(frozen(gap(40, 42), stretches=[slow(40, 42)])).cause is Cause.GPU_IDLE


def test_an_idle_gpu_of_somebody_else_says_nothing() -> None:
    """Where all GPUs of a node are read, it is not known which are this server's."""
    stage = Stage()
    stage.gpu(0, 42, busy=0.0, scope="node")

    assert stage.judge(frozen(gap(40, 42), stretches=[slow(40, 42)])).cause is Cause.UNKNOWN


def test_a_compilation_within_a_prompt_is_no_prefill() -> None:
    """The GPU idled while a prompt was open: the prompt did not fill the step."""
    stage = Stage()
    stage.gpu(0, 40)
    stage.gpu(40, 43, busy=0.0)

    assert stage.judge(frozen(gap(40, 43), stretches=[prompt(40, 43)])).cause is Cause.GPU_IDLE


def test_pressure_explains_an_idle_gpu() -> None:
    """Memory pressure beyond the usual while the GPU waits: the host, not the engine."""
    stage = Stage()
    stage.gpu(0, 40)
    stage.gpu(40, 46, busy=0.1)
    stage.host(0, 40, rate=0.02)
    stage.host(40, 46, rate=0.9)

    verdict = stage.judge(frozen(gap(40, 46), stretches=[slow(40, 46)]))

    assert verdict.cause is Cause.HOST_PRESSURE


def test_a_hang_needs_time() -> None:
    """Thirty seconds without a step are a hang, five are not yet."""
    still = {"moved": False, "steps": None, "slow_samples": 0.0, "slow_seconds": 0.0}

    def told(seconds: float) -> Cause:
        stretch = slow(10, 10 + seconds, **(still | {"lost": seconds}))
        return Stage().judge(frozen(gap(10, 10 + seconds), stretches=[stretch], ongoing=True, blind=True)).cause

    assert told(5) is Cause.UNKNOWN
    assert told(31) is Cause.ENGINE_HANG


@pytest.mark.parametrize(
    ("tokens", "pace", "cause"),
    [
        pytest.param(2_300.0, 0.001, Cause.ENGINE_HANG, id="too few to fill it at the pace seen"),
        pytest.param(9_000.0, 0.001, Cause.PREFILL, id="enough at the pace seen"),
    ],
)
def test_prompts_that_came_during_a_hang_do_not_hide_it(tokens: float, pace: float, cause: Cause) -> None:
    """Once a hang has ended, what was let in at its end explains it only if so many tokens may take that long."""
    stretch = slow(10, 66, prefill=tokens, booked=tokens)

    verdict = Stage().judge(frozen(gap(10, 66), stretches=[stretch]), pace=pace)

    assert verdict.cause is cause


def test_a_hang_is_not_said_while_a_prompt_is_open() -> None:
    """From outside it may be one enormous step."""
    stretch = prompt(10, 60, moved=False, steps=None, lost=50.0, slow_samples=0.0, slow_seconds=0.0)

    stall = frozen(gap(10, 60), stretches=[stretch], ongoing=True, blind=True)

    assert Stage().judge(stall).cause is Cause.UNKNOWN


def test_a_gpu_at_full_power_works_on_something() -> None:
    """It computes one enormous step: no hang, however long."""
    stage = Stage()
    stage.gpu(0, 80)
    stretch = slow(30, 75, moved=False, steps=None, slow_samples=0.0, slow_seconds=0.0, lost=45.0)

    assert stage.judge(frozen(gap(30, 75), stretches=[stretch], ongoing=True, blind=True)).cause is Cause.UNKNOWN


def test_while_the_first_step_is_open_nothing_is_claimed() -> None:
    """Evidence is booked at its end: a prompt that is open is not yet what fills it."""
    stretch = prompt(10, 12, moved=False, steps=None)

    blind = frozen(gap(10, 12), stretches=[stretch], ongoing=True, blind=True)
    later = frozen(gap(10, 12), stretches=[stretch], ongoing=True)

    assert Stage().judge(blind) == Verdict(Cause.UNKNOWN, ())
    assert Stage().judge(later).cause is Cause.PREFILL


def test_a_latch_without_a_signature_is_unknown() -> None:
    """Every step is slower and nothing else changed."""
    stage = Stage()
    stage.gpu(0, 60)
    parts = [slow(50 + i, 51 + i, steps=8.0, lost=0.75, slow_samples=0.0, slow_seconds=0.0) for i in range(5)]

    verdict = stage.judge(frozen(gap(50, 55, StallKind.DEGRADED, Witness.PACE), stretches=parts))

    assert verdict == Verdict(Cause.UNKNOWN, ())


def test_our_own_lateness_is_evidence() -> None:
    """A gap most of which our own loop was late in."""
    stage = Stage()
    stage.observer.add(ObserverSample(10.0, 0.0))
    stage.observer.add(ObserverSample(12.0, 1.7))

    silent = gap(10, 12, StallKind.DECODE, Witness.STREAM)

    assert stage.judge(frozen(silent, stretches=[])).cause is Cause.OBSERVER


def test_a_server_that_refuses_everybody_is_down() -> None:
    """Refused for longer than a full backlog would explain."""
    stage = Stage()
    stage.around.answered(9.9)
    for tenth in range(30):
        stage.around.failed(PollFailure(10 + tenth / 10, Source.ENGINE, Failure.REFUSED))

    down = gap(10, 13, StallKind.ENGINE, Witness.DOWN)

    assert stage.judge(frozen(down, ongoing=True, blind=True)).cause is Cause.ENGINE_DOWN


def test_half_is_enough_and_less_is_not() -> None:
    """The cause explains at least half of the stall."""
    half = frozen(gap(10, 11), gap(11, 12), stretches=[prompt(10, 11), slow(11, 12)])
    third = frozen(gap(10, 11), gap(11, 13), stretches=[prompt(10, 11), slow(11, 13)])

    assert Stage().judge(half).cause is Cause.PREFILL
    assert Stage().judge(third).cause is Cause.UNKNOWN
    assert [evidence.cause for evidence in Stage().judge(third).evidence] == [Cause.PREFILL]
