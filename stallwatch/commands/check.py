"""`stallwatch check`: can this server be watched, how well, and what would make it better."""

import os
import time
from typing import TYPE_CHECKING

from stallwatch import configuration
from stallwatch.commands.finding import cleaned
from stallwatch.commands.gathering import Tools, survey
from stallwatch.commands.judging import exit_status, judge
from stallwatch.commands.table import document, table
from stallwatch.commands.terminal import StatusLine, quiet_log, redactor, run, showable, switch_threads_fast

if TYPE_CHECKING:
    import argparse

    from stallwatch.cli import Invocation

LONGEST_WAIT_SECONDS = 86400.0


def check(invocation: "Invocation") -> int:
    """Runs the command."""
    parser = _parser(invocation)
    if invocation.wants_help:
        invocation.write(parser.format_help() + "\n" + configuration.settings_help())
        return 0
    options, rest = parser.parse_known_args(invocation.arguments)
    if not 0 <= options.wait <= LONGEST_WAIT_SECONDS:
        parser.error(f"argument --wait: {options.wait:g} is not between 0 and {LONGEST_WAIT_SECONDS:g} seconds")
    settings = configuration.load(rest, invocation.environ).settings
    quiet_log(settings.log, invocation.stderr)
    switch_threads_fast()
    line = StatusLine(invocation.stderr)
    tools = Tools(clock=time.monotonic, wall_time=time.time, environ=os.environ, progress=line.show)
    try:
        found = run(survey(settings, tools, wait_seconds=options.wait, canary=options.canary))
    finally:
        line.clear()
    findings = cleaned(judge(found, settings), redactor(settings.engine_access, settings.canary_access))
    status = exit_status(found, findings)
    shown = (document if options.json else table)(str(settings.engine.url).rstrip("/"), findings, status)
    invocation.write(showable(shown, invocation.stdout))
    return status


def _parser(invocation: "Invocation") -> "argparse.ArgumentParser":
    parser = invocation.parser()
    parser.usage = (
        f"stallwatch {invocation.command} [--json] [--wait SECONDS] [--no-canary] [--config FILE] [--SETTING VALUE ...]"
    )
    parser.epilog = (
        "Exits 0 when all is well, 3 when the server can be watched but something is missing, 1 when it cannot, "
        "2 for settings that are refused."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long until the server serves (default: 0)"
    )
    parser.add_argument("--no-canary", dest="canary", action="store_false", help="send no request for tokens")
    return parser
