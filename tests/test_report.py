import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stallwatch import cli
from stallwatch.commands.reporting import compared
from stallwatch.observations import ObserverSample, ServerFacts
from stallwatch.recorder import codec
from stallwatch.recorder.header import header_for
from stallwatch.settings import Settings
from tests.harness import Watched, watch


def call(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    status = cli.main(("report", *arguments), environ={}, stdout=out, stderr=err)
    return status, out.getvalue(), err.getvalue()


def carried(page: str) -> dict[str, Any]:
    """The data inside a page."""
    found: dict[str, Any] = json.loads(
        page.split('<script type="application/json" id="data">')[1].split("</script>", maxsplit=1)[0]
    )
    return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, Path, Path]:
    """A freeze beside the whole sidecar, its recording and its bundle."""
    folder = tmp_path_factory.mktemp("case")
    watched = watch(
        "long-prefill",
        canary={"mode": "persistent"},
        recorder={"file": folder / "case.jsonl.gz", "directory": folder / "incidents"},
    )
    (bundle,) = (folder / "incidents").iterdir()
    return watched, folder / "case.jsonl.gz", bundle


def test_a_bundle_becomes_a_page_and_a_summary(case: tuple[Watched, Path, Path], tmp_path: Path) -> None:
    """Both tell the stall as it was judged at the time, with its evidence, beside what was usual."""
    watched, _, bundle = case
    status, out, err = call(str(bundle), "--output", str(tmp_path / "new"))
    page, summary = (Path(line) for line in out.splitlines())
    found, text = carried(page.read_text()), summary.read_text()
    stall = watched.engine().stalls.closed[0]

    assert (status, err) == (0, "")
    assert (page.name, summary.name) == (
        bundle.name.replace(".jsonl.gz", ".html"),
        bundle.name.replace(".jsonl.gz", ".md"),
    )
    (told,) = found["stalls"]
    assert told["cause"] == "prefill"
    assert told["stall_seconds"] == pytest.approx(stall.seconds, abs=0.002)
    assert told["largest_prompt_tokens"] == 60_000
    assert found["differs"] == []
    assert found["server"]["model"] == "tiny"
    assert "Readers stood still for 31.4 s" in text
    assert "a prompt of 60,000 tokens" in text
    assert "| cause | prefill |" in text
    assert re.search(r"\*\*prefill\*\* explains 2\d\.\d s", text)
    assert len(page.read_bytes()) < 400_000


def test_quiet_stands_beside_stalled(case: tuple[Watched, Path, Path], tmp_path: Path) -> None:
    """The page has the whole timeline, and the usual gap and step beside those of the freeze."""
    status, out, _ = call(str(case[2]), "--output", str(tmp_path))
    found = carried(Path(out.splitlines()[0]).read_text())
    rows = {row["figure"]: row for row in found["compared"]["0"]}

    assert status == 0
    assert found["timeline"]["slots"] > 4 * 60
    assert found["timeline"]["engines"]["0"].keys() >= {"gap_seconds", "step_seconds", "prefill_tokens", "kv_usage"}
    for figure in ("longest gap of a quarter second", "engine step"):
        assert rows[figure]["quiet"]["typical"] < 0.05, figure
        assert rows[figure]["stalled"]["typical"] > 0.5, figure
    assert rows["prefill tokens in a step"]["quiet"]["typical"] == 0
    assert rows["prefill tokens in a step"]["stalled"]["typical"] == pytest.approx(2044, rel=0.01)
    assert rows["computed prompt tokens booked"]["stalled"]["typical"] == pytest.approx(60_000, rel=0.01)


