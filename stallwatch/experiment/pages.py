"""The files of a report: JSON, Markdown, one HTML page. I/O: writes them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from stallwatch.drawing.html import self_contained
from stallwatch.experiment import comparison_markdown, markdown, sweep_markdown
from stallwatch.experiment.document import COMPARISON_SCHEMA, SCHEMA, SWEEP_SCHEMA, text

_STATIC: Final = Path(__file__).parent / "static"


def headlines(report: Mapping[str, Any]) -> Iterator[str]:
    """What a person reads at the end."""
    if report["schema"] == SWEEP_SCHEMA:
        for curve in report["curves"]:
            yield from curve["statements"]
        return
    for one in report["conclusions"]:
        yield one["statement"]
        for advice in one["advice"]:
            yield f"  next: {advice}"
    for note in report["notes"]:
        yield f"  note: {note}"


def write(report: Mapping[str, Any], folder: Path, name: str) -> Iterator[Path]:
    """Writes the files and names them. Raises `OSError`."""
    for ending, content in (("json", text(report)), ("md", summary(report)), ("html", page(report))):
        path = folder / f"{name}.{ending}"
        path.write_text(content, "utf-8")
        yield path


def summary(report: Mapping[str, Any]) -> str:
    """The Markdown."""
    if report["schema"] == SCHEMA:
        return markdown.markdown(report)
    if report["schema"] == SWEEP_SCHEMA:
        return sweep_markdown.sweep_markdown(report)
    return comparison_markdown.comparison_markdown(report)


def page(report: Mapping[str, Any]) -> str:
    """The HTML, which needs no network and nothing beside it."""
    styles = [_STATIC / "report.css"]
    if report["schema"] == COMPARISON_SCHEMA:
        data: dict[str, Any] = {
            "report": report,
            "letters": list(comparison_markdown.letters(len(report["reports"]))),
            "shown": comparison_markdown.SHOWN,
        }
        return self_contained("Experiments compared", data, _STATIC / "compare.js", styles=styles)
    if report["schema"] == SWEEP_SCHEMA:
        first = next((point["experiment"] for point in report["points"] if point["experiment"] is not None), None)
        data = {"report": report, "facts": list(markdown.facts(first)) if first is not None else []}
        return self_contained(f"Sweep of {report['parameter']}", data, _STATIC / "sweep.js", styles=styles)
    data = {"report": report, "facts": list(markdown.facts(report)), "shown": markdown.SHOWN}
    return self_contained("Is it prefill?", data, _STATIC / "report.js", styles=styles)
