"""What the GPUs' past says about their present."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.analysis.gpu import Clock, GpuHistory, is_busy
from stallwatch.observations import GpuReading, GpuSample

HERTZ = 5
CAPPED = frozenset({"sw_power_cap"})


def busy(clock: float = 1.98e9, gpu: str = "0", **figures: object) -> GpuReading:
    known: dict[str, object] = {"utilization": 1.0, "clock_event_reasons": frozenset()}
    return GpuReading(gpu=gpu, uuid=f"GPU-{gpu}", sm_clock=clock, **(known | figures))  # type: ignore[arg-type]  # a table of fields


def idle() -> GpuReading:
    return busy(0.3e9, utilization=0.0, clock_event_reasons=frozenset({"gpu_idle"}))


def play(*parts: tuple[float, Callable[[float], GpuReading]], made: GpuHistory | None = None) -> GpuHistory:
    """A history of parts, each so many seconds long and polled five times a second."""
    made = made or GpuHistory()
    at = 0.0 if made.latest is None else made.latest.at
    for seconds, reading in parts:
        for _ in range(round(seconds * HERTZ)):
            at += 1 / HERTZ
            made.add(GpuSample(at=at, gpus=(reading(at),), scope="container"))
    return made


def ratio(made: GpuHistory, seconds: float = 1.0) -> float | None:
    assert made.latest is not None
    return made.worst_clock_ratio(made.latest.at - seconds, made.latest.at)


def test_a_second_has_low_mean_and_high() -> None:
    """The clock of the last second keeps its dip, which a mean would hide."""
    clocks = iter([2.0e9, 2.0e9, 0.5e9, 1.5e9, 2.0e9])
    (span,) = play((1, lambda _: busy(next(clocks)))).last_second()
    assert span.sm_clock == Clock(0.5e9, 1.6e9, 2.0e9)


def test_the_ratio_is_unknown_before_the_baseline() -> None:
    """Under half a minute of work there is no usual clock, and no ratio."""
    assert ratio(play((25, lambda _: busy()))) is None


def test_a_fallen_clock_shows() -> None:
    """After minutes of work, a clock that falls to a third shows as a ratio of a third."""
    made = play((120, lambda _: busy()), (3, lambda _: busy(0.66e9)))
    assert ratio(made) == pytest.approx(1 / 3)


def test_a_power_cap_alone_shows_nothing() -> None:
    """A power cap bit without a lower clock leaves the ratio at one."""
    made = play((120, lambda _: busy()), (3, lambda _: busy(clock_event_reasons=CAPPED)))
    (span,) = made.last_second()
    assert span.clock_ratio == pytest.approx(1.0)
    assert span.reasons == CAPPED


def test_idle_clocks_are_no_fall() -> None:
    """An idle GPU's low clock is neither a ratio nor part of the baseline."""
    made = play((120, lambda _: busy()), (600, lambda _: idle()))
    assert ratio(made) is None
    assert made.usual_clock("0") == 1.98e9


def test_waking_up_is_no_baseline() -> None:
    """The second in which an idle GPU starts to work is left out of what is usual."""
    made = GpuHistory()
    for _ in range(40):
        play((2, lambda _: idle()), (1, lambda _: busy(0.6e9)), (2, lambda _: busy()), made=made)
    assert made.usual_clock("0") == 1.98e9


def test_what_lasts_becomes_usual() -> None:
    """A clock that stays low for the larger part of a quarter of an hour is a shift, not a fall."""
    made = play((900, lambda _: busy()), (300, lambda _: busy(1.2e9)))
    assert ratio(made) == pytest.approx(1.2 / 1.98)
    play((300, lambda _: busy(1.2e9)), made=made)
    assert ratio(made) == pytest.approx(1.0)


def test_a_partitioned_gpu_is_judged_by_its_reasons() -> None:
    """Without utilisation a GPU counts as busy while its clocks have no reason to idle."""
    made = play((120, lambda _: busy(utilization=None)), (2, lambda _: busy(0.99e9, utilization=None)))
    assert ratio(made) == pytest.approx(0.5)
    assert is_busy(GpuReading(gpu="0", uuid="x")) is None


def test_the_slowest_gpu_counts() -> None:
    """Of several GPUs the one that fell is the one that everybody waits for."""
    made = GpuHistory()
    for tick in range(600):
        low = 0.99e9 if tick >= 590 else 1.98e9
        made.add(GpuSample(at=tick / 5, gpus=(busy(), busy(low, gpu="1")), scope="container"))
    assert ratio(made) == pytest.approx(0.5)
    assert [pytest.approx(span.clock_ratio) for span in made.last_second()] == [1.0, 0.5]


def test_power_comes_from_the_energy_counter() -> None:
    """Mean power is energy over time, which no burst between two polls escapes; without it the polls' mean."""
    metered = play((1, lambda at: busy(energy=700.0 * at, power=10.0))).last_second()
    sampled = play((1, lambda _: busy(power=300.0))).last_second()
    neither = play((1, lambda _: busy())).last_second()
    assert [None if span.power is None else pytest.approx(span.power) for (span,) in (metered, sampled, neither)] == [
        700.0,
        300.0,
        None,
    ]


def test_a_reset_energy_counter_is_no_negative_power() -> None:
    """Over a reload of the driver the power is that of the time on either side."""
    made = play((0.6, lambda at: busy(energy=9000.0 + 500 * at)), (0.4, lambda at: busy(energy=500 * at)))
    assert made.last_second()[0].power == pytest.approx(500.0)


def test_a_gap_in_the_polls_is_unknown() -> None:
    """Nothing is said of a time in which the driver did not answer."""
    made = play((60, lambda _: busy()))
    assert made.spans(61.0, 70.0) == ()
    assert made.worst_clock_ratio(61.0, 70.0) is None


def test_no_gpu_is_unknown() -> None:
    """An empty history knows nothing."""
    assert (GpuHistory().last_second(), GpuHistory().usual_clock("0"), GpuHistory().latest) == ((), None, None)


def test_memory_is_bounded() -> None:
    """Whatever the rate and however many devices come and go, the history stays small."""
    made = GpuHistory()
    for tick in range(20_000):
        made.add(GpuSample(at=tick / 100, gpus=(busy(gpu=str(tick // 100)),), scope="node"))
    assert len(made._tracks) == 64
    assert sum(len(track.samples) for track in made._tracks.values()) <= 6400
    made = play((1500, lambda _: busy()))
    (track,) = made._tracks.values()
    assert (len(track.samples), len(track.baseline), len(track.ordered)) == (1500, 900, 900)


@given(st.lists(st.tuples(st.floats(1e8, 3e9), st.booleans()), min_size=1, max_size=300))
def test_the_baseline_is_a_clock_that_was_seen(seconds: list[tuple[float, bool]]) -> None:
    """The usual clock lies between the lowest and the highest busy clock, and a span between its own."""
    made = GpuHistory()
    for at, (clock, works) in enumerate(seconds):
        made.add(GpuSample(at=float(at), gpus=(busy(clock, utilization=float(works)),), scope="node"))
    usual = made.usual_clock("0")
    if usual is not None:
        worked = [clock for clock, works in seconds if works]
        assert min(worked) <= usual <= max(worked)
    (span,) = made.spans(-1.0, float(len(seconds)))
    assert span.sm_clock is not None
    assert span.sm_clock.low <= span.sm_clock.mean * (1 + 1e-9)
    assert span.sm_clock.mean <= span.sm_clock.high * (1 + 1e-9)
