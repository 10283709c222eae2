"""How things stand, in one sentence for the person on call: what the live page and reports say first.

Nothing is said that was not seen: a server that does not answer, figures that are not there yet and causes without
evidence have sentences of their own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from stallwatch.analysis.causes import WHAT_TO_TRY, Cause, StallKind
from stallwatch.analysis.episodes import Stall
from stallwatch.analysis.findings import EngineFindings, Findings
from stallwatch.analysis.phase import Phase
from stallwatch.analysis.step_model import LEAST_MIXED, LEAST_R2
from stallwatch.analysis.work import WorkView
from stallwatch.health import Health
from stallwatch.observations import Source

_RECENT = 120.0  # seconds after its end for which a stall is still mentioned

NAMES: Mapping[Cause, str] = {
    Cause.OBSERVER: "our own lateness",
    Cause.ENGINE_DOWN: "the engine is down",
    Cause.DELIVERY: "delivery",
    Cause.PREEMPTION: "preemption",
    Cause.PREFILL: "prefill",
    Cause.ADMISSION: "admission",
    Cause.KV_TRANSFER: "KV transfer",
    Cause.GPU_CLOCK: "GPU clock",
    Cause.GPU_IDLE: "GPU idle",
    Cause.INTERCONNECT: "interconnect",
    Cause.HOST_PRESSURE: "host pressure",
    Cause.ENGINE_HANG: "engine hang",
    Cause.UNKNOWN: "unknown",
}

_OPEN: Mapping[StallKind, str] = {
    StallKind.DECODE: "Answers have been stalling for",
    StallKind.ENGINE: "The engine has been stalling for",
    StallKind.ADMISSION: "New requests have been waiting for",
    StallKind.DEGRADED: "Answers have been trickling for",
}


class State(StrEnum):
    """What a verdict comes down to, for its colour."""

    WELL = "well"
    LATE = "late"
    STALLED = "stalled"
    DOWN = "down"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence, one more that may be empty, and the stall that it speaks of."""

    state: State
    sentence: str
    more: str = ""
    stall: str | None = None  # id
    cause: Cause | None = None


def verdict(findings: Findings, health: Health) -> Verdict:
    """How things stand now."""
    stalled = [engine.stalls.open for engine in findings.engines if engine.stalls.open is not None]
    if stalled:
        worst = max(stalled, key=lambda stall: (stall.seconds, stall.id))
        return _stalled(worst, len(stalled), len(findings.engines), findings.at)
    if findings.phase is Phase.GONE:
        return Verdict(State.DOWN, "The server is gone: nothing answers where it was.", _recently(findings))
    if findings.phase is Phase.ASLEEP:
        return Verdict(State.UNKNOWN, "The server sleeps: nothing is judged.")
    source = health.sources.get(Source.ENGINE)
    if findings.phase is Phase.STARTING:
        why = "" if source is None or source.up or source.reason is None else f" ({source.reason})"
        return Verdict(State.UNKNOWN, f"The server is starting or cannot be reached{why}: nothing to judge yet.")
    waits = [wait for engine in findings.engines if (wait := _wait(engine)) is not None]
    if not waits:
        return Verdict(State.UNKNOWN, "No data yet: nobody was seen to read.", _blind(health))
    more = " ".join(part for part in (_blind(health), _recently(findings)) if part)
    missed, engine = max(((engine.just_missed, engine) for engine in findings.engines), key=lambda one: one[0])
    if missed > 0:
        name = f" of engine {engine.engine}" if len(findings.engines) > 1 else ""
        sentence = f"Readers{name} waited longer than promised in {missed:.1f} of the last 30 s"
        own = _wait(engine)
        return Verdict(State.LATE, f"{sentence}{'' if own is None else f', up to {seconds(own)}'}.", more)
    longest = seconds(max(waits))
    return Verdict(State.WELL, f"Readers are served. Longest wait of the last 30 s: {longest}.", more)


