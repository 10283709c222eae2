"""What vLLM's own histogram says of all readers, with our canary's share taken out.

A sample is booked only when the late token arrives, so this view is silent during a freeze and right after it. It is
the one that covers every reader and not only ours.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque

from stallwatch.analysis.counting import bucket_delta
from stallwatch.analysis.itl import MINIMUM_TOKENS, QUANTILES, Gap, LatencyWindow
from stallwatch.analysis.quantiles import bucket_quantile
from stallwatch.observations import Buckets

_MOST_EDGES = 200


class ReadersView:
    """Windowed quantiles and the share of ITL samples within the objective, from successive histograms."""

    def __init__(self, seconds: float, objective: float) -> None:
        self.seconds = seconds
        self.total = 0.0  # samples since we watch, ours taken out
        self.good = 0.0  # those at or below the largest edge that is not above the objective
        self.edge: float | None = None  # that edge, seconds
        self._objective = objective
        self._step = seconds / 60
        self._window: deque[tuple[float, Buckets]] = deque()
        self._last: Buckets | None = None
        self._own: list[float] = []  # our canary's samples that the server has not shown yet, per bucket

    def own_gap(self, gap: Gap) -> None:
        """A gap of our canary, which the server booked too: one sample of the same length."""
        if self._last is None:
            return
        index = min(bisect_left(self._last.edges, gap.seconds), len(self._own) - 1)
        self._own[index] += 1

    def scraped(self, at: float, buckets: Buckets | None) -> None:
        """Takes the histogram of one scrape."""
        if buckets is None or not buckets.edges or len(buckets.edges) > _MOST_EDGES:
            return
        grown = bucket_delta(self._last, buckets)
        self._last = buckets
        if grown is None:
            self._window.clear()
            self._own = [0.0] * len(buckets.edges)
            self._window.append((at, Buckets(buckets.edges, (0.0,) * len(buckets.edges))))
            return
        theirs = self._without_own(grown)
        within = bisect_right(buckets.edges, self._objective * (1 + 1e-9)) - 1
        self.total += theirs[-1]
        if within >= 0:
            self.edge = buckets.edges[within]
            self.good += theirs[within]
        latest = self._window[-1][1]
        summed = Buckets(buckets.edges, tuple(a + b for a, b in zip(latest.counts, theirs, strict=True)))
        # Between two marks of the window the newest entry is replaced, so that its length is bounded.
        if len(self._window) >= 2 and at - self._window[-2][0] < self._step:
            self._window[-1] = (at, summed)
        else:
            self._window.append((at, summed))
        while len(self._window) > 2 and self._window[1][0] <= at - self.seconds:
            self._window.popleft()

    def at(self, now: float) -> LatencyWindow:
        """Quantiles over the last `seconds`, to within a sixtieth of it."""
        begin = now - self.seconds
        inside = [buckets for at, buckets in self._window if at >= begin]
        older = [buckets for at, buckets in self._window if at < begin]
        if not inside:
            return LatencyWindow(self.seconds, 0)
        first, last = (older[-1] if older else inside[0]), inside[-1]
        counts = tuple(b - a for a, b in zip(first.counts, last.counts, strict=True))
        samples = round(counts[-1])
        itl = {}
        for q in QUANTILES:
            value = bucket_quantile(q, last.edges, counts) if samples >= MINIMUM_TOKENS[q] else None
            if value is not None and math.isfinite(value):
                itl[q] = value
        return LatencyWindow(self.seconds, samples, itl)

    def _without_own(self, grown: Buckets) -> tuple[float, ...]:
        # The server books a sample before we see the token, we before the next scrape shows it. What cannot be taken
        # out now waits for the next scrape; a sample that fell into a neighbouring bucket is taken out there.
        plain = [b - a for a, b in zip((0.0, *grown.counts), grown.counts, strict=False)]
        for index in range(len(self._own)):
            for near in (index, index - 1, index + 1):
                if 0 <= near < len(plain):
                    taken = min(self._own[index], plain[near])
                    plain[near] -= taken
                    self._own[index] -= taken
        total = 0.0
        cumulative = []
        for count in plain:
            total += count
            cumulative.append(total)
        return tuple(cumulative)
