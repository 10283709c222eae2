"""How long requests wait to be let in, from the queue's length alone.

Nobody tells how long a request in vLLM's queue has waited until it leaves. But who leaves shows as a first token, and
what the queue's length does not explain by these has joined: the age of the oldest is then known, if the first to
join is the first to leave. Requests that are deferred (their KV cache is on its way) are passed by others, so they
are counted by their own number alone. A request that leaves the batch of a full KV cache and joins the queue in the
same interval was thrown out; it goes to the head and is told apart, since it is a reader in the middle of an answer.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from stallwatch.analysis.causes import StallKind
from stallwatch.analysis.counting import Growth
from stallwatch.analysis.gaps import Gap, Witness
from stallwatch.observations import EngineCounters

_FULL: Final = 0.9  # KV usage before or after somebody was thrown out
_MOST: Final = 1024  # groups that joined together


@dataclass(slots=True)
class _Line:
    """Who waits, by when they joined: [at, requests], oldest first."""

    groups: deque[list[float]] = field(default_factory=deque)

    @property
    def length(self) -> float:
        return sum(count for _, count in self.groups)

    def follow(self, at: float, length: float, left: float) -> None:
        """Takes a reading: so many wait now, and at least so many have left since the last one."""
        before = self.length
        left = min(before, max(left, before - length))
        while self.groups and left > 0:
            taken = min(self.groups[0][1], left)
            self.groups[0][1] -= taken
            left -= taken
            if self.groups[0][1] <= 0:
                self.groups.popleft()
        joined = length - self.length
        if joined > 0:
            self.groups.append([at, joined])
        while len(self.groups) > _MOST:
            count = self.groups.popleft()[1]
            self.groups[0][1] += count

    def age(self, at: float) -> float:
        """How long the oldest has waited; 0 when nobody does."""
        return at - self.groups[0][0] if self.groups else 0.0


@dataclass(slots=True)
class QueueWatch:
    """Follows the queue of one engine; only readings of the estimator's fields tell who left."""

    at: float | None = None  # the last reading that was of use
    _capacity: _Line = field(default_factory=_Line)
    _deferred: _Line = field(default_factory=_Line)
    _victims: _Line = field(default_factory=_Line)
    _growth: Growth = field(default_factory=Growth)
    _waiting: float = 0.0
    _running: float | None = None
    _usage: float = 0.0
    _ours: int = 0

    def read(self, at: float, seen: EngineCounters, *, moved: bool, ours: int) -> None:
        """Takes a reading; `ours` of our own requests have no token yet and may be in the queue."""
        if seen.waiting is None:
            return
        if not moved and self.at is not None:
            self.at = at  # no step ended, so nobody was let in
        if seen.first_tokens is None:
            return
        self.at, self._ours = at, ours
        left = self._growth.of(seen, "first_tokens") or 0.0
        grown, self._waiting = seen.waiting - self._waiting, seen.waiting
        usage, self._usage = self._usage, seen.kv_usage or 0.0
        ran, self._running = self._running, seen.running
        fallen = 0.0 if ran is None or seen.running is None else ran - seen.running
        deferred = min(seen.waiting_deferred or 0.0, seen.waiting)
        self._deferred.follow(at, deferred, 0.0)
        waiting = seen.waiting - deferred
        victims = min(self._victims.length, waiting)
        if grown < 0:
            victims = max(0.0, victims + grown)  # they stand at the head
        elif max(usage, self._usage) > _FULL:
            victims = min(waiting, victims + min(grown, max(0.0, fallen)))
        self._victims.follow(at, victims, 0.0)
        self._capacity.follow(at, waiting - victims, left)

    def clear(self) -> None:
        """The engine is another process."""
        self._capacity, self._deferred, self._victims = _Line(), _Line(), _Line()
        self._growth.forget()
        self._waiting, self._running, self._usage = 0.0, None, 0.0

    def waits(self, *, threshold: float, ttft: float) -> list[Gap]:
        """Waits above their limit, as of the last reading."""
        at = self.at
        if at is None:
            return []
        found = []
        if self._victims.age(at) > threshold:
            start = at - self._victims.age(at)
            readers = self._victims.length
            found.append(Gap(start=start, end=at, kind=StallKind.DECODE, witness=Witness.VICTIM, readers=readers))
        age = max(self._capacity.age(at), self._deferred.age(at))
        if age > ttft:
            readers = max(0.0, self._capacity.length + self._deferred.length - self._ours)
            found.append(Gap(start=at - age, end=at, kind=StallKind.ADMISSION, witness=Witness.QUEUE, readers=readers))
        return found
