"""The step engine: vLLM's engine core without vLLM, one rank, pure.

With async scheduling the next step is planned before the current one ends, so queue and KV figures run one step
ahead of the outputs. It reads no clock: whoever drives it says what time it is, and keeps the steps it returns as
the ground truth of what every reader was waiting for.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace

from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.cost import Cause, Disturbances, Elapsed
from stallwatch.simulator.request import Request
from stallwatch.simulator.scheduler import Plan, Scheduler, Slot
from stallwatch.simulator.step import Outcome, Step


@dataclass(slots=True)
class _Executing:
    plan: Plan
    end: float
    step: Step


class Engine:
    """One rank. `begin` starts or continues stepping and says when the current step ends; `finish` ends it."""

    def __init__(self, config: EngineConfig, disturbances: Disturbances | None = None, *, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.scheduler = Scheduler(config)
        self.steps: list[Step] = []
        self.empty_steps: list[Step] = []
        self.paused = False
        self._disturbances = disturbances or Disturbances()
        self._planned: deque[Plan] = deque()
        self._executing: _Executing | None = None
        self._may_plan = True
        self._ended = 0

    @property
    def executing(self) -> Step | None:
        """The step that is under way, its end as planned."""
        return self._executing.step if self._executing else None

    def add(self, request: Request, now: float) -> None:
        """Queues a request; the scheduler sees it at the next step boundary."""
        request.arrival = now
        request.queued_at = now
        request.rank = self.rank
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Ends a request before the outputs of the step under way are looked at; its tokens in flight are dropped."""
        self.scheduler.abort(request)

    def abort_all(self) -> list[Request]:
        """Ends every request at once, as putting the engine to sleep does, and forgets the cache."""
        ended = self.scheduler.requests()
        for request in ended:
            self.scheduler.abort(request)
        self.scheduler.take_inputs()
        self.scheduler.pool.reset_cache()
        return ended

    def forget(self, before: float) -> None:
        """Drops the record of steps that ended before a time."""
        for steps in (self.steps, self.empty_steps):
            del steps[: bisect_left(steps, before, key=lambda s: s.end)]

    def begin(self, now: float) -> float | None:
        """Plans as far ahead as the scheduling mode allows; the end of the step under way, or None when idle."""
        depth = 2 if self.config.async_scheduling else 1
        while self._may_plan or not self._executing:
            in_flight = len(self._planned) + (1 if self._executing else 0)
            if in_flight >= depth or self.paused:
                break
            if not self._executing:
                # Also after idleness, when the last plan came to nothing, the first step is planned with the second.
                self._may_plan = True
                self.scheduler.take_inputs()
            plan = self.scheduler.schedule(now)
            if plan is None or (plan.wake_at is not None and in_flight):
                # What arrives from here on is read at the next boundary, as a loop that blocks on the device does.
                self._may_plan = False
                break
            self._planned.append(plan)
            if not self._executing:
                self._execute(now)
        return self._executing.end if self._executing else None

    def finish(self) -> Outcome:
        """Ends the step under way: hands out its tokens, takes the queued inputs, and starts the planned one."""
        if self._executing is None:
            raise RuntimeError("no step is under way")
        done = self._executing
        self._executing = None
        self._may_plan = True
        # Those who left while the step was computed are gone in its figures already, as in vLLM's engine core.
        self.scheduler.take_aborts()
        outputs = self.scheduler.hand_out(done.plan, done.end)
        stats = self.scheduler.snapshot(done.end)
        step = replace(
            done.step,
            emitted_tokens=sum(o.count for o in outputs),
            running=stats.running,
            waiting=stats.waiting,
            deferred=stats.deferred,
            kv_used_blocks=self.scheduler.pool.used_blocks,
        )
        (self.empty_steps if step.empty else self.steps).append(step)
        self._ended += not step.empty
        self.scheduler.take_inputs()
        if self._planned:
            self._execute(done.end)
        return Outcome(step, outputs, stats)

    def _execute(self, now: float) -> None:
        plan = self._planned.popleft()
        prefill = [s for s in plan.slots if not s.decode]
        decode = [s for s in plan.slots if s.decode]
        again = [s for s in prefill if s.request.recomputing]
        fresh = [s for s in prefill if not s.request.recomputing]
        told = [s for s in plan.slots if s.told_as_prefill]
        context = sum(s.context for s in decode)
        if plan.slots:
            by_cause, elapsed = self._price(now, fresh, again, decodes=len(decode), context=context)
        else:
            # A plan that only throws somebody out is over at once: no model runs for it.
            by_cause, elapsed = {}, Elapsed(max(now, plan.wake_at or now))
        step = Step(
            index=self._ended,
            rank=self.rank,
            start=now,
            end=elapsed.end,
            prefill_tokens=sum(s.tokens for s in prefill),
            recompute_tokens=sum(s.tokens for s in again),
            prefill_requests=len(prefill),
            told_prefill_tokens=sum(s.tokens for s in told),
            told_prefill_requests=len(told),
            decode_tokens=sum(s.tokens for s in decode),
            decode_requests=len(decode),
            context=context,
            preempted=plan.preempted,
            blocked=plan.blocked,
            slowdown=elapsed.slowdown,
            pause=elapsed.pause,
            seconds_by_cause=tuple(by_cause.items()),
        )
        self._executing = _Executing(plan, elapsed.end, step)

    def _price(
        self, now: float, fresh: list[Slot], again: list[Slot], *, decodes: int, context: int
    ) -> tuple[dict[Cause, float], Elapsed]:
        cost = self.config.cost
        parts = {
            Cause.PREFILL: _prefill_seconds(self.config, fresh),
            Cause.PREEMPTION: _prefill_seconds(self.config, again),
        }
        elapsed = self._disturbances.elapse(
            now, cost.decode_seconds(decodes, context) + sum(parts.values()), rank=self.rank
        )
        by_cause = {cause: seconds for cause, seconds in parts.items() if seconds > 0}
        for cause, seconds in elapsed.added.items():
            by_cause[cause] = by_cause.get(cause, 0.0) + seconds
        return by_cause, elapsed


def _prefill_seconds(config: EngineConfig, slots: list[Slot]) -> float:
    tokens = sum(s.tokens for s in slots)
    # A chunk's first token looks back on the context before it, its last one on the whole chunk too.
    return config.cost.prefill_seconds(tokens, sum(s.tokens * (s.context + s.tokens / 2) for s in slots))