def test_a_recording_is_reported_too_and_other_objectives_judge_anew(
    case: tuple[Watched, Path, Path], tmp_path: Path
) -> None:
    """A flag asks what would have been: with a floor above every gap there was no stall."""
    status, out, err = call(str(case[1]), "--output", str(tmp_path), "--stall.floor_seconds", "5")
    found, text = carried(Path(out.splitlines()[0]).read_text()), Path(out.splitlines()[1]).read_text()

    assert (status, err) == (0, "")
    assert not [stall for stall in found["stalls"] if stall["kind"] == "decode"]
    assert found["changed"] == {"stall.floor_seconds": [0.5, 5.0]}
    assert "Judged with stall.floor\\_seconds = 5.0 instead of 0.5." in text
    assert text.startswith("# Recording of ")


def test_what_is_not_known_is_a_dash(tmp_path: Path) -> None:
    """A recording of nothing but our own heartbeats gives a report that says so."""
    lines = [header_for(Settings(), unix_offset=1.7e9).line()]
    lines += [codec.encode(ObserverSample(second / 4, 0.0)) for second in range(40)]
    (tmp_path / "case.jsonl").write_text("\n".join(lines) + "\n")
    status, out, err = call(str(tmp_path / "case.jsonl"), "--output", str(tmp_path))
    text = Path(out.splitlines()[1]).read_text()

    assert (status, err) == (0, "")
    assert "a vLLM of unknown version" in text
    assert "No stalls." in text


def test_text_of_the_server_is_no_markup(tmp_path: Path) -> None:
    """A model's name that looks like HTML or Markdown stays a name in both files."""
    name = "</script><script>alert(1)</script>|[x](javascript:alert)`<img src=x onerror=alert(1)>"
    lines = [
        header_for(Settings(), unix_offset=1.7e9, server=ServerFacts(at=0.0, version=name, model_name=name)).line(),
        codec.encode(ServerFacts(at=0.0, version=name, model_name=name)),
        *(codec.encode(ObserverSample(second / 4, 0.0)) for second in range(8)),
    ]
    (tmp_path / "case.jsonl.gz").write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    status, out, _ = call(str(tmp_path / "case.jsonl.gz"), "--output", str(tmp_path))
    page, text = (Path(line).read_text() for line in out.splitlines())

    assert status == 0
    assert carried(page)["server"]["model"] == name
    assert "alert(1)</script>" not in page
    assert "<img" not in page
    assert not re.search(r"(?<!\\)[<\[`]", text)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ((), 2, "the file comes first"),
        (("nowhere.jsonl.gz",), 1, "no such file"),
        (("nowhere.jsonl.gz", "--stall.flor_seconds", "1"), 1, "no such file"),
        (("--output", "x"), 2, "the file comes first"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], status: int, says: str) -> None:
    """Nothing is written, and one line says why."""
    found = call(*arguments)

    assert found[0] == status
    assert found[1] == ""
    assert says in found[2]
    assert found[2].count("\n") == 1


def test_a_folder_that_cannot_be_written_is_said(case: tuple[Watched, Path, Path], tmp_path: Path) -> None:
    """A file where the folder should be costs one line and status 1."""
    (tmp_path / "taken").write_text("")
    status, out, err = call(str(case[2]), "--output", str(tmp_path / "taken"))

    assert (status, out) == (1, "")
    assert err.count("\n") == 1


def test_slots_of_a_stall_that_is_still_open_are_stalled() -> None:
    """A stall without an end reaches to the end of the timeline; another engine's stall is none of ours."""
    timeline = {
        "start_unix": 100.0, "slot_seconds": 0.25, "slots": 8, "gpus": {}, "sidecar": {},
        "engines": {"0": {"gap_seconds": [0.1, 0.1, 0.1, 0.1, 2.0, None, 2.0, 4.0]}},
        "stalls": [
            {"engine": "0", "start_unix": 101.0, "end_unix": None},
            {"engine": "1", "start_unix": 100.0, "end_unix": 102.0},
        ],
    }  # fmt: skip
    (row,) = compared(timeline, "0")

    assert row["quiet"] == {"typical": 0.1, "most": 0.1}
    assert row["stalled"] == {"typical": 2.0, "most": 4.0}
