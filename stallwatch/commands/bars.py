"""A histogram of gaps for a terminal: logarithmic rows, bars of eighths where the encoding has them. Pure."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from stallwatch.commands.terminal import percent

UNICODE_BARS = " ▏▎▍▌▋▊▉█"
# Edges in each decade, the finest first: the first that needs few enough rows is taken.
_SCALES = (
    (1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.5, 2.8, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 9.0),
    (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
    (1.0, 2.0, 5.0),
)
_MOST_ROWS = 20
_EMPTY_ROWS = 2  # more than so many in a row become one line


@dataclass(frozen=True, slots=True)
class Bin:
    """Gaps from `low` up to, and not including, `high`; seconds."""

    low: float
    high: float
    gaps: int
    seconds: float


def histogram(gaps: Sequence[float]) -> tuple[Bin, ...]:
    """Bins from the shortest to the longest gap, the empty ones between them too."""
    lengths = [gap for gap in gaps if gap > 0]
    if not lengths:
        return ()
    scales = (_edges(min(lengths), max(lengths), scale) for scale in _SCALES)
    edges = next((edges for edges in scales if len(edges) - 1 <= _MOST_ROWS), None)
    if edges is None:
        edges = _edges(min(lengths), max(lengths), _SCALES[-1])
    counts, sums = [0] * (len(edges) - 1), [0.0] * (len(edges) - 1)
    for gap in lengths:
        place = min(max(bisect_right(edges, gap) - 1, 0), len(counts) - 1)
        counts[place] += 1
        sums[place] += gap
    return tuple(
        Bin(low, high, count, total) for (low, high), count, total in zip(pairwise(edges), counts, sums, strict=True)
    )


def _edges(shortest: float, longest: float, steps: Sequence[float]) -> list[float]:
    first, last = math.floor(math.log10(shortest)), math.floor(math.log10(longest)) + 1
    every = [step * 10.0**power for power in range(first - 1, last + 1) for step in steps]
    begin = bisect_right(every, shortest) - 1
    end = bisect_right(every, longest)
    return every[max(begin, 0) : end + 1]


def drawn(bins: Sequence[Bin], *, width: int, unicode: bool) -> list[str]:
    """A line a bin: its range, a bar for the number of gaps, that number, and its share of the time."""
    if not bins:
        return []
    most = max(one.gaps for one in bins)
    total = sum(one.seconds for one in bins)
    names = [_range(one.low, one.high) for one in bins]
    label = max(len(name) for name in names)
    digits = max(len(f"{most:,}"), len("gaps"))
    room = max(8, width - label - digits - 17)
    lines = [f"{'':<{label}}  {'gaps':<{room}}  {'':>{digits}}  {'of the time':>11}".rstrip()]
    for is_empty, members in groupby(zip(names, bins, strict=True), key=lambda named: named[1].gaps == 0):
        rows = list(members)
        if is_empty and len(rows) > _EMPTY_ROWS:
            lines.append(f"{'...':>{label}}")
            continue
        lines += [
            f"{name:>{label}}  {_bar(one.gaps / most, room, unicode=unicode):<{room}}  {one.gaps:>{digits},}  "
            f"{percent(one.seconds / total) if one.gaps else '':>11}".rstrip()
            for name, one in rows
        ]
    return lines


def _bar(share: float, room: int, *, unicode: bool) -> str:
    if share <= 0:
        return ""
    if not unicode:
        return "#" * max(1, round(share * room))
    eighths = max(1, round(share * room * 8))
    return UNICODE_BARS[8] * (eighths // 8) + UNICODE_BARS[eighths % 8].strip()


def _range(low: float, high: float) -> str:
    unit, factor = ("s", 1.0) if low >= 0.9995 else ("ms", 1000.0) if high > 0.00105 else ("us", 1e6)
    return "-".join(_number(edge * factor) for edge in (low, high)) + f" {unit}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def as_rows(bins: Sequence[Bin]) -> Iterator[dict[str, float | int]]:
    """The bins for JSON."""
    for one in bins:
        yield {"from_seconds": one.low, "to_seconds": one.high, "gaps": one.gaps, "seconds": one.seconds}
