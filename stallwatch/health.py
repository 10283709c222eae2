"""Whether our own sources work: one memory of every poll, and one log line when a source goes down or comes back."""

from collections import Counter
from dataclasses import dataclass, field

import structlog

from stallwatch.observations import Failure, Source
from stallwatch.scheduling import Poll

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SourceState:
    """How one source is doing. Times are monotonic, durations in seconds."""

    up: bool
    duration: float
    since: float  # when it went up or down
    last_success: float | None
    reason: Failure | None = None
    detail: str = ""


@dataclass(slots=True)
class Writing:
    """What became of what the recorder wrote; counts since the start."""

    incidents_written: int = 0
    incidents_failed: int = 0
    recording_failures: int = 0


@dataclass(slots=True)
class Health:
    """Remembers how every source does."""

    sources: dict[Source, SourceState] = field(default_factory=dict)
    writing: Writing = field(default_factory=Writing)
    failures: Counter[tuple[Source, Failure]] = field(default_factory=Counter)

    def polled(self, poll: Poll) -> None:
        """Takes the outcome of one poll, and says so in the log where it changes anything."""
        before = self.sources.get(poll.source)
        failure = poll.failure
        if not self.remember(poll):
            return
        if failure is not None:
            log.warning("source down", source=poll.source, reason=failure.reason, detail=failure.detail)
        elif before is None:
            log.info("source up", source=poll.source)
        else:
            log.info("source up", source=poll.source, down_seconds=round(poll.ended - before.since, 3))

    def remember(self, poll: Poll) -> bool:
        """Takes the outcome of one poll. Returns whether the source went up or down with it."""
        before = self.sources.get(poll.source)
        failure = poll.failure
        up = failure is None
        changed = before is None or before.up is not up
        self.sources[poll.source] = SourceState(
            up=up,
            duration=poll.ended - poll.started,
            since=poll.ended if before is None or changed else before.since,
            last_success=poll.ended if up else before.last_success if before else None,
            reason=failure.reason if failure else None,
            detail=failure.detail if failure else "",
        )
        if failure is not None:
            self.failures[poll.source, failure.reason] += 1
        return changed
