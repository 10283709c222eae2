"""Stalls of the real vLLM and the causes named for them; thresholds are the defaults where not said otherwise."""

import getpass
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest

from stallwatch.commands.terminal import duration
from tests.e2e.processes import get, process, stallwatch, until
from tests.vllm.environment import Environment
from tests.vllm.load import decode_stream, load, long_prompt
from tests.vllm.server import VllmServer, free_port
from tests.vllm.sidecar import Sidecar, beside

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

REPORTS = Path(__file__).parents[2] / ".out" / "incident"

NGINX = """
user {user};
daemon off;
error_log stderr;
pid {folder}/nginx.pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {target};
            proxy_http_version 1.1;
            proxy_buffering on;
            limit_rate 8k;
        }}
    }}
}}
"""


@pytest.fixture(scope="module")
def server(vllm_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server with four places, so that a full queue is easily had."""
    folder = tmp_path_factory.mktemp("vllm")
    with VllmServer(vllm_environment, folder, model="small", flags=("--max-num-seqs", "4")) as running:
        yield running


def stalls(sidecar: Sidecar) -> list[dict[str, Any]]:
    """The stalls that the sidecar remembers, open ones first."""
    found: list[dict[str, Any]] = json.loads(get(f"{sidecar.url}/api/v1/stalls"))["stalls"]
    return found


def a_stall(sidecar: Sidecar, accepted: Callable[[dict[str, Any]], bool], seconds: float, what: str) -> dict[str, Any]:
    """Waits for a stall that is accepted, and prints it."""
    until(lambda: any(accepted(stall) for stall in stalls(sidecar)), seconds, what)
    found = next(stall for stall in stalls(sidecar) if accepted(stall))
    print(f"{found['kind']} stall of {found['duration_seconds']:.1f} s: {found['cause']}")
    for evidence in found["evidence"]:
        print(f"  {evidence['cause']} {evidence['explains_seconds']:.1f} s: {evidence['what']}")
    return found


def test_a_long_prompt_is_one_stall_and_prefill(server: VllmServer, tmp_path: Path) -> None:
    """Twenty-four slow steps of one prompt are one stall, its cause prefill, its culprit the prompt.

    The report of its bundle says the same; it stays in `.out/incident`, to be looked at.
    """
    bundles = tmp_path / "incidents"
    with load(server.url, [decode_stream(tokens=8_000, salt="stall")]) as reading:
        reading.wait_for_tokens("victim", 300)
        with beside(server, tmp_path, "--recorder.directory", str(bundles)) as sidecar:
            time.sleep(4.0)
            with load(server.url, [long_prompt(salt="stall")]) as asking:
                other = asking.finish()["long"]
            closed = a_stall(sidecar, lambda stall: not stall["open"], 15, "the stall is over")
            count = len(stalls(sidecar))
            until(lambda: list(bundles.glob("incident-*")), 20, "the bundle is written")
    lasted = (other.first_token_wait or 0.0) + 0.0
    (bundle,) = bundles.glob("incident-*")
    reported = subprocess.run(
        stallwatch("report", str(bundle), "--output", str(REPORTS)), capture_output=True, text=True, check=True
    )
    page, summary = (Path(line).read_text() for line in reported.stdout.splitlines())
    print(summary)

    assert count == 1
    assert closed["cause"] == "prefill"
    assert closed["duration_seconds"] == pytest.approx(lasted, rel=0.25)
    assert closed["largest_prompt_tokens"] == pytest.approx(12_000, rel=0.05)
    assert "| cause | prefill |" in summary
    assert f"| lasted | {duration(closed['duration_seconds'])} |" in summary
    assert '"cause":"prefill"' in page


def test_a_stopped_engine_is_a_hang_and_not_prefill(server: VllmServer, tmp_path: Path) -> None:
    """While the engine core is stopped under a decoding reader the cause becomes engine_hang."""
    with load(server.url, [decode_stream(tokens=8_000, salt="hang")]) as reading:
        reading.wait_for_tokens("victim", 300)
        with beside(server, tmp_path, "--stall.hang_seconds", "8") as sidecar:
            time.sleep(4.0)
            server.signal_engine(SIGSTOP)
            try:
                hung = a_stall(sidecar, lambda stall: stall["cause"] == "engine_hang", 25, "the hang is named")
            finally:
                server.signal_engine(SIGCONT)
            until(lambda: not any(stall["open"] for stall in stalls(sidecar)), 20, "the stall is over")
            causes = {stall["cause"] for stall in stalls(sidecar)}

    assert hung["open"]
    assert "prefill" not in causes


def test_a_full_queue_is_admission(server: VllmServer, tmp_path: Path) -> None:
    """When long answers hold every place, our pulse waits to be let in: readers are fine, newcomers are not."""
    plan = [decode_stream(f"holder{i}", tokens=3_500, seed=40 + i, salt="queue") for i in range(6)]
    settings = ("--canary.interval_seconds", "5", "--stall.ttft_seconds", "5", "--slo.ttft_seconds", "3")
    with load(server.url, plan) as holding:
        holding.wait_for_tokens("holder0", 50)
        with beside(server, tmp_path, *settings) as sidecar:
            waited = a_stall(
                sidecar,
                lambda stall: stall["kind"] == "admission" and stall["cause"] != "unknown",
                40,
                "our pulse waits",
            )

    assert waited["cause"] == "admission"


@contextmanager
def _nginx(target: str, folder: Path) -> Iterator[str]:
    """A proxy in front of the server that buffers the answer and hands it out by the second."""
    folder.mkdir()
    port = free_port()
    conf = folder / "nginx.conf"
    conf.write_text(NGINX.format(folder=folder, port=port, target=target, user=getpass.getuser()))
    with process(["nginx", "-c", str(conf)], folder / "nginx.log"):
        until(lambda: get(f"http://127.0.0.1:{port}/health") == "", 10, "nginx answers")
        yield f"http://127.0.0.1:{port}"


def test_a_proxy_that_buffers_is_delivery(server: VllmServer, tmp_path: Path) -> None:
    """Through nginx that buffers and paces answers the stream comes in bursts while the engine steps on."""
    with (
        load(server.url, [decode_stream(tokens=8_000, salt="proxy")]) as reading,
        _nginx(server.url, tmp_path / "nginx") as url,
    ):
        reading.wait_for_tokens("victim", 100)
        with beside(server, tmp_path, "--canary.url", url, "--canary.mode", "persistent") as sidecar:
            burst = a_stall(
                sidecar, lambda stall: not stall["open"] or stall["cause"] != "unknown", 240, "bursts are a stall"
            )
            time.sleep(8.0)
            causes = {stall["cause"] for stall in stalls(sidecar)}

    assert burst["cause"] == "delivery"
    assert causes == {"delivery"}


def test_our_own_standstill_is_observer(server: VllmServer, tmp_path: Path) -> None:
    """A sidecar that was stopped for three seconds misses nothing for it and blames nobody else."""
    with load(server.url, [decode_stream(tokens=8_000, salt="observer")]) as reading:
        reading.wait_for_tokens("victim", 100)
        with beside(server, tmp_path, "--canary.mode", "persistent") as sidecar:
            until(lambda: (sidecar.value("itl_samples", source="canary", window="5m") or 0) > 200, 120, "canary tokens")
            before = sidecar.value("slo_missed_seconds_total") or 0.0
            sidecar.process.popen.send_signal(SIGSTOP)
            time.sleep(3.0)
            sidecar.process.popen.send_signal(SIGCONT)
            time.sleep(6.0)
            missed = (sidecar.value("slo_missed_seconds_total") or 0.0) - before
            excluded = sidecar.value("observer_excluded_gaps_total")
            lag = sidecar.value("observer_lag_seconds") or 0.0
            causes = {stall["cause"] for stall in stalls(sidecar)}
    print(f"own lag {lag:.2f} s, {excluded} gaps excluded, {missed:.2f} s missed, causes {causes}")

    assert lag > 2.5
    assert excluded
    assert missed < 0.5
    assert causes <= {"observer"}
