"""`vllm bench serve`, the benchmark client that comes with vLLM, from the same installation as the server.

It runs in a process of its own and takes some ten seconds to begin. Times in seconds.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.vllm.environment import Environment
from tests.vllm.server import VARIABLES

SECONDS = 180.0

_MAIN = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
"""Its own entry point: the console script of a build for CPUs asks for a distribution of another name."""


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that it asks for, one after the other; prompts of random text, different with each `seed`."""

    streams: int
    prompt_tokens: int
    tokens: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """What it measured, a stream each: time to first token, and the times between chunks."""

    first_tokens: Sequence[float]
    gaps: Sequence[Sequence[float]]


@contextmanager
def running(url: str, environment: Environment, folder: Path, load: Load) -> Iterator["Benchmark"]:
    """Runs the benchmark while the block runs; kills what is left of it at the end."""
    result = folder / "bench.json"
    result.unlink(missing_ok=True)
    command = [
        *(str(environment.python), "-c", _MAIN, "--backend", "openai", "--base-url", url),
        *("--model", str(environment.model("tiny")), "--served-model-name", "tiny"),
        *("--dataset-name", "random", "--seed", str(load.seed)),
        *("--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.tokens)),
        *("--num-prompts", str(load.streams), "--max-concurrency", "1", "--ignore-eos", "--temperature", "0"),
        *("--num-warmups", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", result.name),
    ]
    with (folder / "bench.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_variables(), process_group=0
        )
    try:
        yield Benchmark(process, result)
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One run of it."""

    _process: "subprocess.Popen[bytes]"
    _result: Path

    def ended(self) -> bool:
        """Whether it came to its end, good or bad."""
        return self._process.poll() is not None

    def timed(self) -> Timed:
        """Waits for its end; AssertionError when it failed, `subprocess.TimeoutExpired` when it takes too long."""
        status = self._process.wait(SECONDS)
        assert status == 0, self._result.with_suffix(".log").read_text(errors="replace")[-2_000:]
        told = json.loads(self._result.read_text())
        return Timed(told["ttfts"], told["itls"])


def timed(url: str, environment: Environment, folder: Path, load: Load) -> Timed:
    """Runs the benchmark to its end."""
    with running(url, environment, folder, load) as made:
        return made.timed()


def _variables() -> dict[str, str]:
    """Ours without those of our own interpreter."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, **VARIABLES}
