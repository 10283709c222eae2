"""Gaps in what readers get, and the episodes that they make up.

One freeze is seen by several witnesses: by a stream that stops, by counters that stand still, by the samples that are
booked at its end. Their gaps overlap, and a second counts once, whoever saw it first.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from stallwatch.analysis.causes import StallKind

QUIET: Final = 2.0
"""Seconds of normal progress that end a stall."""


class Witness(Enum):
    """Who saw a gap."""

    STREAM = "stream"  # one of our own streams
    STEPS = "steps"  # the engine's counters stood still, or its samples were long
    SAMPLES = "samples"  # long samples of some readers while others went on
    PACE = "pace"  # many slow steps
    VICTIM = "victim"  # a request that was thrown out of the batch waits to be let in again
    QUEUE = "queue"  # a request waits to be let in
    PAGE = "page"  # the metrics page does not answer in time
    DOWN = "down"  # the server refuses everybody


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which somebody waited; `normal` seconds of it would have passed anyway."""

    start: float
    end: float
    kind: StallKind
    witness: Witness
    normal: float = 0.0
    readers: float = 0.0  # who waited, our own streams not counted

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start

    @property
    def excess(self) -> float:
        """Seconds beyond what is normal."""
        return max(0.0, self.seconds - self.normal)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part [start, end] of a gap that no other gap covers."""

    start: float
    end: float
    gap: Gap

    @property
    def excess(self) -> float:
        """Seconds of it beyond what is normal."""
        return self.gap.excess * (self.end - self.start) / self.gap.seconds if self.gap.seconds > 0 else 0.0


def find_stalls(gaps: Iterable[Gap], *, threshold: float, quiet: float = QUIET) -> list[tuple[float, float]]:
    """The episodes of recorded gaps: those longer than `threshold` seconds, joined when `quiet` or less apart."""
    spans = sorted((gap.start, gap.end) for gap in gaps if gap.seconds > threshold)
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start - found[-1][1] <= quiet:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


class Pieces:
    """Disjoint pieces of the gaps of one episode, in order; beyond `most` the oldest are forgotten."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._pieces: list[Piece] = []
        self._horizon = float("-inf")

    def all(self) -> list[Piece]:
        """What is remembered."""
        return list(self._pieces)

    def after(self, since: float) -> list[Piece]:
        """Those that end after `since`."""
        return self._pieces[bisect_right(self._pieces, since, key=lambda known: known.end) :]

    def add(self, gap: Gap) -> list[Piece]:
        """Takes a gap; the pieces of it that were not covered before."""
        new = self.uncovered(gap)
        for piece in new:
            self._pieces.insert(bisect_left(self._pieces, piece.start, key=lambda known: known.start), piece)
        if len(self._pieces) > self._most:
            surplus = len(self._pieces) - self._most
            self._horizon = self._pieces[surplus - 1].end
            del self._pieces[:surplus]
        return new

    def uncovered(self, gap: Gap) -> list[Piece]:
        """The pieces of a gap that nothing covers yet."""
        if gap.seconds <= 0:
            return []
        at = max(gap.start, self._horizon)
        found = []
        index = bisect_left(self._pieces, at, key=lambda known: known.end)
        while at < gap.end:
            if index == len(self._pieces) or self._pieces[index].start >= gap.end:
                found.append(Piece(at, gap.end, gap))
                break
            if self._pieces[index].start > at:
                found.append(Piece(at, self._pieces[index].start, gap))
            at = max(at, self._pieces[index].end)
            index += 1
        return found


def shifted(gap: Gap, seconds: float) -> Gap:
    """The same gap at another time."""
    return replace(gap, start=gap.start + seconds, end=gap.end + seconds)
