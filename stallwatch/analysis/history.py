"""Bounded memory of the recent past: the largest value of the last seconds."""

from collections import deque


class RecentMaximum:
    """The largest value booked during the last `seconds`, whatever the number of values."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._falling: deque[tuple[float, float]] = deque()  # (at, value), values falling: the head is the largest

    def add(self, at: float, value: float) -> None:
        """Books `value` at time `at`; times must not decrease."""
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((at, value))
        self._forget(at)

    def at(self, now: float) -> float | None:
        """The largest value of the `seconds` before `now`; None when nothing was booked in them."""
        self._forget(now)
        return self._falling[0][1] if self._falling else None

    def _forget(self, now: float) -> None:
        while self._falling and self._falling[0][0] <= now - self._seconds:
            self._falling.popleft()
