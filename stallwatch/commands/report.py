"""`stallwatch report`: one HTML file with everything inside, and the same in Markdown, of what a bundle holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from stallwatch import configuration
from stallwatch.commands.report_markdown import markdown
from stallwatch.commands.reporting import reported
from stallwatch.drawing.html import self_contained
from stallwatch.recorder.reading import Recording, RecordingError

if TYPE_CHECKING:
    import argparse

    from stallwatch.cli import Invocation

_STATIC: Final = Path(__file__).parent / "static"


def report(invocation: "Invocation") -> int:
    """Runs the command."""
    parser = _parser(invocation)
    if invocation.wants_help:
        invocation.write(parser.format_help() + "\n" + configuration.settings_help(("slo", "stall")))
        return 0
    if not invocation.arguments or invocation.arguments[0].startswith("-"):
        parser.error("the file comes first: stallwatch report BUNDLE ...")
    options, rest = parser.parse_known_args(invocation.arguments)
    recording = Recording(Path(options.file))
    try:
        found = reported(recording, rest)
    except RecordingError as error:
        invocation.complain(configuration.shown(str(error)))
        return 1
    title = f"Incident of {found['began']}" if found["incident"] else f"Recording of {found['began']}"
    name = recording.path.name.removesuffix(".gz").removesuffix(".jsonl")
    page = self_contained(title, found, _STATIC / "report.js", styles=[_STATIC / "report.css"])
    texts = {f"{name}.html": page, f"{name}.md": markdown(title, found)}
    folder = Path(options.output)
    for file, text in texts.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, "utf-8")
        except OSError as error:
            invocation.complain(f"{configuration.shown(str(folder / file))}: {(error.strerror or str(error)).lower()}")
            return 1
        invocation.write(f"{folder / file}\n")
    if recording.torn:
        invocation.complain("the end of the file is missing, or of a part of it: what came before is in the report")
    return 0


def _parser(invocation: "Invocation") -> "argparse.ArgumentParser":
    parser = invocation.parser()
    parser.usage = f"stallwatch {invocation.command} BUNDLE [--output FOLDER] [--SETTING VALUE ...]"
    parser.epilog = (
        "Writes NAME.html, which needs no network and nothing beside it, and NAME.md. Stalls are told as they were "
        "judged at the time; --slo.itl_seconds 0.2 and the like judge them anew."
    )
    parser.add_argument("file", metavar="BUNDLE", help="an incident bundle, or a recording of `run --record`")
    parser.add_argument("--output", default=".", metavar="FOLDER", help="where to write (default: here)")
    return parser
