"""Inter-token latency as a reader feels it, over a sliding window: exact, with the gap that is still open counted.

A gap is the time between two socket reads of one stream that each carried a token. Quantiles of ITL (gap / tokens) are
weighted by tokens; time-weighted quantiles are over whole gaps and say what share of the time readers spent in them:
a freeze of 110 s in 5 minutes of 37 ms gaps leaves the token-weighted p99 at 37 ms, the time-weighted p95 says seconds.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from stallwatch.analysis.quantiles import Entry, WeightedQuantiles

QUANTILES = (0.5, 0.95, 0.99)

MINIMUM_TOKENS: Mapping[float, int] = {0.5: 1, 0.95: 60, 0.99: 200}
"""Below these counts a quantile is hardly more than the maximum, and is not given."""

_NANOSECONDS = 1_000_000_000
_MOST_GAPS = 200_000  # a reader at 1.5 ms a token for 5 minutes; beyond it the window shortens


@dataclass(frozen=True, slots=True)
class Gap:
    """`tokens` arrived together, `end - start` seconds after the previous ones."""

    start: float
    end: float
    tokens: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class LatencyWindow:
    """What one window says; a quantile that cannot be given is left out. Seconds."""

    seconds: float
    tokens: int
    itl: Mapping[float, float] = field(default_factory=dict)
    time_weighted: Mapping[float, float] = field(default_factory=dict)


class GapWindow:
    """The gaps whose end lies in the last `seconds` seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._gaps: deque[Gap] = deque()
        self._per_token = WeightedQuantiles()
        self._per_second = WeightedQuantiles()

    def add(self, gap: Gap) -> None:
        """Takes a closed gap; ends must not decrease by more than the overlap of two streams."""
        self._gaps.append(gap)
        self._per_token.add(gap.seconds / gap.tokens, gap.tokens)
        self._per_second.add(gap.seconds, _weight(gap.seconds))
        if len(self._gaps) > _MOST_GAPS:
            self._drop()

    def at(self, now: float, open_since: float | None = None) -> LatencyWindow:
        """The window ending at `now`; `open_since` is the time of the last token of a stream that is decoding."""
        self.forget(now)
        begin = now - self.seconds
        open_gap = now - open_since if open_since is not None and now > open_since else None
        tokens = self._per_token.total
        itl = {}
        for q in QUANTILES:
            value = self._per_token.quantile(q)
            if open_gap is not None and (value is None or open_gap > value):
                value = self._per_token.quantile(q, [(open_gap, 1)])
            if value is not None and tokens >= MINIMUM_TOKENS[q]:
                itl[q] = value
        extra = self._outside(begin)
        if open_gap is not None:
            extra.append((open_gap, _weight(min(open_gap, self.seconds))))
        weighted = {}
        if tokens >= MINIMUM_TOKENS[0.95]:
            for q in QUANTILES:
                value = self._per_second.quantile(q, extra)
                if value is not None:
                    weighted[q] = value
        return LatencyWindow(self.seconds, tokens, itl, weighted)

    def forget(self, now: float) -> None:
        """Drops the gaps that ended before the window."""
        while self._gaps and self._gaps[0].end <= now - self.seconds:
            self._drop()

    def _outside(self, begin: float) -> list[Entry]:
        # Gaps that began before the window weigh only what lies inside it. They stand first, but for two streams
        # that overlap while one is handed over to the other.
        outside = []
        for gap in self._gaps:
            if gap.start >= begin:
                break
            outside.append((gap.seconds, -_weight(begin - gap.start)))
        return outside

    def _drop(self) -> None:
        gap = self._gaps.popleft()
        self._per_token.remove(gap.seconds / gap.tokens, gap.tokens)
        self._per_second.remove(gap.seconds, _weight(gap.seconds))


def _weight(seconds: float) -> int:
    return max(1, round(seconds * _NANOSECONDS))
