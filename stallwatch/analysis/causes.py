"""The words for what happened: kinds of stalls, their causes, the evidence for them, and what to try.

A cause is only named where something was seen that explains it; `unknown` is an answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class StallKind(StrEnum):
    """How a stall shows itself; the `kind` label. A stall of several kinds has the first of them."""

    DECODE = "decode"  # a stream that had tokens stopped
    ENGINE = "engine"  # metrics alone: known decoders, and no step ended
    ADMISSION = "admission"  # a first token is late
    DEGRADED = "degraded"  # no single long gap, yet a fraction of the usual progress


class Cause(StrEnum):
    """Why readers waited; the `cause` label."""

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
class Evidence:
    """What one rule saw, and how many seconds of the stall that explains."""

    cause: Cause
    seconds: float
    sentence: str


WHAT_TO_TRY: Mapping[Cause, str] = MappingProxyType(
    {
        Cause.OBSERVER: "give stallwatch more CPU: what it saw was its own lateness",
        Cause.ENGINE_DOWN: "look at the server's last log lines and its exit code",
        Cause.DELIVERY: "look at what lies between the engine and the reader: CPU of the API process, proxy buffering",
        Cause.PREEMPTION: "give the KV cache more room, or let fewer sequences run (--max-num-seqs)",
        Cause.PREFILL: "lower --max-num-batched-tokens or set --long-prefill-token-threshold",
        Cause.ADMISSION: "add capacity, or raise --max-num-seqs while the KV cache has room",
        Cause.KV_TRANSFER: "look at the KV connector and its storage: requests wait for their cache to be loaded",
        Cause.GPU_CLOCK: "look for heat, a power limit or another tenant: the GPU clock is below its own past",
        Cause.GPU_IDLE: "look at the engine's host process: compilation, garbage collection or communication",
        Cause.INTERCONNECT: "look at the links between the GPUs' hosts: congestion, retransmissions, a degraded port",
        Cause.HOST_PRESSURE: "look at the host's memory and disk pressure, and at the CPU limit of vLLM's container",
        Cause.ENGINE_HANG: "take a stack dump of the engine process (py-spy), then restart it",
        Cause.UNKNOWN: "look at the timeline of this stall: nothing that was seen explains it",
    }
)


def runbook(cause: Cause) -> str:
    """Where the runbook goes on."""
    return f"docs/runbook.md#{cause}"
