"""`stallwatch experiment`: is it prefill? The matrix of three runs, for one server or for several settings of it."""

import asyncio
import gc
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stallwatch import configuration
from stallwatch.app import monitor_for
from stallwatch.commands.terminal import StatusLine, quiet_log, redactor, run, showable, switch_threads_fast
from stallwatch.configuration import BadConfiguration, Fault
from stallwatch.experiment import pages
from stallwatch.experiment.conduct import Asked, Experiment, NotPossibleError, Outcome, Tools, experiment
from stallwatch.experiment.document import document
from stallwatch.experiment.launch import problem_of
from stallwatch.experiment.plan import Shape, cost, described
from stallwatch.experiment.sweep import START_SECONDS, Sweep, Varied, planned, sweep, sweep_document
from stallwatch.scheduling import SourceError
from stallwatch.settings import Settings

if TYPE_CHECKING:
    import argparse

    from stallwatch.cli import Invocation

_OK, _FAILED, _INTERRUPTED = 0, 1, 130
_ONE_SIGNAL_SECONDS = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MOST_TOKENS = 5_000_000
_DEFAULTS = Shape()
_BOUNDS = (
    ("repeats", 1, 1_000),
    ("streams", 1, 1_000),
    ("output_tokens", 64, 65_536),
    ("pause", 0, 3_600),
    ("timeout", 1, 86_400),
    ("start_timeout", 1, 86_400),
    ("max_tokens", 1, 10**12),
)


def command(invocation: "Invocation") -> int:
    """Runs the command."""
    parser = _parser(invocation)
    if invocation.wants_help:
        rooms = ("engine", "canary", "slo", "stall", "gpu", "host", "log")
        invocation.write(parser.format_help() + "\n" + configuration.settings_help(rooms))
        return _OK
    options, rest = parser.parse_known_args(invocation.arguments)
    for name, least, most in _BOUNDS:
        value = getattr(options, name)
        if not least <= value <= most:
            parser.error(f"argument --{name.replace('_', '-')}: {value:g} is not between {least:,} and {most:,}")
    settings = _settings(rest, options, invocation)
    shape = _shape(parser, options)
    varied = _varied(parser, options)
    total = cost(shape).tokens * (len(varied.values) if varied is not None else 1)
    if total > options.max_tokens:
        parser.error(f"it may cost {total:,} tokens, more than --max-tokens {options.max_tokens:,}: make it smaller")
    invocation.write("".join(f"{line}\n" for line in _plan(shape, varied, settings)))
    if options.dry_run:
        return _OK
    folder = Path(options.output)
    name = options.name or f"experiment-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        invocation.complain(f"{configuration.shown(str(folder))}: {(error.strerror or str(error)).lower()}")
        return _FAILED
    asked = Asked(
        shape=shape,
        allow_busy=options.allow_busy,
        timeout_seconds=options.timeout,
        command=options.server_command,
        scheduler=dict(_pair(parser, "--scheduler", text) for text in options.scheduler),
    )
    return _made(invocation, settings, asked, varied, folder=folder, name=name)


def _made(
    invocation: "Invocation", settings: Settings, asked: Asked, varied: Varied | None, *, folder: Path, name: str
) -> int:
    quiet_log(settings.log, invocation.stderr)
    switch_threads_fast()
    redact = redactor(settings.canary_access, settings.engine_access)
    line = StatusLine(invocation.stderr)

    def say(text: str) -> None:
        line.clear()
        invocation.write(showable(redact(text), invocation.stdout) + "\n")

    gc.disable()  # a collection in a run would be a gap of our own making; it is made between runs
    try:
        found = run(_work(settings, asked, varied, say=say, progress=line.show, folder=folder, name=name))
    except asyncio.CancelledError:
        return _INTERRUPTED
    except (NotPossibleError, SourceError) as error:
        line.clear()
        detail = error.detail or str(error.reason) if isinstance(error, SourceError) else str(error)
        invocation.complain(configuration.shown(redact(detail)))
        return _FAILED
    finally:
        gc.enable()
        line.clear()
    report = sweep_document(found) if isinstance(found, Sweep) else document(found)
    report = _redacted(report, redact)
    say("")
    for text in pages.headlines(report):
        say(text)
    try:
        for path in pages.write(report, folder, name):
            invocation.write(f"{path}\n")
    except OSError as error:
        invocation.complain(f"{configuration.shown(str(folder))}: {(error.strerror or str(error)).lower()}")
        return _FAILED
    if found.outcome is Outcome.INTERRUPTED:
        return _INTERRUPTED
    if found.outcome is Outcome.STOPPED:
        invocation.complain(configuration.shown(redact(found.why)))
        return _FAILED
    return _OK if _measured(found) else _FAILED


