"""One request as the engine sees it: tokens known, tokens computed, blocks held.

Content is real token ids, because prefix caching compares content. What the model "says" is a fixed function of the
prompt and the position, so two runs of the same request say the same, however they are scheduled.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from random import Random
from zlib import crc32

_EOS = 257
_TEXT = b"the quick brown fox jumps over the lazy dog, caf\xc3\xa9 by caf\xc3\xa9; "


class FinishReason(StrEnum):
    """vLLM's labels of `request_success`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class State(Enum):
    """Where a request stands in the scheduler."""

    WAITING = 1
    LOADING = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED = 5


@dataclass(slots=True, eq=False)
class Request:
    """Mutable scheduling state. `computed` is optimistic: it includes tokens of steps in flight, as vLLM's does."""

    id: str
    prompt: "array[int]"
    max_tokens: int
    priority: int = 0
    stop_at: int | None = None
    salt: bytes = b""
    external_tokens: int = 0
    transfer_seconds: float = 0.0
    background: bool = False

    arrival: float = 0.0
    rank: int = 0
    state: State = State.WAITING
    computed: int = 0
    placeholders: int = 0
    output: "array[int]" = field(default_factory=lambda: array("H"))
    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    remembered: int = 0
    preemptions: int = 0
    ready_at: float = 0.0
    finish_reason: FinishReason | None = None

    queued_at: float = 0.0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    cached_tokens: int = 0
    external_hits: int = 0
    preemptions_booked: int = 0
    seed: int = 0
    _rng: Random | None = None

    def __post_init__(self) -> None:
        self.seed = crc32(self.prompt.tobytes())

    @property
    def prompt_tokens(self) -> int:
        """Length of what was asked."""
        return len(self.prompt)

    @property
    def known_tokens(self) -> int:
        """What was asked and what has been said."""
        return len(self.prompt) + len(self.output)

    @property
    def recomputing(self) -> bool:
        """Whether a prefill of it repeats work that a preemption threw away."""
        return self.preemptions > 0

    def append_output(self, count: int) -> None:
        """Says the next `count` tokens."""
        for _ in range(count):
            position = len(self.output)
            if self.stop_at is not None and position + 1 >= self.stop_at:
                self.output.append(_EOS)
            else:
                self.output.append(_TEXT[(self.seed + position) % len(_TEXT)])

    def accepted_drafts(self, drafts: int, acceptance: float) -> int:
        """How many drafts in a row the target model accepts, drawn from the request's own sequence."""
        if self._rng is None:
            self._rng = Random(self.seed)  # noqa: S311  # a simulation, not a secret
        accepted = 0
        while accepted < drafts and self._rng.random() < acceptance:
            accepted += 1
        return accepted


def synthetic_prompt(identity: int, tokens: int, *, prefix: int | None = None, prefix_tokens: int = 0) -> "array[int]":
    """A prompt of random token ids; equal identities give equal prompts, equal prefixes share their head."""
    head = min(prefix_tokens, tokens) if prefix is not None else 0
    content = array("H")
    if head:
        content.frombytes(Random(f"prefix {prefix}").randbytes(2 * head))  # noqa: S311
    content.frombytes(Random(f"prompt {identity}").randbytes(2 * (tokens - head)))  # noqa: S311
    return content
