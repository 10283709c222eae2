"""Prefill tokens that vLLM scheduled between two polls, from its default metrics.

vLLM books a prompt's tokens only when its first token leaves, so the counters stand still while a long prompt is
computed. Two things do move. Admission is booked at once (prefix queries minus hits: the work to come), and so is its
end (locally computed tokens, first-token count): together they say how much work is open, exactly, and whether any is
left. And the scheduler is greedy: while work is left, every step is filled to the token budget, decodes first. So the
prefill of an interval is `steps * budget - decodes` while a prompt stays open, and what was left of it when it ends.
The KV cache's growth, known to a block a request, teaches the budget, counts the steps that emit no token, and stands
in wherever the schedule does not fill its steps.

The rules, each with its reason, and what is known to be missed:

* Prefix hits: a hit block that another request holds adds nothing to the usage, a hit block that was free adds its
  whole size. Which it was cannot be seen; where that leaves the usage ambiguous the schedule decides.
  A prompt that is cached whole still computes its last block.
* Aborts are never booked. They show as a prompt that is open while every running request is a decoder. vLLM applies
  an abort when the step in flight ends, so that step's work was done: one chunk, or as many as the mean step time says.
* Preemption: a victim's tokens leave the cache, and come back as recompute that no counter books. Under KV pressure an
  open prompt that no running request accounts for is taken as parked, not aborted, and cache growth while no prompt is
  open is `residual_tokens`: evidence of recompute, never prefill.
* KV received from elsewhere (connectors) leaves both the open work and the growth.
* Hybrid caches (sliding windows, state-space layers) free and share blocks by group: usage is no token count. Without
  prefix caching admission is not booked at all. Both: nothing is estimated.
* Async scheduling: admission and KV usage describe the step in flight while outputs describe the one before. `lead`
  says so once it has shown itself, and `completed_tokens` is the same estimate moved back by the chunk in flight.
* Servers before 0.16 do not split booked prompts by source: nothing is estimated. That covers 0.9 to 0.10.1, whose
  gauges stand still in phases without output.
* Up to 0.26 a prompt that does not fit into the cache is queried again at each attempt; under KV pressure such open
  work vanishes as parked, and the sums disagree.
* Several API servers count a step once for each that had output: the budget is then learned too small and is mostly
  rejected by the cache's growth, which remains.
* Prompts that ask for prompt log-probabilities skip the prefix cache and are seen only when they end. The share of
  such tokens decides `trusted`.
* Speculative decoding: drafts that are rejected fill steps and leave no trace, so the budget is learned without them
  and the estimate leans on the cache's growth.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import Final

from stallwatch.observations import CacheFacts, EngineCounters

_SAMPLES: Final = 31
"""Intervals that the step budget and the step times are learned from."""
_PRESSURE: Final = 0.9
"""KV usage above which a missing prompt may be waiting for memory rather than aborted."""
_MEMORY: Final = 1e6
"""Booked tokens after which older ones count half in judging whether to trust."""
_UNSEEN_SHARE: Final = 0.1
"""Share of booked tokens that nothing announced, above which the announcements are not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceInterval:
    """What the token balance says of one poll interval of one engine; all counts in tokens."""

    prefill_tokens: float
    """Scheduled in the interval. Under async scheduling this includes the step in flight at its end."""
    completed_tokens: float
    """The same, in steps that ended in the interval: differs under async scheduling only."""
    residual_tokens: float | None
    """Growth of the KV cache that neither decodes nor admitted prompts explain, while no prompt is open: recompute
    after a preemption when positive, an abort when negative. None while a prompt is open."""
    backlog_tokens: float
    """Admitted and not computed yet, at the end of the interval."""
    open_tokens: float
    """Uncached length of the prompts that are admitted and have no first token yet."""
    step_budget: float | None
    """Tokens in a full step, as seen so far."""
    largest_admission: float
    """Uncached tokens admitted in the interval: the largest prompt of it when one was admitted, else an upper bound."""
    aborted_tokens: float
    """Backlog that vanished because its request was aborted."""
    parked: bool
    """A prompt is open and not running: preempted, or it does not fit into the KV cache."""
    lead: bool | None
    """Whether admission runs one step ahead of outputs (async scheduling); None until it could show."""
    trusted: bool
    """False when what was booked disagrees with what was admitted; the estimate must then not be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    """Differences of one interval, in tokens or counts, and the gauges at both ends."""

    kv: float
    queries: float
    hits: float
    external: float
    compute: float
    cached: float
    firsts: float
    finished: float
    finished_prompt: float
    finished_computed: float
    finished_generated: float
    steps: float
    itl: float
    itl_seconds: float | None
    decodes: float
    running_before: float
    running: float
    waiting_before: float
    waiting: float
    usage: float

    @property
    def admitted(self) -> float:
        return self.queries - self.hits - self.external

    @property
    def fell(self) -> bool:
        """A counter went backwards: the engine was restarted."""
        return min(self.queries, self.hits, self.compute, self.firsts, self.finished, self.steps, self.itl) < 0

    @property
    def idle(self) -> bool:
        return self.running == 0 and self.waiting == 0

    @property
    def motionless(self) -> bool:
        """No step ended."""
        return self.still and self.kv == 0 and self.steps == 0

    @property
    def still(self) -> bool:
        """No request was admitted, got its first token or finished."""
        return not (self.queries or self.hits or self.compute or self.firsts or self.finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One interval with what is known about it; tokens."""

    seen: _Moves
    block: float
    budget: float | None
    growth: float
    open: float  # at the interval's start
    done: float  # of the open
    lost: float  # decoders that left unbooked
    murky: bool  # the cache's growth is no measure of the work
    earlier: float = 0.0  # computed for a prompt that is gone, counted apart

    @property
    def left(self) -> float:
        """Uncomputed at the start."""
        return self.open - self.done

    @property
    def room(self) -> float:
        """The most that can have been computed."""
        return self.left + self.seen.admitted

    @property
    def low(self) -> float:
        """The least: the rest of the prompts that ended."""
        return max(0.0, self.seen.compute - self.done)


