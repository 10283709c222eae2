"""The report as Markdown, from the object that is written as JSON. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stallwatch.experiment.figures import figure, told
from stallwatch.experiment.gaps import ARMS

_ACTIVE = re.compile(r"([\\`*_{}\[\]<>#|~&])")

SHOWN: Final = (
    *("lost_seconds", "longest_gap_seconds", "itl_p50_seconds", "itl_p95_seconds", "itl_p99_seconds"),
    *("icl_p99_seconds", "time_weighted_p95_seconds", "time_weighted_p99_seconds", "beside_itl_p99_seconds"),
    *("stall_seconds", "stream_ttft_seconds", "prompt_ttft_seconds", "decode_step_seconds", "mixed_step_seconds"),
    *("prefill_tokens_per_step", "prefill_tokens", "cached_tokens", "computed_tokens", "running", "waiting"),
    *(
        "kv_usage",
        "preemptions",
        "output_tokens_per_second",
        "total_tokens_per_second",
        "gpu_sm_clock_hertz",
        "gpu_sm_clock_beside_hertz",
    ),
    *("gpu_utilization", "gpu_power_watts", "host_cpu_pressure", "host_memory_pressure", "host_io_pressure"),
    "observer_lag_seconds",
)
"""Measures of the table, in its order; those that no run has get no row."""
_EFFECTS: Final = (
    "lost_seconds",
    "longest_gap_seconds",
    "itl_p99_seconds",
    "time_weighted_p99_seconds",
    "prompt_ttft_seconds",
)


def markdown(report: Mapping[str, Any]) -> str:
    """One experiment."""
    return "\n".join(_experiment(report)) + "\n"


def _experiment(report: Mapping[str, Any]) -> Iterator[str]:
    yield "# Is it prefill?"
    yield ""
    for one in report["conclusions"]:
        yield from _conclusion(one, lengths=len(report["conclusions"]))
    if report["why"]:
        yield f"The experiment did not come to its end: {safe(report['why'])}."
        yield ""
    for note in report["notes"]:
        yield f"- {safe(note)}"
    if report["notes"]:
        yield ""
    for one in report["conclusions"]:
        yield from _means(report, one["prompt_tokens"])
        yield from _effects(report, one)
    yield from _runs(report)
    yield from identity(report)


def _conclusion(one: Mapping[str, Any], *, lengths: int) -> Iterator[str]:
    if lengths > 1:
        yield f"## {one['prompt_tokens']:,} tokens"
        yield ""
    yield f"**{safe(one['statement'])}**"
    yield ""
    for line in one["because"]:
        yield f"- {safe(line)}"
    if one["not_shown"]:
        yield ""
        yield "Not shown:"
        yield ""
        for line in one["not_shown"]:
            yield f"- {safe(line)}"
    if one["advice"]:
        yield ""
        yield "Next: " + safe("; ".join(one["advice"]))
    yield ""


def _means(report: Mapping[str, Any], tokens: int) -> Iterator[str]:
    """Each measure's mean over the valid runs of each kind."""
    kinds = {arm: _valid(report, arm, tokens) for arm in ARMS}
    yield f"## Means over valid runs, prompt of {tokens:,} tokens"
    yield ""
    yield "| | " + " | ".join(f"{arm} ({len(runs)})" for arm, runs in kinds.items()) + " |"
    yield "|---|" + "---:|" * len(kinds)
    for name in SHOWN:
        means = [_mean(runs, name) for runs in kinds.values()]
        if any(value is not None for value in means):
            measure = report["measures"][name]
            cells = " | ".join(figure(measure["unit"], value) for value in means)
            yield f"| {measure['words']} | {cells} |"
    yield ""


def _effects(report: Mapping[str, Any], one: Mapping[str, Any]) -> Iterator[str]:
    rows = [effect for effect in one["effects"] if effect["measure"] in _EFFECTS]
    if not rows:
        return
    yield "## Effects, with 95 % intervals over blocks"
    yield ""
    yield "| | | difference | 95 % interval | ratio | blocks |"
    yield "|---|---|---:|---:|---:|---:|"
    for effect in rows:
        measure = report["measures"][effect["measure"]]
        seen = effect["difference"]
        yield (
            f"| {measure['words']} | {effect['one']} less {effect['other']} | "
            f"{figure(measure['unit'], seen['mean'])} | {interval(measure['unit'], seen)} | "
            f"{_times(effect['ratio'])} | {seen['n']} |"
        )
    yield ""


