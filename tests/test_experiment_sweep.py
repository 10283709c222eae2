import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stallwatch import cli
from stallwatch.experiment.identity import flags, listening_command, without_secrets
from stallwatch.experiment.launch import Launched, LaunchError, command, problem_of
from stallwatch.experiment.statistics import Estimate
from stallwatch.experiment.tradeoff import PROMPT, READERS, Point, knee, meeting, statements
from stallwatch.sources.http import Target
from tests.e2e.processes import free_port

T = TypeVar("T")

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""Healthy at once, with a child that outlives it unless its whole group is ended."""

SIMULATED = """
import asyncio, sys
from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.cost import StepCost
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.server import run_simulator
port, budget = int(sys.argv[1]), int(sys.argv[2])
cost = StepCost(0.002, 0.0001, 0.0, 0.0, 0.0)
engine = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=64, cost=cost)
asyncio.run(run_simulator(Scenario(name="x", sentence="x", engine=engine), port=port))
"""
"""A simulated vLLM whose steps take 2 ms and 0.1 ms a prompt token; it refuses a budget below 64."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs in real time: processes know no other."""
    return asyncio.run(main)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def launched(template: str, port: int, folder: Path) -> Launched:
    """A server of the template, at the port."""
    target = Target(f"http://127.0.0.1:{port}")
    return Launched(
        command(template, {"port": str(port)}), target, folder / "server.log", clock=time.monotonic, environ=os.environ
    )


def listens(port: int) -> bool:
    """Whether somebody accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_stopping_ends_the_whole_group_and_frees_the_port(tmp_path: Path) -> None:
    """Helpers of the server go with it, and the next one can have its port."""
    port = free_port()
    script = tmp_path / "server.py"
    script.write_text(SERVER)

    async def main() -> tuple[float, bool, int]:
        server = launched(f"{sys.executable} {script} {{port}}", port, tmp_path)
        took = await server.start(timeout_seconds=60.0)
        child = int((tmp_path / "server.log").read_text().split()[0])
        before = listens(port) and alive(child)
        assert str(script) in (listening_command("127.0.0.1", port) or "")
        assert listening_command("192.0.2.1", port) is None
        await server.stop()
        return took, before, child

    took, before, child = run(main())

    assert took < 60
    assert before
    assert not listens(port)
    assert not alive(child)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param("raise SystemExit('Error: no such budget')", r"ended with status 1 .*no such budget", id="ends"),
        pytest.param(
            r"raise SystemExit('  Value error, budget (32) is too small\\n    For further information visit https://x/error')",
            r"ended with status 1 .*: Value error, budget \(32\) is too small",
            id="points elsewhere",
        ),
        pytest.param("import time; time.sleep(600)", r"was not healthy after 1 s", id="hangs"),
    ],
)  # fmt: skip
def test_a_start_that_fails_is_told(tmp_path: Path, script: str, expected: str) -> None:
    """A server that ends or never becomes healthy is told with the words of its log, and nothing of it stays."""
    (tmp_path / "server.py").write_text(script)

    async def main() -> None:
        server = launched(f"{sys.executable} {tmp_path / 'server.py'}", free_port(), tmp_path)
        try:
            with pytest.raises(LaunchError, match=expected):
                await server.start(timeout_seconds=1.0 if "sleep" in script else 60.0)
        finally:
            await server.stop()

    run(main())


def test_a_taken_port_is_not_measured(tmp_path: Path) -> None:
    """Where something listens already nothing is started: the answers would be another server's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = launched(f"{sys.executable} -c 1", taken.getsockname()[1], tmp_path)

        with pytest.raises(LaunchError, match=r"listens at .* already"):
            run(server.start(timeout_seconds=1.0))


