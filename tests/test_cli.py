import asyncio
import io
import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import structlog

import stallwatch
from stallwatch import cli, configuration
from stallwatch.cli import Command, Invocation
from stallwatch.settings import Settings

ROOT = Path(__file__).parent.parent


def call(*arguments: str, environ: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    status = cli.main(arguments, environ=environ or {}, stdout=out, stderr=err)
    return status, out.getvalue(), err.getvalue()


def process(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "stallwatch", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def logging_as_before() -> Iterator[None]:
    root, access, loop = logging.getLogger(), logging.getLogger("aiohttp.access"), logging.getLogger("asyncio")
    before = (root.handlers[:], root.level, access.handlers[:], access.propagate, loop.level)
    try:
        yield
    finally:
        root.handlers[:], root.level, access.handlers[:], access.propagate, loop.level = before
        logging.captureWarnings(capture=False)
        structlog.reset_defaults()


@contextmanager
def listener(status: int = 200, body: bytes = b"", *, delay_seconds: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    done = threading.Event()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            done.wait(delay_seconds)
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            with suppress(ConnectionError):  # whoever asked may have given up
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", asked
    finally:
        done.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_without_a_command_the_overview_is_an_error() -> None:
    """`stallwatch` alone explains itself on standard error and exits 2; --help is no error."""
    status, out, err = call()
    assert (status, out) == (2, "")
    assert call("--help") == call("-h") == call("help") == (0, err, "")
    for name, command in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", err, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("rnu",), "rnu: not a command; did you mean run?"),
        (("\x1b[2J",), rf"\x1b[2J: not a command; choose one of {', '.join(cli.COMMANDS)}"),
        (("--web.port", "1"), "--web.port: the command comes first; write stallwatch run --web.port ..."),
        (
            ("version", "--jsn"),
            "stallwatch version: unrecognized arguments: --jsn; see `stallwatch version --help`",
        ),
        (
            ("metrics", "--format=pdf"),
            (
                "stallwatch metrics: argument --format: invalid choice: 'pdf' (choose from text, markdown, json); see `"
                "stallwatch metrics --help`"
            ),
        ),
        (("healthcheck", "--web.prt", "1"), "--web.prt: not a setting; did you mean --web.port?"),
        (("run", "--web.prt", "1"), "--web.prt: not a setting; did you mean --web.port?"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_2(arguments: tuple[str, ...], line: str) -> None:
    """Misspelt commands and options are answered like misspelt settings."""
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    # Python 3.12 and later quote choices differently.
    assert re.sub(r"[']", "", err) == re.sub(r"[']", "", f"stallwatch: {line}\n")


def test_bad_configuration_is_a_line_a_fault_and_exit_2() -> None:
    """`run` refuses to start with every fault on a line of its own, before anything else is loaded."""
    done = process("run", "--canary.mode", "presistent", STALLWATCH_SLO__TARGET="99", STALLWATCH_LOG_LEVLE="x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "stallwatch: STALLWATCH_LOG_LEVLE: not a setting; did you mean STALLWATCH_LOG__LEVEL?\n"
        "stallwatch: --canary.mode = presistent: not one of pulse, persistent; did you mean persistent?\n"
        "stallwatch: STALLWATCH_SLO__TARGET = 99: too large; it is a share: write 0.99\n"
    )


def test_version_says_which_and_under_which_python() -> None:
    """Both forms name the version; the JSON form is an object."""
    python = ".".join(map(str, sys.version_info[:3]))
    expected = (0, f"stallwatch {stallwatch.__version__}\npython {python}\n", "")
    assert call("version") == call("--version") == expected
    status, out, _ = call("version", "--json")
    assert (status, json.loads(out)) == (0, {"version": stallwatch.__version__, "python": python})


def test_help_of_run_lists_every_setting_within_80_columns() -> None:
    """Each setting stands there as flag and variable; a secret only as variable."""
    status, out, err = call("run", "--help")
    assert (status, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert out.startswith("usage: stallwatch run [--config FILE] [--SETTING VALUE ...]\n")
    assert "  --canary.mode pulse|persistent\n" in out
    assert "      STALLWATCH_CANARY__MODE\n" in out
    assert "  --canary.model MODEL\n" in out
    assert "  STALLWATCH_ENGINE__API_KEY=KEY\n" in out
    assert "--engine.api_key " not in out


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_explains_itself(command: str) -> None:
    """`--help` goes to standard output and exits 0 for each command."""
    status, out, err = call(command, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: stallwatch {command}")


def test_the_metric_reference_can_be_printed() -> None:
    """`metrics` prints the catalogue in each of its forms."""
    text, markdown, as_json = (call("metrics", "--format", style) for style in ("text", "markdown", "json"))
    assert text == call("metrics")
    assert {text[0], markdown[0], as_json[0]} == {0}
    assert "stallwatch_" in text[1]
    assert "| metric |" in markdown[1]
    assert json.loads(as_json[1])


def test_healthcheck_asks_our_own_liveness() -> None:
    """It finds the port as `run` does, from flag, variable or file, asks /livez and exits 0 in silence."""
    with listener() as (address, asked):
        port = address.rpartition(":")[2]
        assert call("healthcheck", "--web.port", port) == (0, "", "")
        assert call("healthcheck", environ={"STALLWATCH_WEB__PORT": port, "STALLWATCH_X": "not ours"}) == (0, "", "")
        assert call("healthcheck", "--web.host=127.0.0.1", f"--web.port={port}") == (0, "", "")
        assert call("healthcheck", "--url", f"http://{address}/prefix/livez") == (0, "", "")
        assert asked == ["/livez", "/livez", "/livez", "/prefix/livez"]


def test_healthcheck_reads_the_port_from_the_file_of_settings(tmp_path: Path) -> None:
    """A port that only the file names is found, and other rooms of it are not judged."""
    with listener() as (address, _):
        file = tmp_path / "s.yaml"
        file.write_text(f"web:\n  port: {address.rpartition(':')[2]}\nfuture:\n  x: 1\n")
        assert call("healthcheck", environ={"STALLWATCH_CONFIG": str(file)}) == (0, "", "")


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (503, b"loop stuck for 31 s\nmore", "HTTP 503: loop stuck for 31 s"),
        (302, b"", "HTTP 302"),
        (500, b"\x1b[2J", r"HTTP 500: \x1b[2J"),
    ],
)
def test_healthcheck_says_what_was_wrong(status: int, body: bytes, problem: str) -> None:
    """Any answer but 200 is exit 1 with one printable line; a redirect is not followed."""
    with listener(status, body) as (address, asked):
        url = f"http://{address}/livez"
        assert call("healthcheck", "--url", url) == (1, "", f"stallwatch: {url}: {problem}\n")
        assert asked == ["/livez"]


def test_healthcheck_fails_where_nothing_answers() -> None:
    """A refused connection, a wrong address and a port that is no number are one line and exit 1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert call("healthcheck", "--web.port", str(port)) == (
            1,
            "",
            f"stallwatch: http://127.0.0.1:{port}/livez: connection refused\n",
        )
    assert call("healthcheck", "--url", "ftp://x")[2] == "stallwatch: ftp://x: not an http:// or https:// address\n"
    assert call("healthcheck", "--web.port", "http")[0] == 1


def test_healthcheck_gives_up_after_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that accepts and stays silent is not alive."""
    monkeypatch.setattr(cli, "HEALTHCHECK_TIMEOUT_SECONDS", 0.1)
    with listener(delay_seconds=5) as (address, _):
        status, _, err = call("healthcheck", "--url", f"http://{address}")
    assert (status, err) == (1, f"stallwatch: http://{address}: no answer within 0.1 s\n")


def test_short_commands_start_at_once() -> None:
    """The health probe runs on the CPUs of the watched server: neither it nor `version` may load what `run` needs."""
    heavy = {"pydantic", "aiohttp", "asyncio", "structlog", "prometheus_client", "uvloop", "yaml"}
    for arguments in (["version"], ["healthcheck", "--web.port", "1"]):
        code = (
            "import sys; from stallwatch import cli; "
            f"cli.main({arguments}, environ={{}}, stdout=sys.stdout, stderr=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; print(*sys.modules)"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert heavy.isdisjoint(done.stdout.split())
        wall, cpu = [], []
        for _ in range(5):
            started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            process(*arguments)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall.append(time.perf_counter() - started)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        print(f"{arguments[0]}: {min(wall) * 1000:.0f} ms, of which CPU {min(cpu) * 1000:.0f} ms")
        # CPU time of the quickest: what the machine did beside it is not ours.
        assert min(cpu) < 0.25


def test_a_closed_pipe_ends_a_command_without_a_traceback() -> None:
    """`stallwatch metrics | head` ends like other programs whose reader left."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "stallwatch", "run", "--help"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_interrupt_ends_any_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is exit 130 and silence."""

    def interrupted(_: Invocation) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(cli, "COMMANDS", {"wait": Command("Waits.", interrupted)})
    assert call("wait") == (130, "", "")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception leaves main as it is; the interpreter prints it and exits 1."""

    def broken(_: Invocation) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "COMMANDS", {"break": Command("Breaks.", broken)})
    with pytest.raises(ZeroDivisionError):
        call("break")


def test_run_says_what_was_configured_and_returns_what_the_work_returned() -> None:
    """The log begins with the settings given, without secrets, and each doubtful one; then the work runs."""
    environ = {"STALLWATCH_ENGINE__API_KEY": "sk-verysecret", "STALLWATCH_SLO__TTFT_SECONDS": "20"}
    loaded = configuration.load(["--log.format", "json"], environ)
    loops: list[str] = []

    async def work(settings: Settings) -> int:
        assert settings is loaded.settings
        loops.append(type(asyncio.get_running_loop()).__module__)
        return 1

    err = io.StringIO()
    with logging_as_before():
        assert cli.watch(loaded, work, stderr=err) == 1
    assert loops == ["uvloop"]
    lines = [json.loads(line) for line in err.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["starting", "questionable setting", "questionable setting"]
    assert lines[0]["version"] == stallwatch.__version__
    assert lines[0]["settings"]["slo.ttft_seconds"] == "20"
    assert lines[1]["setting"] == "STALLWATCH_SLO__TTFT_SECONDS = 20 with stall.ttft_seconds = 10 (default)"
    assert "verysecret" not in err.getvalue()


def test_the_status_of_a_command_is_the_status_of_the_process() -> None:
    """What a command returns, among them 1 and 2, reaches the shell."""
    assert process("version").returncode == 0
    assert process("healthcheck", "--url", "http://127.0.0.1:1").returncode == 1
    assert process("nothing").returncode == 2
