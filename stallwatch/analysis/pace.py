"""How long the rest of an open prompt will take.

A prompt token attends to all before it, so the pace falls along a long prompt: seconds a token are a straight line in
the position. How steep it is belongs to the model and the machine and is remembered from prompt to prompt, by position,
so that many short prompts do not push out what a long one taught; how far this prompt is above or below the line,
because more decode beside it or the clock is lower, is what its own last steps say.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf, log2, sqrt
from statistics import median
from typing import Final

_SAMPLES_A_BAND: Final = 8
_BANDS_AN_OCTAVE: Final = 2
_OWN_SAMPLES: Final = 64
_RECENT: Final = 8
"""Own samples that say how far this prompt is off the line."""
_FIRST_BAND: Final = 256.0  # tokens; positions below are one band
_TOO_FAST: Final = 6.0
"""Times the typical pace above which a sample's tokens and seconds are not of the same step."""
_LEAST_OWN: Final = 5
"""Samples of this prompt above which they may know better than those of the prompts before."""
_LEAST_SAMPLES: Final = 3
"""Below that there is no slope: noise makes a steep line of two points."""
_FLAT_REACH: Final = 2.0
"""Times the deepest position seen up to which a pace without a slope is believed."""
_SURE: Final = 0.25
"""Standard error of the pace, as a share of it, above which it is no answer."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Prompt tokens computed around `position` tokens into the open prompt, in `seconds`."""

    position: float
    tokens: float
    seconds: float

    @property
    def pace(self) -> float:
        """Seconds a token."""
        return self.seconds / self.tokens


class _Line:
    """Seconds a token against position: least squares, each sample weighted by its tokens."""

    def __init__(self, seen: Collection[Stretch]) -> None:
        # Under async scheduling a prompt shows itself while the step before its first chunk ends: far too fast a pace.
        quickest = median(one.pace for one in seen) / _TOO_FAST
        seen = [one for one in seen if one.pace >= quickest]
        total = sum(one.tokens for one in seen)
        self._share = 1 / len(seen)
        self._position = sum(one.position * one.tokens for one in seen) / total
        self._pace = sum(one.seconds for one in seen) / total
        self._least = min(one.pace for one in seen) / 2
        self._reach = _FLAT_REACH * max(one.position + one.tokens / 2 for one in seen)
        self._spread = sum(one.tokens * (one.position - self._position) ** 2 for one in seen) / total
        self._slope: float | None = None
        self._variance = 0.0
        if len(seen) >= _LEAST_SAMPLES and self._spread > 0:
            along = sum(one.tokens * (one.position - self._position) * (one.pace - self._pace) for one in seen) / total
            self._slope = max(0.0, along / self._spread)
            scatter = sum(one.tokens * (one.pace - self.at(one.position)) ** 2 for one in seen) / total
            self._variance = scatter * len(seen) / (len(seen) - 2)

    def at(self, position: float) -> float:
        """Seconds a token at a position."""
        return max(self._pace + (self._slope or 0.0) * (position - self._position), self._least)

    def doubt(self, position: float, until: float) -> float:
        """Standard error of the pace at `position`, as a share of it, in a prompt of `until` tokens."""
        if self._slope is None:
            return 0.0 if until <= self._reach else inf
        leverage = (position - self._position) ** 2 / self._spread
        return sqrt(self._variance * self._share * (1 + leverage)) / self.at(position)


@dataclass(slots=True)
class PrefillPace:
    """The pace of one engine."""

    _bands: dict[int, deque[Stretch]] = field(default_factory=dict)
    _own: deque[Stretch] = field(default_factory=lambda: deque(maxlen=_OWN_SAMPLES))
    _rough: deque[Stretch] = field(default_factory=lambda: deque(maxlen=_SAMPLES_A_BAND))

    def add(self, seen: Stretch, *, pure: bool) -> None:
        """Takes an interval.

        Args:
            seen: The prompt tokens of the interval, and the time that they took.
            pure: Whether every step of it had prompt tokens: a prompt was open all the while, and none ended.
        """
        if seen.tokens < 1 or seen.seconds <= 0:
            return
        if pure:
            self._own.append(seen)
            return
        self._rough.append(seen)
        for own in self._own:
            band = int(_BANDS_AN_OCTAVE * log2(max(own.position, _FIRST_BAND)))
            self._bands.setdefault(band, deque(maxlen=_SAMPLES_A_BAND)).append(own)
        self._own.clear()

    def eta(self, position: float, backlog: float) -> float | None:
        """Seconds for the next `backlog` tokens from `position`; None while too little is known to tell."""
        if backlog <= 0:
            return 0.0
        middle, until = position + backlog / 2, position + backlog
        line = min(self._lines(), key=lambda one: one.doubt(middle, until), default=None)
        if line is None or line.doubt(middle, until) > _SURE:
            return None
        recent = list(self._own)[-_RECENT:]
        usual = sum(seen.tokens * line.at(seen.position) for seen in recent)
        ratio = sum(seen.seconds for seen in recent) / usual if usual > 0 else 1.0
        return backlog * ratio * line.at(middle)

    def _lines(self) -> list[_Line]:
        before = [seen for band in self._bands.values() for seen in band]
        own = list(self._own) if not before or len(self._own) >= _LEAST_OWN else []
        known = [before, own] if before or own else [list(self._rough)]
        return [_Line(seen) for seen in known if seen]
