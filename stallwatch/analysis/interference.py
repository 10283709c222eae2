"""How much slower readers were because prompts were computed beside them.

Interference is the time that steps took beyond what they take without prefill, in intervals in which prefill was seen.
It is a sum of excess over a sum of baseline, both taken over steps: a scrape that catches three steps adds what three
scrapes of one step each would, so the ratio does not depend on how often the server is polled. A ratio of means does:
on one and the same run it read 9.0 by step, 2.6 at 4 Hz and 0.56 at 2 Hz.

0 is none, 1 is twice as slow.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from stallwatch.analysis.paired import PairedInterval
from stallwatch.analysis.spans import SpanUnion

WINDOW: Final = 300.0
"""Seconds that the ratio looks back."""
_DEBT: Final = 2.0
"""Baseline steps by which an interval that was faster than the baseline may lower the next ones."""
_AGREE: Final = 0.1
"""How far p95 may move, relative to a step's length, with what is not known by step taken as nothing or as endless."""


@dataclass(frozen=True, slots=True)
class _Entry:
    at: float
    base: float  # seconds that the steps take without prefill
    excess: float  # seconds beyond, in the presence of prefill
    ratios: tuple[tuple[float, float], ...]  # (slowdown, steps)
    unknown: float  # steps among them whose own slowdown is not known


@dataclass(slots=True)
class Interference:
    """Follows one engine; intervals in which it is not known what was computed are left out of everything."""

    seconds_total: float = 0.0
    """Seconds that steps took longer because of prefill: never falls."""
    prefilling: SpanUnion = field(default_factory=SpanUnion)
    """Time of steps that had other people's prefill in them."""
    judged: float = 0.0  # seconds of steps that were judged
    _entries: deque[_Entry] = field(default_factory=deque)
    _balance: float = 0.0

    def add(self, seen: PairedInterval, *, beside: bool, baseline: float | None) -> None:
        """Takes an interval.

        Args:
            seen: Its steps.
            beside: Whether prompts were computed in them that are not our canary's.
            baseline: Seconds of a step with its decoders and no prefill; None while unknown.
        """
        if beside:
            self.prefilling.add(seen.began, seen.until)
        if baseline is None or seen.prefill is None or seen.steps < 1:
            return
        base = seen.steps * baseline
        excess = seen.excess(baseline) if beside else 0.0
        self.judged += base + excess
        ratios = _ratios(seen, baseline, beside=beside)
        unknown = max(0.0, seen.steps - sum(steps for _, steps in ratios))
        self._entries.append(_Entry(seen.until, base, excess, ratios, unknown))
        while self._entries and self._entries[0].at <= seen.until - WINDOW:
            self._entries.popleft()
        # What fluctuates around the baseline must not pile up as interference, nor a long advance swallow a real one.
        self._balance = max(self._balance + excess, -_DEBT * baseline)
        if self._balance > 0:
            self.seconds_total += self._balance
            self._balance = 0.0

    def ratio(self, now: float) -> float | None:
        """Slowdown of the last five minutes; None when no step was judged in them."""
        recent = self._recent(now)
        base = sum(entry.base for entry in recent)
        return max(0.0, sum(entry.excess for entry in recent) / base) if base > 0 else None

    def p95(self, now: float) -> float | None:
        """The slowdown that 95 % of the steps of the last five minutes did not exceed.

        None when too few durations of single steps are known for that: the plugin tells them, and so do polls that
        held one step.
        """
        recent = self._recent(now)
        known = [pair for entry in recent for pair in entry.ratios]
        unknown = sum(entry.unknown for entry in recent)
        low = _quantile([(0.0, unknown), *known], 0.95)
        high = _quantile([*known, (inf, unknown)], 0.95)
        return low if low is not None and high is not None and high - low <= _AGREE * (1 + low) else None

    def _recent(self, now: float) -> list[_Entry]:
        return [entry for entry in self._entries if entry.at > now - WINDOW]


def _ratios(seen: PairedInterval, baseline: float, *, beside: bool) -> tuple[tuple[float, float], ...]:
    """Slowdowns of the steps of which they are known."""
    if not beside:
        return ((0.0, seen.steps),)
    if seen.single:
        return ((max(0.0, seen.seconds / baseline - 1.0), 1.0),)
    if seen.exact is None:
        return ((0.0, seen.steps - max(1.0, seen.mixed)),)
    found = [(0.0, seen.exact.phases["decode"].steps)] if "decode" in seen.exact.phases else []
    mixed = seen.exact.phases.get("mixed")
    if mixed is not None and mixed.steps > 0:
        # Steps with prefill that end within one poll are of one prompt's neighbouring chunks: alike.
        found.append((max(0.0, mixed.seconds / mixed.steps / baseline - 1.0), mixed.steps))
    return tuple(found)


def _quantile(weighted: list[tuple[float, float]], q: float) -> float | None:
    goal = q * sum(weight for _, weight in weighted)
    reached = 0.0
    for value, weight in sorted(weighted):
        reached += weight
        if weight > 0 and reached >= goal:
            return value
    return None


def share(stalls: Iterable[tuple[float, float]], prefilling: SpanUnion, judged: float) -> float | None:
    """Share of judged seconds that readers stood still in while prefill was computed; None without a verdict.

    Args:
        stalls: Disjoint spans of stalls within the judged time, seconds.
        prefilling: Time in which other people's prefill was computed.
        judged: Seconds for which there was a verdict.
    """
    if judged <= 0:
        return None
    return min(1.0, sum(prefilling.within(start, end) for start, end in stalls) / judged)
