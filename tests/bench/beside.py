"""What stallwatch costs beside a real vLLM: CPU and memory of its process, and what a reader notices.

A reader is asked for the same number of tokens again and again, with and without stallwatch beside, in pairs whose
order alternates. The quotient of two neighbours takes out what changes slowly on the machine.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.bench.figures import Figure, milliseconds, rank, ratio
from tests.vllm import load
from tests.vllm.environment import Environment
from tests.vllm.server import VllmServer
from tests.vllm.sidecar import Sidecar, beside

PAIRS = 5
READER_SECONDS = 16.0  # longer than canary.interval_seconds: every reader meets a pulse
CALIBRATION_TOKENS, MOST_TOKENS = 300, 6000
SETTLE_SECONDS = 2.0
COST_WINDOWS, COST_SECONDS = 3, 15.0  # each holds one pulse

_TICKS = os.sysconf("SC_CLK_TCK")


def cost_figures(environment: Environment, folder: Path) -> list[Figure]:
    """Starts a server of its own; needs the real vLLM's environment."""
    with VllmServer(environment, folder, model="small") as server:
        return [*_own_cost(server, folder), *_observer_effect(server, folder)]


def _own_cost(server: VllmServer, folder: Path) -> list[Figure]:
    reader = load.decode_stream(tokens=16_000, seed=1)
    with load.load(server.url, [reader]) as reading, beside(server, folder) as sidecar:
        reading.wait_for_tokens("victim", 50)
        time.sleep(5.0)  # starting up is no part of it
        shares = []
        for _ in range(COST_WINDOWS):
            begun, before = time.monotonic(), _cpu_seconds(sidecar)
            time.sleep(COST_SECONDS)
            shares.append((_cpu_seconds(sidecar) - before) / (time.monotonic() - begun))
        memory = _resident_mib(sidecar)
        reads = reading.streams()["victim"].reads
        assert reads[-1].at > time.monotonic() - 30, "the reader ended before the measurement did"
    low, high = min(shares), max(shares)
    return [
        Figure(
            "CPU time of stallwatch a minute, defaults, beside one reader",
            f"{median(shares) * 60:.2f} s ({low * 60:.2f} to {high * 60:.2f}), {median(shares):.1%} of a core",
            "0.9 s, 1.5 %",
        ),
        Figure("resident memory", f"{memory:.0f} MiB", "64 MiB"),
    ]


def _observer_effect(server: VllmServer, folder: Path) -> list[Figure]:
    pace = _reader(server, CALIBRATION_TOKENS, 2)
    tokens = min(MOST_TOKENS, int(READER_SECONDS / (sum(pace) / len(pace))))
    medians: list[float] = []
    tails: list[float] = []
    alone_medians: list[float] = []
    alone_tails: list[float] = []
    for pair in range(PAIRS):
        seen = {}
        for watched in (False, True) if pair % 2 else (True, False):
            with _perhaps_beside(server, folder, watched=watched):
                time.sleep(SETTLE_SECONDS)
                seen[watched] = _reader(server, tokens, 10 + pair)
        medians.append(rank(seen[True], 0.5) / rank(seen[False], 0.5))
        tails.append(rank(seen[True], 0.99) / rank(seen[False], 0.99))
        alone_medians.append(rank(seen[False], 0.5))
        alone_tails.append(rank(seen[False], 0.99))
    of = f"{PAIRS} pairs of {tokens:,} tokens"
    return [
        Figure(
            f"ITL p50 of a reader, with stallwatch to without, 95 % interval over {of}",
            f"{ratio(medians)}; without {milliseconds(median(alone_medians))}",
            "1.02",
        ),
        Figure("ITL p99, the same", f"{ratio(tails)}; without {milliseconds(median(alone_tails))}", "1.05"),
    ]


def _reader(server: VllmServer, tokens: int, seed: int) -> list[float]:
    """The gaps of a reader of so many tokens, in seconds."""
    stream = load.run(server.url, load.decode_stream(tokens=tokens, seed=seed))["victim"]
    assert stream.outcome == "complete", stream.error
    return [after.at - before.at for before, after in pairwise(stream.reads)]


@contextmanager
def _perhaps_beside(server: VllmServer, folder: Path, *, watched: bool) -> Iterator[None]:
    if not watched:
        yield
        return
    with beside(server, folder):
        yield


def _cpu_seconds(sidecar: Sidecar) -> float:
    fields = Path(f"/proc/{sidecar.process.popen.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident_mib(sidecar: Sidecar) -> float:
    status = Path(f"/proc/{sidecar.process.popen.pid}/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return int(kib) / 1024
