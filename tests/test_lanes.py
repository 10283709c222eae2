import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.observations import EngineCounters, Lane
from stallwatch.sources import lanes
from stallwatch.sources.lanes import Costs, Pace, Plan, Sent

PACE = Pace(interval=0.25, full_interval=30.0, max_duty=0.02)

costs = st.floats(0, 0.5)
paces = st.builds(Pace, st.floats(0.05, 60), st.floats(1, 600), st.floats(0.001, 1))


def run(pace: Pace, plan: Plan, seconds: float, *, moving: bool = True) -> list[tuple[float, Lane]]:
    """Every request that a plan sends, when asked at the configured interval and answered at once."""
    sent, now, requests = Sent(), 0.0, []
    while now < seconds:
        at, lane = lanes.due(plan, sent, now, moving=moving)
        sent = sent.after(lane, at)
        requests.append((at, lane))
        now = max(now + pace.interval, at)
    return requests


def test_cheap_scrapes_are_as_frequent_as_asked_for() -> None:
    """While the costs fit into the budget nothing is stretched."""
    plan = lanes.plan(PACE, detection=0.0014, estimator=0.003, full=0.018)

    assert (plan.detection, plan.estimator, plan.full, plan.at_floors) == (0.25, 0.25, 30.0, False)


def test_the_estimator_is_stretched_first() -> None:
    """Costs as measured on a real server leave detection and the full page alone."""
    plan = lanes.plan(PACE, detection=0.0024, estimator=0.0085, full=0.018)

    assert plan.detection == 0.25
    assert plan.full == 30.0
    assert 0.25 < plan.estimator < lanes.ESTIMATOR_FLOOR
    assert plan.duty == pytest.approx(PACE.max_duty)


def test_the_full_page_is_stretched_second() -> None:
    """A huge page becomes rare before detection does."""
    plan = lanes.plan(PACE, detection=0.004, estimator=0.012, full=0.15)

    assert plan.detection == 0.25
    assert plan.estimator == lanes.ESTIMATOR_FLOOR
    assert 30.0 < plan.full <= lanes.FULL_FLOOR


def test_detection_is_stretched_last_and_to_its_floor() -> None:
    """A server too slow for the budget is still looked at once a second, and the plan says that it is over budget."""
    plan = lanes.plan(PACE, detection=0.2, estimator=0.3, full=0.5)

    assert plan.detection == lanes.DETECTION_FLOOR
    assert plan.at_floors


def test_a_slow_pace_is_never_quickened() -> None:
    """Floors bound the stretching, not what the settings ask for."""
    plan = lanes.plan(Pace(20.0, 600.0, 0.02), detection=1.0, estimator=2.0, full=3.0)

    assert (plan.detection, plan.estimator, plan.full) == (20.0, 20.0, 600.0)


@given(paces, costs, costs, costs)
def test_the_planned_duty_stays_within_the_budget(pace: Pace, detection: float, estimator: float, full: float) -> None:
    """Only when every lane is at its floor may the planned duty exceed the budget."""
    plan = lanes.plan(pace, detection=detection, estimator=estimator, full=full)

    assert plan.detection >= pace.interval
    assert plan.estimator >= plan.detection
    assert plan.full >= pace.full_interval
    if plan.at_floors:
        assert plan.detection == max(pace.interval, lanes.DETECTION_FLOOR)
        assert estimator <= detection or plan.estimator == max(pace.interval, lanes.ESTIMATOR_FLOOR)
        assert full <= detection or plan.full == max(pace.full_interval, lanes.FULL_FLOOR)
    else:
        assert plan.duty <= pace.max_duty * (1 + 1e-5)


@settings(max_examples=60, deadline=None)
@given(costs, costs, costs)
def test_what_is_sent_costs_no_more_than_planned(detection: float, estimator: float, full: float) -> None:
    """Over ten minutes of constant movement the requests cost what the plan says, and one full page at the start."""
    plan = lanes.plan(PACE, detection=detection, estimator=estimator, full=full)
    price = {Lane.DETECTION: detection, Lane.ESTIMATOR: max(detection, estimator), Lane.FULL: max(detection, full)}

    spent = sum(price[lane] for _, lane in run(PACE, plan, 600))

    assert spent <= plan.duty * 600 + price[Lane.FULL] + price[Lane.ESTIMATOR] + detection


