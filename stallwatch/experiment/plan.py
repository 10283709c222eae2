"""What will be run, in which order, and what it will cost. Pure; one seed gives one order.

A block holds every run once, in an order of its own, so that what drifts (heat, neighbours, a filling cache) meets all
kinds of runs alike; effects are taken within blocks.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

READER_PROMPT_TOKENS: Final = 64
"""About as long as a reader's own prompt is, counted high."""
SAMPLE_TOKENS: Final = 2_000
"""Of the small request that tells how many tokens a word is, counted high."""


class Arm(StrEnum):
    """What goes on beside the streams of a run."""

    ALONE = "alone"
    UNCACHED = "uncached"
    CACHED = "cached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The load, the same in every run. Tokens and seconds."""

    streams: int = 4
    output_tokens: int = 400
    prompt_tokens: tuple[int, ...] = (12_000,)
    repeats: int = 5
    settle_tokens: int = 32
    """Tokens that every stream has got before the long prompt is sent."""
    pause_seconds: float = 2.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """One run. `prompt_tokens` are None where no prompt is sent beside the streams."""

    number: int  # from 1, in the order of running
    block: int  # from 1
    arm: Arm
    prompt_tokens: int | None = None

    @property
    def name(self) -> str:
        """For a person."""
        if self.prompt_tokens is None:
            return "streams alone"
        return f"beside {self.prompt_tokens:,} tokens, {self.arm}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The most that the server is asked for. Tokens."""

    runs: int
    requests: int
    computed_tokens: int  # of prompts that no cache can have
    cached_tokens: int  # of prompts that should come out of the cache; computed too where it does not hold them
    output_tokens: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.computed_tokens + self.cached_tokens + self.output_tokens


def arms(shape: Shape) -> Sequence[tuple[Arm, int | None]]:
    """The kinds of runs of a block."""
    beside = ((arm, tokens) for tokens in shape.prompt_tokens for arm in (Arm.UNCACHED, Arm.CACHED))
    return ((Arm.ALONE, None), *beside)


def matrix(shape: Shape) -> tuple[Planned, ...]:
    """All runs in their order."""
    return tuple(_runs(shape))


def _runs(shape: Shape) -> Iterator[Planned]:
    rng = random.Random(shape.seed)  # noqa: S311 (an order that can be repeated, no secret)
    number = 0
    for block in range(1, shape.repeats + 1):
        kinds = list(arms(shape))
        rng.shuffle(kinds)
        for arm, tokens in kinds:
            number += 1
            yield Planned(number, block, arm, tokens)


def cost(shape: Shape) -> Cost:
    """What the whole of it may cost, warm-up included."""
    runs = matrix(shape)
    # The warm-up: a sample, each prompt once, and streams as in a run.
    readers = (len(runs) + 1) * shape.streams
    uncached = sum(run.prompt_tokens or 0 for run in runs if run.arm is Arm.UNCACHED)
    # Before each of these runs the prompt is sent once so that the cache holds it, then once beside the streams.
    cached = sum(2 * (run.prompt_tokens or 0) for run in runs if run.arm is Arm.CACHED)
    prompts = sum({Arm.ALONE: 0, Arm.UNCACHED: 1, Arm.CACHED: 2}[run.arm] for run in runs)
    return Cost(
        runs=len(runs),
        requests=readers + prompts + 1 + len(shape.prompt_tokens),
        computed_tokens=readers * READER_PROMPT_TOKENS + uncached + sum(shape.prompt_tokens) + SAMPLE_TOKENS,
        cached_tokens=cached,
        output_tokens=readers * shape.output_tokens + prompts + 1 + len(shape.prompt_tokens),
    )


def described(shape: Shape) -> Iterator[str]:
    """The plan, for a person to read before it is carried out."""
    runs, price = matrix(shape), cost(shape)
    lengths = " and ".join(f"{tokens:,}" for tokens in shape.prompt_tokens)
    yield (
        f"{shape.repeats} blocks of {len(runs) // shape.repeats} runs in random order (seed {shape.seed}), after a "
        "warm-up that is not counted"
    )
    yield (
        f"each run: {shape.streams} streams of {shape.output_tokens:,} tokens; once each of them has "
        f"{shape.settle_tokens} tokens:"
    )
    yield "  alone      nothing more"
    yield f"  uncached   one prompt of about {lengths} tokens, not in the prefix cache"
    yield "  cached     the same prompt, put into the prefix cache before"
    yield f"{shape.pause_seconds:g} s between runs; a run waits until the server is idle"
    yield (
        f"cost: {price.requests:,} requests; at most {price.computed_tokens:,} prompt tokens to compute, "
        f"{price.cached_tokens:,} that the prefix cache should save, {price.output_tokens:,} tokens of output"
    )
