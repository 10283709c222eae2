import pytest

from stallwatch.analysis.slo import DeadlineEvents, SecondsIndicator, allowed_gap


@pytest.mark.parametrize(
    ("tokens", "objective", "allowed"),
    [
        pytest.param(1, 0.1, 0.1, id="one token"),
        pytest.param(4, 0.1, 0.4, id="speculative decoding"),
        pytest.param(50, 0.1, 1.0, id="a burst excuses one second at most"),
        pytest.param(1, 2.0, 2.0, id="never less than the objective"),
    ],
)
def test_allowed_gap(tokens: float, objective: float, allowed: float) -> None:
    """Tokens that come together may take longer, up to a second."""
    assert allowed_gap(tokens, objective) == pytest.approx(allowed)


def test_overlapping_evidence_counts_once() -> None:
    """A second that the canary and the engine both saw missed is one missed second."""
    indicator = SecondsIndicator()
    for second in range(20):
        indicator.judge(second, second + 1)
    indicator.miss(5, 9)
    indicator.miss(7, 12)

    assert (indicator.judged, indicator.missed) == (20, 7)


def test_missed_seconds_are_judged_seconds() -> None:
    """Missed never exceeds judged, also when a miss reaches back before judging began."""
    indicator = SecondsIndicator()
    indicator.judge(10, 11)
    indicator.miss(4, 10.5)

    assert indicator.judged == 7
    assert indicator.missed == 6.5


def test_deadline_events_of_a_closed_gap() -> None:
    """A gap of one token over 2.5 objectives had three slots and missed two."""
    events = DeadlineEvents(objective=0.1, floor=0.5)
    events.close(1, 0.25, 1)
    events.close(1, 0.02, 1)

    assert (events.total, events.missed) == (4, 2)


def test_deadline_events_of_a_burst_after_a_freeze() -> None:
    """Fifty tokens at the end of two seconds do not make the two seconds good."""
    events = DeadlineEvents(objective=0.1, floor=0.5)
    events.close(1, 2.0, 50)

    assert (events.total, events.missed) == (50, 19)


def test_an_open_gap_is_booked_live_and_reconciled_upward_only() -> None:
    """Events grow while the gap is open, and closing adds what is left without taking anything back."""
    events = DeadlineEvents(objective=0.1, floor=0.5)
    seen = []
    for tenths in range(1, 41):
        events.open(1, tenths / 10 + 1e-6)
        seen.append(events.missed)
    events.close(1, 4.05, 1)
    seen.append(events.missed)

    assert seen == sorted(seen)
    assert seen[-2] == 39
    assert (events.total, events.missed) == (41, 40)
