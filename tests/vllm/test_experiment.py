"""The experiment beside the real vLLM: the matrix, a sweep, and its ITL beside that of vLLM's own benchmark."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stallwatch.experiment.confirm import Counted
from stallwatch.experiment.load import Client, play
from stallwatch.experiment.measure import Run, Taken, Threshold, measured
from stallwatch.experiment.plan import Arm, Planned
from stallwatch.experiment.record import Log, Played
from stallwatch.sources.http import Target
from stallwatch.sources.lag import LagSource
from stallwatch.sources.stream import StreamRequest
from tests.bench.gaps import _BENCH, _plain_environment
from tests.e2e.processes import stallwatch
from tests.vllm.environment import Environment
from tests.vllm.load import load, long_prompt
from tests.vllm.server import VARIABLES, VllmServer, free_port, sample

pytestmark = pytest.mark.vllm

QUANTILES = (50, 95, 99)


def experiment(
    folder: Path,
    *arguments: str,
    environ: dict[str, str] | None = None,
    seconds: float = 900.0,
    where: Path | None = None,
) -> Any:
    """The report that the command writes; what it says is printed."""
    command = stallwatch("experiment", "--output", str(folder), "--name", "made", *arguments)
    done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=seconds, env=environ, cwd=where)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "made.json").read_text())


def means(report: Any, measure: str) -> dict[str, float]:
    """A measure's mean over the valid runs of each kind."""
    found: dict[str, list[float]] = {}
    for run in report["runs"]:
        if not run["void"] and measure in run["measures"]:
            found.setdefault(run["arm"], []).append(run["measures"][measure])
    return {arm: sum(values) / len(values) for arm, values in found.items()}


