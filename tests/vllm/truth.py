"""What the readers of some streams went through, from the load client's own time stamps: the tests' truth.

Pure functions after the definitions of the design's section 3, written apart from `stallwatch.analysis` on purpose.
Seconds and tokens throughout; intervals are half-open pairs on CLOCK_MONOTONIC. A quantile over nothing is None.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.vllm.load import Stream

Interval = tuple[float, float]
EVER: Interval = (-math.inf, math.inf)

# However many tokens a gap brings, waiting longer than this for them is not good service.
LONGEST_EXCUSED = 1.0


@dataclass(frozen=True, slots=True)
class Gap:
    """Time between two reads that carried tokens; `tokens` came with the second. An open gap has none yet."""

    start: float
    end: float
    tokens: int

    @property
    def seconds(self) -> float:
        """How long the reader waited."""
        return self.end - self.start


def gaps(stream: Stream, *, window: Interval = EVER) -> list[Gap]:
    """The closed gaps of `stream` whose end lies in `window`."""
    pairs = pairwise(stream.reads)
    return [Gap(a.at, b.at, b.tokens) for a, b in pairs if window[0] <= b.at < window[1]]


def open_gap(stream: Stream, at: float) -> Gap | None:
    """The gap open at `at` (from send when no token has come); None before the request or after its end."""
    if at < stream.sent or (stream.ended is not None and at >= stream.ended):
        return None
    start = max((read.at for read in stream.reads if read.at <= at), default=stream.sent)
    return Gap(start, at, 0)


def nearest_rank(values: Sequence[float], q: float, *, weights: Sequence[float] | None = None) -> float | None:
    """The smallest value that at least the share `q` (0..1) of the weight does not exceed."""
    if not values:
        return None
    weighted = sorted(zip(values, weights or [1.0] * len(values), strict=True))
    # The tolerance keeps 0.95 * 100 at 95: without it a last bit of rounding would ask for the 96th value.
    wanted = q * sum(weight for _, weight in weighted) * (1 - 1e-12)
    reached = 0.0
    for value, weight in weighted:
        reached += weight
        if reached >= wanted:
            return value
    return weighted[-1][0]


def icl_quantile(samples: Iterable[Gap], q: float) -> float | None:
    """Inter-chunk latency: the quantile of the gaps themselves."""
    return nearest_rank([gap.seconds for gap in samples], q)


def itl_quantile(samples: Iterable[Gap], q: float) -> float | None:
    """Inter-token latency: gap / tokens, weighted by tokens."""
    closed = [gap for gap in samples if gap.tokens > 0]
    return nearest_rank([gap.seconds / gap.tokens for gap in closed], q, weights=[gap.tokens for gap in closed])


def time_weighted_quantile(samples: Iterable[Gap], q: float, *, window: Interval = EVER) -> float | None:
    """The smallest gap such that gaps up to it hold the share `q` of the time; gaps are clipped to `window`."""
    clipped = [min(gap.end, window[1]) - max(gap.start, window[0]) for gap in samples]
    lengths = [seconds for seconds in clipped if seconds > 0]
    return nearest_rank(lengths, q, weights=lengths)


def reader_wait(streams: Iterable[Stream], at: float, *, window_seconds: float = 30.0) -> float:
    """The largest gap or first-token wait, open or closed, that touched the last `window_seconds` before `at`."""
    longest = 0.0
    for stream in streams:
        still_open = open_gap(stream, at)
        waits = [*gaps(stream), *first_token_waits(stream), *([still_open] if still_open else [])]
        seen = [gap.seconds for gap in waits if at - window_seconds <= gap.end <= at]
        longest = max([longest, *seen])
    return longest


def first_token_waits(stream: Stream) -> list[Gap]:
    """From send to the first token, or to the end of a stream that never had one; empty while it is open."""
    if stream.reads:
        return [Gap(stream.sent, stream.reads[0].at, stream.reads[0].tokens)]
    return [] if stream.ended is None else [Gap(stream.sent, stream.ended, 0)]


def limit(tokens: int, objective: float) -> float:
    """How long a gap of `tokens` tokens may be under an objective of `objective` seconds a token."""
    return max(objective, min(tokens * objective, LONGEST_EXCUSED))


def missed_intervals(stream: Stream, *, objective: float, ttft: float, at: float | None = None) -> list[Interval]:
    """The time that counts as missed: whole gaps above their limit and whole first-token waits above `ttft`.

    With `at`, the gap that is open then counts too, as a gap of one token.
    """
    missed = [gap for gap in gaps(stream) if gap.seconds > limit(gap.tokens, objective)]
    missed += [wait for wait in first_token_waits(stream) if wait.seconds > ttft]
    still_open = None if at is None else open_gap(stream, at)
    if still_open is not None and still_open.seconds > (objective if stream.reads else ttft):
        missed.append(still_open)
    return [(gap.start, gap.end) for gap in missed]


def union_seconds(intervals: Iterable[Interval], *, window: Interval = EVER) -> float:
    """Seconds covered by at least one interval, inside `window`."""
    total, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])  # noqa: PLW2901 - clipped in place
        if end > start:
            total += end - start
            reached = end
    return total


def missed_seconds(
    streams: Iterable[Stream], *, objective: float, ttft: float = math.inf, window: Interval = EVER
) -> float:
    """Wall seconds in which at least one of `streams` missed its objective: the truth behind the SLI."""
    every = [pair for stream in streams for pair in missed_intervals(stream, objective=objective, ttft=ttft)]
    return union_seconds(every, window=window)


def served_seconds(streams: Iterable[Stream], *, window: Interval = EVER) -> float:
    """Wall seconds in which at least one of `streams` was open."""
    return union_seconds(
        [(stream.sent, stream.ended if stream.ended is not None else math.inf) for stream in streams], window=window
    )


def stall_seconds(samples: Iterable[Gap], *, threshold: float, baseline: float) -> float:
    """The sum of what gaps longer than `threshold` exceed `baseline`."""
    return sum(gap.seconds - baseline for gap in samples if gap.seconds > threshold)
