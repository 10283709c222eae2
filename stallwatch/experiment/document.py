"""The report as JSON: everything that was measured and concluded, in one object with a versioned schema.

`docs/experiment.md` documents it. Within a version, keys are only added; what is not known is null or absent.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from stallwatch.experiment.conclude import Conclusion, Effect
from stallwatch.experiment.conduct import Experiment
from stallwatch.experiment.gaps import gaps_by_arm
from stallwatch.experiment.measure import MEASURES, Run
from stallwatch.experiment.plan import cost
from stallwatch.experiment.record import Followed
from stallwatch.experiment.statistics import Estimate
from stallwatch.observations import EngineCounters, HostSample

SCHEMA: Final = "stallwatch.experiment/1"
SWEEP_SCHEMA: Final = "stallwatch.sweep/1"
COMPARISON_SCHEMA: Final = "stallwatch.comparison/1"

_MOST_BYTES: Final = 256 * 1024 * 1024
_COLUMNS: Final = ("running", "waiting", "kv_usage", "generation_tokens", "preemptions")


class UnreadableReportError(Exception):
    """A file that is no report of ours; one sentence why."""


def document(found: Experiment, *, timelines: bool = True) -> dict[str, Any]:
    """The object for JSON.

    Without `timelines`, for reports that hold many experiments, only the figures of runs, and their gaps as a
    comparison draws them.
    """
    shape, price, plan = found.asked.shape, cost(found.asked.shape), found.threshold
    runs = [_run(run, found.unix_offset) for run in found.runs]
    gaps: dict[str, Any] = {}
    if not timelines:
        gaps["gaps"] = gaps_by_arm(runs)
        for run in runs:
            del run["timeline"]
    return {
        "schema": SCHEMA,
        "outcome": str(found.outcome),
        "why": found.why or None,
        "began": moment(found.began + found.unix_offset),
        "began_unix": round(found.began + found.unix_offset, 3),
        "seconds": round(found.ended - found.began, 3),
        "conclusions": [conclusion(one) for one in found.conclusions],
        "identity": {
            "server": dict(found.identity.server),
            "command": found.identity.command,
            "scheduler": dict(found.identity.scheduler),
            "scheduler_source": found.identity.scheduler_source,
            "gpus": [dict(gpu) for gpu in found.identity.gpus],
            "driver": found.identity.driver,
            "host": dict(found.identity.host),
            "stallwatch": found.identity.stallwatch,
            "python": found.identity.python,
            "seed": found.identity.seed,
        },
        "plan": {
            "repeats": shape.repeats,
            "streams": shape.streams,
            "output_tokens": shape.output_tokens,
            "prompt_tokens": list(shape.prompt_tokens),
            "settle_tokens": shape.settle_tokens,
            "pause_seconds": shape.pause_seconds,
            "seed": shape.seed,
            "allow_busy": found.asked.allow_busy,
            "requests": price.requests,
            "most_tokens": price.tokens,
        },
        "judged_by": {
            "usual_gap_seconds": _rounded(plan.usual) if plan is not None else None,
            "slow_gap_seconds": _rounded(plan.slow) if plan is not None else None,
            "stall_seconds": _rounded(plan.stall) if plan is not None else None,
        },
        "notes": list(found.notes),
        "left_out": [
            {"run": run.number, "block": run.block, "arm": str(run.arm), "prompt_tokens": run.prompt_tokens}
            for run in found.left_out
        ],
        "measures": {measure.name: {"words": measure.words, "unit": measure.unit} for measure in MEASURES},
        **gaps,
        "runs": runs,
    }


def conclusion(one: Conclusion) -> dict[str, Any]:
    """What follows for one length of prompt."""
    return {
        "prompt_tokens": one.prompt_tokens,
        "verdict": str(one.verdict),
        "statement": one.statement,
        "because": list(one.because),
        "not_shown": list(one.not_shown),
        "advice": list(one.advice),
        "effects": [_effect(effect) for effect in one.effects],
    }


def _effect(effect: Effect) -> dict[str, Any]:
    return {
        "measure": effect.measure,
        "one": str(effect.one),
        "other": str(effect.other),
        "one_mean": _rounded(effect.one_mean),
        "other_mean": _rounded(effect.other_mean),
        "difference": estimate(effect.difference),
        "ratio": None if effect.ratio is None else estimate(effect.ratio),
    }


def estimate(seen: Estimate) -> dict[str, Any]:
    """A mean with its interval; a bound that nothing is known of is null."""
    return {"mean": _rounded(seen.mean), "low": _rounded(seen.low), "high": _rounded(seen.high), "n": seen.n}


def _run(run: Run, offset: float) -> dict[str, Any]:
    planned, played = run.planned, run.taken.played
    return {
        "run": planned.number,
        "block": planned.block,
        "arm": str(planned.arm),
        "prompt_tokens": planned.prompt_tokens,
        "void": list(run.void),
        "began_unix": round(played.began + offset, 3),
        "seconds": round(played.ended - played.began, 4),
        "measures": {name: _rounded(value) for name, value in run.measures.items()},
        "confirmed_by": run.confirmation.source,
        "prefill_evidence": str(run.evidence),
        "stall_seconds_by_cause": {str(cause): round(seconds, 3) for cause, seconds in run.causes.items()},
        "inside_share": None if run.inside is None else round(run.inside, 4),
        "timeline": _timeline(run),
    }


def _timeline(run: Run) -> dict[str, Any]:
    """Everything seen in a run, in seconds from its beginning, on one clock."""
    taken, played = run.taken, run.taken.played
    zero = played.began

    def since(at: float | None) -> float | None:
        return None if at is None else round(at - zero, 4)

    scrapes = [(seen.at, seen.engines[taken.engine]) for seen in taken.log.scrapes if taken.engine in seen.engines]
    gpus: dict[str, dict[str, list[Any]]] = {}
    for seen in taken.log.gpus:
        for reading in seen.gpus:
            columns = gpus.setdefault(
                reading.gpu, {"at": [], "utilization": [], "sm_clock_hertz": [], "power_watts": []}
            )
            columns["at"].append(since(seen.at))
            columns["utilization"].append(reading.utilization)
            columns["sm_clock_hertz"].append(reading.sm_clock)
            columns["power_watts"].append(reading.power)
    return {
        "marked": since(played.marked),
        "ended": since(played.ended),
        "streams": [_stream(reader, zero) for reader in played.readers],
        "prompt": None
        if played.prompt is None
        else {
            "sent": since(played.prompt.sent_at),
            "first_token": since(played.prompt.first_token_at),
        },
        "engine": {
            "at": [since(at) for at, _ in scrapes],
            **{name: _column(name, (counters for _, counters in scrapes)) for name in _COLUMNS},
        },
        "steps": [
            {
                "since": since(seen.since),
                "until": since(seen.until),
                "steps": round(seen.steps),
                "seconds": _rounded(seen.seconds),
                "prefill_tokens": _rounded(seen.prefill),
                "evidence": str(seen.evidence),
            }
            for seen in taken.log.paired
            if seen.steps or seen.prefill
        ],
        "gpus": gpus,
        "host": _host(taken.log.host, zero),
        "lag": [[since(seen.at), round(seen.lag, 4)] for seen in taken.log.lags if seen.lag >= 0.005],
    }


def _stream(reader: Followed, zero: float) -> dict[str, Any]:
    told: dict[str, Any] = {
        "sent": None if reader.sent_at is None else round(reader.sent_at - zero, 4),
        "at": [round(at - zero, 4) for at, _ in reader.arrivals],
    }
    tokens = [count for _, count in reader.arrivals]
    if any(count != 1 for count in tokens):
        told["tokens"] = tokens
    return told


def _host(samples: Sequence[HostSample], zero: float) -> dict[str, Any]:
    """Seconds that tasks waited for a resource, and that vLLM's container was not allowed to run: counters."""
    told: dict[str, Any] = {"at": [round(seen.at - zero, 4) for seen in samples]}
    for resource in ("cpu", "memory", "io"):
        column = [seen.pressure_seconds.get((resource, "some")) for seen in samples]
        if any(value is not None for value in column):
            told[f"{resource}_waited_seconds"] = [None if value is None else round(value, 4) for value in column]
    throttled = [seen.engine_throttled_seconds for seen in samples]
    if any(value is not None for value in throttled):
        told["engine_throttled_seconds"] = throttled
    return told


