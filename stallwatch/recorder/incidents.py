"""Which stalls belong into one bundle, and when it is to be written.

Stalls that follow each other closely are one incident to whoever reads about it, and a server that stalls every few
seconds must not fill the disk with copies of the same minutes. So a bundle takes every stall that begins within half of
the minutes that are kept, and is written again when there is more to say; then the next bundle begins.
"""

from dataclasses import dataclass, field
from typing import Final

from stallwatch.analysis.episodes import Stall

SETTLE_SECONDS: Final = 5.0  # after a stall's end: how it got better belongs to the story
LONG_SECONDS: Final = 30.0  # a stall that is open for so long is written down before its end
AGAIN_SECONDS: Final = 60.0  # until the next write while a stall stays open
REST_SECONDS: Final = 20.0  # least time between two writes of one bundle


@dataclass(slots=True)
class Incident:
    """The stalls of one bundle."""

    number: int
    began: float
    stalls: dict[str, Stall] = field(default_factory=dict)
    written_at: float | None = None  # when last


@dataclass(slots=True)
class Incidents:
    """Decides; does no I/O. `span` is how long one bundle takes new stalls, seconds."""

    span: float
    current: Incident | None = None
    _due: float | None = None
    _retired: Incident | None = None  # its successor has begun before it was written
    _count: int = 0

    def opened(self, stall: Stall, now: float) -> None:
        """A stall has begun, or is known better."""
        current = self._incident(stall, now)
        new = stall.id not in current.stalls
        current.stalls[stall.id] = stall
        if new:
            self._be_due(now + LONG_SECONDS)

    def closed(self, stall: Stall, now: float) -> None:
        """A stall has ended."""
        self._incident(stall, now).stalls[stall.id] = stall
        self._be_due(now + SETTLE_SECONDS)

    def knows(self, stall: Stall) -> bool:
        """Whether the stall is in the present incident."""
        return self.current is not None and stall.id in self.current.stalls

    def due(self, now: float) -> Incident | None:
        """The incident to write now, if there is one; the next one is due later."""
        if self._retired is not None:
            retired, self._retired = self._retired, None
            return retired
        current = self.current
        if current is None or self._due is None or now < self._due:
            return None
        if current.written_at is not None and now - current.written_at < REST_SECONDS:
            return None
        return self._taken(current, now)

    def left(self) -> list[Incident]:
        """What is not written yet, when there is no later."""
        current = self.current if self._due is not None else None
        return [incident for incident in (self._retired, current) if incident is not None]

    def _taken(self, written: Incident, now: float) -> Incident:
        still_open = [stall for stall in written.stalls.values() if stall.end is None]
        written.written_at = now
        self._due = now + AGAIN_SECONDS if still_open else None
        if now - written.began >= self.span:
            # What comes is in the next bundle, with the stalls that go on.
            self.current = None
            if still_open:
                self.current = self._begin(now)
                self.current.stalls = {stall.id: stall for stall in still_open}
        return written

    def _incident(self, stall: Stall, now: float) -> Incident:
        current = self.current
        if current is None or (stall.id not in current.stalls and now - current.began >= self.span):
            before = current
            current = self.current = self._begin(min(stall.start, now))
            if before is not None and self._due is not None:
                self._retired = before
                current.stalls = {one.id: one for one in before.stalls.values() if one.end is None}
        return current

    def _begin(self, at: float) -> Incident:
        self._count += 1
        return Incident(self._count, at)

    def _be_due(self, at: float) -> None:
        self._due = at if self._due is None else min(self._due, at)
