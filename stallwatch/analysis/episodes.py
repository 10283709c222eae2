"""Episodes of one engine: what belongs to one stall, when it is over, what it came down to, and the sums that stay.

An episode is open while gaps come in, over after two seconds without any, and settled once the samples are in that
cover its end. Until then its cause may change and late evidence may show that it goes on; after that nothing changes.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from stallwatch.analysis.attribution import Frozen, Scene, Verdict, attribute
from stallwatch.analysis.attribution.frozen import LATE, cut
from stallwatch.analysis.causes import Cause, Evidence, StallKind
from stallwatch.analysis.gaps import QUIET, Gap, Piece, Pieces
from stallwatch.analysis.histogram import Histogram, HistogramState
from stallwatch.analysis.spans import SpanUnion
from stallwatch.analysis.window import Stretch

KEPT_STALLS: Final = 100
"""Closed stalls that are remembered one by one."""

_PATIENCE: Final = 10.0  # seconds that an episode that is over waits for evidence about its end
_STALE: Final = 5.0  # seconds without news after which a source is not waited for
_JUDGED_EVERY: Final = 1.0  # seconds between two provisional verdicts, more in long stalls
_LATELY: Final = 60.0  # seconds that a provisional verdict looks back
_LEAST_CULPRIT: Final = 128.0  # tokens: below that a prompt is nobody's culprit


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """One stall, open or closed. Seconds; `seconds` are those by which its gaps exceed what is usual."""

    id: str
    engine: str
    kind: StallKind
    start: float
    end: float | None  # None while it is open
    detected: float
    seconds: float
    reader_seconds: float  # lost by the server's own readers, ours not counted
    longest: float  # the longest single gap
    cause: Cause
    evidence: tuple[Evidence, ...]  # all there is, the strongest first
    culprit_tokens: float | None = None  # the largest uncached prompt let in during it
    notes: tuple[str, ...] = ()

    def duration(self, now: float) -> float:
        """From its beginning to its end, or to now."""
        return (self.end if self.end is not None else now) - self.start


class Change(Enum):
    """What became of a stall."""

    OPENED = "opened"
    CAUSE = "cause"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class StallNews:
    """A stall opened, its provisional cause changed, or it closed with its last verdict."""

    at: float
    change: Change
    stall: Stall


@dataclass(frozen=True, slots=True, kw_only=True)
class StallsView:
    """The stalls of one engine as of now."""

    open: Stall | None
    closed: tuple[Stall, ...]  # the last ones, newest first
    active_seconds: float
    counts: Mapping[tuple[StallKind, Cause], int]
    seconds: Mapping[Cause, float]
    durations: Mapping[StallKind, HistogramState]
    reader_seconds: float


@dataclass(slots=True)
class Episode:
    """A stall under way, or one that is over and waits for its verdict."""

    number: int
    start: float
    detected: float
    bad_until: float  # the last moment known to be part of it
    kinds: set[StallKind] = field(default_factory=set)
    pieces: Pieces = field(default_factory=Pieces)
    seconds: float = 0.0
    reader_seconds: float = 0.0
    longest: float = 0.0
    verdict: Verdict = field(default_factory=Verdict)
    next_cause: Cause | None = None
    judged: float | None = None
    culprit: float = 0.0
    aborted: float = 0.0
    over: bool = False

    def add(self, gap: Gap) -> None:
        """Takes a gap that ended."""
        for piece in self.pieces.add(gap):
            self.seconds += piece.excess
            self.reader_seconds += piece.excess * gap.readers
        self.touch(gap)

    def touch(self, gap: Gap) -> None:
        """Takes note of a gap that may still be open."""
        self.start = min(self.start, gap.start)
        self.bad_until = max(self.bad_until, gap.end)
        self.longest = max(self.longest, gap.seconds)
        self.kinds.add(gap.kind)

    @property
    def kind(self) -> StallKind:
        """The first kind of those that were seen."""
        return next(kind for kind in StallKind if kind in self.kinds)


@dataclass(slots=True)
class Ledger:
    """Books the gaps of one engine into episodes."""

    engine: str
    scene: Scene
    current: Episode | None = None
    news: deque[StallNews] = field(default_factory=lambda: deque(maxlen=KEPT_STALLS))
    spans: SpanUnion = field(default_factory=SpanUnion)
    """Time in stalls, up to the last sign of the one that is open."""
    _ending: Episode | None = None
    _late: Episode | None = None  # our own lateness
    _closed: deque[Stall] = field(default_factory=lambda: deque(maxlen=KEPT_STALLS))
    _counts: Counter[tuple[StallKind, Cause]] = field(default_factory=Counter)
    _seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    _durations: dict[StallKind, Histogram] = field(default_factory=lambda: {kind: Histogram() for kind in StallKind})
    _reader_seconds: float = 0.0
    _number: int = 0
    _settled_until: float = float("-inf")

    def add(self, gap: Gap, now: float) -> None:
        """Books a gap that ended."""
        self._join(gap, now, ended=True)

    def touch(self, gap: Gap, now: float) -> None:
        """Takes note of a gap that is still open."""
        self._join(gap, now, ended=False)

    def ours(self, gap: Gap) -> None:
        """A gap that says more about us than about the server: it opens nothing, and is booked apart."""
        if self._late is None:
            self._number += 1
            self._late = Episode(self._number, gap.start, gap.end, gap.end)
        self._late.add(replace(gap, readers=0.0))

    def move_on(self, live: list[Gap], now: float, *, calm: bool, estimated_at: float | None) -> None:
        """Judges, ends and settles.

        Args:
            live: Gaps that are open and above their threshold.
            now: The moment, seconds.
            calm: Whether progress was seen since the last sign of the current episode.
            estimated_at: When the last scrape of the estimator's lane was sent.
        """
        self._tell_late(now)
        live = self._unsettled(live)
        episode = self.current
        if episode is not None:
            if not live and calm and now - episode.bad_until >= QUIET:
                if self._ending is not None:
                    self._settle(self._ending, now)
                episode.over = True
                self.current, self._ending = None, episode
            else:
                self._judge_now_and_then(episode, live, now)
        ending = self._ending
        if ending is not None and (self.current is not None or self._evidence_is_in(ending, now, estimated_at)):
            self._settle(ending, now)

    def view(self, live: Iterable[Gap]) -> StallsView:
        """The stalls, with `live` gaps open."""
        return StallsView(
            open=None if self.current is None else self._stall(self.current, self._unsettled(live)),
            closed=tuple(reversed(self._closed)),
            active_seconds=self.spans.total,
            counts={(kind, cause): self._counts[kind, cause] for kind in StallKind for cause in Cause},
            seconds=dict(self._seconds),
            durations={kind: histogram.state() for kind, histogram in self._durations.items()},
            reader_seconds=self._reader_seconds,
        )

    def _join(self, gap: Gap, now: float, *, ended: bool) -> None:
        clipped = self._clipped(gap)
        if clipped is None:
            return
        gap = clipped
        ending = self._ending
        if self.current is None and ending is not None and gap.start <= ending.bad_until + QUIET:
            # Evidence that came late shows that it was not over.
            self.current, self._ending = ending, None
            ending.over = False
        if self.current is None:
            self._number += 1
            self.current = Episode(self._number, gap.start, now, gap.end)
            self.current.touch(gap)
            self.news.append(StallNews(now, Change.OPENED, self._stall(self.current, [gap])))
        if ended:
            self.current.add(gap)
        else:
            self.current.touch(gap)
        self.spans.add(self.current.start, self.current.bad_until)

    def _unsettled(self, live: Iterable[Gap]) -> list[Gap]:
        return [gap for gap in map(self._clipped, live) if gap is not None]

    def _clipped(self, gap: Gap) -> Gap | None:
        """The part of a gap that no settled stall has; None when there is none."""
        start = max(gap.start, self._settled_until)
        if gap.end <= start:
            return None
        return replace(gap, start=start, normal=gap.normal * (gap.end - start) / gap.seconds)

    def _evidence_is_in(self, episode: Episode, now: float, estimated_at: float | None) -> bool:
        end = episode.bad_until + LATE
        if now - end >= _PATIENCE:
            return True
        sources = (estimated_at, self.scene.around.gpus_known_until, self.scene.around.host_known_until)
        return all(known is None or known >= end or now - known > _STALE for known in sources)

    def _settle(self, episode: Episode, now: float) -> None:
        """The last verdict: it enters the counters and is never changed."""
        self._ending = None
        episode.verdict = attribute(self._frozen(episode, [], now), self.scene)
        stall = self._stall(episode, [])
        self._book(stall, now)
        self._reader_seconds += stall.reader_seconds
        self._settled_until = max(self._settled_until, episode.bad_until)

    def _book(self, stall: Stall, now: float) -> None:
        self._closed.append(stall)
        self._counts[stall.kind, stall.cause] += 1
        self._seconds[stall.cause] += stall.seconds
        self._durations[stall.kind].observe(stall.duration(now))
        self.news.append(StallNews(now, Change.CLOSED, stall))

    def _judge_now_and_then(self, episode: Episode, live: list[Gap], now: float) -> None:
        pause = max(_JUDGED_EVERY, (now - episode.start) / 60)
        if episode.judged is not None and now - episode.judged < pause:
            return
        episode.judged = now
        verdict = attribute(self._frozen(episode, live, now), self.scene)
        before = episode.verdict.cause
        if verdict.cause is not before and before is not Cause.UNKNOWN and episode.next_cause is not verdict.cause:
            # One look that says otherwise is not news yet.
            episode.next_cause = verdict.cause
            return
        episode.next_cause = None
        episode.verdict = verdict
        if verdict.cause is not before:
            self.news.append(StallNews(now, Change.CAUSE, self._stall(episode, live)))

    def _frozen(self, episode: Episode, live: Iterable[Gap], now: float) -> Frozen:
        window = self.scene.engine
        end = episode.bad_until
        # While it goes on, what it comes down to is what it comes down to lately.
        since = episode.start if episode.over else end - _LATELY
        pieces = [*episode.pieces.after(since), *_fresh(episode.pieces, live)]
        pieces.sort(key=lambda piece: piece.start)
        start = pieces[0].start if pieces else episode.start
        stretches = window.between(start, end + LATE if episode.over else max(end, now))
        self._look_for_culprit(episode, stretches)
        moved = window.moved_at
        return Frozen(
            start=episode.start,
            end=end,
            ongoing=not episode.over,
            blind=not episode.over and (moved is None or moved <= episode.start + LATE / 2),
            slices=tuple(cut(pieces, stretches, end=max(end, now))),
            stretches=tuple(stretches),
        )

    def _look_for_culprit(self, episode: Episode, stretches: list[Stretch]) -> None:
        """The largest prompt that was let in during the stall, or before it and was still being computed."""
        for stretch in stretches:
            episode.culprit = max(episode.culprit, stretch.admitted)
        episode.aborted = max(episode.aborted, sum(stretch.aborted for stretch in stretches))
        for stretch in self.scene.engine.newest():
            if stretch.since >= episode.start:
                continue
            open_then = stretch.backlog is not None and stretch.backlog[1] > 0
            if not open_then and stretch.until < episode.start - LATE:
                break
            episode.culprit = max(episode.culprit, stretch.admitted)

    def _stall(self, episode: Episode, live: Sequence[Gap]) -> Stall:
        seconds, reader_seconds = episode.seconds, episode.reader_seconds
        for piece in _fresh(episode.pieces, live):
            seconds += piece.excess
            reader_seconds += piece.excess * piece.gap.readers
        notes: tuple[str, ...] = ()
        if episode.aborted >= _LEAST_CULPRIT:
            notes = (f"prompts with {episode.aborted:.0f} tokens to go were given up by their clients",)
        return Stall(
            id=f"{self.engine}-{episode.number}",
            engine=self.engine,
            kind=episode.kind,
            start=min([episode.start, *(gap.start for gap in live)]),
            end=episode.bad_until if episode.over else None,
            detected=episode.detected,
            seconds=seconds,
            reader_seconds=reader_seconds,
            longest=episode.longest,
            cause=episode.verdict.cause,
            evidence=episode.verdict.evidence,
            culprit_tokens=episode.culprit if episode.culprit >= _LEAST_CULPRIT else None,
            notes=notes,
        )

    def _tell_late(self, now: float) -> None:
        late = self._late
        if late is None or now - late.bad_until < QUIET:
            return
        self._late = None
        late.over = True
        lag = self.scene.around.observer.lag_within(late.start, late.bad_until)
        seen = Evidence(Cause.OBSERVER, late.seconds, f"our own loop ran up to {lag:.2f} s late")
        late.verdict = Verdict(Cause.OBSERVER, (seen,))
        self._book(self._stall(late, []), now)


def _fresh(pieces: Pieces, live: Iterable[Gap]) -> list[Piece]:
    """The parts of open gaps that no closed gap covers, each second once."""
    found = Pieces()
    new: list[Piece] = []
    for gap in live:
        for piece in pieces.uncovered(gap):
            part = replace(gap, start=piece.start, end=piece.end)
            new += [Piece(more.start, more.end, gap) for more in found.add(part)]
    return new
