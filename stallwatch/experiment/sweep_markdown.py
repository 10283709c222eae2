"""The report of a sweep as Markdown. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from stallwatch.experiment.figures import figure
from stallwatch.experiment.markdown import identity, interval, safe


def sweep_markdown(report: Mapping[str, Any]) -> str:
    """From the object that is written as JSON."""
    return "\n".join(_sweep(report)) + "\n"


def _sweep(report: Mapping[str, Any]) -> Iterator[str]:
    name = safe(report["parameter"])
    yield f"# What {name} costs whom"
    yield ""
    for curve in report["curves"]:
        if len(report["curves"]) > 1:
            yield f"## {curve['prompt_tokens']:,} tokens"
            yield ""
        yield "**" + safe(" ".join(curve["statements"])) + "**"
        yield ""
        yield from _table(report, curve)
    yield "## Each value"
    yield ""
    yield f"| {name} | server ready after | runs, void | is it prefill? |"
    yield "|---|---:|---:|---|"
    for point in report["points"]:
        yield _point(point)
    yield ""
    if report["why"]:
        yield f"The sweep did not come to its end: {safe(report['why'])}."
        yield ""
    yield f"Command: `{report['template'].replace('`', ' ')}`"
    yield ""
    first = next((point["experiment"] for point in report["points"] if point["experiment"] is not None), None)
    if first is not None:
        yield from identity(first)


def _table(report: Mapping[str, Any], curve: Mapping[str, Any]) -> Iterator[str]:
    """Means with their intervals, over the valid runs beside the uncached prompt."""
    points = curve["points"]
    marks = {
        point["value"]: [
            word
            for word, value in (("knee", curve["knee"]), ("meets the objective", curve["meets_objective"]))
            if value == point["value"]
        ]
        for point in points
    }
    heads = [safe(value) + (f" ({', '.join(words)})" if words else "") for value, words in marks.items()]
    yield f"| {safe(report['parameter'])} | " + " | ".join(heads) + " |"
    yield "|---|" + "---:|" * len(points)
    for name, one in report["measures"].items():
        cells = []
        for point in points:
            seen = point["measures"].get(name)
            told = "-" if seen is None else f"{figure(one['unit'], seen['mean'])} ({interval(one['unit'], seen)})"
            cells.append(told)
        yield f"| {one['words']} | " + " | ".join(cells) + " |"
    yield ""


def _point(point: Mapping[str, Any]) -> str:
    if point["experiment"] is None:
        return f"| {safe(point['value'])} | - | - | left out: {safe(point['problem'] or 'not tried')} |"
    made = point["experiment"]
    void = sum(1 for run in made["runs"] if run["void"])
    verdicts = ", ".join(one["verdict"] for one in made["conclusions"])
    return f"| {safe(point['value'])} | {point['start_seconds']:.0f} s | {len(made['runs'])}, {void} | {verdicts} |"
