"""How wrong a client's gaps are, against a loopback server that stamped every chunk when it sent it.

The canary is that of the whole sidecar as it is run, its recording says what it saw. The other client is
`vllm bench serve`, which comes with vLLM. Both are asked in the same run, idle and beside a process that keeps a core
busy.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from stallwatch.observations import ObserverSample, StreamOpened, StreamTokens
from stallwatch.recorder.reading import Recording
from tests.bench.figures import Figure, tail
from tests.e2e.processes import free_port, get, process, stallwatch, until
from tests.vllm import benchmark
from tests.vllm.environment import Environment

WATCHED_SECONDS = 15.0
SCRAPED_SECONDS = 10.0
SCRAPE_EVERY = 0.2
BENCH_STREAMS, BENCH_TOKENS = 3, 500
AIM = "p50 0.1 ms, p99 0.5 ms"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the sidecar did in one run; times in seconds."""

    errors: list[float]  # of gaps while nobody scraped us
    errors_scraped: list[float]
    lags: list[float]  # worst lateness of each quarter of a second, while nobody scraped us
    lags_scraped: list[float]
    renders: list[float]  # from asking for our page to its last byte


def gap_figures(environment: Environment | None, folder: Path) -> list[Figure]:
    """Both clients, idle and busy; without vLLM's environment only ours."""
    figures = []
    for name, busy in (("idle", False), ("one core kept busy", True)):
        with _server(folder) as url, _spinning(on=busy):
            seen = watch(url, folder)
            figures.append(Figure(f"canary gap error, {name}", tail(seen.errors), "" if busy else AIM))
            if environment is not None:
                figures.append(
                    Figure(f"gap error of `vllm bench serve`, {name}", tail(bench(url, environment, folder)))
                )
            if not busy:
                figures += [
                    Figure("`/metrics` of ours, asked five times a second", tail(seen.renders)),
                    Figure("own lateness, a quarter of a second's worst", tail(seen.lags)),
                    Figure("the same while our page is asked for", tail(seen.lags_scraped), "p99 below 2 ms"),
                    Figure("canary gap error while our page is asked for", tail(seen.errors_scraped)),
                ]
    return figures


def watch(url: str, folder: Path) -> Seen:
    """Runs the sidecar beside the server and compares what it recorded with what was sent."""
    port, recording = free_port(), folder / f"recording-{time.monotonic_ns()}.jsonl"
    arguments = stallwatch(
        *("run", "--engine.url", url, "--web.port", str(port), "--canary.mode", "persistent"),
        *("--recorder.file", str(recording)),
    )
    page = f"http://127.0.0.1:{port}/metrics"
    with process(arguments, folder / "stallwatch.log") as sidecar:
        until(lambda: "stallwatch_open_gap_seconds" in get(page), 60, "a canary stream is open")
        time.sleep(2.0)
        start = time.monotonic()
        time.sleep(WATCHED_SECONDS)
        middle = time.monotonic()
        renders = []
        while time.monotonic() < middle + SCRAPED_SECONDS:
            asked = time.perf_counter()
            get(page)
            renders.append(time.perf_counter() - asked)
            time.sleep(SCRAPE_EVERY)
        end = time.monotonic()
        sent = _sent(url)
        status, _ = sidecar.stop()
        assert status == 0, sidecar.output()
    opened: dict[int, str] = {}
    reads: dict[int, list[StreamTokens]] = {}
    lags = []
    for entry in Recording(recording):
        if isinstance(entry, StreamOpened):
            opened[entry.stream] = entry.request_id
        elif isinstance(entry, StreamTokens):
            reads.setdefault(entry.stream, []).append(entry)
        elif isinstance(entry, ObserverSample):
            lags.append((entry.at, entry.lag))
    errors = [one for stream, seen in reads.items() for one in _errors(seen, sent[opened[stream]])]
    return Seen(
        errors=[error for at, error in errors if start <= at < middle],
        errors_scraped=[error for at, error in errors if middle <= at < end],
        lags=[lag for at, lag in lags if start <= at < middle],
        lags_scraped=[lag for at, lag in lags if middle <= at < end],
        renders=renders,
    )


def _errors(seen: Sequence[StreamTokens], sent: Sequence[float]) -> Iterator[tuple[float, float]]:
    """When each gap ended and how wrong it was; a read that brought several chunks is compared with the last."""
    last, true = None, None
    tokens = 0
    for read in seen:
        tokens += read.tokens
        if tokens > len(sent):
            return
        if last is not None and true is not None:
            yield read.at, abs((read.at - last) - (sent[tokens - 1] - true))
        last, true = read.at, sent[tokens - 1]


def bench(url: str, environment: Environment, folder: Path) -> list[float]:
    """Runs `vllm bench serve` and compares its inter-token latencies with what was sent; the errors in seconds."""
    asked = benchmark.Load(streams=BENCH_STREAMS, prompt_tokens=16, tokens=BENCH_TOKENS)
    seen = benchmark.timed(url, environment, folder, asked).gaps
    sent = list(_sent_in_order(url))[-BENCH_STREAMS:]
    errors = []
    for gaps, stamps in zip(seen, sent, strict=True):
        true = [after - before for before, after in pairwise(stamps)]
        assert len(gaps) == len(true), f"{len(gaps)} gaps of {len(true)}"
        errors += [abs(gap - really) for gap, really in zip(gaps, true, strict=True)]
    return errors


def _sent(url: str) -> dict[str, list[float]]:
    return {stream["request_id"]: stream["sent"] for stream in json.loads(get(f"{url}/sent"))}


def _sent_in_order(url: str) -> Iterator[list[float]]:
    for stream in json.loads(get(f"{url}/sent")):
        yield stream["sent"]


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    port = free_port()
    with process([sys.executable, "-m", "tests.bench.stamping", str(port)], folder / "stamping.log"):
        url = f"http://127.0.0.1:{port}"
        until(lambda: get(f"{url}/version"), 20, "the stamping server listens")
        yield url


@contextmanager
def _spinning(*, on: bool) -> Iterator[None]:
    """Keeps one core busy by a process, not a thread: ours must not share an interpreter with it."""
    if not on:
        yield
        return
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"], process_group=0)
    try:
        yield
    finally:
        spinner.kill()
        spinner.wait()
