"""Stalls of one engine: when readers are kept waiting, for how long, and what it comes down to.

A stall is an episode that a reader would call one freeze. It opens on a gap, an open gap or a step age above the
threshold, on requests that are not let in, or when decode progress over two seconds falls below a third of the usual;
it closes after two seconds without any of these. What overlaps or follows within these two seconds belongs to it, so a
long prompt is one stall and not twenty-four. A gap that our own lateness explains opens nothing: it is booked apart.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from stallwatch.analysis.attribution import Scene
from stallwatch.analysis.causes import StallKind
from stallwatch.analysis.episodes import Ledger, StallsView
from stallwatch.analysis.gaps import Gap, Witness
from stallwatch.analysis.observer import comparable
from stallwatch.analysis.phase import Phase
from stallwatch.analysis.prefill import PrefillInterval
from stallwatch.analysis.queue import QueueWatch
from stallwatch.analysis.steps import StepInterval
from stallwatch.analysis.surroundings import Surroundings
from stallwatch.analysis.window import Baseline, EngineWindow, Stretch
from stallwatch.observations import (
    EngineCounters,
    EngineSample,
    Lane,
    Outcome,
    StreamClosed,
    StreamOpened,
    StreamTokens,
)

_ANSWER: Final = 0.03
"""Seconds by which an age is at least too low: it counts from an answer to a request, and a step that ended in between
two polls is taken to have ended at the later one."""
_UNKNOWN_FACTOR: Final = 4.0  # times the floor, while it is not known what is usual
_PROGRESS_WINDOW: Final = 2.0  # seconds
_LEAST_PROGRESS: Final = 1 / 3
_RECOVERED: Final = 1 / 2  # an interval with so much progress is no part of a degraded stretch
_FILLED: Final = 0.8  # of the window that must be decoding
_LEAST_GAPS: Final = 16  # of a stream, to know what is usual
_GAPS_KEPT: Final = 512
_BURST: Final = 4  # tokens in the first read of a stream, from which on it comes in bursts
_MOST_READERS: Final = 64
_SILENT_FOR_GOOD: Final = 60.0  # seconds without any sign of progress after which a stall is given up

_WAITED_THROUGH: Final = {Outcome.TIMEOUT, Outcome.CUT, Outcome.SERVER_ERROR}
_ENDS_SILENTLY: Final = {Witness.QUEUE, Witness.VICTIM, Witness.DOWN}
_FAILED: Final = {Outcome.REFUSED, Outcome.CUT, Outcome.SERVER_ERROR}


@dataclass(frozen=True, slots=True)
class StallLimits:
    """When a gap is a stall; seconds, and multiples of what is usual."""

    floor: float = 0.5
    factor: float = 8.0
    ttft: float = 10.0
    hang: float = 30.0

    def above(self, usual: float | None) -> float:
        """The gap above which readers are stalled, where `usual` is what gaps usually are."""
        return self.floor * _UNKNOWN_FACTOR if usual is None else max(self.floor, self.factor * usual)


@dataclass(slots=True)
class _Reader:
    """One stream of ours."""

    since: float
    decoding: bool = False
    burst: bool = False
    recent: deque[Gap] = field(default_factory=deque)  # of the last two seconds


@dataclass(frozen=True, slots=True)
class _Wait:
    stream: int
    start: float
    end: float
    first: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class _Progress:
    since: float
    until: float
    normal: float | None  # seconds that its steps usually take; None when that is unknown or nobody decoded


@dataclass(slots=True)
class StallWatch:
    """Finds and judges the stalls of one engine; every method takes its time from the observation."""

    engine: str
    limits: StallLimits
    around: Surroundings
    baseline: Baseline
    window: EngineWindow = field(default_factory=EngineWindow)
    ledger: Ledger = field(init=False)
    _queue: QueueWatch = field(default_factory=QueueWatch)
    _readers: dict[int, _Reader] = field(default_factory=dict)
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS_KEPT))
    _usual_gap: float | None = None
    _unjudged: list[_Wait] = field(default_factory=list)
    _progress: deque[_Progress] = field(default_factory=deque)
    _decoders: float = 0.0
    _counters: EngineCounters | None = None
    _read_at: float | None = None
    _sent_at: float = 0.0
    _estimated_at: float | None = None
    _standing: tuple[float, float] | None = None
    _flowed_at: float | None = None
    _phase: Phase = Phase.STARTING
    _live_before: list[Gap] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.engine, Scene(self.window, self.around, self.limits.hang))

    # what happens

    def stream_opened(self, seen: StreamOpened) -> None:
        """A request of ours was sent."""
        if len(self._readers) < _MOST_READERS:
            self._readers[seen.stream] = _Reader(seen.at)

    def stream_tokens(self, seen: StreamTokens) -> None:
        """One of our streams got tokens."""
        self._flowed_at = seen.at
        self.around.stream_flows(seen.at)
        reader = self._readers.get(seen.stream)
        if reader is None:
            return
        first = not reader.decoding
        if first:
            reader.decoding, reader.burst = True, seen.tokens >= _BURST
        self._unjudged.append(_Wait(seen.stream, reader.since, seen.at, first, seen.tokens))
        reader.since = seen.at

    def stream_closed(self, seen: StreamClosed) -> None:
        """One of our streams ended; what it was waiting for then is a lower bound."""
        reader = self._readers.pop(seen.stream, None)
        if seen.outcome in _FAILED:
            self.around.stream_failed(seen.at)
        if reader is not None and seen.outcome in _WAITED_THROUGH:
            self._unjudged.append(_Wait(seen.stream, reader.since, seen.at, not reader.decoding, 0))

    def scraped(
        self,
        sample: EngineSample,
        seen: EngineCounters,
        interval: StepInterval | None,
        prefill: PrefillInterval | None,
        *,
        decoders: float,
        progressed_at: float | None,
    ) -> None:
        """Takes a scrape of this engine.

        Args:
            sample: The scrape.
            seen: What it said of this engine.
            interval: What became of its steps since the scrape before.
            prefill: The evidence of prefill since the last scrape of the estimator's lane.
            decoders: Requests known to decode now.
            progressed_at: The last reading that saw a step end.
        """
        before = self._decoders
        decoders = min(decoders, seen.running) if seen.running is not None else decoders
        usual = self._usual_step(before)
        silent_from = self._read_at
        stretch = self.window.scraped(
            sample,
            seen,
            prefill,
            moved=interval is not None and interval.moved,
            decoders=decoders,
            threshold=self.limits.above(usual),
            baseline=self._usual_step,
        )
        self._counters = seen
        self._decoders = decoders
        self._sent_at = sample.sent_at
        if sample.lane is not Lane.DETECTION:
            self._estimated_at = sample.sent_at
        if self.around.page_silent and silent_from is not None and before >= 0.5:
            self._page_gap(silent_from, sample.at, usual)
        self._read_at = sample.at
        ours = sum(not reader.decoding for reader in self._readers.values())
        self._queue.read(sample.at, seen, moved=interval is None or interval.moved, ours=ours)
        if interval is not None:
            self._judge_steps(sample, interval, before, decoders, progressed_at, usual)
        if stretch is not None:
            self._judge_samples(stretch)

    def restart(self, at: float) -> None:
        """The engine is another process: its counters start over."""
        if self._decoders >= 0.5 and self._read_at is not None:
            gap = Gap(
                start=self._read_at, end=at, kind=StallKind.ENGINE, witness=Witness.DOWN, readers=self._strangers()
            )
            if gap.seconds > self.limits.floor:
                self.ledger.add(gap, at)
        self.window.restart()
        self._queue.clear()
        self._progress.clear()
        self._standing = None
        self._decoders = 0.0
        self._counters = None

    def tick(self, now: float, phase: Phase) -> None:
        """Moves everything on to `now`: judges waits that ended, opens, closes and settles stalls."""
        judged, self._unjudged = self._unjudged, []
        for wait in judged:
            self._judge_wait(wait, now)
        for reader in self._readers.values():
            while reader.recent and reader.recent[0].end < now - _PROGRESS_WINDOW:
                reader.recent.popleft()
        self._phase = phase
        live = self._live(now, phase)
        self._book_ended(live, now)
        for gap in live:
            self.ledger.touch(gap, now)
        self.ledger.move_on(live, now, calm=self._calm(now, phase), estimated_at=self._estimated_at)

    def view(self, now: float) -> StallsView:
        """The stalls as of `now`."""
        return self.ledger.view(self._live(now, self._phase))

    def _book_ended(self, live: list[Gap], now: float) -> None:
        """Books waits whose end nothing else tells: who waited was let in, or the server is back."""
        there = {(gap.witness, gap.start) for gap in live}
        for gap in self._live_before:
            if (gap.witness, gap.start) not in there:
                self.ledger.add(gap, now)
        self._live_before = [gap for gap in live if gap.witness in _ENDS_SILENTLY]

    # what is seen

    def _judge_wait(self, wait: _Wait, now: float) -> None:
        kind = StallKind.ADMISSION if wait.first else StallKind.DECODE
        usual = None if wait.first else self._usual(self._readers.get(wait.stream))
        gap = Gap(
            start=wait.start,
            end=wait.end,
            kind=kind,
            witness=Witness.STREAM,
            normal=usual or 0.0,
            readers=self._stream_readers(first=wait.first),
        )
        limit = self.limits.ttft if wait.first else self.limits.above(usual)
        if comparable(gap.seconds, self.around.observer.lag_within(gap.start, gap.end)):
            if gap.seconds > limit:
                self.ledger.ours(gap)
            return
        reader = self._readers.get(wait.stream)
        if gap.seconds > limit:
            self.ledger.add(gap, now)
        elif not wait.first and reader is not None and wait.tokens and self.ledger.current is None and not reader.burst:
            self._gaps.append(gap.seconds)
            self._usual_gap = None
        if not wait.first and reader is not None:
            reader.recent.append(gap)
            self._judge_stream_pace(reader, gap, now)

    def _judge_stream_pace(self, reader: _Reader, last: Gap, now: float) -> None:
        """Many gaps, none of them long, and still a fraction of the usual progress."""
        usual = self._usual(reader)
        if usual is None or (len(self._gaps) < _LEAST_GAPS and not reader.burst):
            return
        covered = sum(gap.seconds for gap in reader.recent)
        if covered < _FILLED * _PROGRESS_WINDOW or last.seconds * _RECOVERED < usual:
            return
        if len(reader.recent) * usual < _LEAST_PROGRESS * covered:
            for gap in reader.recent:
                if gap.seconds * _RECOVERED >= usual:
                    self.ledger.add(replace(gap, kind=StallKind.DEGRADED, normal=min(usual, gap.seconds)), now)

    def _judge_steps(
        self,
        sample: EngineSample,
        interval: StepInterval,
        before: float,
        decoders: float,
        progressed_at: float | None,
        usual: float | None,
    ) -> None:
        at = sample.at
        if interval.moved and self._standing is not None:
            start, _ = self._standing
            self._standing = None
            # It ended after the reading before this one, and how long after, its samples will tell.
            self.ledger.add(self._step_gap(start, max(start, interval.since), usual), at)
        # Begun inside a freeze, nothing tells who decodes: that requests run must do.
        waiting = before >= 0.5 or self.window.moved_at is None
        above = interval.silence + _ANSWER > self.limits.above(usual)
        if waiting and above and progressed_at is not None:
            self._standing = (progressed_at, sample.sent_at)
            self.ledger.touch(self._step_gap(progressed_at, sample.sent_at, usual), at)
        elif not interval.moved and interval.silence <= 0:
            self._standing = None
        normal = None
        exact = self.baseline(max(1.0, decoders)) if min(before, decoders) >= 0.5 else None
        if exact is not None and interval.steps is not None:
            normal = interval.steps * exact
        self._progress.append(_Progress(interval.since, interval.until, normal))
        while self._progress and self._progress[0].until < interval.until - 2 * _PROGRESS_WINDOW:
            self._progress.popleft()
        self._judge_pace(at)

    def _judge_pace(self, at: float) -> None:
        seconds = normal = 0.0
        picked: list[_Progress] = []
        for entry in reversed(self._progress):
            if entry.normal is None:
                return
            picked.append(entry)
            seconds += entry.until - entry.since
            normal += entry.normal
            if seconds >= _PROGRESS_WINDOW:
                break
        if seconds < _PROGRESS_WINDOW or normal >= _LEAST_PROGRESS * seconds:
            return
        last = picked[0]
        if last.normal is not None and last.normal > _RECOVERED * (last.until - last.since):
            return
        for entry in reversed(picked):
            length = entry.until - entry.since
            if entry.normal is None or entry.normal > _RECOVERED * length:
                continue
            self.ledger.add(
                Gap(
                    start=entry.since,
                    end=entry.until,
                    kind=StallKind.DEGRADED,
                    witness=Witness.PACE,
                    normal=min(length, entry.normal),
                    readers=self._strangers(),
                ),
                at,
            )

    def _judge_samples(self, stretch: Stretch) -> None:
        """Long samples of the server's own histogram, booked when the late tokens came."""
        if stretch.slow_samples <= 0:
            return
        usual = self._usual_step(stretch.decoders) or 0.0
        each = stretch.slow_seconds
        if stretch.slow_samples >= 0.5 * max(1.0, stretch.decoders):
            times = max(1.0, round(stretch.slow_samples / max(1.0, stretch.decoders)))
            length = min(times * each, stretch.seconds + each)
            end = stretch.moved_at if times == 1 and stretch.moved_at is not None else stretch.until
            gap = self._step_gap(end - length, end, times * usual)
        else:
            end = stretch.until
            gap = Gap(
                start=end - each,
                end=end,
                kind=StallKind.DECODE,
                witness=Witness.SAMPLES,
                normal=usual,
                readers=stretch.slow_samples,
            )
        self.ledger.add(gap, stretch.until)

    def _step_gap(self, start: float, end: float, usual: float | None) -> Gap:
        return Gap(
            start=start,
            end=end,
            kind=StallKind.ENGINE,
            witness=Witness.STEPS,
            normal=min(usual or 0.0, end - start),
            readers=self._strangers(),
        )

    def _page_gap(self, start: float, end: float, usual: float | None) -> None:
        if self._flowed_at is not None and self._flowed_at > start:
            return
        self.ledger.add(
            Gap(
                start=start,
                end=end,
                kind=StallKind.ENGINE,
                witness=Witness.PAGE,
                normal=usual or 0.0,
                readers=self._strangers(),
            ),
            end,
        )

    def _live(self, now: float, phase: Phase) -> list[Gap]:
        """What is open now and above its threshold."""
        found: list[Gap] = []
        if phase is Phase.ASLEEP:
            return found
        usual = self._usual_step(self._decoders)
        down = self.around.down_since(now)
        waited = self.ledger.current is not None or self._decoders >= 0.5
        if down is not None and phase is not Phase.STARTING and waited:
            found.append(
                Gap(start=down, end=now, kind=StallKind.ENGINE, witness=Witness.DOWN, readers=self._strangers())
            )
        if self._standing is not None and down is None:
            found.append(self._step_gap(*self._standing, usual))
        if self.around.page_silent and self._read_at is not None and self._decoders >= 0.5:
            flows = self._flowed_at is not None and self._flowed_at > self._read_at
            if not flows:
                found.append(
                    Gap(
                        start=self._read_at,
                        end=now,
                        kind=StallKind.ENGINE,
                        witness=Witness.PAGE,
                        normal=usual or 0.0,
                        readers=self._strangers(),
                    )
                )
        for reader in self._readers.values():
            expected = self._usual(reader) if reader.decoding else None
            limit = self.limits.above(expected) if reader.decoding else self.limits.ttft
            wait = now - reader.since
            if wait <= limit or comparable(wait, self.around.observer.lag_within(reader.since, now)):
                continue
            found.append(
                Gap(
                    start=reader.since,
                    end=now,
                    kind=StallKind.DECODE if reader.decoding else StallKind.ADMISSION,
                    witness=Witness.STREAM,
                    normal=expected or 0.0,
                    readers=self._stream_readers(first=not reader.decoding),
                )
            )
        if self._read_at is not None and down is None:
            found += self._queue.waits(threshold=self.limits.above(usual), ttft=self.limits.ttft)
        return found

    def _calm(self, now: float, phase: Phase) -> bool:
        """Whether progress was seen since the last sign of the stall, or nobody is left who could wait."""
        episode = self.ledger.current
        if episode is None or phase is Phase.ASLEEP or now - episode.bad_until >= _SILENT_FOR_GOOD:
            return True
        if self._flowed_at is not None and self._flowed_at > episode.bad_until:
            return True
        if self._read_at is None or self._sent_at < episode.bad_until:
            return False
        moved = self.window.moved_at
        return self._decoders < 0.5 or (moved is not None and moved > episode.bad_until)

    # what is usual, and who waits

    def _usual_step(self, decoders: float) -> float | None:
        """Seconds of a step with so many decoders, or with fewer where that is not known."""
        wanted = max(1.0, decoders)
        while (known := self.baseline(wanted)) is None and wanted > 1:
            wanted = max(1.0, wanted / 2)
        return known

    def _usual(self, reader: _Reader | None) -> float | None:
        """Seconds of a gap of our streams: never less than the engine's steps usually take.

        A stream that comes in bursts from its first token on is measured by these alone; where the server sends several
        steps' tokens at a time by its settings, the first one comes by itself.
        """
        step = self._usual_step(self._decoders)
        if (reader is not None and reader.burst) or len(self._gaps) < _LEAST_GAPS:
            return step
        if self._usual_gap is None:
            self._usual_gap = median(self._gaps)
        return max(self._usual_gap, step or 0.0)

    def _strangers(self) -> float:
        """Requests that decode and are not ours; one reader where nothing is known of others."""
        if self._counters is None or self._counters.itl_count is None:
            return 1.0
        return max(0.0, self._decoders - sum(reader.decoding for reader in self._readers.values()))

    def _stream_readers(self, *, first: bool) -> float:
        """Who waits with one of our streams."""
        if self._counters is None or not first:
            return self._strangers()
        ours = sum(not reader.decoding for reader in self._readers.values())
        return max(0.0, (self._counters.waiting or 0.0) - ours)
