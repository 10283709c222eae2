"""What can go wrong between a healthy engine and its reader, as windows of simulated time.

A frontend that is blocked, a proxy that buffers, a metrics page that is down: the engine goes on stepping through
all of them, which is exactly what has to be told apart from an engine that does not.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf


class FaultKind(Enum):
    """Each names the layer that misbehaves."""

    RESTART = "restart"
    """The process dies at `start` and is back at `end`: connections refused, state and counters lost."""
    REFUSED = "refused"
    """Connections are refused although the engine works."""
    FROZEN = "frozen"
    """The whole process is stopped: it accepts connections and answers nothing, and the engine stands still."""
    FRONTEND = "frontend"
    """The API process is busy: nothing is answered or delivered until `end`, while the engine steps on."""
    METRICS_DOWN = "metrics_down"
    """The metrics pages answer 503."""
    METRICS_SLOW = "metrics_slow"
    """The metrics pages take `value` seconds longer."""
    BUFFERING = "buffering"
    """A proxy passes a stream on only in pieces of `value` bytes."""
    STREAM_ERROR = "stream_error"
    """Streams open at `start` end with an error object in the middle."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault from `start` to `end`; `value` is the fault's own measure."""

    kind: FaultKind
    start: float
    end: float = inf
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Sleep:
    """The engine is put to sleep at `start` and woken at `end`."""

    start: float
    end: float
    level: int = 1


def repeated(kind: FaultKind, *, start: float, until: float, period: float, lasts: float) -> tuple[Fault, ...]:
    """The same fault in a regular rhythm."""
    times = int((until - start) / period)
    return tuple(Fault(kind, start + i * period, start + i * period + lasts) for i in range(times))


def active(faults: Iterable[Fault], kind: FaultKind, now: float) -> Fault | None:
    """The fault of this kind that is under way, if any."""
    return next((f for f in faults if f.kind is kind and f.start <= now < f.end), None)


def blocked_until(faults: Iterable[Fault], now: float) -> float:
    """When the API process answers next: now, unless it is stopped or busy."""
    until = now
    for fault in sorted(faults, key=lambda f: f.start):
        if fault.kind in {FaultKind.FROZEN, FaultKind.FRONTEND} and fault.start <= until < fault.end:
            until = fault.end
    return until
