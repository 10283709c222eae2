"""Virtual time: a real event loop over real sockets whose clock jumps to the next timer when nothing is ready.

Threads are invisible to it: code that hands work to a thread must accept an injected `run_blocking`.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# A loopback write becomes readable a moment after the call returns; before time may jump,
# the selector is asked again this many times, so that bytes under way always arrive first.
_SETTLE_POLLS = 3


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        for _ in range(_SETTLE_POLLS):
            ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
            if ready or timeout == 0:
                return ready
        if timeout is None:
            return super().select(None)
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: `time()` is the selector's own count of seconds."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def stand_still(self, seconds: float) -> None:
        """Lets time pass in which nothing runs, as a callback that blocks does."""
        self._jumping.now += seconds

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end in virtual time and returns its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
