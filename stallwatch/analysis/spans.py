"""A union of spans of time whose total length only grows: overlapping evidence counts once."""

from bisect import bisect_left, bisect_right


class SpanUnion:
    """Disjoint spans in order, with the total length ever covered; spans older than `keep` seconds are forgotten.

    Evidence arrives live and may reach back; `add` returns what was not covered before. A span that begins before
    what is still remembered is cut there, since its earlier part was either counted live or is no longer knowable.
    """

    def __init__(self, keep: float = 3600.0) -> None:
        self._keep = keep
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._horizon = float("-inf")
        self.total = 0.0

    def add(self, start: float, end: float) -> float:
        """Covers [start, end]; returns the seconds that this added."""
        start = max(start, self._horizon)
        if end <= start:
            return 0.0
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        before = sum(self._ends[i] - self._starts[i] for i in range(first, last))
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        added = (end - start) - before
        self.total += added
        self._forget(self._ends[-1] - self._keep)
        return added

    def within(self, start: float, end: float) -> float:
        """Seconds of [start, end] that are covered, as far as remembered."""
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        return sum(min(end, self._ends[i]) - max(start, self._starts[i]) for i in range(first, last))

    def _forget(self, before: float) -> None:
        stale = bisect_left(self._ends, before)
        if stale:
            self._horizon = self._ends[stale - 1]
            del self._starts[:stale], self._ends[:stale]
