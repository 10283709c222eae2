"""The scheduler settings of vLLM that shape interference, by its names, with its refusals."""

from dataclasses import dataclass, field
from enum import StrEnum

from stallwatch.simulator.cost import TINY_ON_TWO_CORES, StepCost


class Policy(StrEnum):
    """Order of the waiting queue."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The scheduler settings of vLLM that shape interference, with its names."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 131072
    num_gpu_blocks: int = 16384
    block_size: int = 16
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = True
    policy: Policy = Policy.FCFS
    num_speculative_tokens: int = 0
    acceptance: float = 0.7
    acceptance_changes: tuple[tuple[float, float], ...] = ()
    """From a time on, another share of drafts is accepted."""
    model_runner_v2: bool = True
    """vLLM's choice wherever it has Triton; the other runner tells recomputed tokens as decoded ones."""
    serial_transfers: bool = False
    admission_closed: tuple[tuple[float, float], ...] = ()
    """Spans in which a miscounted reservation lets nobody in."""
    cost: StepCost = field(default_factory=StepCost)

    def acceptance_at(self, now: float) -> float:
        """The share of drafts accepted at a time."""
        return next((share for since, share in reversed(self.acceptance_changes) if now >= since), self.acceptance)

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs * (1 + self.num_speculative_tokens):
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must hold one token for each of "
                f"max_num_seqs ({self.max_num_seqs}) requests and its drafts"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must hold max_model_len "
                f"({self.max_model_len}) without chunked prefill"
            )
        if (self.num_gpu_blocks - 1) * self.block_size < self.max_model_len:
            raise ValueError(
                f"num_gpu_blocks ({self.num_gpu_blocks}) of {self.block_size} tokens cannot hold one request of "
                f"max_model_len ({self.max_model_len})"
            )


CPU_REFERENCE = EngineConfig(
    max_num_batched_tokens=512,
    max_num_seqs=256,
    max_model_len=16384,
    num_gpu_blocks=8192,
    block_size=128,
    async_scheduling=False,
    model_runner_v2=False,
    cost=TINY_ON_TWO_CORES,
)
"""The settings under which the real vLLM was watched on a CPU, where its scheduling is always synchronous."""
