"""Our own streams on one engine, as their reader felt them: gaps, first-token waits, the wait that is still open."""

from dataclasses import dataclass, field

from stallwatch.analysis.findings import CanaryView
from stallwatch.analysis.histogram import Histogram
from stallwatch.analysis.history import RecentMaximum
from stallwatch.analysis.itl import Gap, GapWindow
from stallwatch.analysis.observer import ObserverHistory, comparable
from stallwatch.analysis.slo import DeadlineEvents, SecondsIndicator, allowed_gap
from stallwatch.observations import Outcome, StreamClosed, StreamOpened, StreamTokens

WAIT_WINDOW = 30.0  # seconds: a scrape every 15 s misses nothing

_CENSORED = {Outcome.TIMEOUT, Outcome.CUT, Outcome.SERVER_ERROR}
"""Ends that a reader would have waited through: what was waited until then is a lower bound of a gap."""


@dataclass(slots=True)
class OpenStream:
    """One stream under way. `since` is the time of its last token, or of sending while none has come."""

    number: int
    request_id: str
    since: float
    tokens: int = 0

    @property
    def decoding(self) -> bool:
        """Whether a token has come."""
        return self.tokens > 0


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait that ended and is not judged yet."""

    stream: OpenStream
    start: float
    end: float
    tokens: int  # that ended it; 0 when the stream ended without one
    first: bool  # for the stream's first token


@dataclass(slots=True)
class Objectives:
    """What readers were promised, seconds."""

    itl: float
    ttft: float
    stall_floor: float


@dataclass(slots=True)
class StreamsWatch:
    """Follows the canary's streams on one engine and books what they felt.

    A wait is judged at the next heartbeat, when it is known whether we were late ourselves when it was stamped.
    """

    objectives: Objectives
    indicator: SecondsIndicator
    observer: ObserverHistory
    windows: tuple[GapWindow, ...]
    open: dict[int, OpenStream] = field(default_factory=dict)
    excluded: int = 0  # gaps that our own lateness explains
    stream_seconds: float = 0.0
    last_end: float | None = None  # when the last stream ended that told something
    _icl: Histogram = field(default_factory=Histogram)
    _itl: Histogram = field(default_factory=Histogram)
    _ttft: Histogram = field(default_factory=Histogram)
    _waits: RecentMaximum = field(default_factory=lambda: RecentMaximum(WAIT_WINDOW))
    _events: DeadlineEvents = field(init=False)
    _unjudged: list[_Wait] = field(default_factory=list)
    _ticked_at: float | None = None

    def __post_init__(self) -> None:
        self._events = DeadlineEvents(self.objectives.itl, self.objectives.stall_floor)

    def opened(self, seen: StreamOpened) -> None:
        """A request was sent."""
        self.open[seen.stream] = OpenStream(seen.stream, seen.request_id, seen.at)

    def tokens(self, seen: StreamTokens) -> None:
        """Tokens arrived."""
        stream = self.open.get(seen.stream)
        if stream is None:
            return
        self._unjudged.append(_Wait(stream, stream.since, seen.at, seen.tokens, first=not stream.decoding))
        stream.since = seen.at
        stream.tokens += seen.tokens

    def closed(self, seen: StreamClosed) -> None:
        """A stream ended; a wait that it did not survive is booked as the lower bound that it is."""
        stream = self.open.pop(seen.stream, None)
        if stream is None:
            return
        if stream.decoding or seen.outcome in _CENSORED:
            self.last_end = seen.at
        wait = seen.at - stream.since
        promised = self.objectives.itl if stream.decoding else self.objectives.ttft
        if seen.outcome in _CENSORED and (wait > promised or seen.outcome is Outcome.TIMEOUT):
            self._unjudged.append(_Wait(stream, stream.since, seen.at, 0, first=not stream.decoding))

    def tick(self, now: float) -> None:
        """Judges the waits that ended, and books what is missed while one is open."""
        if self._ticked_at is not None and self.open:
            self.stream_seconds += max(0.0, now - self._ticked_at)
        self._ticked_at = now
        judged, self._unjudged = self._unjudged, []
        for ended in judged:
            self._judge(ended)
        self._events.keep(self.open)
        for stream in self.open.values():
            wait = now - stream.since
            if self._ours(stream.since, now):
                continue
            if stream.decoding:
                if wait > allowed_gap(self._events.typical_tokens, self.objectives.itl):
                    self.indicator.miss(stream.since, now)
                self._events.open(stream.number, wait)
            elif wait > self.objectives.ttft:
                self.indicator.miss(stream.since, now)

    def decoding_since(self) -> float | None:
        """Time of the last token of the stream that has been waiting longest among those that decode."""
        return min((stream.since for stream in self.open.values() if stream.decoding), default=None)

    def view(self, now: float) -> CanaryView:
        """What the streams felt, as of `now`."""
        open_gap = max((now - stream.since for stream in self.open.values()), default=None)
        recent = (self._waits.at(now), open_gap, *(wait.end - wait.start for wait in self._unjudged))
        decoding = self.decoding_since()
        return CanaryView(
            inter_chunk=self._icl.state(),
            inter_token=self._itl.state(),
            first_token=self._ttft.state(),
            windows=tuple(window.at(now, decoding) for window in self.windows),
            open_gap=open_gap,
            wait_max=max((wait for wait in recent if wait is not None), default=None),
            stream_seconds=self.stream_seconds,
            events=self._events.total,
            events_missed=self._events.missed,
        )

    def _judge(self, wait: _Wait) -> None:
        seconds = wait.end - wait.start
        if self._ours(wait.start, wait.end):
            self.excluded += 1
            self._events.drop(wait.stream.number)
            return
        self._waits.add(wait.end, seconds)
        request_id = wait.stream.request_id
        if wait.first:
            self._ttft.observe(seconds, exemplar=request_id)
            if seconds > self.objectives.ttft:
                self.indicator.miss(wait.start, wait.end)
            return
        gap = Gap(wait.start, wait.end, max(1, wait.tokens))
        self._icl.observe(seconds, exemplar=request_id)
        self._itl.observe(seconds / gap.tokens, gap.tokens, exemplar=request_id)
        for window in self.windows:
            window.add(gap)
        self._events.close(wait.stream.number, seconds, wait.tokens)
        if seconds > allowed_gap(gap.tokens, self.objectives.itl):
            self.indicator.miss(gap.start, gap.end)

    def _ours(self, start: float, end: float) -> bool:
        return comparable(end - start, self.observer.lag_within(start, end))
