"""A cumulative histogram with fixed edges, and the edges that all of ours share.

Pods whose buckets differ cannot be summed, so there is one list: a ratio of at most 2 between neighbours up to 1 s,
and the usual objectives are edges.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

LATENCY_EDGES = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Seconds; the bucket above the last edge is implied."""


@dataclass(frozen=True, slots=True)
class HistogramState:
    """A copy for rendering: observations per bucket (not cumulative), the last one above every edge."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    exemplars: tuple[tuple[str, float] | None, ...]


@dataclass(slots=True)
class Histogram:
    """Counts observations by bucket; remembers per bucket the request id of the last one as an exemplar."""

    edges: tuple[float, ...] = LATENCY_EDGES
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0
    exemplars: list[tuple[str, float] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.edges) + 1)
        self.exemplars = [None] * (len(self.edges) + 1)

    def observe(self, value: float, weight: int = 1, exemplar: str | None = None) -> None:
        """Books `weight` observations of `value`."""
        index = bisect_left(self.edges, value)
        self.counts[index] += weight
        self.sum += value * weight
        if exemplar is not None:
            self.exemplars[index] = (exemplar, value)

    def state(self) -> HistogramState:
        """What is booked so far, detached from later observations."""
        return HistogramState(self.edges, tuple(self.counts), self.sum, tuple(self.exemplars))
