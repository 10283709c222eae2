"""One rank's scheduler: who gets how many tokens in the next step, and what its outputs change.

The rules are vLLM's: running requests first, in order, then waiting ones while token budget, sequence slots and KV
blocks allow; out of blocks, the last running request is thrown out, recomputed later, and nobody is admitted in
that step. `computed` counts tokens in flight, so that the next step can be planned before the current one ends.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass

from stallwatch.simulator.config import EngineConfig, Policy
from stallwatch.simulator.kv import BlockPool, extend_chain
from stallwatch.simulator.request import FinishReason, Request, State
from stallwatch.simulator.step import Blocked, Output, Snapshot

# With nothing to compute but requests that wait for a transfer, vLLM's loop spins; this is how often we look.
_IDLE_TICK = 0.02


@dataclass(slots=True)
class Slot:
    """The share of one request in a step; `epoch` tells whether it was preempted since.

    `decode` says what was computed, `told_as_prefill` what vLLM calls it in its own figures of a step.
    """

    request: Request
    tokens: int
    context: int
    emits: bool
    decode: bool
    drafts: int
    epoch: int
    told_as_prefill: bool


@dataclass(slots=True)
class Plan:
    """One step to be executed; with `wake_at` there is nothing to compute, only something to wait for."""

    slots: list[Slot]
    blocked: Blocked
    preempted: tuple[str, ...]
    wake_at: float | None = None


class Scheduler:
    """Queues and blocks. Invariant: an unfinished request is in one queue; those running or loading hold blocks."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks)
        self._waiting: list[Request] = []
        self._loading: list[Request] = []
        self._running: list[Request] = []
        self._deferred: set[str] = set()
        self._added: deque[Request] = deque()
        self._aborted: deque[Request] = deque()
        self._transfer_lane = 0.0
        self._queries = self._hits = self._external_queries = self._external_hits = 0

    @property
    def running(self) -> int:
        """Requests that hold a sequence slot, as of now."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that do not, including those not yet read from the input queue."""
        return len(self._waiting) + len(self._loading) + len(self._added)

    def requests(self) -> list[Request]:
        """Everyone who is not finished."""
        return [*self._added, *self._loading, *self._waiting, *self._running]

    def add(self, request: Request) -> None:
        """Queues a request for the next boundary."""
        self._added.append(request)

    def abort(self, request: Request) -> None:
        """Ends a request when aborts are taken next."""
        if request.state is not State.FINISHED:
            self._aborted.append(request)

    def take_inputs(self) -> None:
        """Reads what arrived during a step: new requests, then those whose clients have gone."""
        while self._added:
            request = self._added.popleft()
            if self.config.enable_prefix_caching:
                extend_chain(request.chain, request.prompt, block_size=self.config.block_size, salt=request.salt)
            self._enqueue(request)
        self.take_aborts()

    def take_aborts(self) -> None:
        """Ends the requests whose clients have gone; one that has not been read yet is ended after it was."""
        unread = [request for request in self._aborted if request in self._added]
        for request in self._aborted:
            if request.state is not State.FINISHED and request not in unread:
                self._drop(request)
                request.finish_reason = FinishReason.ABORT
        self._aborted = deque(unread)

    def _enqueue(self, request: Request, *, at_head: bool = False) -> None:
        if self.config.policy is Policy.PRIORITY:
            insort(self._waiting, request, key=lambda r: (r.priority, r.arrival))
        elif at_head:
            self._waiting.insert(0, request)
        else:
            self._waiting.append(request)

    def _drop(self, request: Request) -> None:
        for queue in (self._running, self._waiting, self._loading):
            if request in queue:
                queue.remove(request)
        self._deferred.discard(request.id)
        self._free(request)
        request.state = State.FINISHED

    def _free(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.remembered = 0

    def schedule(self, now: float) -> Plan | None:
        """Plans the next step; None when there is nothing to do before a step in flight ends."""
        config = self.config
        budget = config.max_num_batched_tokens
        eligible = len(self._running) + len(self._waiting) + len(self._loading)
        threshold = config.long_prefill_token_threshold if eligible > 1 else 0
        scheduled: dict[str, Slot] = {}
        preempted: list[str] = []

        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            wanted = self._wanted(request)
            if 0 < threshold < wanted:
                wanted = threshold
            wanted = min(wanted, budget, config.max_model_len - 1 - request.computed)
            if wanted <= 0:
                index += 1
                continue
            while not self._grow(request, wanted):
                victim = self._victim()
                position = self._running.index(victim)
                del self._running[position]
                if position < index:
                    index -= 1
                slot = scheduled.pop(victim.id, None)
                if slot is not None:
                    budget += slot.tokens
                    if slot.emits:
                        victim.placeholders -= 1 + slot.drafts
                self._preempt(victim)
                preempted.append(victim.id)
                if victim is request:
                    break
            else:
                budget -= wanted
                scheduled[request.id] = self._advance(request, wanted)
                index += 1
                continue
            break

        blocked = Blocked.PREEMPTION if preempted and self._waiting else Blocked.NOTHING
        if not preempted:
            blocked = self._admit(now, budget, threshold=threshold, scheduled=scheduled)
        if not scheduled and not preempted:
            if not self._waiting and not self._loading:
                return None
            if self._running:
                return None
            wake = min([r.ready_at for r in self._loading if r.ready_at > now], default=now + _IDLE_TICK)
            return Plan([], blocked, (), wake_at=max(min(wake, now + _IDLE_TICK), now + 0.001))
        return Plan(list(scheduled.values()), blocked, tuple(preempted))

    def _wanted(self, request: Request) -> int:
        if request.placeholders:
            in_flight_steps = -(-request.placeholders // (1 + self.config.num_speculative_tokens))
            if len(request.output) + in_flight_steps >= request.max_tokens:
                return 0
        wanted = request.known_tokens + request.placeholders - request.computed
        if wanted == 1 and request.computed >= request.prompt_tokens and (request.output or request.placeholders):
            wanted += self.config.num_speculative_tokens
        return wanted

    def _grow(self, request: Request, tokens: int) -> bool:
        needed = -(-(request.computed + tokens) // self.config.block_size) - len(request.blocks)
        if needed <= 0:
            return True
        if self.pool.missing(needed) > 0:
            return False
        request.blocks += self.pool.take(needed)
        return True

    def _victim(self) -> Request:
        if self.config.policy is Policy.PRIORITY:
            return max(self._running, key=lambda r: (r.priority, r.arrival))
        return self._running[-1]

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.state = State.PREEMPTED
        request.computed = 0
        request.preemptions += 1
        self._enqueue(request, at_head=True)

    def _advance(self, request: Request, tokens: int, *, admitted: bool = False) -> Slot:
        context = request.computed
        # A request that has said nothing yet, or that recomputes, is prefilling; all else is decoding.
        decode = context >= request.prompt_tokens and tokens <= 1 + self.config.num_speculative_tokens
        silent = not (request.output or request.placeholders)
        decode = decode and not silent
        # vLLM calls it decoding once a request has said something, even when a preempted one is computed again; only
        # the newer of its two model runners takes the first chunk of one that comes back for a new prompt.
        told_as_prefill = silent or (admitted and (self.config.model_runner_v2 or not request.preemptions))
        target = request.known_tokens + request.placeholders
        drafts = max(0, context + tokens - target)
        emits = context + tokens >= target
        request.computed += tokens
        if emits:
            request.placeholders += 1 + drafts
        self._remember(request, request.computed)
        return Slot(request, tokens, context, emits, decode, drafts, request.preemptions, told_as_prefill)

    def _remember(self, request: Request, computed: int) -> None:
        if not self.config.enable_prefix_caching:
            return
        known = min(computed, request.known_tokens)
        size = self.config.block_size
        full = min(known // size, len(request.blocks))
        if full > request.remembered:
            if full > len(request.chain):
                extend_chain(request.chain, request.prompt + request.output, block_size=size, salt=request.salt)
            for position in range(request.remembered, full):
                self.pool.remember(request.blocks[position], request.chain[position])
            request.remembered = full

    def _admit(self, now: float, budget: int, *, threshold: int, scheduled: dict[str, Slot]) -> Blocked:
        config = self.config
        if self._waiting and any(start <= now < end for start, end in config.admission_closed):
            return Blocked.KV
        position = {id(self._loading): 0, id(self._waiting): 0}
        while budget > 0:
            queue = self._loading if position[id(self._loading)] < len(self._loading) else self._waiting
            at = position[id(queue)]
            if at >= len(queue):
                return Blocked.NOTHING
            if len(self._running) >= config.max_num_seqs:
                return Blocked.SEQUENCES
            request = queue[at]
            if request.state is State.LOADING and now < request.ready_at:
                position[id(queue)] = at + 1
                continue
            if request.placeholders:
                # Its last token is still in flight; sampling that position again would say it twice.
                self._deferred.add(request.id)
                position[id(queue)] = at + 1
                continue
            fresh = request.state is not State.LOADING
            hits: list[int] = []
            external = 0
            if fresh:
                limit = (request.known_tokens - 1) // config.block_size
                hits = self.pool.cached_prefix(request.chain, limit) if config.enable_prefix_caching else []
                start = len(hits) * config.block_size
                if request.preemptions == 0 and request.external_tokens > start:
                    external = min(request.external_tokens, request.known_tokens - 1) - start
            else:
                start = request.computed
            if external and request.transfer_seconds > 0:
                if not self._start_transfer(request, hits, external, now):
                    return Blocked.KV
                queue.remove(request)
                self._loading.append(request)
                position[id(self._loading)] = len(self._loading)
                continue
            start += external
            wanted = request.known_tokens - start
            if 0 < threshold < wanted:
                wanted = threshold
            if not config.enable_chunked_prefill and wanted > budget:
                return Blocked.BUDGET
            wanted = min(wanted, budget)
            if fresh and not self._reserve(request, hits, start=start, wanted=wanted):
                return Blocked.KV
            if not fresh and self.pool.missing(self._blocks_short(request, start + wanted)) > 0:
                return Blocked.KV
            queue.remove(request)
            self._deferred.discard(request.id)
            if fresh:
                self._account(request, len(hits) * config.block_size, external)
                request.blocks = self.pool.take(-(-(start + wanted) // config.block_size) - len(hits), hits)
                request.remembered = len(hits)
            else:
                request.blocks += self.pool.take(self._blocks_short(request, start + wanted))
            request.computed = start
            request.state = State.RUNNING
            if request.scheduled_at is None:
                request.scheduled_at = now
            self._running.append(request)
            budget -= wanted
            scheduled[request.id] = self._advance(request, wanted, admitted=True)
        return Blocked.BUDGET if self._waiting else Blocked.NOTHING

    def _blocks_short(self, request: Request, tokens: int) -> int:
        return max(0, -(-tokens // self.config.block_size) - len(request.blocks))

    def _reserve(self, request: Request, hits: list[int], *, start: int, wanted: int) -> bool:
        size = self.config.block_size
        if self.config.scheduler_reserve_full_isl:
            whole = -(-request.known_tokens // size) - len(hits)
            if self.pool.missing(whole, hits) > 0:
                return False
        return self.pool.missing(-(-(start + wanted) // size) - len(hits), hits) <= 0

    def _account(self, request: Request, local: int, external: int) -> None:
        if request.preemptions:
            return
        request.cached_tokens = local + external
        request.external_hits = external
        if self.config.enable_prefix_caching:
            self._queries += request.known_tokens
            self._hits += local
        if request.external_tokens:
            self._external_queries += request.known_tokens - local
            self._external_hits += external

    def _start_transfer(self, request: Request, hits: list[int], external: int, now: float) -> bool:
        local = len(hits) * self.config.block_size
        fresh_blocks = -(-(local + external) // self.config.block_size) - len(hits)
        if self.pool.missing(fresh_blocks, hits) > 0:
            return False
        self._account(request, local, external)
        request.blocks = self.pool.take(fresh_blocks, hits)
        request.remembered = len(hits)
        request.computed = local + external
        request.state = State.LOADING
        begin = max(now, self._transfer_lane) if self.config.serial_transfers else now
        request.ready_at = begin + request.transfer_seconds
        self._transfer_lane = request.ready_at
        self._deferred.add(request.id)
        return True

    def hand_out(self, plan: Plan, end: float) -> tuple[Output, ...]:
        """Gives the tokens of a step that ended to their requests, and ends those that are complete."""
        outputs: list[Output] = []
        acceptance = self.config.acceptance_at(end)
        for slot in plan.slots:
            request = slot.request
            if request.state is State.FINISHED:
                continue
            if not slot.emits:
                continue
            count = 1 + request.accepted_drafts(slot.drafts, acceptance)
            request.placeholders -= 1 + slot.drafts
            if request.preemptions == slot.epoch:
                request.computed -= 1 + slot.drafts - count
            count = min(count, request.max_tokens - len(request.output))
            if request.stop_at is not None:
                count = min(count, request.stop_at - len(request.output))
            first = len(request.output)
            request.append_output(count)
            reason = self._reason(request)
            if request.state is State.RUNNING:
                # Of a step in flight nothing is findable yet beyond what it was planned with.
                self._remember(request, request.computed - request.placeholders)
            if reason is not None:
                self._drop(request)
                request.finish_reason = reason
            if request.first_token_at is None:
                request.first_token_at = end
            outputs.append(Output(request, first, count, reason, slot.drafts))
        return tuple(outputs)

    def _reason(self, request: Request) -> FinishReason | None:
        if request.stop_at is not None and len(request.output) >= request.stop_at:
            return FinishReason.STOP
        if len(request.output) >= request.max_tokens or request.known_tokens >= self.config.max_model_len:
            return FinishReason.LENGTH
        return None

    def snapshot(self, now: float) -> Snapshot:
        """The figures of this moment; the counters in them begin anew."""
        loaded = sum(1 for r in self._loading if r.ready_at <= now)
        deferred = len(self._loading) + sum(1 for r in self._waiting if r.id in self._deferred)
        snapshot = Snapshot(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._loading) - deferred,
            deferred=deferred,
            loading=len(self._loading) - loaded,
            loaded_waiting=loaded,
            kv_usage=self.pool.usage,
            queries=self._queries,
            hits=self._hits,
            external_queries=self._external_queries,
            external_hits=self._external_hits,
        )
        self._queries = self._hits = self._external_queries = self._external_hits = 0
        return snapshot
