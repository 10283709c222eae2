"""The one polling loop.

It owns the interval, the timeout and what becomes of an expected failure: a `PollFailure` value in the stream of
observations. Sources know none of this; they observe once, or raise `SourceError`. Any other exception is a bug and
ends the process. Whether a source is up, and the one log line when that changes, live in `health.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from stallwatch.observations import Failure, PollFailure, Source

T = TypeVar("T")


class SourceError(Exception):
    """An expected failure of a source, with its reason and one sentence for a person."""

    def __init__(self, reason: Failure, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Poll:
    """How one poll went; times of the monotonic clock."""

    source: Source
    started: float
    ended: float
    failure: PollFailure | None


def _unreported(_poll: Poll) -> None:
    return


async def every(
    interval_seconds: float,
    timeout_seconds: float,
    *,
    source: Source,
    observe: Callable[[], Awaitable[T]],
    emit: Callable[[T | PollFailure], None],
    clock: Callable[[], float],
    wake: asyncio.Event | None = None,
    polled: Callable[[Poll], None] = _unreported,
) -> None:
    """Calls `observe` at a fixed rate until cancelled, and emits what it saw or why it failed.

    After an overrun there is one immediate poll and never a burst. Setting `wake` brings the next poll forward, once.
    `polled` hears how each poll went, before its outcome is emitted.
    """
    due = clock()
    while True:
        started = clock()
        try:
            async with asyncio.timeout(timeout_seconds):
                seen: T | PollFailure = await observe()
        except SourceError as error:
            seen = PollFailure(clock(), source, error.reason, error.detail)
        except TimeoutError:
            seen = PollFailure(clock(), source, Failure.TIMEOUT, f"no answer within {timeout_seconds:g} s")
        polled(Poll(source, started, clock(), seen if isinstance(seen, PollFailure) else None))
        # Outside the try: an error in what consumes observations is a bug, not a failure of the source.
        emit(seen)
        due = max(due + interval_seconds, clock())
        await _until(due, clock, wake)


async def _until(due: float, clock: Callable[[], float], wake: asyncio.Event | None) -> None:
    wait = max(0.0, due - clock())
    if wake is None:
        await asyncio.sleep(wait)
        return
    try:
        async with asyncio.timeout(wait):
            await wake.wait()
    except TimeoutError:
        return
    wake.clear()
