"""Which request to send next, and how often the server may be asked. Pure: no I/O, no clock.

Three lanes, each a superset of the one before, so that all numbers of one sample are of one instant: a few names
several times a second, the estimator's names when those moved, everything now and then. A scrape costs the server time
that it takes from its readers; when the costs as measured exceed the budget, the estimator is stretched first, then the
full page, then detection, each to a floor beyond which the numbers would be of no use.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from stallwatch.observations import EngineCounters, Lane

# The slowest that each lane becomes, whatever it costs.
ESTIMATOR_FLOOR: Final = 5.0
FULL_FLOOR: Final = 120.0
DETECTION_FLOOR: Final = 1.0
UNFILTERED_FLOOR: Final = 5.0

ESTIMATOR_IDLE: Final = 2.0  # the estimator's names are read at least so often even when nothing moves
UNFILTERED_INTERVAL: Final = 1.0
COST_SAMPLES: Final = 31

_SLACK = 1e-6  # sums of floats

_SIGNALS = ("running", "waiting", "kv_usage", "prefix_queries", "iterations", "generation_tokens", "itl_count")
_CUMULATIVE = ("prefix_queries", "iterations", "generation_tokens", "itl_count")


@dataclass(frozen=True, slots=True)
class Pace:
    """What the settings ask for: seconds between requests, and scrape seconds allowed per second."""

    interval: float
    full_interval: float
    max_duty: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Seconds between requests of each lane at least; `duty` is what that costs, in scrape seconds per second."""

    detection: float
    estimator: float
    full: float
    duty: float = 0.0
    at_floors: bool = False  # every lane is as slow as it may become


@dataclass(slots=True)
class Costs:
    """How long requests of each lane take, as the median of the last ones that were answered.

    A median, because one scrape that hung in a frozen server says nothing of
    what scrapes cost it.
    """

    _seconds: dict[Lane, deque[float]] = field(default_factory=dict)

    def add(self, lane: Lane, seconds: float) -> None:
        """One answered request."""
        self._seconds.setdefault(lane, deque(maxlen=COST_SAMPLES)).append(seconds)

    def of(self, lane: Lane) -> float:
        """Seconds; 0 while none is known."""
        known = self._seconds.get(lane)
        return median(known) if known else 0.0


@dataclass(frozen=True, slots=True)
class Sent:
    """When each lane was last asked; a larger lane brings the smaller ones with it."""

    detection: float = -math.inf
    estimator: float = -math.inf
    full: float = -math.inf

    def after(self, lane: Lane, at: float) -> "Sent":
        """The state after a request of `lane` at `at`."""
        return Sent(
            detection=at,
            estimator=self.estimator if lane is Lane.DETECTION else at,
            full=at if lane is Lane.FULL else self.full,
        )


def plan(pace: Pace, *, detection: float, estimator: float, full: float) -> Plan:
    """Intervals for costs in seconds a request, as close to what was asked for as the duty allows.

    A larger lane takes the place of a detection request, so it adds only
    what it costs more.
    """
    extra_estimator = max(0.0, estimator - detection)
    extra_full = max(0.0, full - detection)

    def duty(d: float, e: float, f: float) -> float:
        return detection / d + extra_estimator / e + extra_full / f

    def stretched(cost: float, rest: float, asked: float, floor: float) -> float:
        left = pace.max_duty - rest
        needed = cost / left if left > 0 else math.inf
        return min(max(asked, needed), max(asked, floor))

    d, f = pace.interval, pace.full_interval
    e = stretched(extra_estimator, duty(d, math.inf, f), d, ESTIMATOR_FLOOR)
    if duty(d, e, f) > pace.max_duty:
        f = stretched(extra_full, duty(d, e, math.inf), f, FULL_FLOOR)
    if duty(d, e, f) > pace.max_duty:
        d = stretched(detection, duty(math.inf, e, f), d, DETECTION_FLOOR)
    planned = duty(d, e, f)
    return Plan(d, max(e, d), f, duty=planned, at_floors=_over(planned, pace))


def unfiltered_plan(pace: Pace, *, full: float) -> Plan:
    """One lane of full pages, for a server that does not honour the filter."""
    asked = max(UNFILTERED_INTERVAL, pace.interval)
    interval = min(max(asked, full / pace.max_duty), max(asked, UNFILTERED_FLOOR))
    planned = full / interval
    return Plan(interval, interval, interval, duty=planned, at_floors=_over(planned, pace))


def _over(duty: float, pace: Pace) -> bool:
    return duty > pace.max_duty * (1 + _SLACK)


def due(plan: Plan, sent: Sent, now: float, *, moving: bool) -> tuple[float, Lane]:
    """When the next request may be sent (not before `now`), and of which lane it is then."""
    at = max(now, sent.detection + plan.detection)
    if at >= sent.full + plan.full - _SLACK:
        return at, Lane.FULL
    rest = plan.estimator if moving else max(plan.estimator, ESTIMATOR_IDLE)
    if at >= sent.estimator + rest - _SLACK:
        return at, Lane.ESTIMATOR
    return at, Lane.DETECTION


def moved(before: Mapping[str, EngineCounters], after: Mapping[str, EngineCounters]) -> bool:
    """Whether any engine did anything between two samples, as far as the detection lane shows."""
    if before.keys() != after.keys():
        return True
    return any(
        getattr(before[engine], name) != getattr(counters, name)
        for engine, counters in after.items()
        for name in _SIGNALS
    )


def went_back(before: Mapping[str, EngineCounters], after: Mapping[str, EngineCounters]) -> bool:
    """Whether a counter fell: the server is a new process, whatever it calls itself."""
    for engine, counters in after.items():
        if engine not in before:
            continue
        for name in _CUMULATIVE:
            old, new = getattr(before[engine], name), getattr(counters, name)
            if old is not None and new is not None and new < old:
                return True
    return False
