"""Why readers waited: a tuple of small rules over what was going on, each with its own evidence.

A rule says how many seconds of the stall it explains, and never takes a second that another witness explains better:
seconds in which the engine itself stood still are told apart from those in which only a stream did, and what the
machine took from a step that also carried prefill is taken off the prefill. The cause is the one that explains at least
half; if none does, it is unknown. What loses is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stallwatch.analysis.attribution.engine import admission, kv_transfer, preemption, prefill
from stallwatch.analysis.attribution.frozen import Frozen, Scene
from stallwatch.analysis.attribution.machine import engine_hang, gpu_clock, gpu_idle, host_pressure, interconnect
from stallwatch.analysis.attribution.path import delivery, engine_down, observer
from stallwatch.analysis.causes import Cause, Evidence

__all__ = ["RULES", "Frozen", "Rule", "Scene", "Verdict", "attribute"]

_HALF = 0.5
_LEAST_SHARE = 0.02  # of the stall, below which evidence is noise


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; `early` ones may speak while the first frozen step is still open, since they need no end of a step."""

    judge: Callable[[Frozen, Scene], Evidence | None]
    early: bool = False


RULES: tuple[Rule, ...] = (
    Rule(observer, early=True),
    Rule(engine_down, early=True),
    Rule(delivery, early=True),
    Rule(preemption),
    Rule(prefill),
    Rule(admission, early=True),
    Rule(kv_transfer, early=True),
    Rule(gpu_clock),
    Rule(interconnect),
    Rule(host_pressure),
    Rule(engine_hang, early=True),
    Rule(gpu_idle),
)
"""In the order in which they win when they explain equally much."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause, and all the evidence there is, the strongest first."""

    cause: Cause = Cause.UNKNOWN
    evidence: tuple[Evidence, ...] = ()


def attribute(stall: Frozen, scene: Scene) -> Verdict:
    """Judges one stall."""
    total = stall.seconds
    if total <= 0:
        return Verdict()
    scene.refresh()
    found = []
    for order, rule in enumerate(RULES):
        if stall.blind and not rule.early:
            continue
        evidence = rule.judge(stall, scene)
        if evidence is not None and evidence.seconds > _LEAST_SHARE * total:
            found.append((-round(evidence.seconds, 6), order, evidence))
    ranked = tuple(evidence for _, _, evidence in sorted(found, key=lambda entry: entry[:2]))
    if ranked and ranked[0].seconds >= _HALF * total - 1e-9:
        return Verdict(ranked[0].cause, ranked)
    return Verdict(Cause.UNKNOWN, ranked)
