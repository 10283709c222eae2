"""`stallwatch replay`: says what a sidecar would have said of a recording or a bundle, the same every time."""

from pathlib import Path
from typing import TYPE_CHECKING

from stallwatch import configuration
from stallwatch.commands.rejudging import judged
from stallwatch.commands.replay_lines import AsJson, AsText
from stallwatch.commands.replay_series import Scraper, openmetrics
from stallwatch.commands.terminal import showable
from stallwatch.recorder.reading import Recording, RecordingError

if TYPE_CHECKING:
    import argparse

    from stallwatch.cli import Invocation


def replay(invocation: "Invocation") -> int:
    """Runs the command."""
    parser = _parser(invocation)
    if invocation.wants_help:
        invocation.write(parser.format_help() + "\n" + configuration.settings_help(("slo", "stall")))
        return 0
    if not invocation.arguments or invocation.arguments[0].startswith("-"):
        parser.error("the file comes first: stallwatch replay FILE ...")
    options, rest = parser.parse_known_args(invocation.arguments)
    if not options.every > 0:
        parser.error(f"argument --every: {options.every:g} is not a number of seconds above 0")
    recording = Recording(Path(options.file))
    shown = AsJson() if options.json else AsText()
    scraper = Scraper({"job": "stallwatch", "instance": recording.path.name})
    try:
        for told in judged(recording, rest, every=options.every, beside=scraper.beside):
            for line in shown.lines(told):
                invocation.write(showable(line, invocation.stdout) + "\n")
            if options.openmetrics:
                scraper.take(told)
        if options.openmetrics:
            with Path(options.openmetrics).open("w") as out:
                out.writelines(openmetrics(scraper.samples))
    except RecordingError as error:
        invocation.complain(configuration.shown(str(error)))
        return 1
    except OSError as error:
        invocation.complain(f"argument --openmetrics: {options.openmetrics}: {(error.strerror or str(error)).lower()}")
        return 1
    if recording.torn:
        invocation.complain("the end of the file is missing, or of a part of it: what came before was judged")
    for word, lines in recording.passed_over.most_common(5):
        invocation.complain(f"{lines} lines were passed over: {configuration.shown(word)}; is this stallwatch too old?")
    return 0


def _parser(invocation: "Invocation") -> "argparse.ArgumentParser":
    parser = invocation.parser()
    parser.usage = (
        f"stallwatch {invocation.command} FILE [--json] [--every SECONDS] [--openmetrics FILE] [--SETTING VALUE ...]"
    )
    parser.epilog = (
        "Judges by the settings that were recorded; --slo.itl_seconds 0.2 and the like ask what would have been. "
        "Variables and configuration files are not read, so that the same command gives the same answer everywhere."
    )
    parser.add_argument("file", metavar="FILE", help="a recording of `run --record`, or an incident bundle")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with everything that was found")
    parser.add_argument(
        "--every", type=float, default=10.0, metavar="SECONDS", help="how often to say how things stand (default: 10)"
    )
    parser.add_argument(
        "--openmetrics",
        metavar="FILE",
        help="write the metrics page of those moments too, as OpenMetrics with the times of the recording",
    )
    return parser