def _column(name: str, counters: Iterable[EngineCounters]) -> list[float | None]:
    return [_rounded(getattr(seen, name)) for seen in counters]


def _rounded(value: float | None) -> float | None:
    """Six figures of what is not whole; null for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    whole = int(value)
    return whole if whole == value else float(f"{value:.6g}")


def moment(unix: float) -> str:
    """A time for people, UTC."""
    at = datetime.fromtimestamp(min(max(unix, 0.0), 253402300799.0), tz=UTC)
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def text(told: Mapping[str, Any]) -> str:
    """As it is written to a file."""
    return json.dumps(told, allow_nan=False, separators=(",", ":")) + "\n"


def read(path: Path) -> Mapping[str, Any]:
    """A report of ours. Raises `UnreadableReportError`."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UnreadableReportError(f"{path.name}: larger than any report of ours")
        told: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UnreadableReportError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableReportError(f"{path.name}: not JSON") from error
    schema = told.get("schema") if isinstance(told, dict) else None
    if schema in {SCHEMA, SWEEP_SCHEMA}:
        found: Mapping[str, Any] = told
        return found
    if isinstance(schema, str) and schema.startswith("stallwatch."):
        why = f"schema {schema[:40]} is not one that this stallwatch reads ({SCHEMA}, {SWEEP_SCHEMA})"
    else:
        why = "not a report of `stallwatch experiment`"
    raise UnreadableReportError(f"{path.name}: {why}")


def experiments(name: str, told: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The experiments of a report by name: itself, or those of a sweep."""
    if told["schema"] == SCHEMA:
        yield name, told
        return
    for point in told["points"]:
        if point["experiment"] is not None:
            yield f"{name}: {told['parameter']}={point['value']}", point["experiment"]


def values(told: Mapping[str, Any], arm: str, prompt_tokens: int | None, measure: str) -> Sequence[float]:
    """A measure in the valid runs of a kind, in their order."""
    return [
        run["measures"][measure]
        for run in told["runs"]
        if run["arm"] == arm
        and (arm == "alone" or run["prompt_tokens"] == prompt_tokens)
        and not run["void"]
        and run["measures"].get(measure) is not None
    ]
