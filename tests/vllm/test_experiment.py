"""The experiment beside the real vLLM: the matrix, a sweep, and its ITL beside that of vLLM's own benchmark."""

import asyncio
import json
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
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
from tests.e2e.processes import stallwatch
from tests.vllm import benchmark
from tests.vllm.environment import Environment
from tests.vllm.load import load, long_prompt, prompt_text
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
    """A prompt of 6,000 tokens pauses two streams when it is computed, and not when it comes out of the cache."""
    report = experiment(
        tmp_path,
        *("--target", vllm_server.url, "--repeats", "3", "--streams", "2", "--output-tokens", "160"),
        *("--prompt-tokens", "6000", "--pause", "0.2", "--seed", "3"),
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
    assert all(run["measures"]["prefill_tokens"] == pytest.approx(6_007, rel=0.25) for run in uncached)
    # With all runs valid the verdict follows; a machine that was busy with something else voids some.
    void = [run for run in report["runs"] if run["void"]]
    assert said["verdict"] == ("prefill" if not void else said["verdict"])
    assert said["verdict"] in {"prefill", "inconclusive"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_full_matrix(vllm_server: VllmServer, tmp_path: Path) -> None:
    """A prompt of 12,000 tokens takes every stream most of the time until its first token, and hardly any if cached."""
    report = experiment(
        tmp_path,
        *("--target", vllm_server.url, "--streams", "2", "--output-tokens", "400", "--prompt-tokens", "12000"),
        *("--pause", "1", "--seed", "11", "--server-command", shlex.join(["python", *vllm_server.command[1:]])),
        seconds=1700.0,
    )
    (said,) = report["conclusions"]
    lost, gaps = means(report, "lost_seconds"), means(report, "longest_gap_seconds")

    assert said["verdict"] == "prefill"
    assert lost["uncached"] > 0.7 * means(report, "prompt_ttft_seconds")["uncached"]
    assert lost["uncached"] > 10 * lost["cached"]
    assert gaps["uncached"] > 2 * gaps["cached"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_sweep_of_the_token_budget(vllm_environment: Environment, tmp_path: Path) -> None:
    """The larger the budget, the longer readers stand still at a time; a value that vLLM refuses is told."""
    port = free_port()
    template = (
        "python -m vllm.entrypoints.openai.api_server --model tiny --served-model-name tiny --host 127.0.0.1 "
        "--port {port} --max-model-len 16384 --max-num-seqs 64 --max-num-batched-tokens {budget} --enforce-eager"
    )
    environ = {**os.environ, **VARIABLES, "PATH": f"{vllm_environment.python.parent}:{os.environ['PATH']}"}
    report = experiment(
        tmp_path,
        *("--target", f"http://127.0.0.1:{port}", "--launch", template, "--sweep", "budget=32,128,256,512,1024,2048"),
        *("--repeats", "5", "--streams", "2", "--output-tokens", "240", "--prompt-tokens", "8000"),
        *("--pause", "0.5", "--seed", "5", "--slo.itl_seconds", "0.1"),
        environ=environ,
        seconds=3500.0,
        where=vllm_environment.home / "models",  # a model's name is then no path
    )
    points = report["curves"][0]["points"]
    readers = [point["measures"]["beside_itl_p99_seconds"]["mean"] for point in points]

    refused = next(one for one in report["points"] if one["value"] == "32")

    assert "max_num_seqs" in refused["problem"]
    assert [point["value"] for point in points] == ["128", "256", "512", "1024", "2048"]
    assert readers[-1] > 3 * readers[0]
    kept = [point["value"] for point in points if point["measures"]["beside_itl_p99_seconds"]["high"] <= 0.1]
    assert report["curves"][0]["meets_objective"] in (kept or [None])


# --- our figures beside those of vLLM's own benchmark

ROUNDS = 4
LONG_GAPS = "gaps above ten usual ones, in all"
LOADS = {"a short prompt": (32, 1_000), "a long prompt": (4_000, 300)}
"""Tokens of the prompt and of the answer. A long one is computed anew each time: its text is a new one."""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_figures_agree_with_vllm_bench_in_turns(
    vllm_environment: Environment, vllm_server: VllmServer, tmp_path: Path
) -> None:
    """Clients that ask for the same load in turns measure the same first token, and the same gaps between tokens."""
    table = []
    asyncio.run(one_stream(vllm_server, 200, prompt=prompt_text(32)))  # a server's first request is slower
    for place, (name, (prompt_tokens, tokens)) in enumerate(LOADS.items()):
        ours, theirs = [], []
        for turn in range(2 * ROUNDS):
            seed = 10 * place + turn + 1
            if turn % 4 in {0, 3}:  # ours, theirs, theirs, ours: what drifts meets both
                prompt = prompt_text(prompt_tokens, seed=seed)
                ours.append(ours_of(asyncio.run(one_stream(vllm_server, tokens, prompt=prompt))))
            else:
                asked = benchmark.Load(streams=1, prompt_tokens=prompt_tokens, tokens=tokens, seed=seed)
                theirs.append(theirs_of(benchmark.timed(vllm_server.url, vllm_environment, tmp_path, asked)))
        table += [(f"{name}, in turns", figure, *both) for figure, both in means_of(ours, theirs).items()]
    figures = shown(table)

    # What drifts from turn to turn is in these; clients that read at once are compared more sharply below.
    for name in LOADS:
        assert figures[f"{name}, in turns", "ITL mean"] == pytest.approx(1.0, abs=0.25)
        assert figures[f"{name}, in turns", "ITL p50"] == pytest.approx(1.0, abs=0.25)
    assert figures["a long prompt, in turns", "TTFT"] == pytest.approx(1.0, abs=0.25)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_itl_agrees_with_vllm_bench_at_once(
    vllm_environment: Environment, vllm_server: VllmServer, tmp_path: Path
) -> None:
    """Readers of both clients share the engine's steps: quantiles agree, and beside a prompt the same gaps are seen."""
    table = []
    for name, prompt_tokens in (("alone", None), ("beside a prompt", 4_000)):
        (tmp_path / name).mkdir()
        ours, theirs = together(vllm_environment, vllm_server, tmp_path / name, tokens=2_000, beside=prompt_tokens)
        table += [(f"{name}, at once", figure, *both) for figure, both in means_of([ours], [theirs]).items()]
    figures = shown(table)

    assert figures["alone, at once", "ITL p50"] == pytest.approx(1.0, abs=0.1)
    assert figures["beside a prompt, at once", "longest gap"] == pytest.approx(1.0, abs=0.05)
    assert figures["beside a prompt, at once", LONG_GAPS] == pytest.approx(1.0, abs=0.05)


def together(
    environment: Environment, server: VllmServer, folder: Path, *, tokens: int, beside: int | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Both clients at once, a stream each, on one server: the figures of ours and of theirs."""
    asked = benchmark.Load(streams=1, prompt_tokens=32, tokens=tokens)
    with benchmark.running(server.url, environment, folder, asked) as theirs:
        deadline = time.monotonic() + 120
        while not sample(server.metrics("vllm:num_requests_running"), "vllm:num_requests_running"):
            assert not theirs.ended(), "the benchmark ended early"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        plan = [] if beside is None else [long_prompt(prompt_tokens=beside, salt=folder.name, delay=1.0)]
        with load(server.url, plan):
            ours = asyncio.run(one_stream(server, tokens, prompt=prompt_text(32)))
        seen = theirs.timed()
    both = ours_of(ours), theirs_of(seen)
    for figures in both:
        del figures["TTFT"]  # one of them began on an idle server, the other beside it
    return both


async def one_stream(server: VllmServer, tokens: int, *, prompt: str) -> Run:
    """One stream of ours, timed and judged as a run of the experiment is."""
    target = Target(server.url)
    seen = Log()
    sleeper = asyncio.create_task(LagSource(clock=time.monotonic).run(seen.lags.append))
    async with target.session(keep_alive=False) as session:
        client = Client(target=target, session=session, clock=time.monotonic, timeout_seconds=120.0)
        request = StreamRequest(stream=1, engine="0", request_id="ours", model="tiny", prompt=prompt, tokens=tokens)
        played: Played = await play(client, [request], None, settle_tokens=1)
    sleeper.cancel()
    taken = Taken(planned=Planned(1, 1, Arm.ALONE), played=played, log=seen, counted=Counted(), ended=played.ended)
    made = measured(taken, Threshold(usual=0.005, stall_floor=0.5, stall_factor=8.0), allow_busy=True)
    assert played.readers[0].problem == ""
    print(f"our own lateness explains {made.measures['observer_excluded_gaps']:.0f} gaps, which are left out")
    return made


def ours_of(run: Run) -> dict[str, float]:
    """The figures of a run of ours, in seconds."""
    (reader,) = run.taken.played.readers
    gaps = [after - before for (before, _), (after, _) in pairwise(reader.arrivals)]
    return {
        "TTFT": run.measures["stream_ttft_seconds"],
        "ITL mean": sum(gaps) / (reader.tokens - reader.arrivals[0][1]),
        **{f"ITL p{q}": run.measures[f"itl_p{q}_seconds"] for q in QUANTILES},
        **long_gaps(gaps),
    }


def theirs_of(seen: benchmark.Timed) -> dict[str, float]:
    """The figures of the benchmark's only stream as it computes them: over chunks, linear between ranks."""
    (first,), (gaps,) = seen.first_tokens, seen.gaps
    cuts = quantiles(gaps, n=100, method="inclusive")
    return {
        "TTFT": first,
        "ITL mean": fmean(gaps),
        **{f"ITL p{q}": cuts[q - 1] for q in QUANTILES},
        **long_gaps(gaps),
    }


def long_gaps(gaps: Sequence[float]) -> dict[str, float]:
    """The longest gap, and what those longer than ten usual ones come to."""
    least = 10 * median(gaps)
    return {"longest gap": max(gaps), LONG_GAPS: sum(gap for gap in gaps if gap > least)}


def means_of(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """The mean of each figure, ours and theirs; a figure that is nothing with either is left out."""
    found = {name: tuple(fmean(one[name] for one in each) for each in (ours, theirs)) for name in ours[0]}
    return {name: (one, other) for name, (one, other) in found.items() if one and other}


def shown(table: Sequence[tuple[str, str, float, float]]) -> dict[tuple[str, str], float]:
    """Prints the table; the ratio of ours to theirs of each of its rows."""
    print("| load | | stallwatch | vllm bench serve | difference |\n|---|---|---:|---:|---:|")
    for name, figure, ours, theirs in table:
        both = f"{1000 * ours:.2f} ms | {1000 * theirs:.2f} ms"
        print(f"| {name} | {figure} | {both} | {100 * (ours / theirs - 1):+.1f} % |")
    return {(name, figure): ours / theirs for name, figure, ours, theirs in table}
