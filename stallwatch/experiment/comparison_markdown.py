"""A comparison as Markdown. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stallwatch.experiment.figures import figure
from stallwatch.experiment.markdown import interval, safe

SHOWN: Final = (
    *("lost_seconds", "longest_gap_seconds", "itl_p50_seconds", "itl_p99_seconds", "beside_itl_p99_seconds"),
    *("time_weighted_p99_seconds", "prompt_ttft_seconds", "stream_ttft_seconds", "decode_step_seconds"),
    *("mixed_step_seconds", "prefill_tokens_per_step", "preemptions", "total_tokens_per_second"),
)
"""Measures of the tables; the JSON has all."""


def comparison_markdown(found: Mapping[str, Any]) -> str:
    """From the object that is written as JSON."""
    return "\n".join(_comparison(found)) + "\n"


def _comparison(found: Mapping[str, Any]) -> Iterator[str]:
    reports = found["reports"]
    yield f"# {len(reports)} experiments compared"
    yield ""
    yield "| | report | began | verdict |"
    yield "|---|---|---|---|"
    for letter, report in zip(letters(len(reports)), reports, strict=True):
        yield f"| {letter} | {safe(report['name'])} | {safe(report['began'])} | {', '.join(report['verdicts'])} |"
    yield ""
    yield "## What differs in what was measured"
    yield ""
    if found["differs"]:
        yield "| | " + " | ".join(letters(len(reports))) + " |"
        yield "|---|" + "---|" * len(reports)
        for row in found["differs"]:
            cells = " | ".join("-" if value is None else safe(value) for value in row["values"])
            yield f"| {safe(row['fact'])} | {cells} |"
    else:
        yield "Nothing that is known."
    yield ""
    for caution in found["cautions"]:
        yield f"- {safe(caution)}"
    yield ""
    yield from _effects(found)


def _effects(found: Mapping[str, Any]) -> Iterator[str]:
    reports = found["reports"]
    for arm, tokens in dict.fromkeys((row["arm"], row["prompt_tokens"]) for row in found["effects"]):
        rows = [
            row
            for row in found["effects"]
            if (row["arm"], row["prompt_tokens"]) == (arm, tokens) and row["measure"] in SHOWN
        ]
        yield f"## {heading(arm, tokens)}"
        yield ""
        names = list(letters(len(reports)))
        more = [f"{name} less A (95 % interval)" for name in names[1:]]
        yield "| | " + " | ".join([*names, *more]) + " |"
        yield "|---|" + "---:|" * (len(names) + len(more))
        for row in rows:
            measure = found["measures"][row["measure"]]
            unit = measure["unit"]
            means = ["-" if one is None else figure(unit, one["mean"]) for one in row["means"]]
            yield f"| {measure['words']} | " + " | ".join([*means, *_more(row, unit)]) + " |"
        yield ""
    yield "**Bold**: the interval does not hold zero."


def _more(row: Mapping[str, Any], unit: str) -> Iterator[str]:
    for seen, apart in zip(row["more_than_first"][1:], row["apart"][1:], strict=True):
        if seen is None:
            yield "-"
        else:
            told = f"{figure(unit, seen['mean'])} ({interval(unit, seen)})"
            yield f"**{told}**" if apart else told


def heading(arm: str, tokens: int | None) -> str:
    """What went on in the runs of an arm."""
    return "Streams alone" if tokens is None else f"Beside {tokens:,} tokens, {arm}"


def letters(count: int) -> Iterator[str]:
    """A, B, and so on; after Z comes AA."""
    for number in range(count):
        name, rest = "", number
        while rest >= 0:
            name = chr(ord("A") + rest % 26) + name
            rest = rest // 26 - 1
        yield name
