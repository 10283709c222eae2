"""The time of steps beside their prefill: what one interval between two scrapes says of the steps that ended in it.

Both sides are booked when a step ends, so they belong together whatever the poll rate: a scrape that catches no end
of a step shows neither, and the next one shows both. What a scrape cannot show is how the seconds of several steps
divide among them; everything built on these intervals is therefore a sum over steps, or says that it needs single ones.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from stallwatch.analysis.counting import bucket_delta, delta
from stallwatch.analysis.prefill import Evidence, ExactSteps, PrefillInterval
from stallwatch.observations import Buckets, EngineCounters

STEPWISE: Final = frozenset({Evidence.PLUGIN, Evidence.MFU, Evidence.BALANCE})
"""Evidence that says in which interval prefill was computed; what is booked at a prompt's end does not."""
_VOTES: Final = 3
_SLOW: Final = 1.25
"""Times the usual length from which a step is clearly longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedInterval:
    """Steps that ended in an interval; times in seconds, prefill in prompt tokens."""

    since: float
    until: float
    began: float
    """No step of these began before: the interval in which a step was seen to end before them began here."""
    evidence: Evidence
    steps: float
    """Steps in which somebody decoded."""
    decoders: float
    """Requests that decoded, on average over those steps; 0 without any."""
    seconds: float
    """What those steps took together: their mean ITL times their number. Right while decoders do not change."""
    samples: float
    """ITL samples: one for each decoder and step."""
    waited: float
    """Seconds that decoders waited, summed over them."""
    decoders_beside: float
    """Requests that decoded in the steps with prefill: those whose prompt it was join only afterwards."""
    prefill: float | None
    """Computed in steps that ended, our own prompts included; None when the evidence does not say so by interval."""
    mixed: float
    """Steps with prefill among `steps`: from the plugin, or those that were slow, or as many as the budget demands."""
    context: float | None
    """Prompt tokens before the middle of that prefill, when it was of one prompt whose beginning was seen."""
    decoding_only: bool
    """It is certain that nobody's prompt was computed: neither by evidence nor by a request that got no token."""
    in_flight: bool
    """No prefill was told, but that of the interval before, or what was open then, may have been in these steps: the
    balance runs one step ahead under async scheduling, and cannot always know that it does."""
    accompanied: bool
    """Somebody decoded from the interval's beginning and in every step, so that no prefill went on without readers."""
    exact: ExactSteps | None

    @property
    def single(self) -> bool:
        """Whether one step ended, so that its duration and prefill are known."""
        return self.steps == 1

    def excess(self, usual: float) -> float:
        """Seconds that the steps took beyond `usual` seconds each, all of it put on the steps with prefill.

        Not `seconds` less the usual: in the mean ITL a slow step counts by its decoders, and a request that was
        prefilled in it decodes in the fast ones after it.
        """
        beyond = (self.waited - self.samples * usual) / self.decoders_beside
        # A request that was preempted brings one long sample beside the short ones of the same steps.
        return min(beyond, self.until - self.began)


@dataclass(slots=True)
class _Position:
    """How far the engine is into the prompt that it computes."""

    done: float = 0.0
    cached: float = 0.0

    def context(self, tokens: float, *, firsts: float, booked: float, hits: float) -> float | None:
        """Takes an interval's prefill; the context of its middle if it was of one prompt.

        Args:
            tokens: Computed in the interval.
            firsts: Prompts that ended.
            booked: Their computed length.
            hits: Tokens found in the prefix cache by prompts admitted in the interval.
        """
        if self.done <= 0:
            self.cached = hits
        before = self.done
        if not firsts:
            self.done += tokens
            return self.cached + before + tokens / 2 if tokens > 0 else None
        rest = booked - before
        self.done = max(0.0, tokens - max(0.0, rest))
        # A block of slack: the estimates are rounded, and so is what a cached prompt computes again.
        if firsts == 1 and 0 < tokens <= rest + 1:
            return self.cached + before + tokens / 2
        return None