def test_a_command_is_split_and_filled_without_a_shell() -> None:
    """Placeholders are filled in, variables go before, quotes hold; nothing is expanded, other braces stay."""
    made = command("A=1 vllm serve 'my model' --budget {budget} --x '{\"a\": $HOME}'", {"budget": "512"})

    assert made.words == ("vllm", "serve", "my model", "--budget", "512", "--x", '{"a": $HOME}')
    assert made.variables == {"A": "1"}
    assert problem_of("vllm serve", ["budget"]) == "does not hold {budget}, the value to vary"
    assert problem_of("vllm 'serve {budget}", ["budget"]) == "no closing quotation"
    assert problem_of("A={budget}", ["budget"]) == "no program to start"


def test_reports_show_commands_without_secrets() -> None:
    """Keys and tokens are taken out of a command, settings that are called tokens stay."""
    told = without_secrets("HF_TOKEN=abc vllm serve m --api-key k1 k2 --max-num-batched-tokens 512 --hf-token=xyz -x")

    assert told == "HF_TOKEN=... vllm serve m --api-key ... --max-num-batched-tokens 512 --hf-token=... -x"
    assert flags(told) == {"max_num_batched_tokens": "512"}


# --- the curve


def point(value: str, readers: float, prompt: float) -> Point:
    """One value with its two measures."""
    return Point(value, {READERS: Estimate(readers, readers, readers, 5), PROMPT: Estimate(prompt, prompt, prompt, 5)})


BENT = (point("256", 0.05, 20.0), point("512", 0.1, 8.0), point("1024", 0.5, 6.0), point("2048", 2.0, 5.0))


def test_the_knee_and_the_value_that_keeps_the_promise() -> None:
    """The knee is where the curve bends; of the values that keep the promise the quickest prompt wins."""
    assert knee(BENT) == BENT[1]
    assert knee((*BENT, point("4096", 4.0, 5.01))) == BENT[1]  # worse for both than 2048
    assert meeting(BENT, 0.6) == BENT[2]
    assert meeting(BENT, 0.01) is None
    assert next(statements("budget", BENT, 0.6)).startswith("budget=1024 meets the objective: p99 of 500 ms a token")


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(BENT[:2], id="two points"),
        pytest.param((point("1", 1.0, 3.0), point("2", 2.0, 2.0), point("3", 3.0, 1.0)), id="a straight line"),
        pytest.param((point("1", 1.0, 1.0), point("2", 2.0, 2.0), point("3", 3.0, 3.0)), id="no trade-off"),
        pytest.param((point("1", 0.1, 1.0), point("2", 0.4, 1.01), point("3", 3.0, 1.02)), id="no gain"),
    ],
)  # fmt: skip
def test_no_knee_is_made_up(points: tuple[Point, ...]) -> None:
    """Where nothing bends, or nothing is traded, no value is called the knee."""
    assert knee(points) is None


# --- the command


def call(*arguments: str, name: str = "experiment") -> tuple[int, str, str]:
    """Status, output and complaints of a command."""
    out, err = io.StringIO(), io.StringIO()
    status = cli.main((name, *arguments), environ={}, stdout=out, stderr=err)
    return status, out.getvalue(), err.getvalue()


