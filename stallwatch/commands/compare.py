"""`stallwatch compare`: reports of experiments side by side."""

from pathlib import Path
from typing import TYPE_CHECKING

from stallwatch import configuration
from stallwatch.experiment import pages
from stallwatch.experiment.compare import Named, comparison
from stallwatch.experiment.document import UnreadableReportError, experiments, read

if TYPE_CHECKING:
    import argparse

    from stallwatch.cli import Invocation

_OK, _FAILED = 0, 1
_MOST = 26
_TORN = (KeyError, TypeError, AttributeError, IndexError, ValueError)  # of a file that somebody has changed


def compare(invocation: "Invocation") -> int:
    """Runs the command."""
    parser = _parser(invocation)
    options = parser.parse_args(invocation.arguments)
    reports: list[Named] = []
    for file in options.files:
        path = Path(file)
        try:
            reports += experiments(path.stem, read(path))
        except UnreadableReportError as error:
            invocation.complain(configuration.shown(str(error)))
            return _FAILED
        except _TORN:
            invocation.complain(configuration.shown(f"{path.name}: not a whole report"))
            return _FAILED
    if not 2 <= len(reports) <= _MOST:
        parser.error(f"{len(reports)} experiments in these files: from 2 to {_MOST} can be compared")
    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for written in pages.write(comparison(reports), folder, options.name):
            invocation.write(f"{written}\n")
    except OSError as error:
        invocation.complain(f"{configuration.shown(str(folder))}: {(error.strerror or str(error)).lower()}")
        return _FAILED
    except _TORN:
        invocation.complain("one of the files is not a whole report")
        return _FAILED
    return _OK


def _parser(invocation: "Invocation") -> "argparse.ArgumentParser":
    parser = invocation.parser()
    parser.usage = f"stallwatch {invocation.command} REPORT.json REPORT.json ... [--output FOLDER] [--name NAME]"
    parser.epilog = (
        "Reads what `stallwatch experiment` wrote; each value of a sweep counts as a report. Writes NAME.json, NAME.md "
        "and NAME.html: what differs in what was measured, and each measure against that of the first report."
    )
    parser.add_argument("files", nargs="+", metavar="REPORT.json", help="reports of experiments or sweeps")
    parser.add_argument("--output", default=".", metavar="FOLDER", help="where to write (default: here)")
    parser.add_argument("--name", default="comparison", metavar="NAME", help="of the files (default: comparison)")
    return parser
