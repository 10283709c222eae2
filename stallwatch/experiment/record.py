"""What was seen of a run, as it was: requests by their client, observations by their sources. Pure."""

from dataclasses import dataclass, field
from typing import Final

from stallwatch.analysis.episodes import Stall
from stallwatch.analysis.paired import PairedInterval
from stallwatch.analysis.prefill import PrefillInterval
from stallwatch.observations import (
    EngineSample,
    GpuSample,
    HostSample,
    ObserverSample,
    Outcome,
    PollFailure,
    StreamClosed,
    StreamOpened,
    StreamTokens,
)
from stallwatch.scheduling import SourceError
from stallwatch.sources.stream import StreamObservation, StreamRequest

_AROUND: Final = 2.0  # seconds: a reading of the host on either side of a run


@dataclass(slots=True)
class Followed:
    """One request as its client saw it; times of the monotonic clock."""

    request: StreamRequest
    sent_at: float | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # socket reads that carried tokens
    tokens: int = 0
    closed: StreamClosed | None = None
    failure: SourceError | None = None

    @property
    def first_token_at(self) -> float | None:
        """When its first token came."""
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds."""
        first = self.first_token_at
        return None if first is None or self.sent_at is None else first - self.sent_at

    @property
    def problem(self) -> str:
        """Why it is not what was asked for; empty when it is."""
        if self.closed is None:
            return "was cut short"
        if self.closed.outcome is not Outcome.COMPLETED:
            return f"ended as {self.closed.outcome}" + (f": {self.closed.detail}" if self.closed.detail else "")
        if self.tokens < self.request.tokens:
            return f"brought {self.tokens} of {self.request.tokens} tokens"
        return ""

    def hear(self, seen: StreamObservation) -> None:
        """Takes an observation of its stream."""
        match seen:
            case StreamOpened():
                self.sent_at = seen.at
            case StreamTokens():
                self.tokens += seen.tokens
                self.arrivals.append((seen.at, seen.tokens))
            case StreamClosed():
                self.closed = seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the client saw of one run."""

    began: float
    marked: float | None  # when the prompt was sent, or would have been; None when it did not come to that
    ended: float
    readers: tuple[Followed, ...]
    prompt: Followed | None = None


@dataclass(slots=True)
class Log:
    """What was seen, in order; times of the monotonic clock."""

    scrapes: list[EngineSample] = field(default_factory=list)
    prefill: list[PrefillInterval] = field(default_factory=list)
    paired: list[PairedInterval] = field(default_factory=list)
    gpus: list[GpuSample] = field(default_factory=list)
    host: list[HostSample] = field(default_factory=list)
    lags: list[ObserverSample] = field(default_factory=list)
    failures: list[PollFailure] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)

    def within(self, start: float, end: float) -> "Log":
        """What concerns [start, end], with the reading on either side of it where a difference needs one."""
        first, last = start - _AROUND, end + _AROUND
        return Log(
            [seen for seen in self.scrapes if start <= seen.at <= end],
            [seen for seen in self.prefill if start < seen.until and seen.since < end],
            [seen for seen in self.paired if start < seen.until and seen.since < end],
            [seen for seen in self.gpus if start <= seen.at <= end],
            [seen for seen in self.host if first <= seen.at <= last],
            [seen for seen in self.lags if start <= seen.at <= last],
            [seen for seen in self.failures if start <= seen.at <= end],
            [at for at in self.restarts if start <= at <= end],
            [seen for seen in self.stalls if seen.start < end and (seen.end is None or seen.end > start)],
        )