async def _work(
    settings: Settings,
    asked: Asked,
    varied: Varied | None,
    *,
    say: Any,
    progress: Any,
    folder: Path,
    name: str,
) -> Experiment | Sweep:
    """The experiment. The first signal ends it with what there is, a second one at once."""
    stop = asyncio.Event()
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()

    first: float | None = None

    def signalled() -> None:
        nonlocal first
        now = time.monotonic()
        # A supervisor may tell the process and its group at once.
        if first is not None and now - first > _ONE_SIGNAL_SECONDS and task is not None:
            task.cancel()
        first = first or now
        progress("stopping; once more ends it at once")
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, signalled)
    tools = Tools(
        clock=time.monotonic,
        wall_time=time.time,
        monitor=lambda: monitor_for(settings),
        environ=dict(os.environ),
        stop=stop,
        say=say,
        progress=progress,
    )
    try:
        if varied is None:
            return await experiment(settings, asked, tools)
        return await sweep(settings, asked, varied, tools, folder=folder, name=name)
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _measured(found: Experiment | Sweep) -> bool:
    """Whether there is a single valid run."""
    made = [found] if isinstance(found, Experiment) else [one.experiment for one in found.tried if one.experiment]
    return any(not run.void for one in made for run in one.runs)


def _redacted(report: Any, redact: Any) -> Any:
    """The report without our keys, should a server have repeated them."""
    if isinstance(report, str):
        return redact(report)
    if isinstance(report, dict):
        return {name: _redacted(value, redact) for name, value in report.items()}
    if isinstance(report, list) and report and not isinstance(report[0], int | float):
        return [_redacted(value, redact) for value in report]
    return report


def _plan(shape: Shape, varied: Varied | None, settings: Settings) -> Sequence[str]:
    lines = [f"target: {settings.canary_access.url.rstrip('/')}"]
    if varied is not None:
        lines += planned(varied, settings)
    lines += described(shape)
    if varied is not None:
        lines.append(f"that, {len(varied.values)} times: at most {len(varied.values) * cost(shape).tokens:,} tokens")
    return lines


def _shape(parser: "argparse.ArgumentParser", options: "argparse.Namespace") -> Shape:
    lengths = []
    for part in options.prompt_tokens.split(","):
        text = part.strip().replace("_", "")
        if not text.isdecimal() or not 16 <= int(text) <= 10_000_000:
            parser.error(f"argument --prompt-tokens: {part.strip() or 'nothing'} is not a number of tokens from 16 on")
        lengths.append(int(text))
    if len(set(lengths)) < len(lengths):
        parser.error("argument --prompt-tokens: names a length twice")
    return Shape(
        streams=options.streams,
        output_tokens=options.output_tokens,
        prompt_tokens=tuple(lengths),
        repeats=options.repeats,
        settle_tokens=min(_DEFAULTS.settle_tokens, options.output_tokens // 4),
        pause_seconds=options.pause,
        seed=options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000),
    )


def _varied(parser: "argparse.ArgumentParser", options: "argparse.Namespace") -> Varied | None:
    if options.launch is None and options.sweep is None:
        return None
    if options.launch is None:
        parser.error("argument --sweep: needs --launch 'COMMAND with {NAME}': the server is started for each value")
    if options.sweep is None:
        parser.error("argument --launch: needs --sweep NAME=VALUE,VALUE,...")
    name, text = _pair(parser, "--sweep", options.sweep)
    values = tuple(value.strip() for value in text.split(","))
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or not all(values) or name in {"port", "host"}:
        parser.error(f"argument --sweep: {options.sweep} is not NAME=VALUE,VALUE,...")
    if len(set(values)) < len(values):
        parser.error("argument --sweep: names a value twice")
    if problem := problem_of(options.launch, [name]):
        parser.error(f"argument --launch: {problem}")
    return Varied(template=options.launch, parameter=name, values=values, start_seconds=options.start_timeout)


