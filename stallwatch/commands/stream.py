"""One canary stream, kept whole: what came when, for a person to look at. I/O."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from stallwatch.observations import Outcome, StreamClosed, StreamOpened, StreamTokens
from stallwatch.scheduling import SourceError
from stallwatch.sources.http import Target
from stallwatch.sources.stream import CanaryStream, StreamObservation, StreamRequest

_EVENT_CHARACTERS = 2000
_EVENTS_A_TOKEN = 2
_SPARE_EVENTS = 64


@dataclass(slots=True)
class Recording:
    """What one stream brought; it grows while the stream is open, so it can be looked at when that is interrupted."""

    request: StreamRequest
    sent_at: float | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # socket reads that carried tokens
    tokens: int = 0
    longest_gap: float | None = None  # seconds
    events: list[tuple[float, str]] = field(default_factory=list)
    events_left_out: int = 0
    closed: StreamClosed | None = None
    failure: SourceError | None = None

    def observe(self, seen: StreamObservation) -> None:
        """Takes an observation of the stream."""
        match seen:
            case StreamOpened():
                self.sent_at = seen.at
            case StreamTokens():
                if self.arrivals:
                    self.longest_gap = max(self.longest_gap or 0.0, seen.at - self.arrivals[-1][0])
                self.tokens += seen.tokens
                self.arrivals.append((seen.at, seen.tokens))
            case StreamClosed():
                self.closed = seen

    def tap(self, at: float, data: str) -> None:
        """Takes an event as it came."""
        if len(self.events) < _EVENTS_A_TOKEN * self.request.tokens + _SPARE_EVENTS:
            self.events.append((at, data[:_EVENT_CHARACTERS]))
        else:
            self.events_left_out += 1


async def follow(
    recording: Recording,
    target: Target,
    session: aiohttp.ClientSession,
    *,
    clock: Callable[[], float],
    timeout_seconds: float,
    limit_seconds: float | None = None,
    also: Callable[[StreamObservation], None] = lambda _seen: None,
) -> None:
    """Sends the request of a recording and follows it to its end, to `limit_seconds`, or until cancelled."""

    def emit(seen: StreamObservation) -> None:
        recording.observe(seen)
        also(seen)

    stream = CanaryStream(
        recording.request,
        target,
        emit=emit,
        clock=clock,
        timeout_seconds=timeout_seconds,
        tap=recording.tap,
    )
    try:
        async with asyncio.timeout(limit_seconds) as limit:
            ended = await stream.run(session)
    except TimeoutError:
        if not limit.expired():
            raise
        return
    recording.failure = ended.failure
    emit(ended.closed)


def outcome_of(recording: Recording) -> Outcome:
    """How it ended; a stream that was cut short by ourselves counts as cancelled."""
    return recording.closed.outcome if recording.closed is not None else Outcome.CANCELLED
