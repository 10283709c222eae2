"""The benchmark's own arithmetic, and what it says where it cannot measure."""

import subprocess
import sys

import pytest

from stallwatch.observations import StreamTokens
from tests.bench.__main__ import BEGIN, END, README
from tests.bench.figures import Figure, rank, ratio, table
from tests.bench.gaps import _errors


def test_a_ratio_has_its_interval() -> None:
    """The mean is geometric, and the interval Student's on the logarithms."""
    found = ratio([1.0, 1.1, 1.2, 1.0, 1.1])

    assert found.mean == pytest.approx(1.0774, abs=1e-4)
    assert found.low == pytest.approx(0.9795, abs=1e-4)
    assert found.high == pytest.approx(1.1852, abs=1e-4)


def test_quantiles_are_by_nearest_rank() -> None:
    """No value is made up between two."""
    assert rank([3.0, 1.0, 2.0], 0.5) == 2.0
    assert rank(range(1, 101), 0.99) == 99


def test_a_gap_is_compared_with_what_was_sent() -> None:
    """A late stamp makes one gap too long and the next too short; chunks that came together count as their last."""
    sent = [10.0, 10.1, 10.2, 10.3, 10.4]
    reads = [
        StreamTokens(10.001, 1, 1),
        StreamTokens(10.111, 1, 1),
        StreamTokens(10.301, 1, 2),
        StreamTokens(10.401, 1, 1),
    ]
    errors = [error for _, error in _errors(reads, sent)]

    assert errors == pytest.approx([0.01, 0.01, 0.0])


def test_the_table_is_markdown() -> None:
    """A row a figure."""
    assert table([Figure("a", "1 s", "2 s")]).splitlines()[-1] == "| a | 1 s | 2 s |"


def test_what_is_left_out_is_said_with_its_remedy() -> None:
    """Without the real vLLM the command names what it did not measure and how to get it, and writes no table."""
    before = README.read_text()
    command = [sys.executable, "-m", "tests.bench", "--only", "vllm", "--without-vllm", "--update"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 1
    assert "left out: CPU time, memory and observer effect beside a real vLLM; python3 tests/vllm" in done.stdout
    assert "is left as it is" in done.stderr
    assert README.read_text() == before
    assert before.index(BEGIN) < before.index(END)
