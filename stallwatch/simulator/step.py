"""What one engine step leaves behind: the ground truth, the tokens, and the figures that the API server is told."""

from dataclasses import dataclass
from enum import Enum

from stallwatch.simulator.cost import Cause
from stallwatch.simulator.request import FinishReason, Request


class Blocked(Enum):
    """Why the scan of the waiting queue stopped."""

    NOTHING = "nothing"
    BUDGET = "budget"
    SEQUENCES = "sequences"
    KV = "kv"
    PREEMPTION = "preemption"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One engine step, complete: the ground truth. Queue figures are those after its outputs were processed.

    `told_prefill_tokens` and `_requests` are what vLLM itself tells of the step: without what is computed again for
    requests that had said something already.
    """

    index: int
    rank: int
    start: float
    end: float
    prefill_tokens: int = 0
    recompute_tokens: int = 0
    prefill_requests: int = 0
    told_prefill_tokens: int = 0
    told_prefill_requests: int = 0
    decode_tokens: int = 0
    decode_requests: int = 0
    emitted_tokens: int = 0
    context: int = 0
    running: int = 0
    waiting: int = 0
    deferred: int = 0
    kv_used_blocks: int = 0
    preempted: tuple[str, ...] = ()
    blocked: Blocked = Blocked.NOTHING
    slowdown: float = 1.0
    pause: float = 0.0
    seconds_by_cause: tuple[tuple[Cause, float], ...] = ()

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def empty(self) -> bool:
        """Whether the scheduler turned without computing anything."""
        return self.prefill_tokens == 0 and self.decode_tokens == 0


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one request at a step's end."""

    request: Request
    first: int
    count: int
    finish_reason: FinishReason | None
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """vLLM's SchedulerStats: what the gauges will show, and the counters since the last one."""

    running: int
    waiting: int
    deferred: int
    loading: int
    loaded_waiting: int
    kv_usage: float
    queries: int
    hits: int
    external_queries: int
    external_hits: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that one step's end tells the API server."""

    step: Step
    outputs: tuple[Output, ...]
    stats: Snapshot
