"""How long a step takes, and what disturbs it.

The linear model follows measurements of a real vLLM: a prefill token costs more the more context it attends to, a
decode costs a little per request and per context token. Disturbances are functions of time, so the same schedule
with and without them differs only where they act, and every second beyond the undisturbed step has a known cause.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf


class Cause(StrEnum):
    """Why a reader waited: the words of the findings, and `none` where nothing was wrong."""

    NONE = "none"
    OBSERVER = "observer"
    ENGINE_DOWN = "engine_down"
    DELIVERY = "delivery"
    PREEMPTION = "preemption"
    PREFILL = "prefill"
    ADMISSION = "admission"
    KV_TRANSFER = "kv_transfer"
    GPU_CLOCK = "gpu_clock"
    GPU_IDLE = "gpu_idle"
    INTERCONNECT = "interconnect"
    HOST_PRESSURE = "host_pressure"
    ENGINE_HANG = "engine_hang"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a + b*prefill + c*decodes + d*context + e*prefill*context."""

    base: float = 0.030
    per_prefill_token: float = 0.0004
    per_decode_request: float = 0.0005
    per_context_token: float = 2e-8
    per_prefill_context: float = 4e-9

    def prefill_seconds(self, tokens: int, attended: float) -> float:
        """The part that prefill tokens add; `attended` sums the context that each of them looks back on."""
        return self.per_prefill_token * tokens + self.per_prefill_context * attended

    def decode_seconds(self, requests: int, context: int) -> float:
        """A step with these decodes and no prefill."""
        return self.base + self.per_decode_request * requests + self.per_context_token * context


TINY_ON_TWO_CORES = StepCost(0.0035, 0.0007, 0.0003, 9.4e-7, 2.46e-7)
"""A real vLLM 0.32 with a 6 MB model on two CPU cores, as measured: prefill chunks of 393 ms to 1.8 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """From `start` to `end` every step takes `factor` times as long and `extra` seconds more."""

    start: float
    end: float = inf
    factor: float = 1.0
    extra: float = 0.0
    cause: Cause = Cause.UNKNOWN
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """At `at` the engine stands still for `seconds`; `gpu_busy` says whether the device spins meanwhile."""

    at: float
    seconds: float
    cause: Cause = Cause.UNKNOWN
    rank: int | None = None
    gpu_busy: bool = False


@dataclass(frozen=True, slots=True)
class Elapsed:
    """The end of a step, and how many seconds of it each disturbance added."""

    end: float
    added: dict[Cause, float] = field(default_factory=dict)
    slowdown: float = 1.0
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Disturbances:
    """All slowdowns and pauses of a scenario."""

    slowdowns: Sequence[Slowdown] = ()
    pauses: Sequence[Pause] = ()

    def elapse(self, start: float, work: float, *, rank: int = 0) -> Elapsed:
        """When `work` seconds of undisturbed stepping that begin at `start` are done."""
        if not self.slowdowns and not self.pauses:
            return Elapsed(start + work)
        added: dict[Cause, float] = {}
        seconds = work
        for slowdown in self.slowdowns:
            if slowdown.start <= start < slowdown.end and slowdown.rank in {None, rank}:
                more = seconds * (slowdown.factor - 1.0) + slowdown.extra
                added[slowdown.cause] = added.get(slowdown.cause, 0.0) + more
                seconds += more
        end = start + seconds
        paused = 0.0
        for pause in sorted(self.pauses, key=lambda p: p.at):
            if pause.rank not in {None, rank} or pause.at >= end or pause.at + pause.seconds <= start:
                continue
            more = pause.at + pause.seconds - max(start, pause.at)
            added[pause.cause] = added.get(pause.cause, 0.0) + more
            paused += more
            end += more
        return Elapsed(end, added, seconds / work if work else 1.0, paused)