def test_a_small_matrix_says_prefill(vllm_server: VllmServer, tmp_path: Path) -> None:
    """A prompt of 2,000 tokens pauses two streams when it is computed, and not when it comes out of the cache."""
    report = experiment(
        tmp_path,
        *("--target", vllm_server.url, "--repeats", "3", "--streams", "2", "--output-tokens", "160"),
        *("--prompt-tokens", "2000", "--pause", "0.2", "--seed", "3"),
    )
    (said,) = report["conclusions"]
    gaps, lost = means(report, "longest_gap_seconds"), means(report, "lost_seconds")
    uncached = [run for run in report["runs"] if run["arm"] == "uncached" and not run["void"]]

    assert report["identity"]["server"]["version"].startswith("0.32")
    assert "system_fingerprint" in report["identity"]["server"]
    assert len(uncached) >= 2
    assert gaps["uncached"] > 2 * gaps["cached"]
    assert lost["uncached"] > 5 * lost["cached"]
    assert all(run["measures"]["cached_tokens"] == 0 for run in uncached)
    # By default flags it is an estimate from token conservation, and a run has only a few polls.
    assert all(run["measures"]["prefill_tokens"] == pytest.approx(2_007, rel=0.25) for run in uncached)
    # With all runs valid the verdict follows; a machine that was busy with something else voids some.
    void = [run for run in report["runs"] if run["void"]]
    assert said["verdict"] == ("prefill" if not void else said["verdict"])
    assert said["verdict"] in {"prefill", "inconclusive"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_full_matrix(vllm_server: VllmServer, tmp_path: Path) -> None:
    """A prompt of 12,000 tokens: seconds lost by every stream when computed, hardly any when cached."""
    report = experiment(
        tmp_path,
        *("--target", vllm_server.url, "--streams", "2", "--output-tokens", "400", "--prompt-tokens", "12000"),
        *("--pause", "1", "--seed", "11"),
        seconds=1700.0,
    )
    (said,) = report["conclusions"]

    assert said["verdict"] == "prefill"
    assert means(report, "lost_seconds")["uncached"] > 10.0
    assert means(report, "longest_gap_seconds")["cached"] < 1.0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_sweep_of_the_token_budget(vllm_environment: Environment, tmp_path: Path) -> None:
    """The larger the budget, the longer readers stand still at a time; each value has a server of its own."""
    port = free_port()
    template = (
        "python -m vllm.entrypoints.openai.api_server --model tiny --served-model-name tiny --host 127.0.0.1 "
        "--port {port} --max-model-len 16384 --max-num-seqs 64 --max-num-batched-tokens {budget} --enforce-eager"
    )
    environ = {**os.environ, **VARIABLES, "PATH": f"{vllm_environment.python.parent}:{os.environ['PATH']}"}
    report = experiment(
        tmp_path,
        *("--target", f"http://127.0.0.1:{port}", "--launch", template, "--sweep", "budget=128,256,512,1024,2048"),
        *("--repeats", "3", "--streams", "2", "--output-tokens", "240", "--prompt-tokens", "4000"),
        *("--pause", "0.5", "--seed", "5", "--slo.itl_seconds", "0.5"),
        environ=environ,
        seconds=3500.0,
        where=vllm_environment.home / "models",  # a model's name is then no path
    )
    points = report["curves"][0]["points"]
    readers = [point["measures"]["beside_itl_p99_seconds"]["mean"] for point in points]

    assert [point["value"] for point in points] == ["128", "256", "512", "1024", "2048"]
    assert readers[-1] > 3 * readers[0]
    assert report["curves"][0]["meets_objective"] is not None


# --- our ITL beside that of vLLM's own benchmark


@pytest.mark.long
@pytest.mark.timeout(900)
def test_itl_agrees_with_vllm_bench(vllm_environment: Environment, vllm_server: VllmServer, tmp_path: Path) -> None:
    """Readers of both clients share the engine's steps: quantiles agree, and beside a prompt the same gaps are seen."""
    alone = together(vllm_environment, vllm_server, tmp_path / "alone", tokens=2_000)
    beside = together(vllm_environment, vllm_server, tmp_path / "beside", tokens=2_000, prompt_tokens=4_000)
    table = [row for name, seen in (("alone", alone), ("beside a prompt", beside)) for row in rows(name, *seen)]
    print("| load | | stallwatch | vllm bench serve | difference |\n|---|---|---:|---:|---:|")
    for load_name, figure, ours, theirs in table:
        print(f"| {load_name} | {figure} | {ours:.2f} | {theirs:.2f} | {100 * (ours / theirs - 1):+.1f} % |")
    figures = {(name, figure): (ours, theirs) for name, figure, ours, theirs in table}
    ours, theirs = figures["alone", "p50, ms"]

    assert ours == pytest.approx(theirs, rel=0.1)
    ours, theirs = figures["beside a prompt", "max, ms"]
    assert ours == pytest.approx(theirs, rel=0.05)
    ours, theirs = figures["beside a prompt", "sum of gaps above 100 ms, s"]
    assert ours == pytest.approx(theirs, rel=0.05)


def together(
    environment: Environment, server: VllmServer, folder: Path, *, tokens: int, prompt_tokens: int | None = None
) -> tuple[Run, Sequence[float]]:
    """Both clients at once, a stream each, on one server: our run, and the gaps of theirs in seconds."""
    folder.mkdir()
    process = subprocess.Popen(
        [
            *(str(environment.python), "-c", _BENCH),
            *("--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions"),
            *("--model", str(environment.model("tiny")), "--served-model-name", "tiny"),
            *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", str(tokens)),
            *("--num-prompts", "1", "--ignore-eos", "--temperature", "0", "--disable-tqdm", "--num-warmups", "0"),
            *("--ready-check-timeout-sec", "0", "--save-result", "--save-detailed"),
            *("--result-dir", str(folder), "--result-filename", "bench.json"),
        ],
        env={**_plain_environment(), **VARIABLES},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        deadline = time.monotonic() + 120
        while not sample(server.metrics("vllm:num_requests_running"), "vllm:num_requests_running"):
            assert process.poll() is None, "the benchmark ended early"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        plan = [] if prompt_tokens is None else [long_prompt(prompt_tokens=prompt_tokens, salt=folder.name, delay=1.0)]
        with load(server.url, plan):
            ours = asyncio.run(one_stream(server, tokens))
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    detailed = json.loads((folder / "bench.json").read_text())
    return ours, [gap for gaps in detailed["itls"] for gap in gaps]


async def one_stream(server: VllmServer, tokens: int) -> Run:
    """One stream of ours, timed and judged as a run of the experiment is."""
    target = Target(server.url)
    seen = Log()
    sleeper = asyncio.create_task(LagSource(clock=time.monotonic).run(seen.lags.append))
    async with target.session(keep_alive=False) as session:
        client = Client(target=target, session=session, clock=time.monotonic, timeout_seconds=120.0)
        request = StreamRequest(stream=1, engine="0", request_id="ours", model="tiny", prompt="1, 2, 3,", tokens=tokens)
        played: Played = await play(client, [request], None, settle_tokens=1)
    sleeper.cancel()
    taken = Taken(planned=Planned(1, 1, Arm.ALONE), played=played, log=seen, counted=Counted(), ended=played.ended)
    return measured(taken, Threshold(usual=0.005, stall_floor=0.5, stall_factor=8.0), allow_busy=True)


def rows(name: str, run: Run, theirs: Sequence[float]) -> list[tuple[str, str, float, float]]:
    """The table's rows: figure, ours, theirs. Theirs as they compute them: chunks, linear between ranks."""
    ordered = sorted(theirs)
    found = []
    for q in QUANTILES:
        place = q / 100 * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        value = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
        found.append((name, f"p{q}, ms", 1000 * run.measures[f"itl_p{q}_seconds"], 1000 * value))
    found.append((name, "max, ms", 1000 * run.measures["longest_gap_seconds"], 1000 * ordered[-1]))
    if ordered[-1] > 0.1:
        (reader,) = run.taken.played.readers
        gaps = [after - before for (before, _), (after, _) in zip(reader.arrivals, reader.arrivals[1:], strict=False)]
        for words, unit, of in (("gaps above 100 ms", "", len), ("sum of gaps above 100 ms", ", s", sum)):
            both = [float(of([gap for gap in each if gap > 0.1])) for each in (gaps, ordered)]
            found.append((name, words + unit, both[0], both[1]))
    return found