def test_the_plan_is_shown_and_nothing_is_sent() -> None:
    """A dry run says what each run is, what it costs, and which servers it would start."""
    status, out, err = call(
        *("--target", "http://127.0.0.1:9", "--dry-run", "--seed", "4", "--prompt-tokens", "1000,4000"),
        *("--launch", "vllm serve m --port {port} --api-key s3cret --b {budget}", "--sweep", "budget=512,1024"),
    )

    assert (status, err) == (0, "")
    assert "5 blocks of 5 runs in random order (seed 4)" in out
    assert "one prompt of about 1,000 and 4,000 tokens, not in the prefix cache" in out
    assert "at most 38,656 prompt tokens to compute, 50,000 that the prefix cache should save, 41,633 tokens" in out
    assert "vllm serve m --port 9 --api-key ... --b 512" in out
    assert "that, 2 times" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(("--repeats", "0"), "argument --repeats: 0 is not between 1 and 1,000", id="repeats"),
        pytest.param(
            ("--prompt-tokens", "12k"), "argument --prompt-tokens: 12k is not a number of tokens", id="tokens"
        ),
        pytest.param(("--prompt-tokens", "500,500"), "names a length twice", id="twice"),
        pytest.param(("--sweep", "b=1,2"), "needs --launch", id="sweep alone"),
        pytest.param(("--launch", "x {b}"), "needs --sweep", id="launch alone"),
        pytest.param(("--launch", "x", "--sweep", "b=1,2"), "does not hold {b}", id="no placeholder"),
        pytest.param(("--launch", "x {b}", "--sweep", "b=1,1"), "names a value twice", id="same value"),
        pytest.param(("--launch", "x {b}", "--sweep", "b"), "b is not NAME=VALUE", id="no values"),
        pytest.param(("--max-tokens", "1000"), "more than --max-tokens 1,000", id="too dear"),
        pytest.param(("--target", "127.0.0.1:8000"), "--target = 127.0.0.1:8000: not an http://", id="no scheme"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(arguments: tuple[str, ...], expected: str) -> None:
    """A fault ends with status 2 and one line that names it."""
    status, out, err = call(*arguments)

    assert (status, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Without a server there is one line and no report."""
    status, _, err = call("--target", f"http://127.0.0.1:{free_port()}", "--output", str(tmp_path / "new"))

    assert status == 1
    assert err.startswith("stallwatch: ")
    assert err.count("\n") == 1
    assert list((tmp_path / "new").iterdir()) == []


def test_a_sweep_makes_a_curve_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Each value gets a server of its own, one that does not start is told and passed over, reports are written."""
    (tmp_path / "server.py").write_text(SIMULATED)
    port = free_port()
    status, out, err = call(
        *("--target", f"http://127.0.0.1:{port}", "--output", str(tmp_path), "--name", "s", "--seed", "1"),
        *("--launch", f"{sys.executable} {tmp_path / 'server.py'} {{port}} {{budget}}"),
        *("--sweep", "budget=512,16,2048", "--streams", "1", "--output-tokens", "80", "--prompt-tokens", "4000"),
        *("--repeats", "1", "--pause", "0", "--engine.full_interval_seconds", "1", "--engine.max_scrape_duty", "1"),
        *("--host.enabled", "false", "--gpu.enabled", "false", "--slo.itl_seconds", "0.15"),
    )
    report = json.loads((tmp_path / "s.json").read_text())
    by_value = {one["value"]: one for one in report["points"]}
    curve = report["curves"][0]
    readers = [one["measures"]["beside_itl_p99_seconds"]["mean"] for one in curve["points"]]

    assert (status, err) == (0, "")
    assert "budget=16, " in out
    assert "left out: it ended with status 1" in out
    assert [one["value"] for one in curve["points"]] == ["512", "2048"]
    assert readers[0] == pytest.approx(0.053, rel=0.5)
    assert readers[1] > 2 * readers[0]
    assert curve["meets_objective"] == "512"
    assert "budget=512 meets the objective" in (tmp_path / "s.md").read_text()
    assert by_value["16"]["experiment"] is None
    assert "max_num_batched_tokens (16)" in by_value["16"]["problem"]
    assert "timeline" not in by_value["512"]["experiment"]["runs"][0]
    assert not listens(port)
    assert len((tmp_path / "s.html").read_bytes()) < 300_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_sweep_with_its_server(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C in the middle stops the server that was started and writes what there is."""
    (tmp_path / "server.py").write_text(SIMULATED)
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "stallwatch", "experiment", "--target", f"http://127.0.0.1:{port}"),
            *("--output", str(tmp_path), "--name", "s", "--sweep", "budget=512,1024"),
            *("--launch", f"{sys.executable} {tmp_path / 'server.py'} {{port}} {{budget}}"),
        ],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not listens(port):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    status = process.wait(60)

    assert status == 130
    assert not listens(port)
    assert json.loads((tmp_path / "s.json").read_text())["outcome"] == "interrupted"