def test_lanes_over_time_while_idle() -> None:
    """With nothing moving the estimator's names are read every two seconds, the full page every thirty."""
    requests = run(PACE, Plan(0.25, 0.25, 30.0), 60, moving=False)

    assert [at for at, lane in requests if lane is Lane.FULL] == [0.0, 30.0]
    assert [at for at, lane in requests if lane is Lane.ESTIMATOR][:3] == [2.0, 4.0, 6.0]
    assert len(requests) == 240


def test_lanes_over_time_while_moving() -> None:
    """While anything moves every request carries the estimator's names."""
    requests = run(PACE, Plan(0.25, 0.25, 30.0), 10)

    assert {lane for _, lane in requests[1:]} == {Lane.ESTIMATOR}


def test_a_stretched_estimator_leaves_detection_between() -> None:
    """An estimator at half the rate alternates with detection."""
    requests = run(PACE, Plan(0.25, 0.5, 30.0), 2)

    assert [lane for _, lane in requests[:5]] == [
        Lane.FULL,
        Lane.DETECTION,
        Lane.ESTIMATOR,
        Lane.DETECTION,
        Lane.ESTIMATOR,
    ]


def test_a_late_poll_makes_no_burst() -> None:
    """After a pause the next request is due at once and the one after it a whole interval later."""
    sent = Sent().after(Lane.FULL, 0.0)

    at, _ = lanes.due(Plan(0.25, 0.25, 30.0), sent, 7.0, moving=False)
    next_at, _ = lanes.due(Plan(0.25, 0.25, 30.0), sent.after(Lane.ESTIMATOR, at), 7.01, moving=False)

    assert (at, next_at) == (7.0, 7.25)


@pytest.mark.parametrize(
    ("full", "interval"), [(0.018, 1.0), (0.06, 3.0), (1.0, lanes.UNFILTERED_FLOOR)], ids=["cheap", "large", "huge"]
)
def test_unfiltered_pages_come_once_a_second_or_more_rarely(full: float, interval: float) -> None:
    """Where the filter does not work there is one lane, which the duty stretches."""
    plan = lanes.unfiltered_plan(PACE, full=full)

    assert plan.detection == plan.full == pytest.approx(interval)
    assert plan.at_floors == (full == 1.0)


def test_a_hung_scrape_is_not_cost() -> None:
    """The median forgets single scrapes that a frozen server kept waiting."""
    known = Costs()
    for seconds in [0.002] * 20 + [2.0] * 10:
        known.add(Lane.DETECTION, seconds)

    assert known.of(Lane.DETECTION) == 0.002
    assert known.of(Lane.FULL) == 0.0


def test_costs_follow_a_server_that_became_slow() -> None:
    """What scrapes cost today counts, not what they cost once."""
    known = Costs()
    for seconds in [0.002] * 100 + [0.05] * lanes.COST_SAMPLES:
        known.add(Lane.DETECTION, seconds)

    assert known.of(Lane.DETECTION) == 0.05


def test_any_signal_is_movement() -> None:
    """Each of the detection lane's counters and gauges tells movement alone, and so does an engine that appears."""
    still = EngineCounters(running=1, waiting=0, kv_usage=0.5, generation_tokens=7)

    assert not lanes.moved({"0": still}, {"0": still})
    for name in lanes._SIGNALS:
        change: dict[str, Any] = {name: 9.0}
        assert lanes.moved({"0": still}, {"0": dataclasses.replace(still, **change)})
    assert lanes.moved({"0": still}, {"0": still, "1": still})


def test_only_a_falling_counter_is_a_new_process() -> None:
    """Gauges may fall, and a counter that is not known now is none that fell."""
    before = {"0": EngineCounters(running=5, generation_tokens=100, prefix_queries=7)}

    assert not lanes.went_back(before, {"0": EngineCounters(running=0, generation_tokens=100)})
    assert not lanes.went_back(before, {"1": EngineCounters(generation_tokens=1)})
    assert lanes.went_back(before, {"0": EngineCounters(running=5, generation_tokens=99)})


def test_before_anything_was_sent_the_full_page_is_due_at_once() -> None:
    """Nothing can be asked for by name before a full page has said what exists."""
    assert lanes.due(Plan(0.25, 0.25, 30.0), Sent(), 3.0, moving=False) == (3.0, Lane.FULL)
    assert Sent().full == -math.inf
