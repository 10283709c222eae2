"""Whether a run was what it was meant to be: uncached without a token from the cache, cached with nearly all of them.

Nothing is taken on trust: what cannot be confirmed is void. What the server says of the prompt itself comes first
(`prompt_tokens_details`, which vLLM gives with `--enable-prompt-tokens-details`), else its counters over the run, which
speak for the prompt as long as nobody else sends requests. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stallwatch.analysis.counting import delta
from stallwatch.experiment.plan import Arm, Planned
from stallwatch.experiment.record import Played
from stallwatch.observations import EngineCounters

CACHED_SHARE: Final = 0.95
"""Of the prompt, from which on it counts as cached: its last block is always computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How far the server's counters moved over a run; None is not known. Tokens and requests."""

    computed: float | None = None
    cached: float | None = None
    external: float | None = None
    first_tokens: float | None = None
    preemptions: float | None = None
    generated: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """What is known of the prompt of a run, and what is wrong with it."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    source: str | None = None  # "usage" or "counters"
    problems: tuple[str, ...] = ()

    @property
    def computed_tokens(self) -> int | None:
        """Tokens of the prompt that were computed."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


def counted(before: EngineCounters | None, after: EngineCounters | None) -> Counted:
    """The movement between two scrapes of the estimator's lane."""
    if before is None or after is None:
        return Counted()
    cached = delta(before.prompt_local_cache_hit, after.prompt_local_cache_hit)
    return Counted(
        computed=delta(before.prompt_local_compute, after.prompt_local_compute),
        cached=cached if cached is not None else delta(before.prefix_hits, after.prefix_hits),
        external=delta(before.prompt_external, after.prompt_external),
        first_tokens=delta(before.first_tokens, after.first_tokens),
        preemptions=delta(before.preemptions, after.preemptions),
        generated=delta(before.generation_tokens, after.generation_tokens),
    )


def confirm(planned: Planned, played: Played, seen: Counted, *, allow_busy: bool) -> Confirmation:
    """Judges a run that came to its end."""
    sent = len(played.readers) + (played.prompt is not None)
    foreign = None if seen.first_tokens is None else seen.first_tokens - sent
    problems = []
    if foreign is not None and foreign > 0 and not allow_busy:
        problems.append(
            f"the server answered {foreign:.0f} more requests than were sent: somebody else's, or retries on the path"
        )
    closed = played.prompt.closed if played.prompt is not None else None
    if planned.arm is Arm.ALONE:
        return Confirmation(problems=tuple(problems))
    if closed is None or closed.prompt_tokens is None:
        return Confirmation(problems=(*problems, "the server does not say how long the prompt was"))
    cached, source = closed.cached_tokens, "usage"
    if cached is None:
        cached, source = _by_counters(seen, foreign), "counters"
    if cached is None:
        why = "requests of others are in its counters" if foreign else "it gives neither usage details nor counters"
        problems.append(f"how much of the prompt was cached cannot be confirmed: {why}")
        return Confirmation(prompt_tokens=closed.prompt_tokens, problems=tuple(problems))
    problems += _state(planned.arm, cached, closed.prompt_tokens)
    if seen.external:
        problems.append(f"{seen.external:,.0f} tokens of prompts came from a KV transfer")
    return Confirmation(
        prompt_tokens=closed.prompt_tokens, cached_tokens=cached, source=source, problems=tuple(problems)
    )


def _by_counters(seen: Counted, foreign: float | None) -> int | None:
    return None if seen.cached is None or foreign is None or foreign > 0 else round(seen.cached)


def _state(arm: Arm, cached: int, prompt: int) -> Iterator[str]:
    if arm is Arm.UNCACHED and cached > 0:
        yield f"meant to be uncached, but {cached:,} of {prompt:,} prompt tokens came out of the prefix cache"
    if arm is Arm.CACHED and cached < CACHED_SHARE * prompt:
        yield (
            f"meant to be cached, but only {cached:,} of {prompt:,} prompt tokens came out of the prefix cache "
            f"({CACHED_SHARE:.0%} are needed)"
        )
