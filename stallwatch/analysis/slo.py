"""The service level indicator: wall seconds in which readers waited longer than promised.

Seconds and not tokens, because a freeze removes tokens: any count of tokens is calm while readers wait. Evidence from
the canary and from the engine is united, so a second counts once whoever saw it. Deadline events (tokens that were
due and did not come) are kept beside it for information.
"""

import math
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from statistics import median

from stallwatch.analysis.spans import SpanUnion

_EXCUSE_LIMIT = 1.0  # seconds: many tokens at once do not make a longer silence good service


def allowed_gap(tokens: float, objective: float) -> float:
    """The longest gap before `tokens` tokens that still meets an objective of `objective` seconds a token."""
    return max(objective, min(tokens * objective, _EXCUSE_LIMIT))


@dataclass(slots=True)
class SecondsIndicator:
    """Seconds judged and seconds missed of one engine; both only grow, and missed never exceeds judged."""

    _judged: SpanUnion = field(default_factory=SpanUnion)
    _missed: SpanUnion = field(default_factory=SpanUnion)

    @property
    def judged(self) -> float:
        """Seconds for which there was a verdict."""
        return self._judged.total

    @property
    def missed(self) -> float:
        """Seconds among them in which a reader waited longer than promised."""
        return self._missed.total

    def judge(self, start: float, end: float) -> None:
        """There was evidence about [start, end]."""
        self._judged.add(start, end)

    def miss(self, start: float, end: float) -> None:
        """[start, end] was seen to be spent waiting; it may reach back and overlap what was booked."""
        self._judged.add(start, end)
        self._missed.add(start, end)

    def judged_within(self, start: float, end: float) -> float:
        """Seconds of [start, end] for which there was a verdict, as far as remembered."""
        return self._judged.within(start, end)

    def missed_within(self, start: float, end: float) -> float:
        """Missed seconds of [start, end], as far as remembered."""
        return self._missed.within(start, end)


@dataclass(slots=True)
class DeadlineEvents:
    """Tokens due against tokens that came in time, of the canary's streams; an open gap is booked while it grows.

    A gap of k tokens over g seconds had max(k, ceil(g/D)) slots, of which k were met; above D and the stall floor at
    least floor(g/D) - 1 were missed however many tokens came at its end.
    """

    objective: float  # seconds a token
    floor: float  # seconds
    total: int = 0
    missed: int = 0
    _booked: dict[int, int] = field(default_factory=dict)  # by stream: slots booked ahead while its gap is open
    _recent_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=101))

    @property
    def typical_tokens(self) -> int:
        """How many tokens usually arrive together: more than 1 under speculative decoding."""
        return int(median(self._recent_tokens)) if self._recent_tokens else 1

    def open(self, stream: int, seconds: float) -> None:
        """The gap of `stream` has been open for `seconds`."""
        overdue = math.floor(seconds / self.objective) - self.typical_tokens
        ahead = overdue - self._booked.get(stream, 0)
        if ahead > 0:
            self._booked[stream] = overdue
            self.total += ahead
            self.missed += ahead

    def close(self, stream: int, seconds: float, tokens: int) -> None:
        """The gap of `stream` ended with `tokens` tokens (0: the stream ended without one)."""
        booked = self._booked.pop(stream, 0)
        slots = max(tokens, math.ceil(seconds / self.objective - 1e-9))
        missed = slots - tokens
        if seconds > max(self.objective, self.floor):
            missed = max(missed, math.floor(seconds / self.objective) - 1)
        self.total += max(0, slots - booked)
        self.missed += max(0, missed - booked)
        if tokens > 0:
            self._recent_tokens.append(tokens)

    def drop(self, stream: int) -> None:
        """The gap of `stream` is not to be judged; what was booked stays."""
        self._booked.pop(stream, None)

    def keep(self, streams: Container[int]) -> None:
        """Forgets the open gaps of all but these streams."""
        for stream in [stream for stream in self._booked if stream not in streams]:
            del self._booked[stream]
