"""What one engine did in its steps: prefill scheduled, interference, what a prompt token costs, what is still to come.

Ties the evidence for prefill to the durations of steps, takes our own canary's prompts out, and keeps what is exported
of it. Everything here is None until the engine was seen to work: a server that nobody has used yet has no figures.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from stallwatch.analysis.baseline import DecodeBaseline
from stallwatch.analysis.counting import Growth, was_reset
from stallwatch.analysis.histogram import Histogram, HistogramState
from stallwatch.analysis.interference import WINDOW, Interference, share
from stallwatch.analysis.own_prefill import OwnPrefill
from stallwatch.analysis.paired import PairedInterval, Pairing, scheduler_number, scheduler_setting
from stallwatch.analysis.prefill import Evidence, PrefillInterval, PrefillLadder
from stallwatch.analysis.step_model import PrefillBudget, StepModel, StepModelView
from stallwatch.observations import CacheFacts, EngineCounters

PER_STEP_WINDOW: Final = 15.0
"""Seconds: a scrape every 15 s misses nothing."""
ACCEPTANCE_WINDOW: Final = 60.0
PHASES: Final = ("decode", "mixed", "prefill")
TOKEN_EDGES: Final = (0.0, *(float(2**power) for power in range(16)))
"""The plugin's own edges, so that its steps are taken over exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkView:
    """What there is to say at one moment; tokens and seconds, our canary's prompts taken out."""

    evidence: Evidence
    prefill_totals: Mapping[Evidence, float]
    """Prompt tokens by the evidence that told them; each is counted once, under one."""
    per_step_mean: float | None
    per_step_max: float | None
    step_prefill: HistogramState | None
    step_seconds: Mapping[str, HistogramState]  # by phase
    baseline: float | None
    baseline_reference: float | None
    interference_mean: float | None
    interference_p95: float | None
    interference_seconds: float | None
    interference_share: float | None
    backlog: float | None
    backlog_eta: float | None
    model: StepModelView | None
    budget: PrefillBudget | None
    token_budget: int | None  # the server's own setting, where the plugin tells it
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class _Recent:
    at: float
    evidence: Evidence
    tokens: float
    steps: float
    peak: float  # tokens in the fullest step


