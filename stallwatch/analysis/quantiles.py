"""Exact weighted quantiles over a sliding window.

One definition serves all three of ours: the smallest value at which the cumulative weight reaches the share q of the
total. With weight 1 it is the nearest rank; with weight = tokens it is the token-weighted latency; with weight = the
gap itself it says what share of *time* was spent in gaps that long. Weights are integers, so that adding and removing
for weeks leaves no rounding behind. Sketches are not used: at the rate of one stream exact values cost little, and
t-digest and KLL are off by 10 % at p99 for the bimodal shape of a stall.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import pairwise

_BLOCK = 512  # entries; splitting at twice that keeps an insertion to a memmove of a few kilobytes

Entry = tuple[float, int]


class WeightedQuantiles:
    """A multiset of (value, weight) kept in order, as a list of sorted blocks with their weights summed."""

    def __init__(self) -> None:
        self._blocks: list[list[Entry]] = []
        self._tops: list[Entry] = []  # the largest entry of each block
        self._weights: list[int] = []
        self.total = 0

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def add(self, value: float, weight: int) -> None:
        """Adds an entry; a weight of 0 or less is ignored."""
        if weight <= 0:
            return
        entry = (value, weight)
        self.total += weight
        if not self._blocks:
            self._blocks.append([entry])
            self._tops.append(entry)
            self._weights.append(weight)
            return
        index = min(bisect_left(self._tops, entry), len(self._blocks) - 1)
        block = self._blocks[index]
        insort(block, entry)
        self._tops[index] = block[-1]
        self._weights[index] += weight
        if len(block) > 2 * _BLOCK:
            self._split(index)

    def remove(self, value: float, weight: int) -> None:
        """Removes an entry that was added. Raises `KeyError` when there is none."""
        if weight <= 0:
            return
        entry = (value, weight)
        index = bisect_left(self._tops, entry)
        if index == len(self._blocks):
            raise KeyError(entry)
        block = self._blocks[index]
        position = bisect_left(block, entry)
        if position == len(block) or block[position] != entry:
            raise KeyError(entry)
        del block[position]
        self.total -= weight
        self._weights[index] -= weight
        if block:
            self._tops[index] = block[-1]
        else:
            del self._blocks[index], self._tops[index], self._weights[index]

    def quantile(self, q: float, extra: Iterable[Entry] = ()) -> float | None:
        """The smallest value whose cumulative weight is at least q of the total; None when there is no weight.

        `extra` entries count for this question only; a negative weight takes away from an entry that is here.
        """
        pending = sorted(extra)
        total = self.total + sum(weight for _, weight in pending)
        if total <= 0:
            return None
        # The margin absorbs the rounding of q * total, so that 0.99 of 200 is the 198th and not the 199th.
        goal = max(1, math.ceil(q * total - 1e-9))
        reached = 0
        for index, block in enumerate(self._blocks):
            extras_here = bool(pending) and pending[0][0] <= self._tops[index][0]
            if not extras_here and reached + self._weights[index] < goal:
                reached += self._weights[index]
                continue
            for value, weight in block:
                while pending and pending[0][0] < value:
                    reached += pending[0][1]
                    if reached >= goal and pending[0][1] > 0:
                        return pending[0][0]
                    pending.pop(0)
                reached += weight
                while pending and pending[0][0] == value:
                    reached += pending.pop(0)[1]
                if reached >= goal:
                    return value
        for value, weight in pending:
            reached += weight
            if reached >= goal:
                return value
        return self._tops[-1][0] if self._tops else None

    def _split(self, index: int) -> None:
        block = self._blocks[index]
        left, right = block[:_BLOCK], block[_BLOCK:]
        self._blocks[index : index + 1] = [left, right]
        self._tops[index : index + 1] = [left[-1], right[-1]]
        left_weight = sum(weight for _, weight in left)
        self._weights[index : index + 1] = [left_weight, self._weights[index] - left_weight]


def bucket_quantile(q: float, edges: tuple[float, ...], counts: tuple[float, ...]) -> float | None:
    """The quantile that cumulative `counts` at ascending `edges` allow to state; None without counts.

    The last edge is +Inf. Linear inside a bucket, as PromQL's `histogram_quantile`; above the last finite edge only
    that edge is known.
    """
    if not counts or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    for (low, below), (high, upto) in pairwise(zip((0.0, *edges), (0.0, *counts), strict=True)):
        if upto >= rank and upto > below:
            return low if math.isinf(high) else low + (high - low) * (rank - below) / (upto - below)
    return None
