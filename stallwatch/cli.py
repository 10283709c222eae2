"""The commands: from arguments to an exit status.

A command is one line of `COMMANDS` and one function that takes an `Invocation`. It imports what it needs when it runs:
the health probe starts a new process every few seconds on the CPUs of the server that is watched.
"""

# ruff: noqa: PLC0415 (see above)

import os
import sys
import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

import stallwatch

if TYPE_CHECKING:
    import argparse
    import asyncio
    import ssl

    from stallwatch import configuration
    from stallwatch.settings import Settings

OK: Final = 0
FAILED: Final = 1
BAD_CONFIGURATION: Final = 2
DEGRADED: Final = 3
INTERRUPTED: Final = 130
READER_GONE: Final = 141

HEALTHCHECK_TIMEOUT_SECONDS = 2.0


class ReaderGoneError(Exception):
    """Whoever read our standard output has closed it."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of one command."""

    command: str
    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    stdout: TextIO
    stderr: TextIO

    @property
    def wants_help(self) -> bool:
        """Whether the person asked how the command is used."""
        return "--help" in self.arguments or "-h" in self.arguments

    def write(self, text: str) -> None:
        """Writes to standard output at once."""
        try:
            self.stdout.write(text)
            self.stdout.flush()
        except BrokenPipeError as error:
            raise ReaderGoneError from error

    def complain(self, text: str) -> None:
        """Writes one line to standard error, in the form of all our messages."""
        self.stderr.write(f"stallwatch: {text}\n")

    def parser(self) -> "argparse.ArgumentParser":
        """A parser for options of the command's own, whose errors are faults like those of settings."""
        import argparse

        from stallwatch.configuration import BadConfiguration, Fault

        invocation = self

        class Parser(argparse.ArgumentParser):
            def error(self, message: str) -> NoReturn:
                raise BadConfiguration([Fault(self.prog, message, f"see `{self.prog} --help`")])

            def _print_message(self, message: str, file: Any = None) -> None:
                del file
                invocation.write(message)

        return Parser(
            prog=f"stallwatch {self.command}",
            description=COMMANDS[self.command].summary,
            allow_abbrev=False,
        )


@dataclass(frozen=True, slots=True)
class Command:
    """What the overview says of a command, and the function that runs it."""

    summary: str
    call: Callable[[Invocation], int]


def main(arguments: Sequence[str], *, environ: Mapping[str, str], stdout: TextIO, stderr: TextIO) -> int:
    """Runs the command that the arguments name; an exception that leaves here is a bug."""
    name, rest = (arguments[0], tuple(arguments[1:])) if arguments else ("", ())
    name = {"-h": "help", "--help": "help", "--version": "version"}.get(name, name)
    invocation = Invocation(name, rest, environ, stdout, stderr)
    try:
        if name == "help":
            invocation.write(_overview())
            return OK
        if not name:
            stderr.write(_overview())
            return BAD_CONFIGURATION
        if name not in COMMANDS:
            invocation.complain(_unknown_command(name))
            return BAD_CONFIGURATION
        return _call(invocation)
    except ReaderGoneError:
        # The interpreter flushes standard output once more when it ends, which would fail again.
        if stdout is sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED


def _call(invocation: Invocation) -> int:
    from stallwatch.configuration import BadConfiguration

    try:
        return COMMANDS[invocation.command].call(invocation)
    except BadConfiguration as refused:
        for fault in refused.faults:
            invocation.complain(str(fault))
        return BAD_CONFIGURATION
    except SystemExit as end:  # argparse ends the process after its help text
        return end.code if isinstance(end.code, int) else OK if end.code is None else FAILED


def _overview() -> str:
    width = max(len(name) for name in COMMANDS)
    commands = "".join(f"  {name:<{width}}  {command.summary}\n" for name, command in COMMANDS.items())
    return (
        "usage: stallwatch COMMAND [...]\n\n"
        "Tells when readers of a vLLM server are being kept waiting, for how long, and why.\n\n"
        f"commands:\n{commands}\n"
        "`stallwatch COMMAND --help` says more about one.\n\n"
        "exit status: 0 ok, 1 failed, 2 bad configuration, 3 reachable but degraded, 130 interrupted\n"
    )


