"""The goldens captured from the real vLLM: there, told where from, and free of this machine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import truth
from tests.vllm.load import streams
from tests.vllm.server import sample

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PAGES = sorted((GOLDEN / "vllm").glob("*.prom"))
STREAMS = sorted((GOLDEN / "sse").glob("*.txt"))


def families() -> dict[str, dict[str, Any]]:
    """The families of every release."""
    versions: dict[str, dict[str, Any]] = json.loads((GOLDEN / "vllm" / "families.json").read_text())["versions"]
    return versions


def types(page: str) -> set[str]:
    """The family names that a page declares."""
    return set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))


def test_the_folders_are_not_empty() -> None:
    """A gate that silently checks nothing is no gate."""
    assert len(PAGES) >= 4
    assert len(STREAMS) >= 18


@pytest.mark.parametrize("path", [*PAGES, *STREAMS], ids=lambda path: path.name)
def test_every_golden_says_how_it_was_captured(path: Path) -> None:
    """The first line is a comment of the format, with day, command and version."""
    first = path.read_bytes().split(b"\n", 1)[0].decode()
    mark = "#" if path.suffix == ".prom" else ":"

    assert re.match(mark + r" Captured on \d{4}-\d\d-\d\d by `python3 -m tests.vllm.capture` from vLLM 0\.32\.0", first)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("vllm/*")) + sorted(GOLDEN.glob("sse/*")), ids=lambda p: p.name)
def test_no_golden_names_the_machine(path: Path) -> None:
    """Paths and addresses of the machine that captured stay out."""
    assert re.search(r"/(root|home|work|tmp|Users)/|127\.0\.0\.1|localhost|nodename", path.read_text()) is None


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.name)
def test_every_stream_is_whole(path: Path) -> None:
    """Each captured stream ends as vLLM ends a stream."""
    assert path.read_bytes().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("name", ["0.32.0.prom", "0.32.0-idle.prom", "0.32.0-mfu.prom"])
def test_the_captured_pages_have_the_families_of_their_release(name: str) -> None:
    """What the list of families says about 0.32 is what a real 0.32 shows."""
    declared = types((GOLDEN / "vllm" / name).read_text())
    listed = families()["0.32"]

    assert set(listed["present"]) <= declared
    assert not set(listed["absent"]) & declared


def test_no_family_is_both_present_and_absent() -> None:
    """A release's two lists share no name."""
    assert [release for release, lists in families().items() if set(lists["present"]) & set(lists["absent"])] == []


def test_the_mfu_page_counts_scheduled_tokens() -> None:
    """With --enable-mfu-metrics the bytes written are 26,624 a scheduled token and 640 a row of logits, exactly."""
    page = (GOLDEN / "vllm" / "0.32.0-mfu.prom").read_text()
    computed = sample(page, "vllm:prompt_tokens_by_source_total", source="local_compute")
    generated = sample(page, "vllm:generation_tokens_total")
    firsts = sample(page, "vllm:time_to_first_token_seconds_count")
    written = sample(page, "vllm:estimated_write_bytes_per_gpu_total")
    assert computed is not None
    assert generated is not None
    assert firsts is not None
    assert written is not None
    # The reader who left had a step or two under way, whose tokens were scheduled and never generated.
    rows = [(written - 26_624 * (computed + generated - firsts + lost)) / 640 for lost in range(4)]

    assert any(row.is_integer() and generated <= row <= generated + 100 for row in rows)


def test_the_captured_run_shows_the_phenomenon() -> None:
    """In the stored run the reader's worst gap beside the long prompt is over 20 times the median before it."""
    lines = (GOLDEN / "vllm" / "interference.jsonl").read_text().splitlines()
    seen = streams(json.loads(line) for line in lines[1:])
    victim, other = seen["victim"], seen["long"]
    before = truth.icl_quantile(truth.gaps(victim, window=(0.0, other.sent)), 0.5)
    worst = truth.icl_quantile(truth.gaps(victim), 1.0)
    assert before is not None
    assert worst is not None

    assert worst > 20 * before