def _runs(report: Mapping[str, Any]) -> Iterator[str]:
    yield "## Runs, in their order"
    yield ""
    yield "| run | block | | prompt | lost | longest gap | ITL p99 | first token of the prompt | cached | |"
    yield "|---:|---:|---|---:|---:|---:|---:|---:|---:|---|"
    for run in report["runs"]:
        seen = run["measures"]
        times = ("lost_seconds", "longest_gap_seconds", "itl_p99_seconds", "prompt_ttft_seconds")
        cells = " | ".join(told(seen.get(name)) for name in times)
        void = "void: " + safe("; ".join(run["void"])) if run["void"] else ""
        yield (
            f"| {run['run']} | {run['block']} | {run['arm']} | {figure('tokens', seen.get('prompt_tokens'))} | "
            f"{cells} | {figure('tokens', seen.get('cached_tokens'))} | {void} |"
        )
    if report["left_out"]:
        yield ""
        yield f"{len(report['left_out'])} runs were left out."
    yield ""


def identity(report: Mapping[str, Any]) -> Iterator[str]:
    """What was measured, and by which plan."""
    yield "## What was measured"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in facts(report):
        yield f"| {name} | {safe(value)} |"
    yield ""


def facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of the identity and the plan, as texts."""
    seen, plan, judged = report["identity"], report["plan"], report["judged_by"]
    for name, value in seen["server"].items():
        yield f"server: {name.replace('_', ' ')}", str(value)
    if seen["command"]:
        yield "launch command", seen["command"]
    for name, value in seen["scheduler"].items():
        yield f"scheduler: {name} (from {seen['scheduler_source']})", str(value)
    for gpu in seen["gpus"]:
        yield f"GPU {gpu['gpu']}", str(gpu["name"])
    if not seen["gpus"]:
        yield "GPU", "none was read"
    if seen["driver"]:
        yield "GPU driver", str(seen["driver"])
    for name, value in seen["host"].items():
        words = f"{value / 2**30:.1f} GiB" if name == "memory_bytes" else str(value)
        yield f"client's machine: {name.removesuffix('_bytes')}", words
    yield "stallwatch", f"{seen['stallwatch']} on Python {seen['python']}"
    yield "began", f"{report['began']}, {report['seconds']:,.0f} s"
    load = f"{plan['streams']} streams of {plan['output_tokens']:,} tokens"
    yield (
        "plan",
        (f"{plan['repeats']} blocks, {load}, seed {plan['seed']}"),
    )
    if judged["usual_gap_seconds"] is not None:
        yield (
            "a gap is slow above",
            (
                f"{told(judged['slow_gap_seconds'])} (usual {told(judged['usual_gap_seconds'])}), a stall above "
                f"{told(judged['stall_seconds'])}"
            ),
        )


def interval(unit: str, seen: Mapping[str, Any]) -> str:
    """The bounds of an estimate."""
    if seen["low"] is None or seen["high"] is None:
        return "unknown"
    return f"{figure(unit, seen['low'])} to {figure(unit, seen['high'])}"


def _times(seen: Mapping[str, Any] | None) -> str:
    if seen is None:
        return "-"
    if seen["low"] is None or seen["high"] is None:
        return f"{seen['mean']:,.2f}"
    return f"{seen['mean']:,.2f} ({seen['low']:,.2f} to {seen['high']:,.2f})"


def _valid(report: Mapping[str, Any], arm: str, tokens: int) -> Sequence[Mapping[str, Any]]:
    return [
        run
        for run in report["runs"]
        if run["arm"] == arm and not run["void"] and (arm == "alone" or run["prompt_tokens"] == tokens)
    ]


def _mean(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [run["measures"][name] for run in runs if run["measures"].get(name) is not None]
    return sum(known) / len(known) if known else None


def safe(text: str) -> str:
    """Text as text: nothing of it is markup."""
    return _ACTIVE.sub(r"\\\1", "".join(c if c.isprintable() else " " for c in text))