def _unknown_command(name: str) -> str:
    import difflib

    from stallwatch.configuration import Fault, shown

    if name.startswith("-"):
        return str(Fault(shown(name), "the command comes first", f"write stallwatch run {shown(name)} ..."))
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.6)
    remedy = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(COMMANDS)}"
    return str(Fault(shown(name), "not a command", remedy))


def _run(invocation: Invocation) -> int:
    from stallwatch import configuration

    if invocation.wants_help:
        invocation.write(_settings_usage(invocation) + configuration.settings_help())
        return OK
    loaded = configuration.load(_without_short_names(invocation.arguments), invocation.environ)

    from stallwatch import app

    return watch(loaded, app.run, stderr=invocation.stderr)


def _without_short_names(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--record` written out as the setting that it stands for."""
    return [
        f"--recorder.file{argument.removeprefix('--record')}"
        if argument == "--record" or argument.startswith("--record=")
        else argument
        for argument in arguments
    ]


def watch(
    loaded: "configuration.Configuration", work: "Callable[[Settings], Awaitable[int]]", *, stderr: TextIO
) -> int:
    """Sets up the log, says what was configured, and runs `work` on the quickest event loop there is."""
    import asyncio

    import structlog

    from stallwatch import logs

    settings = loaded.settings
    logs.configure(settings.log.level, settings.log.format, stream=stderr)
    log = structlog.get_logger("stallwatch")
    log.info("starting", version=stallwatch.__version__, settings=loaded.shown())
    for caution in loaded.cautions:
        log.warning("questionable setting", setting=caution.subject, problem=caution.problem, remedy=caution.remedy)

    async def main_task() -> int:
        return await work(settings)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main_task())


def _loop_factory() -> "Callable[[], asyncio.AbstractEventLoop] | None":
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _settings_usage(invocation: Invocation) -> str:
    summary = textwrap.fill(COMMANDS[invocation.command].summary, 80)
    return f"usage: stallwatch {invocation.command} [--config FILE] [--SETTING VALUE ...]\n\n{summary}\n\n"


def _metrics(invocation: Invocation) -> int:
    parser = invocation.parser()
    parser.add_argument(
        "--format", choices=("text", "markdown", "json"), default="text", help="how to print it (default: text)"
    )
    options = parser.parse_args(invocation.arguments)

    from stallwatch import catalogue

    invocation.write(catalogue.reference(options.format).rstrip("\n") + "\n")
    return OK


def _version(invocation: Invocation) -> int:
    as_json = invocation.arguments == ("--json",)
    if not as_json and invocation.arguments:
        parser = invocation.parser()
        parser.add_argument("--json", action="store_true", help="one JSON object")
        as_json = bool(parser.parse_args(invocation.arguments).json)
    python = ".".join(str(part) for part in sys.version_info[:3])
    if as_json:
        invocation.write(f'{{"version": "{stallwatch.__version__}", "python": "{python}"}}\n')
    else:
        invocation.write(f"stallwatch {stallwatch.__version__}\npython {python}\n")
    return OK


def _check(invocation: Invocation) -> int:
    from stallwatch.commands.check import check

    return check(invocation)


def _probe(invocation: Invocation) -> int:
    from stallwatch.commands.probe import probe

    return probe(invocation)


def _replay(invocation: Invocation) -> int:
    from stallwatch.commands.replay import replay

    return replay(invocation)


def _report(invocation: Invocation) -> int:
    from stallwatch.commands.report import report

    return report(invocation)


def _experiment(invocation: Invocation) -> int:
    from stallwatch.commands.experiment import command

    return command(invocation)


def _compare(invocation: Invocation) -> int:
    from stallwatch.commands.compare import compare

    return compare(invocation)


def _healthcheck(invocation: Invocation) -> int:
    parser = invocation.parser()
    parser.add_argument("--url", help="where to ask (default: /livez at web.host and web.port)")
    parser.epilog = (
        "Exits 0 when a running stallwatch answers within 2 seconds, else 1 with one line why. The settings of the "
        "listener, --config and their variables are understood as in `stallwatch run`. A certificate is not verified. "
        "Where the listener wants one of its clients, a TLS handshake counts as an answer."
    )
    options, rest = parser.parse_known_args(invocation.arguments)

    from stallwatch import configuration

    # All of the listener's, so that the flags of `run` can be given as they are.
    files = ("tls_cert_file", "tls_key_file", "client_ca_file", "bearer_token_file", "basic_auth_file")
    known = {f"web.{name}": configuration.Setting(f"web.{name}") for name in ("host", "port", *files)}
    reading = configuration.read(rest, invocation.environ, known, partial=True)
    if reading.faults:
        raise configuration.BadConfiguration(reading.faults)
    given = {name: one.text.strip() for name, one in reading.given.items()}
    scheme = "https" if "web.tls_cert_file" in given else "http"
    own = _own_addresses(given.get("web.host", "::"), given.get("web.port", "9709"), scheme)
    ask = _shake_hands if "web.client_ca_file" in given and not options.url else _ask
    problems = []
    for address in [options.url] if options.url else own:
        problem = ask(address)
        if not problem:
            return OK
        problems.append(f"{configuration.shown(address)}: {configuration.shown(problem)}")
    invocation.complain(problems[0])
    return FAILED


def _own_addresses(host: str, port: str, scheme: str) -> list[str]:
    host = host.strip("[]")
    # A wildcard is asked on loopback; `::` may have fallen back to IPv4.
    hosts = {"::": ["127.0.0.1", "::1"], "0.0.0.0": ["127.0.0.1"]}.get(host, [host])  # noqa: S104 (never bound)
    return [f"{scheme}://{f'[{one}]' if ':' in one else one}:{port}/livez" for one in hosts]


def _ask(address: str) -> str:
    """Asks for liveness; says what was wrong, or nothing. Proxies and redirects are never followed."""
    import http.client
    from urllib.parse import urlsplit

    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError as error:
        return f"not a URL ({error})"
    if url.scheme not in {"http", "https"} or not host:
        return "not an http:// or https:// address"
    connection: http.client.HTTPConnection
    if url.scheme == "https":
        timeout, context = HEALTHCHECK_TIMEOUT_SECONDS, _trusting_context()
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=HEALTHCHECK_TIMEOUT_SECONDS)
    try:
        connection.request("GET", url.path if url.path not in {"", "/"} else "/livez")
        answer = connection.getresponse()
        if answer.status == 200:
            return ""
        detail = answer.read(200).decode("utf-8", "replace").strip().partition("\n")[0]
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _unanswered(error)
    finally:
        connection.close()
    return f"HTTP {answer.status}" + (f": {detail}" if detail else "")


def _shake_hands(address: str) -> str:
    """Asks for a TLS handshake, which a loop that is stuck does not do; says what was wrong, or nothing.

    We have no certificate that the listener would take, and a probe should not have one.
    """
    import socket
    from urllib.parse import urlsplit

    try:
        url = urlsplit(address)
        with (
            socket.create_connection((url.hostname or "", url.port or 0), HEALTHCHECK_TIMEOUT_SECONDS) as connection,
            _trusting_context().wrap_socket(connection),
        ):
            return ""
    except (OSError, ValueError) as error:
        return _unanswered(error)


def _trusting_context() -> "ssl.SSLContext":
    import ssl

    # Our own listener, asked by its loopback address, which its certificate does not name.
    return ssl._create_unverified_context()  # noqa: S323, SLF001


def _unanswered(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {HEALTHCHECK_TIMEOUT_SECONDS:g} s"
    strerror = getattr(error, "strerror", None)
    return str(strerror or error).lower() or type(error).__name__


def _hash_password(invocation: Invocation) -> int:
    parser = invocation.parser()
    parser.add_argument("user", metavar="USER", help="whom to write in front of the hash")
    parser.epilog = (
        "Reads the password from standard input, or asks for it on a terminal, and prints one line for the file of "
        "web.basic_auth_file: stallwatch hash-password prometheus < password >> users"
    )
    user = parser.parse_args(invocation.arguments).user

    from stallwatch.web import credentials

    if problem := credentials.user_problem(user):
        parser.error(f"USER: {problem}")
    if sys.stdin.isatty():
        import getpass

        password = getpass.getpass("Password: ")
        if getpass.getpass("Again: ") != password:
            invocation.complain("the two passwords differ")
            return FAILED
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        invocation.complain("no password on standard input")
        return FAILED
    invocation.write(f"{user}:{credentials.hash_password(password)}\n")
    return OK


def _scenario_options(parser: "argparse.ArgumentParser", *, port: str, default: int) -> None:
    parser.add_argument("--scenario", action="append", default=[], metavar="NAME", help="what to show; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the scenarios and end")
    parser.add_argument(
        port, type=int, default=default, metavar="PORT", help=f"where vLLM listens (default: {default})"
    )


def _listed_scenarios(invocation: Invocation) -> int:
    from stallwatch import demo

    for name, sentence in demo.described().items():
        invocation.write(f"{name:<24}{textwrap.fill(sentence, 76, subsequent_indent=' ' * 24)}\n")
    return OK


def _demo(invocation: Invocation) -> int:
    parser = invocation.parser()
    _scenario_options(parser, port="--target-port", default=8000)
    parser.add_argument("--port", type=int, default=9709, help="where stallwatch listens (default: 9709)")
    parser.add_argument("--laps", type=int, default=None, help="end after so many rounds (default: never)")
    options = parser.parse_args(invocation.arguments)
    if options.list:
        return _listed_scenarios(invocation)

    import asyncio

    from stallwatch import demo, logs

    try:
        scenarios = demo.chosen(options.scenario)
    except KeyError as unknown:
        parser.error(f"--scenario {unknown.args[0]}: not a scenario; `stallwatch demo --list` shows them")
    # What stalls is in the line that the demo prints; a log beside it would tear that apart.
    logs.configure("error", "auto", stream=invocation.stderr)
    shown = demo.DemoOptions(scenarios, options.target_port, options.port, options.laps)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(demo.run(shown, out=invocation.stdout))
        except demo.PortTakenError as taken:
            invocation.complain(str(taken))
    return FAILED


def _simulate(invocation: Invocation) -> int:
    parser = invocation.parser()
    _scenario_options(parser, port="--port", default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--speed", type=float, default=1.0, help="simulated seconds in a second (default: 1)")
    options = parser.parse_args(invocation.arguments)
    if options.list:
        return _listed_scenarios(invocation)
    if not options.speed > 0:
        parser.error(f"--speed {options.speed:g}: must be above 0")

    import asyncio

    from stallwatch import demo

    try:
        scenarios = demo.chosen(options.scenario)
    except KeyError as unknown:
        parser.error(f"--scenario {unknown.args[0]}: not a scenario; `stallwatch simulate --list` shows them")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            runner.run(
                demo.simulate(
                    scenarios, host=options.host, port=options.port, speed=options.speed, out=invocation.stdout
                )
            )
        except demo.PortTakenError as taken:
            invocation.complain(str(taken))
            return FAILED
    return OK


COMMANDS: Final[Mapping[str, Command]] = {
    "run": Command("Watch one vLLM server, export metrics, record stalls.", _run),
    "demo": Command("Show what stallwatch does, beside a simulated vLLM.", _demo),
    "simulate": Command("Serve a simulated vLLM: scenarios with a known truth.", _simulate),
    "check": Command("Say whether a server can be watched, how well, and what would make it better.", _check),
    "probe": Command("Time one stream of a server, token by token.", _probe),
    "replay": Command("Judge a recording or an incident bundle again.", _replay),
    "experiment": Command("Find out whether prefill pauses the streams of a server, and how much.", _experiment),
    "compare": Command("Lay reports of experiments side by side.", _compare),
    "report": Command("Make a page and a summary of an incident bundle, to send and to keep.", _report),
    "healthcheck": Command("Ask a running stallwatch whether it is alive.", _healthcheck),
    "hash-password": Command("Hash a password for web.basic_auth_file.", _hash_password),
    "metrics": Command("Print the reference of every exported metric.", _metrics),
    "version": Command("Print the version.", _version),
}
