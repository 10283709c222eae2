"""Whether a gap is blamed on ourselves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.analysis.observer import ObserverHistory, comparable
from stallwatch.observations import ObserverSample

lags = st.floats(0, 5)
periods = st.floats(0.01, 1)


def history(*samples: tuple[float, float]) -> ObserverHistory:
    made = ObserverHistory()
    for at, lag in samples:
        made.add(ObserverSample(at, lag))
    return made


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        pytest.param(0.0, 0.945, 0.01, id="before"),
        pytest.param(1.0, 1.1, 0.4, id="inside"),
        pytest.param(0.0, 9.0, 0.4, id="around"),
        pytest.param(1.6, 1.7, 0.02, id="after"),
        pytest.param(5.0, 6.0, 0.0, id="not known yet"),
        pytest.param(-9.0, -8.0, 0.0, id="never known"),
    ],
)
def test_lag_within(start: float, end: float, expected: float) -> None:
    """The worst lateness is that of the samples which overlap the time asked for."""
    assert expected == history((0.95, 0.01), (1.5, 0.4), (1.75, 0.02)).lag_within(start, end)


def test_a_lateness_reaches_back() -> None:
    """A first sample knows of a lateness that began before it."""
    assert history((10.0, 3.0)).lag_within(7.5, 8.0) == 3.0


@pytest.mark.parametrize(
    ("gap", "lag", "expected"),
    [
        pytest.param(2.0, 1.9, True, id="a freeze of our own"),
        pytest.param(10.0, 0.09, False, id="throttled all along, but the server stood still"),
        pytest.param(0.012, 0.009, False, id="daily jitter"),
        pytest.param(0.05, 0.04, True, id="a hiccup of ours"),
        pytest.param(1.0, 0.49, False, id="the larger part is theirs"),
    ],
)
def test_comparable(gap: float, lag: float, *, expected: bool) -> None:
    """A gap is ours when our lateness makes up half of it, and is more than jitter."""
    assert expected == comparable(gap, lag)


@given(st.floats(0.05, 100), st.floats(0, 100))
def test_what_is_excused_would_be_no_stall(gap: float, lag: float) -> None:
    """A gap that is excused is, without our lateness, at most half as long as it looked."""
    if comparable(gap, lag):
        assert gap - lag <= gap / 2


@given(st.lists(st.tuples(periods, lags), max_size=60), st.floats(0, 60), st.floats(0, 10))
def test_lag_within_is_the_overlapping_maximum(steps: list[tuple[float, float]], start: float, length: float) -> None:
    """The history answers like a search through all samples."""
    made, at = ObserverHistory(), 0.0
    spans: list[tuple[float, float, float]] = []
    for period, lag in steps:
        since = at if spans else at + period
        at += period
        made.add(ObserverSample(at, lag))
        spans.append((min(since, at - lag), at, lag))
    end = start + length
    expected = max((lag for since, until, lag in spans if since <= end and until >= start), default=0.0)
    assert expected == made.lag_within(start, end)


@given(st.lists(st.tuples(periods, lags), min_size=1, max_size=60), st.floats(0, 60), st.floats(0, 10), periods)
def test_a_wider_look_never_sees_less(
    steps: list[tuple[float, float]], start: float, length: float, wider: float
) -> None:
    """Lateness within a time grows with that time."""
    made, at = ObserverHistory(), 0.0
    for period, lag in steps:
        at += period
        made.add(ObserverSample(at, lag))
    assert made.lag_within(start, start + length) <= made.lag_within(start - wider, start + length + wider)


def test_memory_is_bounded() -> None:
    """Hours of samples, however fast they come, keep a bounded number, and the recent ones among them."""
    made = ObserverHistory()
    for tick in range(100_000):
        made.add(ObserverSample(tick * 0.01, 0.001))
    assert len(made._samples) <= 8192
    assert made.lag_within(990.0, 999.0) == 0.001
    assert made.known_until == 999.99
