"""How late our own loop runs, and how long our own container was not allowed to run.

Both are measured where every other time stamp is made, on the loop itself, so that nothing we see can be more wrong
than this says, but for one nap. Waking up is what a sleeper costs, most of it in the kernel: 100 times a second takes
1.2 to 1.6 % of a core, all else that a sidecar does takes about as much. So naps are short only while a stream's tokens
are stamped; what scrapes tell is judged in tenths of a second, and there a longer nap will do.
"""

import asyncio
from collections.abc import Callable

from stallwatch.observations import ObserverSample

_NAP = 0.01
_LONG_NAP = 0.05
_EVERY = 0.25
_AT_ONCE = 0.1


class LagSource:
    """Sleeps for 10 ms over and over, or for 50 ms while nobody needs it closely, and tells how late it woke up.

    A lateness that begins during a nap is told too short, by at most what was left of the nap.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        throttled_seconds: Callable[[], float | None] = lambda: None,
        closely: bool = True,
    ) -> None:
        """`throttled_seconds` gives the total for which our own cgroup was throttled; it must answer at once."""
        self._clock = clock
        self._closely = closely
        self._timer: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] | None = None
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
        # A bare timer: a task that sleeps costs a third more at each wake-up.
        self._ended = asyncio.get_running_loop().create_future()
        self._nap()
        try:
            await self._ended  # only by an error of whoever takes the samples
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None

    def watch_closely(self, closely: bool) -> None:  # noqa: FBT001  (a switch; its callers name it)
        """Says whether tokens are being stamped; the present nap ends in time for it."""
        if closely and not self._closely and self._timer is not None:
            self._lag = max(self._lag, self._clock() - self._due)
            self._timer.cancel()
            self._closely = True
            self._nap()
        self._closely = closely

    def _nap(self) -> None:
        seconds = _NAP if self._closely else _LONG_NAP
        self._due = self._clock() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._woke)

    def _woke(self) -> None:
        try:
            self._look()
        except BaseException as error:  # noqa: BLE001  (handed to the task, where it ends the process as any bug)
            if self._ended is not None and not self._ended.done():
                self._ended.set_exception(error)
            return
        self._nap()

    def _look(self) -> None:
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