@dataclass(slots=True)
class _Levels:
    """The typical value of recent samples, once there are enough."""

    least: int
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    typical: float | None = None

    def add(self, value: float, *, near: float | None = None) -> None:
        """Takes a sample; with `near`, the typical value is that of the largest group that agrees within it."""
        self.samples.append(value)
        if len(self.samples) < self.least:
            return
        if near is None:
            self.typical = median(self.samples)
            return
        groups = ([other for other in self.samples if abs(other - one) <= near] for one in self.samples)
        self.typical = max((len(group), median(group)) for group in groups)[1]


def _delta(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def moves(before: EngineCounters, after: EngineCounters, capacity: float) -> _Moves | None:
    """The differences that the balance needs, or None when a field is missing.

    Args:
        before: Counters at the start of the interval.
        after: Counters at its end.
        capacity: Tokens that a KV usage of 1 stands for.
    """
    kv = _delta(before.kv_usage, after.kv_usage)
    queries = _delta(before.prefix_queries, after.prefix_queries)
    hits = _delta(before.prefix_hits, after.prefix_hits)
    compute = _delta(before.prompt_local_compute, after.prompt_local_compute)
    firsts = _delta(before.first_tokens, after.first_tokens)
    finished = _delta(before.finished_count, after.finished_count)
    prompt = _delta(before.finished_prompt_tokens, after.finished_prompt_tokens)
    generated = _delta(before.finished_generation_tokens, after.finished_generation_tokens)
    steps = _delta(before.iterations, after.iterations)
    itl = _delta(before.itl_count, after.itl_count)
    generation = _delta(before.generation_tokens, after.generation_tokens)
    if (
        kv is None
        or queries is None
        or hits is None
        or compute is None
        or firsts is None
        or finished is None
        or prompt is None
        or generated is None
        or steps is None
        or itl is None
        or generation is None
        or before.running is None
        or after.running is None
        or before.waiting is None
        or after.waiting is None
        or before.kv_usage is None
        or after.kv_usage is None
    ):
        return None
    computed = _delta(before.finished_prefill_computed_tokens, after.finished_prefill_computed_tokens)
    return _Moves(
        kv=round(kv * capacity),
        queries=queries,
        hits=hits,
        external=_delta(before.external_hits, after.external_hits) or 0.0,
        compute=compute,
        cached=_delta(before.prompt_local_cache_hit, after.prompt_local_cache_hit) or 0.0,
        firsts=firsts,
        finished=finished,
        finished_prompt=prompt,
        finished_computed=prompt if computed is None else computed,
        finished_generated=generated,
        steps=steps,
        itl=itl,
        itl_seconds=_delta(before.itl_sum, after.itl_sum),
        decodes=generation - firsts,
        running_before=before.running,
        running=after.running,
        waiting_before=before.waiting,
        waiting=after.waiting,
        usage=max(before.kv_usage, after.kv_usage),
    )


class BalanceEstimator:
    """The token balance of one engine, fed with successive intervals.

    Args:
        cache: Layout of the engine's KV cache. Unknown or hybrid layouts, and prefix caching switched off, make every
            answer None.
    """

    def __init__(self, cache: CacheFacts) -> None:
        self._cache = cache
        self.reset()

    @property
    def usable(self) -> bool:
        """Whether the cache's layout allows a balance at all."""
        cache = self._cache
        return cache.capacity_tokens is not None and not cache.hybrid and cache.prefix_caching is not False

    def reset(self) -> None:
        """Forgets everything, as after a restart of the engine."""
        self._started = False
        self._open = 0.0  # uncached length of the prompts admitted and not booked
        self._done = 0.0  # the part of it that was scheduled
        self._in_flight = 0.0  # the part of what was scheduled whose step had not ended
        self._ghost = 0.0  # scheduled for the prompt judged aborted last, should it be booked after all
        self._inherited = False  # a prompt was open when we began to look
        self._parked = False  # an open prompt waits for memory
        self._overlap = False  # prompts were seen to be computed side by side
        self._serial = False  # a request was seen to wait for the open prompt
        self._prefilling: float | None = None
        self._decoders: float | None = None
        self._budgets = _Levels(least=1)
        self._motionless = False  # nothing moved in the last interval, though a prompt was open
        self._light = _Levels(least=5)
        self._heavy = _Levels(least=3)
        self._lead_votes = 0.0
        self._booked = 0.0
        self._unseen = 0.0

    def update(self, before: EngineCounters, after: EngineCounters) -> BalanceInterval | None:
        """Judges the interval between two scrapes; None when it cannot be judged.

        A counter that fell is a restart: everything is forgotten.
        """
        capacity = self._cache.capacity_tokens
        block = self._cache.block_size
        if capacity is None or block is None or not self.usable:
            return None
        seen = moves(before, after, capacity)
        if seen is None:
            return None
        if seen.fell:
            self.reset()
            return None
        if not self._started:
            self._start(before)
        return self._judge(seen, float(block))

    def _start(self, first: EngineCounters) -> None:
        self._started = True
        if first.running == 0:
            self._decoders = 0.0
            return
        # Everything ever admitted minus everything ever booked is what is open now, plus what aborts left in the past:
        # the latter goes as soon as every running request is seen to decode.
        admitted = (first.prefix_queries or 0.0) - (first.prefix_hits or 0.0) - (first.external_hits or 0.0)
        self._open = max(0.0, admitted - (first.prompt_local_compute or 0.0))
        self._inherited = self._open > 0

    @property
    def lead(self) -> bool | None:
        """Whether admission was seen to run ahead of outputs; None until it could show."""
        return None if abs(self._lead_votes) < 2 else self._lead_votes > 0

    def _judge(self, seen: _Moves, block: float) -> BalanceInterval:
        decoders, certain = _decoders(seen, self._decoders)
        prefilling = max(0.0, seen.running - decoders) if decoders is not None else None
        self._order(seen, prefilling if certain else None)
        case = _Case(
            seen=seen,
            block=block,
            budget=self._budgets.typical,
            growth=_growth(seen, block),
            open=self._open,
            done=self._done,
            lost=_lost(seen, self._decoders, decoders) if certain else 0.0,
            murky=self._parked or (seen.usage >= _PRESSURE and self.lead is not True),
        )
        self._vote(case, prefilling if certain else None)
        earlier = aborted = 0.0
        if self._superseded(case):
            earlier = self._chunk(case, case.left)
            aborted = case.left - earlier
            self._ghost = case.done + earlier
            case = replace(case, open=0.0, done=0.0, earlier=earlier, murky=True)
        now_open = case.open + seen.admitted - seen.compute
        done, residual, parked = 0.0, None, False
        if now_open < 1:
            prefill = self._ended(case, unannounced=max(0.0, -now_open))
            residual = case.growth - prefill if not (seen.firsts or seen.finished) else 0.0
            now_open = 0.0
        elif prefilling == 0 and seen.waiting > 0 and (seen.usage >= _PRESSURE or self._parked):
            parked = True
            prefill = min(max(case.growth, case.low), case.room)
        elif seen.idle or (prefilling == 0 and (certain or self._overdue(case))):
            prefill = self._of_aborted(case)
            self._ghost = case.done + prefill
            aborted += max(0.0, case.room - prefill)
            now_open = 0.0
        else:
            prefill = self._of_open(case)
            done = min(max(0.0, case.done + prefill - seen.compute), now_open)
        self._learn(case, now_open, disturbed=aborted > 0 or case.lost > 0 or self._parked)
        self._open, self._done, self._parked = now_open, done, parked
        self._inherited = self._inherited and now_open > 0
        self._decoders = 0.0 if seen.running == 0 else decoders
        prefill += earlier
        return BalanceInterval(
            prefill_tokens=prefill,
            completed_tokens=self._completed(case, prefill),
            residual_tokens=residual,
            backlog_tokens=now_open - done,
            open_tokens=now_open,
            step_budget=case.budget,
            largest_admission=max(0.0, seen.admitted),
            aborted_tokens=aborted,
            parked=parked,
            lead=self.lead,
            trusted=self._unseen <= max(_UNSEEN_SHARE * self._booked, 4 * block),
        )

    def _ended(self, case: _Case, *, unannounced: float) -> float:
        """No prompt is open, so all were computed to the end: exact, but for what was done before we looked."""
        prefill = case.seen.compute - case.done
        if self._inherited:
            prefill = min(case.growth, prefill)
        if unannounced:
            prefill -= self._ghost
            if self._ghost > 0:  # it had not been aborted: two prompts were unbooked because admission leads
                self._lead_votes = min(self._lead_votes + 2, 20)
        self._ghost = 0.0
        self._booked += case.seen.compute
        self._unseen += unannounced
        if self._booked > _MEMORY:
            self._booked, self._unseen = self._booked / 2, self._unseen / 2
        return max(0.0, prefill)

    def _completed(self, case: _Case, prefill: float) -> float:
        """Moves the chunk in flight from the interval that scheduled it to the one in which its step ends."""
        before, self._in_flight = self._in_flight, 0.0
        if self.lead and self._open > 0 and case.budget is not None:
            chunk = max(1.0, case.budget - (case.seen.decodes / case.seen.steps if case.seen.steps else 0.0))
            if self._open - self._done < 1:  # the last chunk is in flight: what full chunks leave of the prompt
                chunk = min(chunk, case.room % chunk or chunk) if case.room else before
            self._in_flight = min(chunk, prefill + before)
        return max(0.0, prefill + before - self._in_flight)

    def _superseded(self, case: _Case) -> bool:
        """Whether the open prompt is gone because a newcomer took its place.

        Where prompts are computed one after the other, a newcomer is
        admitted only when the open one leaves budget: it has ended, which is
        booked, or it was aborted. With admission leading its last chunk may
        be in flight; then only a prompt too long for that is surely gone.
        """
        if self._overlap or self._inherited or case.seen.queries <= 0 or case.seen.compute + 1 > case.open:
            return False
        # Its blocks are gone too: nothing else that may have left took as many.
        if case.done >= 4 * case.block and case.growth < -case.done / 2 and not case.lost and not case.murky:
            return True
        if not self._serial:
            return False
        return self.lead is False or (case.budget is not None and case.left > (case.seen.steps + 1) * case.budget)

    def _order(self, seen: _Moves, prefilling: float | None) -> None:
        """Whether prompts are computed one after the other: the default, unless a threshold caps each one's share."""
        before, self._prefilling = self._prefilling, prefilling
        if seen.steps == 0 or seen.usage >= _PRESSURE:
            return
        # With admission leading by a step, two are unbooked at times, but one of them is booked by the next step.
        if prefilling is not None and before is not None and min(prefilling, before) >= 2 and not seen.firsts:
            self._overlap = True
        if (
            self._open > self._done
            and not seen.queries
            and not seen.firsts
            and min(seen.waiting_before, seen.waiting) > 0
        ):
            self._serial = True

    def _vote(self, case: _Case, prefilling: float | None) -> None:
        """A prompt that the interval's steps could finish is booked in it, unless admission leads by one step."""
        seen = case.seen
        if not self._decoders or not 0 < seen.steps <= seen.itl:
            return
        if self._inherited or self._overlap or self._parked or seen.usage >= _PRESSURE:
            return
        steps = seen.steps if case.left > 0 else 1.0
        fits = 0.9 * (steps * case.budget - seen.decodes * steps / seen.steps) if case.budget is not None else 0.0
        if case.left <= 0:
            fits = max(fits, case.block)  # at least that much goes into any step
        if not 0 < case.room <= fits:
            return
        if seen.compute == 0 and prefilling is not None and prefilling >= 1:
            if case.growth > case.room + 2 * case.block:
                return  # more was computed than was thought to be left: it is our count that is behind
            self._lead_votes = min(self._lead_votes + 2, 20)
        elif 0 < seen.admitted == seen.compute - case.open:
            # Had admission led, a poll between the two would have shown it once in as many times as there were steps.
            self._lead_votes = max(self._lead_votes - 1 / seen.steps, -20)

    def _chunk(self, case: _Case, left: float) -> float:
        """What was computed of an aborted prompt: the step in flight, or as many as were slow."""
        if case.budget is None:
            return min(max(0.0, case.growth), left)
        steps = self._slow_steps(case.seen)
        decodes = (case.seen.decodes + case.lost) * (min(1.0, steps / case.seen.steps) if case.seen.steps else 1.0)
        return min(left, max(0.0, steps * case.budget - decodes))

    def _of_aborted(self, case: _Case) -> float:
        """No prompt is open any more and not all were booked."""
        if case.seen.compute < case.open:  # the oldest is the aborted one: those that were booked came after it
            return min(case.room, self._chunk(case, case.left) + case.seen.compute)
        return min(case.room, max(self._chunk(case, case.room), case.low))

    def _of_open(self, case: _Case) -> float:
        """A prompt is open and in work: every step since it was admitted was full."""
        seen, budget = case.seen, case.budget
        high = max(case.low, case.room if self.lead else case.room - 1)
        grown = min(max(case.growth - case.earlier, case.low), high)
        if budget is None or self._overlap:
            return grown
        pending = case.left + case.earlier > 0
        decodes = seen.decodes + case.lost
        steps, counted = seen.steps, bool(self._decoders) and seen.itl >= seen.steps > 0
        if not counted and pending and seen.firsts and seen.steps and not self.lead:
            # Without decoders the steps before the open prompt's last one were silent, and their number is known.
            steps += -(-(case.left + case.earlier) // budget) - 1
            counted = True
        most = steps if counted else inf
        least = most if counted and pending else float(counted and seen.admitted > 0)
        per_step = 0.0 if pending or not steps else decodes / steps
        if case.lost:
            count = self._slow_steps(seen)
        elif per_step:
            count = round(case.growth / (budget - per_step)) if budget > per_step else 0
        else:
            count = round((case.growth + decodes) / budget)
        count = min(max(least, count), most)
        full = count * budget - (min(decodes, count * per_step) if per_step else decodes)
        # Rounding to blocks: of the chunk, of the decodes, and of each prompt that began or ended.
        tolerance = case.block * (2 + seen.finished + seen.firsts) + seen.hits
        if (counted and (case.murky or case.lost)) or abs(case.growth - full) <= tolerance:
            return min(max(full - case.earlier, case.low), high)
        return grown

    def _overdue(self, case: _Case) -> bool:
        """The steps of the interval would have finished every open prompt, and one is still open."""
        if case.budget is None or (case.left <= 0 and self._decoders != 0):
            return False
        steps = case.seen.steps - (1 if self.lead else 0)
        return steps * case.budget - case.seen.decodes > case.room + case.block

    def _slow_steps(self, seen: _Moves) -> float:
        """Steps of the interval that were as long as those that carry prefill, at least one."""
        light, heavy = self._light.typical, self._heavy.typical
        if seen.steps > 1 and seen.itl and seen.itl_seconds and light and heavy and heavy > 1.5 * light:
            mean = seen.itl_seconds / seen.itl
            return float(min(max(1.0, round((mean - light) / (heavy - light) * seen.steps)), seen.steps))
        return 1.0

    def _learn(self, case: _Case, now_open: float, *, disturbed: bool) -> None:
        seen = case.seen
        mean = seen.itl_seconds / seen.itl if seen.itl and seen.itl_seconds is not None else None
        if mean is not None and now_open <= 0 and case.left <= 0 and not seen.admitted:
            self._light.add(mean)
        # A step that outlasts a poll is alone in the interval that it ends in, though it emits nothing to count it by.
        alone, self._motionless = self._motionless, seen.motionless and now_open > 0
        if disturbed or now_open <= 0 or seen.hits or seen.usage >= _PRESSURE or case.growth <= case.block:
            return
        if alone and seen.still and seen.steps == 0 and not self._overlap:
            self._budgets.add(case.growth, near=case.block)
        few = seen.still or seen.firsts + seen.finished < seen.steps  # whose rounding would blur the sum
        if case.left > 0 and self._decoders and seen.itl >= seen.steps > 0 and few:
            self._budgets.add((case.growth + seen.decodes) / seen.steps, near=case.block)
            if mean is not None:
                self._heavy.add(mean)


def _lost(seen: _Moves, before: float | None, after: float | None) -> float:
    """Decoders that left without being booked. They took their blocks along: growth is then a lower bound."""
    if before is None or after is None:
        return 0.0
    return max(0.0, before + seen.firsts - seen.finished - after)


def _growth(seen: _Moves, block: float) -> float:
    """Tokens by which the KV cache grew beyond decodes, with what finished requests gave back put in again.

    Whether blocks of a prefix hit were free (then they count as growth when hit and as freed at the end) or held by
    another request cannot be seen: with nothing running before they were free, else they are taken as held.
    """
    ended = seen.finished_generated - seen.finished
    base = seen.kv - seen.decodes + ended
    free = base + seen.finished_prompt - seen.hits
    held = base + seen.finished_computed
    growth = free if seen.running_before == 0 or (seen.hits == 0 and abs(free - held) < 1) else held
    growth -= seen.external
    growth += _padding(seen.finished_prompt + ended, seen.finished, block)
    return growth - _padding(seen.compute + seen.cached, seen.firsts, block)


def _padding(tokens: float, requests: float, block: float) -> float:
    """Unused tokens in the last blocks: exact for one request, the expected half a block for several."""
    if requests <= 0:
        return 0.0
    return -tokens % block if requests == 1 else requests * (block - 1) / 2


def _decoders(seen: _Moves, before: float | None) -> tuple[float | None, bool]:
    """Decoding requests at the interval's end, and whether that is certain."""
    if seen.steps == 1:
        return seen.itl + seen.firsts - seen.finished, True
    if seen.steps > 1 and not (seen.firsts or seen.finished):
        return float(seen.itl // seen.steps), True
    if seen.steps == 0 and not seen.motionless:
        return 0.0, True  # a step ended and emitted nothing: nobody decodes
    if before is None:
        return None, False
    if seen.steps == 0:
        return before, True
    return min(before + seen.firsts - seen.finished, seen.running), False