def _pair(parser: "argparse.ArgumentParser", flag: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip() or not value.strip():
        parser.error(f"argument {flag}: {text} is not NAME=VALUE")
    return name.strip(), value.strip()


def _settings(rest: Sequence[str], options: "argparse.Namespace", invocation: "Invocation") -> Settings:
    """The settings; a fault in the target names the flag that was written."""
    flags = [] if options.target is None else [f"--engine.url={options.target}"]
    try:
        return configuration.load([*rest, *flags], invocation.environ).settings
    except BadConfiguration as refused:
        if options.target is None:
            raise
        faults = [
            Fault(fault.subject.replace("--engine.url", "--target"), fault.problem, fault.remedy)
            for fault in refused.faults
        ]
        raise BadConfiguration(faults) from refused


def _parser(invocation: "Invocation") -> "argparse.ArgumentParser":
    parser = invocation.parser()
    parser.usage = (
        f"stallwatch {invocation.command} --target URL [--repeats N] [--streams N] [--output-tokens N] "
        "[--prompt-tokens N,...] [--dry-run] [--output FOLDER] [--launch COMMAND --sweep NAME=V,V,...] "
        "[--SETTING VALUE ...]"
    )
    parser.epilog = (
        "Streams decode alone, beside a long prompt that must be computed, and beside the same prompt out of the "
        "prefix cache, in random order and repeatedly. Writes NAME.json, NAME.md and NAME.html. Exits 0 when it came "
        "to its end, whatever it says; 1 when nothing could be measured; 2 for bad settings; 130 after Ctrl-C, with "
        "a report of what there is."
    )
    add = parser.add_argument
    add(
        "--target",
        metavar="URL",
        help="server to measure, instead of engine.url; canary.url may name a proxy before it",
    )
    add("--repeats", type=int, default=_DEFAULTS.repeats, metavar="N", help="blocks of runs (default: %(default)s)")
    add(
        "--streams", type=int, default=_DEFAULTS.streams, metavar="N", help="streams that decode (default: %(default)s)"
    )
    add(
        "--output-tokens",
        type=int,
        default=_DEFAULTS.output_tokens,
        metavar="N",
        help="tokens of each stream (default: %(default)s)",
    )
    add("--prompt-tokens", default="12000", metavar="N,...", help="length or lengths of the prompt (default: 12000)")
    add("--pause", type=float, default=_DEFAULTS.pause_seconds, metavar="S", help="seconds between runs (default: 2)")
    add("--seed", type=int, metavar="N", help="of the order and the texts (default: a new one; the report names it)")
    add(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds without a token that end a run (default: 300)",
    )
    add(
        "--max-tokens", type=int, default=_MOST_TOKENS, metavar="N", help="refuse what may cost more (default: 5000000)"
    )
    add("--allow-busy", action="store_true", help="measure although others use the server, or although nobody can tell")
    add("--server-command", metavar="TEXT", help="how the server was started, for the report")
    add("--scheduler", action="append", default=[], metavar="NAME=VALUE", help="a setting of it, for the report")
    add("--launch", metavar="COMMAND", help="start the server for each value; {port} and {NAME} are filled in")
    add("--sweep", metavar="NAME=V,V,...", help="values of one setting, one server start each")
    add("--start-timeout", type=float, default=START_SECONDS, metavar="S", help="seconds for a start (default: 1800)")
    add("--output", default=".", metavar="FOLDER", help="where to write (default: here)")
    add("--name", metavar="NAME", help="of the files (default: experiment-DATE-TIME)")
    add("--dry-run", action="store_true", help="show the plan and its cost, and end")
    return parser
