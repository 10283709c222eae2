"""How late our own loop runs, and how long our own container was not allowed to run.

Both are measured where every other time stamp is made, on the loop itself, so that nothing we see can be more wrong
than this says.
"""

import asyncio
from collections.abc import Callable

from stallwatch.observations import ObserverSample

_NAP = 0.01
_EVERY = 0.25
_AT_ONCE = 0.1


class LagSource:
    """Sleeps for 10 ms over and over, and tells by how much it woke up late."""

    def __init__(
        self, *, clock: Callable[[], float], throttled_seconds: Callable[[], float | None] = lambda: None
    ) -> None:
        """`throttled_seconds` gives the total for which our own cgroup was throttled; it must answer at once."""
        self._clock = clock
        self._throttled_seconds = throttled_seconds
        self._emit: Callable[[ObserverSample], None] | None = None
        self._due = 0.0
        self._lag = 0.0
        self._last = 0.0
        self._throttled: float | None = None

    async def run(self, emit: Callable[[ObserverSample], None]) -> None:
        """Emits a sample every 0.25 s until cancelled, and at once after a lateness of 0.1 s or more."""
        self._emit = emit
        self._last = self._clock()
        self._throttled = self._throttled_seconds()
        while True:
            self._due = self._clock() + _NAP
            await asyncio.sleep(_NAP)
            now = self._clock()
            self._lag = max(self._lag, now - self._due)
            if self._lag >= _AT_ONCE or now - self._last >= _EVERY:
                self._tell(now)

    def speak_up(self) -> None:
        """Emits a sample now if the sleeper is overdue by 0.1 s or more.

        The first thing that a late loop does is to stamp the bytes that had been waiting; the sleeper wakes only after
        that. Called before such a stamp is judged, this makes the lateness known in time. Costs one look at the clock.
        """
        if self._emit is None:
            return
        now = self._clock()
        if now - self._due >= _AT_ONCE:
            self._lag = max(self._lag, now - self._due)
            self._due = now  # told up to here: the sleeper will only add what comes after
            self._tell(now)

    def _tell(self, now: float) -> None:
        total = self._throttled_seconds()
        sample = ObserverSample(now, max(0.0, self._lag), _risen(self._throttled, total))
        self._last, self._throttled, self._lag = now, total, 0.0
        if self._emit is not None:
            self._emit(sample)


def _risen(before: float | None, after: float | None) -> float | None:
    # A total that fell belongs to another cgroup: the process was moved.
    return None if before is None or after is None or after < before else after - before