@dataclass(slots=True)
class _Order:
    """Whether prompts are announced a step before they are computed, by what the steps took.

    A prompt that takes several steps slows the step whose end announces it down, or, under async scheduling, only the
    next one.
    """

    votes: int = 0
    _open: bool = True  # a prompt may be from before we looked
    _quiet: bool = False  # a prompt was announced by a step that was not slow

    @property
    def ahead(self) -> bool | None:
        return None if self.votes == 0 else self.votes > 0

    def take(self, seen: PrefillInterval, *, slow: bool) -> None:
        """Takes an interval with steps; `slow` says whether their excess was more than a usual step."""
        was_open, self._open = self._open, seen.backlog_tokens is None or seen.backlog_tokens > 0
        quiet, self._quiet = self._quiet, False
        if quiet and slow:
            self.votes = min(self.votes + 1, _VOTES)
        elif not was_open and self._open and seen.prefill_tokens:
            self._quiet = not slow
            if slow:
                self.votes = max(self.votes - 1, -_VOTES)


Usual = Callable[[float], float | None]
"""Seconds of a step with so many decoders and no prefill; None while unknown."""


@dataclass(slots=True)
class Pairing:
    """Pairs successive intervals of one engine."""

    usual: Usual
    _moved_since: float | None = None
    _scheduled: bool = False  # the interval before scheduled prefill, or left some to come
    _position: _Position = field(default_factory=_Position)
    _decoders: float | None = None  # at the end of the interval before
    _order: _Order = field(default_factory=_Order)

    def pair(self, before: EngineCounters, after: EngineCounters, seen: PrefillInterval) -> PairedInterval | None:
        """What the interval from `before` to `after` says; None when the counters needed are not there."""
        outputs = delta(before.iterations, after.iterations)
        samples = delta(before.itl_count, after.itl_count)
        itl = delta(before.itl_sum, after.itl_sum)
        if outputs is None or samples is None or itl is None:
            return None
        prefill = completed(seen)
        began = self._moved_since if self._moved_since is not None else seen.since
        # A step whose only output was a first token has no ITL sample.
        steps = min(outputs, samples)
        decoders = max(1.0, samples / steps) if steps else 0.0
        seconds = itl / samples * steps if samples else 0.0
        if self._moved_since is not None:
            seconds = min(seconds, seen.until - began)
        if steps or prefill:
            self._moved_since = seen.since
        usual = self.usual(decoders) if steps else None
        if usual is not None:
            self._order.take(seen, slow=(itl - samples * usual) / decoders > usual)
        ahead = seen.evidence is Evidence.BALANCE and self.ahead(seen) is not False
        in_flight = self._scheduled and ahead and not prefill
        if steps or prefill or seen.prefill_tokens:
            self._scheduled = bool(seen.prefill_tokens or seen.backlog_tokens)
        accompanied = samples >= outputs and self._decoders != 0
        mixed, beside = self._mixed(before, after, seen, prefill, steps=steps, samples=samples)
        firsts = delta(before.first_tokens, after.first_tokens) or 0.0
        prefilling = (after.running or 0.0) - round(decoders) - firsts
        self._decoders = _decoders_at_end(before, after, seen, steps=steps, samples=samples, firsts=firsts)
        return PairedInterval(
            since=seen.since,
            until=seen.until,
            began=began,
            evidence=seen.evidence,
            steps=steps,
            decoders=decoders,
            seconds=seconds,
            samples=samples,
            waited=itl,
            decoders_beside=beside,
            prefill=prefill,
            mixed=mixed,
            context=self._context(before, after, seen, prefill, firsts=firsts, prefilling=prefilling),
            decoding_only=not in_flight
            and _decoding_only(before, after, seen, prefill, prefilling=prefilling + firsts),
            in_flight=in_flight,
            accompanied=accompanied,
            exact=seen.exact_steps,
        )

    def ahead(self, seen: PrefillInterval) -> bool | None:
        """Whether what the balance counts runs one step ahead of what has ended; None while nothing shows it."""
        lead = seen.balance.lead if seen.balance is not None else None
        return lead if lead is not None else self._order.ahead

    def _mixed(
        self,
        before: EngineCounters,
        after: EngineCounters,
        seen: PrefillInterval,
        prefill: float | None,
        *,
        steps: float,
        samples: float,
    ) -> tuple[float, float]:
        """How many of the steps had prefill, and how many decoded in each of those."""
        decoders = max(1.0, samples / steps) if steps else 1.0
        if seen.exact_steps is not None:
            exact = seen.exact_steps.phases.get("mixed")
            if exact is None or not exact.steps or not exact.decode:
                return 0.0, decoders
            # Decode tokens are more than decoders where drafts are computed too: shares are the same.
            tokens = sum(sums.decode for sums in seen.exact_steps.phases.values())
            return exact.steps, max(1.0, exact.decode / exact.steps * samples / tokens)
        if not prefill or not steps:
            return 0.0, decoders
        begun = self._decoders if self._decoders and steps > 1 else decoders
        slow = _slow(bucket_delta(before.itl_buckets, after.itl_buckets), self.usual(decoders))
        if slow:
            mixed = min(steps, max(1.0, round(slow / begun)))
            return mixed, max(1.0, slow / mixed)
        budget = seen.balance.step_budget if seen.balance is not None else None
        room = None if budget is None else budget - begun
        mixed = min(steps, max(1.0, ceil(prefill / room - 0.01))) if room is not None and room >= 1 else 1.0
        return mixed, decoders if mixed == steps else max(1.0, begun)

    def _context(
        self,
        before: EngineCounters,
        after: EngineCounters,
        seen: PrefillInterval,
        prefill: float | None,
        *,
        firsts: float,
        prefilling: float,
    ) -> float | None:
        if prefill is None:
            self._position = _Position()
            return None
        context = self._position.context(
            prefill,
            firsts=firsts,
            booked=delta(before.prompt_local_compute, after.prompt_local_compute) or 0.0,
            hits=delta(before.prefix_hits, after.prefix_hits) or 0.0,
        )
        if seen.balance is not None and (seen.balance.aborted_tokens > 0 or seen.balance.open_tokens <= 0):
            self._position = _Position()
        # Of several prompts at once nobody knows how far each is.
        return context if prefilling <= 1 else None


