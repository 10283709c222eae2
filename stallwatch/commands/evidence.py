"""Which evidence for scheduled prefill tokens a metrics page offers, and what a better one would take. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from stallwatch.analysis.prefill import CLIMBS, LADDER, Climb, Evidence
from stallwatch.observations import CacheFacts, EngineCounters

_BALANCE_FIELDS = (
    "running",
    "waiting",
    "kv_usage",
    "prefix_queries",
    "prefix_hits",
    "iterations",
    "itl_count",
    "generation_tokens",
    "first_tokens",
    "prompt_local_compute",
    "finished_count",
    "finished_prompt_tokens",
    "finished_generation_tokens",
)
_PLUGIN_STEPS = re.compile(r'stallwatch_plugin_step_moments_total\{.*\bterm="n"')


@dataclass(frozen=True, slots=True)
class Offer:
    """The best rung that a server stands on, why it is no higher, and what would be."""

    evidence: Evidence
    obstacles: tuple[str, ...]
    better: tuple[Climb, ...]


def offered(counters: EngineCounters, cache: CacheFacts | None, version: str | None) -> Offer:
    """What one engine offers."""
    obstacles: list[str] = []
    for evidence, check in (
        (Evidence.PLUGIN, _plugin),
        (Evidence.MFU, _mfu),
        (Evidence.BALANCE, lambda seen: _balance(seen, cache)),
        (Evidence.COMPLETION, _completion),
    ):
        obstacle = check(counters)
        if obstacle is None:
            return Offer(evidence, tuple(obstacles), _better(evidence, version))
        if obstacle:
            obstacles.append(obstacle)
    return Offer(Evidence.UNKNOWN, tuple(obstacles), _better(Evidence.UNKNOWN, version))


def worst(offers: Mapping[str, Offer]) -> Offer:
    """The offer of the engine that offers least; there must be one."""
    return max(offers.values(), key=lambda offer: LADDER.index(offer.evidence))


# Each gives None when the rung holds, else why it does not; "" where that is the ordinary case.


def _plugin(seen: EngineCounters) -> str | None:
    if not seen.plugin:
        return ""
    steps = sum(value for key, value in seen.plugin.items() if _PLUGIN_STEPS.search(key))
    if steps > 0 or not seen.iterations:
        return None
    return "the plugin is loaded but counts no step: start vLLM with --enable-logging-iteration-details"


def _mfu(seen: EngineCounters) -> str | None:
    return None if seen.write_bytes else ""


def _balance(seen: EngineCounters, cache: CacheFacts | None) -> str | None:
    lacking = [name for name in _BALANCE_FIELDS if getattr(seen, name) is None]
    if lacking:
        return f"the token balance lacks {', '.join(lacking)}"
    if cache is None or cache.capacity_tokens is None:
        return "the token balance lacks the size of the KV cache"
    if cache.prefix_caching is False:
        return "the token balance needs prefix caching, which is off"
    if cache.hybrid:
        return "the token balance does not hold in a hybrid KV cache"
    return None


def _completion(seen: EngineCounters) -> str | None:
    if seen.prompt_local_compute is None and seen.prompt_tokens is None:
        return "prompt tokens are not counted"
    return None


def _better(evidence: Evidence, version: str | None) -> tuple[Climb, ...]:
    place = LADDER.index(evidence)
    return tuple(
        climb
        for climb in CLIMBS
        if LADDER.index(climb.evidence) < place
        # The balance needs no flag: what it lacks stands among the obstacles.
        and climb.evidence in {Evidence.PLUGIN, Evidence.MFU}
        and _has(version, climb.since)
    )


def _has(version: str | None, since: str) -> bool:
    """Whether a release has something, as far as it is known; development builds count as having everything."""
    have, need = _release(version or ""), _release(since)
    return have is None or need is None or have >= need or have == (0, 0)


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})", version)
    return (int(found[1]), int(found[2])) if found else None
