"""The program as a process, in real time: starts, serves, and ends as Kubernetes expects."""

import json
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.processes import free_port, get, process, stallwatch, until

_ASKED = b'{"model": "tiny", "prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true}'
_ENDLESS_STREAM = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + (
    b"Content-Length: %d\r\n\r\n%s" % (len(_ASKED), _ASKED)
)


@pytest.mark.parametrize("mode", ["pulse", "persistent"])
def test_run_exports_and_ends_on_sigterm(mode: str, tmp_path: Path) -> None:
    """Beside a simulated server the sidecar shows latencies within seconds, and SIGTERM ends it within 2 s."""
    target, port = free_port(), free_port()
    run = stallwatch(
        "run", "--engine.url", f"http://127.0.0.1:{target}", "--web.port", str(port), "--canary.mode", mode
    )
    simulate = stallwatch("simulate", "--scenario", "quiet", "--port", str(target))
    with process(simulate, tmp_path / "simulate.log"), process(run, tmp_path / "run.log") as sidecar:
        url = f"http://127.0.0.1:{port}"
        until(lambda: 'stallwatch_target_phase{phase="serving"} 1.0' in get(f"{url}/metrics"), 20, "serving")
        until(lambda: 'stallwatch_itl_seconds{engine="0",q="0.5"' in get(f"{url}/metrics"), 20, "a latency")
        status = json.loads(get(f"{url}/api/v1/status"))
        alive = get(f"{url}/livez")
        code, seconds = sidecar.stop()
        log = sidecar.output()
    print(f"{mode}: ended {seconds:.2f} s after SIGTERM")

    assert status["target"]["phase"] == "serving"
    assert alive == "ok\n"
    assert code == 0, log
    assert seconds < 2 * 5
    assert "Traceback" not in log
    assert sum('"source up"' in line and '"engine"' in line for line in log.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("program", [["stallwatch", "simulate"], ["stallwatch.simulator"]], ids=lambda one: one[0])
def test_a_simulated_server_ends_on_a_signal(program: list[str], number: signal.Signals, tmp_path: Path) -> None:
    """With a stream open, a simulated server ends at once with status 0: as process 1 it needs handlers of its own."""
    port = free_port()
    arguments = [sys.executable, "-m", *program, "--scenario", "quiet", "--port", str(port)]
    with process(arguments, tmp_path / "simulate.log") as simulate:
        until(lambda: "num_requests_running" in get(f"http://127.0.0.1:{port}/metrics"), 20, "it serves")
        with socket.create_connection(("127.0.0.1", port), 5) as reader:
            reader.sendall(_ENDLESS_STREAM)
            assert reader.recv(1024).startswith(b"HTTP/1.1 200")
            code, seconds = simulate.stop(number)
        said = simulate.output()
    print(f"ended {seconds:.2f} s after {number.name}")

    assert code == 0, said
    assert seconds < 2 * 5
    assert "Traceback" not in said


def test_a_canary_under_way_is_aborted_on_the_server(tmp_path: Path) -> None:
    """When the sidecar ends, vLLM sees the connection close and gives the request's place free."""
    target, port = free_port(), free_port()
    run = stallwatch(
        "run", "--engine.url", f"http://127.0.0.1:{target}", "--web.port", str(port), "--canary.mode", "persistent"
    )
    simulate = stallwatch("simulate", "--scenario", "idle", "--port", str(target))

    def running() -> str:
        page = get(f"http://127.0.0.1:{target}/metrics/?name[]=vllm:num_requests_running")
        return page.rsplit(" ", 1)[-1].strip()

    with process(simulate, tmp_path / "simulate.log"), process(run, tmp_path / "run.log") as sidecar:
        until(lambda: running() == "1.0", 20, "the canary runs")
        sidecar.stop()
        until(lambda: running() == "0.0", 10, "the canary was aborted")


def test_a_taken_port_is_said_in_one_line(tmp_path: Path) -> None:
    """A second sidecar on the same port ends with status 1 and a hint."""
    port = free_port()
    arguments = stallwatch(
        "run", "--web.host", "127.0.0.1", "--web.port", str(port), "--engine.url", "http://127.0.0.1:9"
    )
    with process(arguments, tmp_path / "first.log") as first:
        until(lambda: get(f"http://127.0.0.1:{port}/livez") == "ok\n", 20, "the first listens")
        with process(arguments, tmp_path / "second.log") as second:
            code = second.popen.wait(timeout=20)
            said = second.output()
        assert first.popen.poll() is None

    assert code == 1
    assert "cannot listen" in said
    assert "set web.port" in said


def test_demo_shows_a_freeze_and_ends_on_interrupt(tmp_path: Path) -> None:
    """The demo serves its metrics, prints a verdict, and Ctrl-C ends it without a traceback."""
    target, port = free_port(), free_port()
    arguments = stallwatch("demo", "--scenario", "jit-pause", "--target-port", str(target), "--port", str(port))
    with process(arguments, tmp_path / "demo.log") as demo:
        until(lambda: "stallwatch_itl_seconds" in get(f"http://127.0.0.1:{port}/metrics"), 30, "latencies of the demo")
        time.sleep(5.5)
        code, _ = demo.stop(signal.SIGINT)
        said = demo.output()

    assert code in {0, 130}, said
    assert f"http://127.0.0.1:{port}/metrics" in said
    assert "open gap" in said
    assert "Traceback" not in said


def test_demo_refuses_a_taken_port_with_a_hint(tmp_path: Path) -> None:
    """Each of the two ports, when taken, is named with the flag that changes it."""
    target, port = free_port(), free_port()
    arguments = stallwatch("demo", "--target-port", str(target), "--port", str(port))
    with process(stallwatch("simulate", "--scenario", "idle", "--port", str(target)), tmp_path / "simulate.log"):
        until(lambda: get(f"http://127.0.0.1:{target}/health") == "", 20, "the target listens")
        with process(arguments, tmp_path / "demo.log") as demo:
            code = demo.popen.wait(timeout=20)
            said = demo.output()

    assert code == 1
    assert f"port {target} cannot be used" in said
    assert "--target-port" in said
    assert "Traceback" not in said