def completed(seen: PrefillInterval) -> float | None:
    """Prompt tokens in steps that ended in the interval, where the evidence tells them by interval.

    The balance counts what was scheduled; under async scheduling that is one step ahead of the durations.
    """
    if seen.evidence not in STEPWISE:
        return None
    if seen.evidence is Evidence.BALANCE and seen.balance is not None:
        return seen.balance.completed_tokens
    return seen.prefill_tokens


def _slow(grown: Buckets | None, usual: float | None) -> float:
    """ITL samples that are clearly longer than usual, as far as bucket edges can tell."""
    if grown is None or usual is None:
        return 0.0
    edge = bisect_left(grown.edges, _SLOW * usual)
    return grown.counts[-1] - grown.counts[edge] if edge < len(grown.edges) else 0.0


def _decoders_at_end(
    before: EngineCounters,
    after: EngineCounters,
    seen: PrefillInterval,
    *,
    steps: float,
    samples: float,
    firsts: float,
) -> float | None:
    if steps == 1:
        return samples + firsts - (delta(before.finished_count, after.finished_count) or 0.0)
    if after.running is None or seen.balance is None or not seen.balance.trusted:
        return None
    # Prompts are computed one after the other, unless a threshold caps each one's share.
    return max(0.0, after.running - (1.0 if seen.balance.open_tokens >= 1 else 0.0))


def _decoding_only(
    before: EngineCounters,
    after: EngineCounters,
    seen: PrefillInterval,
    prefill: float | None,
    *,
    prefilling: float,
) -> bool:
    if delta(before.preemptions, after.preemptions):
        return False  # the time holds recompute, which is not prefill
    if prefill is not None:
        return prefill == 0 and not seen.prefill_tokens
    # Without evidence by interval: every request that ran got a token in every step, and none its first.
    ran = min(before.running or 0.0, after.running or 0.0)
    return 0 < ran == after.running == before.running and prefilling <= 0


_INFO: Final = "stallwatch_plugin_scheduler_info{"


def scheduler_setting(plugin: Mapping[str, float], name: str) -> str | None:
    """One of the scheduler's settings, from the labels of the plugin's info gauge; None where it is not told."""
    for key in plugin:
        if key.startswith(_INFO):
            labels = dict(pair.split("=", 1) for pair in key[len(_INFO) : -1].split(",") if "=" in pair)
            return labels.get(name, "").strip('"') or None
    return None


def scheduler_number(plugin: Mapping[str, float], name: str) -> int | None:
    """The same where it is a number."""
    value = scheduler_setting(plugin, name)
    return int(value) if value is not None and value.isdecimal() else None