def advice(work: WorkView | None, objective: float) -> str:
    """What to set the token budget to, or why nothing can be advised; `objective` in seconds."""
    if work is None:
        return "No data yet: the engine was not seen to work."
    budget, model = work.budget, work.model
    if budget is not None:
        now = f", now {work.token_budget:,}" if work.token_budget is not None else ""
        if budget.tokens <= 0:
            return f"No chunk of prefill fits into {seconds(objective)} here{now and ' (' + now[2:] + ')'}."
        return (
            f"--max-num-batched-tokens {budget.batched_tokens:,} keeps 95 % of steps within {seconds(objective)}{now}."
        )
    if model is None or not model.per_token:
        return "No advice yet: no step with prefill beside readers was timed."
    if model.mixed_steps < LEAST_MIXED:
        return f"No advice yet: {model.mixed_steps:.0f} steps with prefill were timed, {LEAST_MIXED} are needed."
    if model.r2 is None or model.r2 < LEAST_R2:
        return "No advice: what steps take is not explained by what they carry."
    return "No advice: what a prompt token costs is not known."


def reservations(work: WorkView | None) -> str:
    """For which prompts the advice holds; empty without advice."""
    budget = work.budget if work is not None else None
    if budget is None:
        return ""
    words = [f"A chunk of {budget.tokens:,} prompt tokens beside {_count(budget.decoders, 'reader')}"]
    if budget.context_min is not None and budget.context_max is not None:
        words.append(f"learned with {budget.context_min:,.0f} to {budget.context_max:,.0f} tokens of context")
    if budget.extrapolated:
        words.append("extrapolated beyond what was seen")
    if budget.max_num_seqs is None:
        words.append("not below --max-num-seqs")
    return ", ".join(words) + "."


def seconds(value: float) -> str:
    """Three figures and a unit."""
    if not math.isfinite(value):
        return "an unknown time"
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    if value < 99.5:
        return f"{value:.1f} s"
    whole = round(value)
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )


def because(stall: Stall) -> str:
    """A stall's cause in words, with the prompt where one is known to matter."""
    if stall.cause is Cause.PREFILL and stall.culprit_tokens is not None:
        return f"prefill, a prompt of {stall.culprit_tokens:,.0f} tokens"
    return NAMES[stall.cause]


def _stalled(stall: Stall, stalled: int, engines: int, now: float) -> Verdict:
    where = ""
    if engines > 1:
        where = f" on {stalled} of {engines} engines" if stalled > 1 else f" on engine {stall.engine}"
    cause = "Nothing seen so far explains it" if stall.cause is Cause.UNKNOWN else f"Cause: {because(stall)}"
    return Verdict(
        State.STALLED,
        f"{_OPEN[stall.kind]} {seconds(stall.duration(now))}{where}. {cause}.",
        "" if stall.cause is Cause.UNKNOWN else f"Try: {WHAT_TO_TRY[stall.cause]}.",
        stall.id,
        stall.cause,
    )


def _wait(engine: EngineFindings) -> float | None:
    waits = (engine.engine_wait_max, engine.canary.wait_max if engine.canary is not None else None)
    return max((wait for wait in waits if wait is not None), default=None)


def _recently(findings: Findings) -> str:
    closed = [stall for engine in findings.engines for stall in engine.stalls.closed[:1] if stall.end is not None]
    last = max(closed, key=lambda stall: stall.end or 0.0, default=None)
    if last is None or last.end is None or findings.at - last.end > _RECENT:
        return ""
    ago = seconds(max(1.0, findings.at - last.end))
    return f"The last stall ended {ago} ago: {seconds(last.duration(findings.at))}, {because(last)}."


def _blind(health: Health) -> str:
    source = health.sources.get(Source.ENGINE)
    if source is None or source.up:
        return ""
    return f"The server's metrics cannot be read ({source.reason}): judged by the canary alone."


def _count(number: float, what: str) -> str:
    text = f"{number:.0f}"
    return f"{text} {what}" if text == "1" else f"{text} {what}s"
