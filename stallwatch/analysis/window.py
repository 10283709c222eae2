"""What one engine did, stretch by stretch: the facts that rules of attribution look at.

A stretch lies between two readings of the estimator's fields of which the later one saw a step end. While a step is
under way there is no new evidence: its end brings all of it, so readings without movement are joined to the stretch
that the next movement closes. Bounded: a quarter of an hour of stretches.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from stallwatch.analysis.counting import bucket_delta, delta
from stallwatch.analysis.prefill import PrefillInterval
from stallwatch.observations import Buckets, EngineCounters, EngineSample, Lane

_KEPT_SECONDS: Final = 900.0
_KEPT: Final = 4096
_QUICK: Final = 0.05  # seconds of a step that needs no explanation, while it is not known what is usual
_PACE_SAMPLES: Final = 64
_LEAST_LOSS: Final = 0.1  # of a stretch, below which its pace is noise
_LEAST_TOKENS: Final = 128  # of prefill in a stretch, below which its pace is noise

Baseline = Callable[[float], float | None]
"""Seconds of a step with so many decoders and no prefill; None while unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One engine from `since` to `until`; counts are those booked in it, gauges the largest readings."""

    since: float
    until: float
    moved: bool = False
    moved_at: float | None = None  # the first reading in it that saw a movement
    answered: int = 0  # readings
    steps: float | None = None  # that gave somebody a token
    decoders: float = 0.0
    lost: float | None = None  # seconds in which decoders got nothing, beyond the usual; None when not known
    slow_samples: float = 0.0  # ITL samples above the threshold of a stall
    slow_seconds: float = 0.0  # their mean length
    running: float = 0.0
    waiting: float = 0.0
    deferred: float = 0.0
    kv_usage: float = 0.0
    preemptions: float = 0.0
    prefill: float | None = None  # tokens scheduled in it; None when not known by interval
    flown: float = 0.0  # tokens scheduled just before it, which its first step may have computed
    backlog: tuple[float, float] | None = None  # uncomputed tokens of admitted prompts at both ends
    prefilling: float = 0.0  # requests that run and do not decode
    booked: float = 0.0  # prompt tokens of prompts that ended in it
    admitted: float = 0.0  # uncached tokens of prompts that were let in
    recompute: float = 0.0  # tokens that no prompt explains
    parked: bool = False
    aborted: float = 0.0  # tokens of prompts that nobody waits for any more
    fetching: float = 0.0
    loaded: float = 0.0  # seconds spent on loading KV
    connector: bool = False  # a KV connector has shown itself

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.until - self.since

    @property
    def has_prefill(self) -> bool:
        """Whether other evidence than a late booking says that prompts were computed in it."""
        if self.backlog is not None:
            return bool(self.prefill) or (self.backlog[0] > 0 and self.running > 0)
        if self.prefill is not None:
            return self.prefill + self.flown > 0
        return self.prefilling >= 1

    @property
    def pressed(self) -> bool:
        """Whether the KV cache was as good as full."""
        return self.kv_usage > 0.95


@dataclass(slots=True)
class _Gauges:
    """Largest readings since the last stretch was closed."""

    answered: int = 0
    moved_at: float | None = None
    running: float = 0.0
    waiting: float = 0.0
    deferred: float = 0.0
    kv_usage: float = 0.0
    fetching: float = 0.0

    def take(self, seen: EngineCounters, *, moved: bool, at: float) -> None:
        self.answered += 1
        if moved and self.moved_at is None:
            self.moved_at = at
        for name, value in (
            ("running", seen.running),
            ("waiting", seen.waiting),
            ("deferred", seen.waiting_deferred),
            ("kv_usage", seen.kv_usage),
            ("fetching", seen.kv_fetch_waiting),
        ):
            if value is not None and value > getattr(self, name):
                setattr(self, name, value)


@dataclass(slots=True)
class EngineWindow:
    """The last quarter of an hour of one engine."""

    moved_at: float | None = None  # the last reading that saw a step end
    _stretches: deque[Stretch] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _pace: deque[float] = field(default_factory=lambda: deque(maxlen=_PACE_SAMPLES))
    _gauges: _Gauges = field(default_factory=_Gauges)
    _last: EngineCounters | None = None  # the last reading of the estimator's fields
    _since: float = 0.0  # its time, or that of an earlier one without movement since
    _read_at: float = 0.0
    _decoders: float = 0.0
    _backlog: float | None = None
    _moved: bool = False
    _prefill: float | None = 0.0  # of the readings without movement so far
    _admitted: float = 0.0
    _flown: float = 0.0  # tokens scheduled in the stretch before
    _connector: bool = False

    def scraped(
        self,
        sample: EngineSample,
        seen: EngineCounters,
        prefill: PrefillInterval | None,
        *,
        moved: bool,
        decoders: float,
        threshold: float,
        baseline: Baseline,
    ) -> Stretch | None:
        """Takes a scrape; the stretch that it closed, if it did.

        Args:
            sample: The scrape.
            seen: What it said of this engine.
            prefill: The prefill evidence of the interval that it ends, for the estimator's lane.
            moved: Whether a step ended since the scrape before.
            decoders: Requests known to decode before it.
            threshold: Seconds above which an ITL sample is a stall.
            baseline: The usual duration of steps.
        """
        if moved:
            self.moved_at = sample.at
        self._gauges.take(seen, moved=moved, at=sample.at)
        self._moved = self._moved or moved
        self._read_at = sample.at
        if prefill is not None:
            self._admitted = max(self._admitted, _admission(prefill))
            self._prefill = _added(self._prefill, _tokens(prefill))
        if sample.lane is Lane.DETECTION:
            return None
        before, self._last = self._last, seen
        if before is None:
            self._begin(sample.at, decoders, prefill)
            return None
        if not self._moved:
            self._last = before
            return None
        closed = self._close(before, seen, prefill, sample.at, threshold=threshold, baseline=baseline)
        self._learn(closed)
        self._stretches.append(closed)
        while self._stretches[0].until < sample.at - _KEPT_SECONDS:
            self._stretches.popleft()
        self._begin(sample.at, decoders, prefill)
        return closed

    def restart(self) -> None:
        """The engine is another process: nothing may be compared across; what was seen stays."""
        self._last = None
        self._gauges = _Gauges()
        self._moved = False
        self._prefill, self._admitted, self._flown = 0.0, 0.0, 0.0
        self._backlog = None
        self.moved_at = None

    def open_stretch(self, now: float) -> Stretch | None:
        """What is known since the last stretch ended; None before the first reading."""
        if self._last is None:
            return None
        gauges = self._gauges
        idle = self._decoders < 0.5
        return Stretch(
            since=self._since,
            until=max(now, self._since),
            moved=self._moved,
            moved_at=gauges.moved_at,
            answered=gauges.answered,
            decoders=self._decoders,
            lost=None if self._moved else 0.0 if idle else max(0.0, now - self._since),
            running=gauges.running or (self._last.running or 0.0),
            waiting=gauges.waiting,
            deferred=gauges.deferred,
            kv_usage=gauges.kv_usage,
            prefill=self._prefill,
            flown=self._flown,
            backlog=None if self._backlog is None else (self._backlog, self._backlog),
            prefilling=max(0.0, (self._last.running or 0.0) - self._decoders),
            admitted=self._admitted,
            fetching=gauges.fetching,
            connector=self._connector,
        )

    def between(self, start: float, end: float) -> list[Stretch]:
        """The stretches that overlap [start, end], in order, with the open one last."""
        first = bisect_left(self._stretches, start, key=lambda stretch: stretch.until)
        picked: list[Stretch] = []
        for index in range(first, len(self._stretches)):
            stretch = self._stretches[index]
            if stretch.since >= end:
                break
            picked.append(stretch)
        ongoing = self.open_stretch(end)
        if ongoing is not None and ongoing.until > max(start, ongoing.since):
            picked.append(ongoing)
        return picked

    def newest(self) -> Iterator[Stretch]:
        """Stretches from the newest back."""
        return reversed(self._stretches)

    def pace(self) -> float | None:
        """The most that a token of prefill was seen to cost, seconds: nine tenths of the stretches had less."""
        if len(self._pace) < 3:
            return None
        return sorted(self._pace)[int(0.9 * (len(self._pace) - 1))]

    def _begin(self, at: float, decoders: float, prefill: PrefillInterval | None) -> None:
        self._since, self._decoders = at, decoders
        self._moved = False
        self._flown = (self._prefill or 0.0) if self._prefill is not None else 0.0
        self._prefill, self._admitted = 0.0, 0.0
        self._gauges = _Gauges()
        self._backlog = prefill.backlog_tokens if prefill is not None else None
        if prefill is not None and prefill.balance is not None and prefill.balance.trusted:
            # A prompt whose last chunk is in flight has no backlog and is still being computed.
            self._backlog = prefill.balance.open_tokens

    def _close(
        self,
        before: EngineCounters,
        seen: EngineCounters,
        prefill: PrefillInterval | None,
        at: float,
        *,
        threshold: float,
        baseline: Baseline,
    ) -> Stretch:
        steps = delta(before.iterations, seen.iterations)
        samples = delta(before.itl_count, seen.itl_count)
        itl = delta(before.itl_sum, seen.itl_sum)
        decoders = self._decoders if self._decoders >= 0.5 else samples / steps if samples and steps else 0.0
        usual = baseline(decoders) if decoders >= 0.5 else None
        slow, slow_seconds = _slow(before.itl_buckets, seen.itl_buckets, samples, itl, threshold, usual)
        balance = prefill.balance if prefill is not None else None
        trusted = balance is not None and balance.trusted
        backlog = self._backlog
        after = balance.open_tokens if balance is not None and trusted else None
        externals = (delta(before.external_queries, seen.external_queries) or 0.0) > 0
        loaded = delta(before.kv_load_seconds, seen.kv_load_seconds) or 0.0
        gauges = self._gauges
        self._connector = self._connector or externals or loaded > 0 or gauges.fetching > 0
        return Stretch(
            since=self._since,
            until=at,
            moved=True,
            moved_at=gauges.moved_at,
            answered=gauges.answered,
            steps=steps,
            decoders=decoders,
            lost=self._lost(at, steps, samples, itl, usual, whole=slow_seconds if slow >= 0.5 * decoders else 0.0),
            slow_samples=slow,
            slow_seconds=slow_seconds,
            running=gauges.running,
            waiting=gauges.waiting,
            deferred=gauges.deferred,
            kv_usage=gauges.kv_usage,
            preemptions=delta(before.preemptions, seen.preemptions) or 0.0,
            prefill=self._prefill,
            flown=self._flown,
            backlog=None if backlog is None or after is None else (backlog, after),
            prefilling=max(0.0, gauges.running - decoders),
            booked=delta(before.prompt_local_compute, seen.prompt_local_compute) or 0.0,
            admitted=self._admitted,
            recompute=max(0.0, balance.residual_tokens or 0.0) if balance is not None and trusted else 0.0,
            parked=balance is not None and balance.parked,
            aborted=balance.aborted_tokens if balance is not None and trusted else 0.0,
            fetching=gauges.fetching,
            loaded=loaded,
            connector=self._connector,
        )

    def _lost(
        self,
        at: float,
        steps: float | None,
        samples: float | None,
        itl: float | None,
        usual: float | None,
        *,
        whole: float,
    ) -> float | None:
        """Seconds in which decoders got nothing beyond the usual; `whole` is a slow step that all of them shared."""
        if steps is None:
            return None
        if usual is None and (not samples or itl is None):
            return 0.0 if self._decoders < 0.5 and not samples else None
        usual = _QUICK if usual is None else usual
        beyond = max(0.0, at - self._since - steps * usual)
        if samples and itl is not None:
            # A request that was preempted brings one long sample of its own: no more than the whole stretch is lost.
            return min(beyond, max(0.0, min(steps, samples) * (itl / samples - usual), whole - usual))
        return beyond

    def _learn(self, seen: Stretch) -> None:
        if seen.prefill is None or not seen.lost or seen.preemptions:
            return
        tokens = seen.prefill + seen.flown
        # Where admission runs ahead, the tokens of a stretch may be those of a step that ends in the next one.
        if tokens >= _LEAST_TOKENS and seen.lost >= _LEAST_LOSS * seen.seconds:
            self._pace.append(seen.lost / tokens)


def clipped(stretch: Stretch, start: float, end: float) -> Stretch:
    """The part of a stretch in [start, end]; what is lost in it is taken to lie in it as far as it fits."""
    return replace(stretch, since=max(start, stretch.since), until=min(end, stretch.until))


def _tokens(prefill: PrefillInterval) -> float | None:
    """Tokens scheduled or completed in the interval, whichever is more; None when not known by interval."""
    if prefill.evidence not in {"plugin", "mfu", "balance"} or prefill.prefill_tokens is None:
        return None
    if prefill.evidence == "balance" and prefill.balance is not None:
        return max(prefill.prefill_tokens, prefill.balance.completed_tokens)
    return prefill.prefill_tokens


def _admission(prefill: PrefillInterval) -> float:
    return prefill.balance.largest_admission if prefill.balance is not None else 0.0


def _added(total: float | None, more: float | None) -> float | None:
    return None if total is None or more is None else total + more


def _slow(
    before: Buckets | None,
    after: Buckets | None,
    samples: float | None,
    itl: float | None,
    threshold: float,
    usual: float | None,
) -> tuple[float, float]:
    """How many ITL samples were above the threshold, and their mean length in seconds."""
    grown = bucket_delta(before, after)
    if grown is None or not samples or itl is None:
        if samples and itl is not None and itl / samples > threshold:
            return samples, itl / samples
        return 0.0, 0.0
    index = bisect_left(grown.edges, threshold * (1 - 1e-9))
    if index >= len(grown.edges) - 1:
        return 0.0, 0.0
    slow = grown.counts[-1] - grown.counts[index]
    if slow <= 0:
        # An edge above the threshold hides what lies between the two, unless all samples are alike.
        return (samples, itl / samples) if itl / samples > threshold else (0.0, 0.0)
    rest = (samples - slow) * min(usual or 0.0, threshold)
    return slow, max(grown.edges[index], (itl - rest) / slow)