@dataclass(slots=True)
class EngineWork:
    """State of one engine."""

    cache: CacheFacts | None = None
    worked: bool = False  # a step or a running request was seen
    last: PrefillInterval | None = None  # the latest answer of the evidence ladder
    paired: PairedInterval | None = None  # the latest interval in which the times of steps were told
    baseline: DecodeBaseline = field(default_factory=DecodeBaseline)
    model: StepModel = field(default_factory=StepModel)
    interference: Interference = field(default_factory=Interference)
    _ladder: PrefillLadder = field(default_factory=PrefillLadder)
    _pairing: Pairing = field(init=False)
    _before: EngineCounters | None = None
    _booked_own: OwnPrefill = field(default_factory=OwnPrefill)  # of what is counted, as scheduled
    _paired_own: OwnPrefill = field(default_factory=OwnPrefill)  # of what is timed, as completed
    _decoders: float | None = None  # when somebody last decoded
    _beside: bool = False  # the last steps timed had other people's prefill in them
    _totals: dict[Evidence, float] = field(default_factory=dict)
    _ahead: float = 0.0  # counted already of prompts that the server will book at their end
    _recent: deque[_Recent] = field(default_factory=deque)
    _prefill_steps: Histogram | None = None
    _seconds: dict[str, Histogram] = field(default_factory=dict)
    _backlog_moved: float = 0.0
    _own_waiting: float = 0.0
    _growth: Growth = field(default_factory=Growth)
    _drafts: deque[tuple[float, float, float]] = field(default_factory=deque)  # (at, drafted, accepted)

    def __post_init__(self) -> None:
        self._pairing = Pairing(self.baseline.seconds)

    def stream_opened(self, stream: int) -> None:
        """One of our requests was sent to this engine."""
        self._booked_own.opened(stream)
        self._paired_own.opened(stream)

    def stream_answered(self, stream: int) -> None:
        """It got a token."""
        self._booked_own.answered(stream)
        self._paired_own.answered(stream)

    def stream_closed(self, stream: int, computed: int | None) -> None:
        """It ended; `computed` tokens of its prompt were not cached, if known."""
        self._booked_own.closed(stream, computed)
        self._paired_own.closed(stream, computed)

    def restart(self) -> None:
        """The server is another process now: what is learned of it goes, our totals stay."""
        self.last = self.paired = self._before = self._decoders = None
        self._ladder, self._pairing = PrefillLadder(), Pairing(self.baseline.seconds)
        self._booked_own.restart()
        self._paired_own.restart()
        self.baseline.restart()
        self.model.restart()
        self._ahead = 0.0
        self._recent.clear()
        self._growth.forget()
        self._drafts.clear()

    def scraped(self, counters: EngineCounters, at: float) -> None:
        """Takes a scrape; those of the detection lane tell nothing here."""
        if counters.first_tokens is None:
            return
        before, self._before = self._before, counters
        if before is not None and was_reset(before, counters):
            self.restart()
            self._before = counters
        self.worked = self.worked or bool(counters.running)
        self._take_drafts(counters, at)
        seen = self._ladder.scraped(counters, at, cache=self.cache)
        if before is None or seen is None:
            return
        backlog, self.last = self.last.backlog_tokens if self.last is not None else None, seen
        if seen.backlog_tokens != backlog:
            # The step that moved it ended at any time between the two scrapes, but no step has ended since.
            self._backlog_moved = at - min(seen.until - seen.since, self._step_seconds()) / 2
        paired = self._pairing.pair(before, counters, seen)
        others = self._book(seen, paired)
        self.worked = self.worked or bool(others or (paired is not None and paired.steps))
        self._own_waiting = self._booked_own.expected
        if paired is not None:
            self._pair(paired)

    def view(
        self,
        now: float,
        *,
        objective: float,
        fresh: bool,
        stalls: Iterable[tuple[float, float]] = (),
        judged: float = 0.0,
    ) -> WorkView | None:
        """What there is to say; None while the engine was not seen to work.

        Args:
            now: The moment, seconds.
            objective: Seconds that a reader may wait for a token.
            fresh: Whether the last scrape still holds, so that live figures may be shown.
            stalls: Spans in which readers stood still, disjoint.
            judged: Seconds of the window of interference for which there was a verdict.
        """
        if not self.worked:
            return None
        self.baseline.forget(now)
        known = self.paired is not None
        model = self.model.view()
        plugin = self._before.plugin if self._before is not None else {}
        backlog, eta = self._backlog(now) if fresh else (None, None)
        mean, largest = self._per_step(now) if fresh else (None, None)
        last = self.last
        return WorkView(
            evidence=last.evidence if last is not None and fresh else Evidence.UNKNOWN,
            prefill_totals=dict(self._totals),
            per_step_mean=mean,
            per_step_max=largest,
            step_prefill=self._prefill_steps.state() if self._prefill_steps is not None else None,
            step_seconds={phase: histogram.state() for phase, histogram in self._seconds.items()},
            baseline=None if self._decoders is None else self.baseline.seconds(self._decoders),
            baseline_reference=None if self._decoders is None else self.baseline.reference(self._decoders),
            interference_mean=self.interference.ratio(now),
            interference_p95=self.interference.p95(now),
            interference_seconds=self.interference.seconds_total if known and self.interference.judged else None,
            interference_share=self._share(stalls, judged, now),
            backlog=backlog,
            backlog_eta=eta,
            model=model,
            budget=self.model.budget(
                objective,
                view=model,
                deepest=last.balance.open_tokens if last is not None and last.balance is not None else None,
                max_num_seqs=scheduler_number(plugin, "max_num_seqs"),
            ),
            token_budget=scheduler_number(plugin, "max_num_batched_tokens"),
            acceptance=self._acceptance(now),
        )

    def _share(self, stalls: Iterable[tuple[float, float]], judged: float, now: float) -> float | None:
        if not self.interference.judged:
            return None
        recent = [(max(start, now - WINDOW), end) for start, end in stalls if end > now - WINDOW]
        return share(recent, self.interference.prefilling, judged)

    def _book(self, seen: PrefillInterval, paired: PairedInterval | None) -> float:
        """Counts what the interval computed; returns the part that is not ours."""
        tokens = seen.prefill_tokens
        if tokens is None:
            self._booked_own.take(0.0)
            return 0.0
        ours = self._booked_own.take(tokens)
        others = max(0.0, tokens - ours)
        booked = seen.estimates.get(Evidence.COMPLETION)
        if seen.evidence is Evidence.COMPLETION:
            # What better evidence counted while the prompt was computed must not be counted again at its end.
            known = min(self._ahead, others)
            self._ahead -= known
            others -= known
        else:
            self._ahead = max(0.0, self._ahead + tokens - (booked or 0.0))
            if seen.balance is not None and seen.balance.trusted:
                self._ahead = min(self._ahead, seen.balance.open_tokens)
        self._totals[seen.evidence] = self._totals.get(seen.evidence, 0.0) + others
        if seen.evidence is not Evidence.COMPLETION:
            self._remember(seen, paired, others)
        return others

    def _remember(self, seen: PrefillInterval, paired: PairedInterval | None, others: float) -> None:
        if seen.exact_steps is not None:
            steps = seen.exact_steps.steps
            means = [s.prefill / s.steps for s in seen.exact_steps.phases.values() if s.steps > 0]
            peak = min(others, max(means, default=0.0))
        else:
            full = _full_steps(seen, paired, others)
            steps = max(paired.steps if paired is not None else 0.0, full)
            peak = others / full if full else 0.0
        if steps > 0:
            self._recent.append(_Recent(seen.until, seen.evidence, others, steps, peak))
        while self._recent and self._recent[0].at <= seen.until - PER_STEP_WINDOW:
            self._recent.popleft()

    def _pair(self, seen: PairedInterval) -> None:
        prefill = seen.prefill or 0.0
        ours = self._paired_own.take(prefill)
        others = prefill - ours
        if ours > 0:
            # Estimates are rounded to blocks: what is left beside our own prompt need not be anybody's.
            block = self.cache.block_size if self.cache is not None and self.cache.block_size is not None else 0
            others = others if others > block else 0.0
        held_up = self.model.held_up(seen)
        beside = (others > 0 or (seen.in_flight and self._beside)) and not held_up
        expected = self.baseline.seconds(seen.decoders) if seen.steps else None
        self.interference.add(seen, beside=beside, baseline=expected)
        if seen.steps or prefill:
            self._beside = beside
        if seen.steps:
            self.paired = seen
            self._decoders = seen.decoders
            if seen.decoding_only:
                self.baseline.add(seen.until, seen.decoders, seen.seconds, seen.steps)
        if (others > 0 or not ours) and not held_up:
            self.model.add(seen)
        self._observe(seen, others=others, ours=ours)

    def _observe(self, seen: PairedInterval, *, others: float, ours: float) -> None:
        """Adds single steps to the histograms."""
        only_ours = ours > 0 and others <= 0
        if seen.exact is not None:
            for phase, sums in seen.exact.phases.items():
                if sums.steps > 0 and phase in PHASES and not (only_ours and phase != "decode"):
                    self._took(phase, sums.seconds / sums.steps, round(sums.steps))
            buckets = seen.exact.prefill_buckets
            if buckets is not None:
                below = 0.0
                for edge, upto in zip(buckets.edges, buckets.counts, strict=True):
                    if edge <= 0 or not only_ours:
                        self._carried(edge, round(upto - below))
                    below = upto
                self._steps_by_prefill().sum += others
        elif seen.single and seen.prefill is not None and not only_ours and not seen.in_flight:
            self._took("mixed" if others > 0 else "decode", seen.seconds, 1)
            self._carried(others, 1)
            self._steps_by_prefill().sum += others

    def _took(self, phase: str, seconds: float, steps: int) -> None:
        self._seconds.setdefault(phase, Histogram()).observe(seconds, steps)

    def _carried(self, tokens: float, steps: int) -> None:
        if steps > 0:
            self._steps_by_prefill().counts[bisect_left(TOKEN_EDGES, tokens)] += steps

    def _steps_by_prefill(self) -> Histogram:
        if self._prefill_steps is None:
            self._prefill_steps = Histogram(TOKEN_EDGES)
        return self._prefill_steps

    def _per_step(self, now: float) -> tuple[float | None, float | None]:
        """Mean and largest prefill of a step over the last seconds, by the present evidence alone."""
        evidence = self.last.evidence if self.last is not None else Evidence.UNKNOWN
        recent = [e for e in self._recent if e.at > now - PER_STEP_WINDOW and e.evidence is evidence]
        steps = sum(entry.steps for entry in recent)
        if steps <= 0:
            return None, None
        return sum(entry.tokens for entry in recent) / steps, max(entry.peak for entry in recent)

    def _backlog(self, now: float) -> tuple[float | None, float | None]:
        last = self.last
        if last is None or last.backlog_tokens is None:
            return None, None
        backlog = last.backlog_tokens
        if self._own_waiting > 0 and backlog <= self._own_waiting:
            backlog = 0.0
        if backlog <= 0:
            return 0.0, 0.0
        if last.backlog_eta is None:
            return backlog, None
        # It was right when a step ended. The step under way brings the end nearer, one that hangs does not; and under
        # async scheduling it is a step whose tokens do not count as open any more.
        usual = self._step_seconds()
        since = max(0.0, now - self._backlog_moved)
        match self._asynchronous():
            case True:
                shift = usual - min(usual, since)
            case False:
                shift = -min(usual, since)
            case None:
                shift = -min(usual / 2, since)
        return backlog, max(0.0, last.backlog_eta + shift)

    def _step_seconds(self) -> float:
        return self.paired.seconds / self.paired.steps if self.paired is not None else 0.0

    def _asynchronous(self) -> bool | None:
        """Whether the balance runs a step ahead of what has ended; None while nothing told."""
        told = scheduler_setting(self._before.plugin, "async_scheduling") if self._before is not None else None
        if told is not None:
            return told == "true"
        return self._pairing.ahead(self.last) if self.last is not None else None

    def _take_drafts(self, counters: EngineCounters, at: float) -> None:
        drafted = self._growth.of(counters, "spec_draft_tokens")
        accepted = self._growth.of(counters, "spec_accepted_tokens")
        if drafted and accepted is not None:
            self._drafts.append((at, drafted, accepted))
        while self._drafts and self._drafts[0][0] <= at - ACCEPTANCE_WINDOW:
            self._drafts.popleft()

    def _acceptance(self, now: float) -> float | None:
        recent = [entry for entry in self._drafts if entry[0] > now - ACCEPTANCE_WINDOW]
        drafted = sum(entry[1] for entry in recent)
        return min(1.0, sum(entry[2] for entry in recent) / drafted) if drafted > 0 else None


def _full_steps(seen: PrefillInterval, paired: PairedInterval | None, tokens: float) -> float:
    """Steps that the prefill of an interval was spread over, where no plugin counts them."""
    if tokens <= 0:
        return 0.0
    if paired is not None and paired.mixed:
        return paired.mixed
    budget = seen.balance.step_budget if seen.balance is not None else None
    return max(1.0, ceil(tokens / budget - 0.01)) if budget else 1.0
