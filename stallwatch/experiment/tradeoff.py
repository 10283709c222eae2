"""The curve of a sweep: what readers wait for against what the long prompt waits for, with its knee. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stallwatch.experiment import statistics
from stallwatch.experiment.document import values
from stallwatch.experiment.figures import told
from stallwatch.experiment.statistics import Estimate

CURVE: Final = (
    ("beside_itl_p99_seconds", "ITL p99 while the prompt is computed", "seconds"),
    ("itl_p99_seconds", "ITL p99 of the whole run", "seconds"),
    ("longest_gap_seconds", "longest gap", "seconds"),
    ("lost_seconds", "lost by a stream", "seconds"),
    ("prompt_ttft_seconds", "first token of the long prompt", "seconds"),
    ("total_tokens_per_second", "prompt and output tokens a second", "tokens_per_second"),
    ("prefill_tokens_per_step", "prefill tokens in a step with prefill", "tokens"),
)
"""What is told of each value, over its valid runs beside the uncached prompt."""

READERS: Final = "beside_itl_p99_seconds"
PROMPT: Final = "prompt_ttft_seconds"
_LEAST_POINTS: Final = 3
_LEAST_BEND: Final = 0.1
"""How far below the straight line between its ends a curve must come, as a share of its height, to have a knee."""
_LEAST_RANGE: Final = 1.1
"""Below this factor between largest and smallest there is no trade-off to speak of."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of what was varied; a measure without a valid run is absent."""

    value: str
    measures: Mapping[str, Estimate]


def curve(points: Sequence[Mapping[str, Any]], prompt_tokens: int, *, seed: int) -> tuple[Point, ...]:
    """The points of a sweep in the order of their values."""
    return tuple(
        sorted(
            (
                Point(point["value"], dict(_measures(point["experiment"], prompt_tokens, seed)))
                for point in points
                if point["experiment"] is not None
            ),
            key=lambda point: order(point.value),
        )
    )


def order(value: str) -> tuple[float, str]:
    """Numbers by their size, then everything else by its text."""
    try:
        return float(value), value
    except ValueError:
        return math.inf, value


def _measures(report: Mapping[str, Any], prompt_tokens: int, seed: int) -> Iterator[tuple[str, Estimate]]:
    for name, _, _ in CURVE:
        seen = statistics.mean(values(report, "uncached", prompt_tokens, name), seed=seed)
        if seen is not None:
            yield name, seen


def knee(points: Sequence[Point]) -> Point | None:
    """Where giving the prompt more begins to cost readers a lot: the point furthest below the line between the ends.

    Of the points that trade one for the other: one that is no better for the prompt than another and no better for
    readers either is not on the curve. None where too few are left, or where there is nothing to gain.
    """
    known = _front(points)
    if len(known) < _LEAST_POINTS:
        return None
    xs = [point.measures[PROMPT].mean for point in known]
    ys = [point.measures[READERS].mean for point in known]
    if max(xs) < _LEAST_RANGE * min(xs) or max(ys) < _LEAST_RANGE * min(ys):
        return None
    # From (0, 1), the quickest prompt, to (1, 0), the smoothest reading.
    bends = [
        1 - (x - min(xs)) / (max(xs) - min(xs)) - (y - min(ys)) / (max(ys) - min(ys))
        for x, y in zip(xs, ys, strict=True)
    ]
    most = max(bends)
    return known[bends.index(most)] if most >= _LEAST_BEND else None


def _front(points: Sequence[Point]) -> Sequence[Point]:
    """From the quickest prompt to the smoothest reading, without the points that are worse than another in both."""
    known = [point for point in points if {READERS, PROMPT} <= point.measures.keys()]
    found: list[Point] = []
    for point in sorted(known, key=lambda one: (one.measures[PROMPT].mean, one.measures[READERS].mean)):
        if not found or point.measures[READERS].mean < found[-1].measures[READERS].mean:
            found.append(point)
    return found


def meeting(points: Sequence[Point], objective: float) -> Point | None:
    """Of the values with which readers get what they were promised, the one with the quickest prompt.

    Judged by the upper end of the interval where there is one.
    """
    good = [
        point
        for point in points
        if {READERS, PROMPT} <= point.measures.keys() and _upper(point.measures[READERS]) <= objective
    ]
    return min(good, key=lambda point: point.measures[PROMPT].mean, default=None)


def _upper(seen: Estimate) -> float:
    return seen.high if math.isfinite(seen.high) else seen.mean


def statements(name: str, points: Sequence[Point], objective: float) -> Iterator[str]:
    """What the curve says, in sentences."""
    known = [point for point in points if READERS in point.measures]
    if not known:
        yield "No value has a valid run beside the uncached prompt."
        return
    best = meeting(points, objective)
    if best is not None:
        yield (
            f"{name}={best.value} meets the objective: p99 of {told(best.measures[READERS].mean)} a token while the "
            f"prompt is computed ({told(objective)} promised), and its first token after "
            f"{told(best.measures[PROMPT].mean)}, the quickest of the values that do."
        )
    else:
        least = min(known, key=lambda point: point.measures[READERS].mean)
        yield (
            f"No value meets the objective of {told(objective)} a token while the prompt is computed; "
            f"{name}={least.value} comes nearest with a p99 of {told(least.measures[READERS].mean)}."
        )
    bend = knee(points)
    if bend is not None:
        yield (f"The knee is at {name}={bend.value}: beyond it the prompt gains little, and readers lose a lot.")
        return
    firsts = [point.measures[PROMPT].mean for point in known if PROMPT in point.measures]
    if len(known) >= _LEAST_POINTS and firsts and max(firsts) < _LEAST_RANGE * min(firsts):
        yield (
            "There is no knee: the prompt's first token comes about equally soon with all values, so the smallest "
            "costs nothing here."
        )
    else:
        yield "The curve has no clear knee."
