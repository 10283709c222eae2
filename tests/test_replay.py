import gzip
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stallwatch import cli
from stallwatch.analysis.findings import Findings
from stallwatch.app import monitor_for
from stallwatch.commands.rejudging import Begun, Ended, Happened, Lost, Stands, judged, settings_for
from stallwatch.observations import ObserverSample, ServerFacts
from stallwatch.recorder import codec
from stallwatch.recorder.header import Header, Value, header_for
from stallwatch.recorder.reading import Note, Recording
from stallwatch.settings import Settings
from tests.harness import Watched, watch

HEADER = header_for(Settings(), unix_offset=1.7e9)
ODD = 0.99731  # seconds: no observation falls on the moment at which findings are asked for


def call(*arguments: str, environ: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    status = cli.main(arguments, environ=environ or {}, stdout=out, stderr=err)
    return status, out.getvalue(), err.getvalue()


def recording(path: Path, *lines: str, header: Header = HEADER) -> Path:
    path.write_text("\n".join([header.line(), *lines]) + "\n")
    return path


pytestmark = pytest.mark.xdist_group("replay")  # what its tests share is made once


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, Path, Path]:
    """A freeze beside the whole sidecar, its recording and its bundle."""
    folder = tmp_path_factory.mktemp("case")
    watched = watch(
        "long-prefill",
        sample_every=ODD,
        canary={"mode": "persistent"},
        slo={"itl_seconds": 0.3},
        recorder={"file": folder / "case.jsonl.gz", "directory": folder / "incidents"},
    )
    (bundle,) = (folder / "incidents").iterdir()
    return watched, folder / "case.jsonl.gz", bundle


@pytest.mark.parametrize(
    ("scenario", "rooms"),
    [
        ("long-prefill", {}),
        ("long-prefill", {"canary": {"mode": "persistent"}}),
        ("kv-preemption", {"canary": {"mode": "persistent"}}),
        ("dp-rank-frozen", {"slo": {"itl_seconds": 0.05}, "stall": {"floor_seconds": 0.3}}),
        ("engine-restart", {"canary": {"mode": "persistent"}, "stall": {"hang_seconds": 5.0}}),
    ],
)
def test_a_recording_gives_the_findings_of_the_live_run(tmp_path: Path, scenario: str, rooms: dict[str, Any]) -> None:
    """At every moment the recording says what the sidecar said then, to the last bit."""
    path = tmp_path / "case.jsonl.gz"
    watched = watch(scenario, seconds=60.0713, sample_every=ODD, recorder={"file": path}, **rooms)
    lived = watched.findings[:-1]  # the sidecar was stopped in the moment of the last
    replayed = findings_at(path, [findings.at for findings in lived])

    assert len(lived) >= 60
    for live, again in zip(lived, replayed, strict=True):
        assert again == live, live.at
        assert printed(again) == printed(live), live.at


def printed(findings: Findings) -> str:
    """The findings as Python prints them, a read-only view of a mapping like the mapping itself."""
    return re.sub(r"mappingproxy\((\{.*?\})\)", r"\1", repr(findings))


def findings_at(path: Path, moments: list[float]) -> list[Findings]:
    """Findings of a recording at given moments, judged as the command judges."""
    entries = iter(Recording(path))
    header = next(entries)
    assert isinstance(header, Header)
    monitor = monitor_for(settings_for(header, []))
    found, waiting = [], list(moments)
    for entry in entries:
        if isinstance(entry, Header | Note):
            continue
        while waiting and entry.at > waiting[0]:
            found.append(monitor.findings(waiting.pop(0)))
        monitor.observe(entry)
        monitor.news()
    return found + [monitor.findings(moment) for moment in waiting]


def test_looking_more_often_changes_nothing(case: tuple[Watched, Path, Path]) -> None:
    """How often findings are asked for has no influence on them."""
    _, path, _ = case
    often, seldom = (list(judged(Recording(path), [], every=every)) for every in (0.25, 1e6))

    assert repr(often[-1]) == repr(seldom[-1])
    assert [one for one in often if isinstance(one, Happened)] == [one for one in seldom if isinstance(one, Happened)]


def test_a_bundle_is_judged_like_the_live_run(case: tuple[Watched, Path, Path]) -> None:
    """The bundle of a freeze holds the verdict that was given, and gives it again."""
    watched, _, path = case
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    noted = next(line for line in lines if line["type"] == "stall")
    ended = list(judged(Recording(path), [], every=10.0))[-1]
    assert isinstance(ended, Ended)
    (stall,) = ended.stalls
    (live,) = watched.engine().stalls.closed

    assert (live.kind, live.cause) == (stall.kind, stall.cause) == (noted["kind"], noted["cause"])
    assert stall.seconds == pytest.approx(live.seconds, rel=0.01)
    assert ended.findings.version == "0.32.0"
    assert noted["evidence"][0]["sentence"] == live.evidence[0].sentence


def test_what_if(case: tuple[Watched, Path, Path]) -> None:
    """Objectives are those recorded unless others are given; the environment has no say."""
    _, path, _ = case
    recorded = call("replay", str(path), environ={"STALLWATCH_SLO__ITL_SECONDS": "9"})
    status, laxer, _ = call("replay", str(path), "--slo.itl_seconds", "2", "--stall.floor_seconds=1.2")

    assert "judged with" not in recorded[1]
    assert status == 0
    assert "judged with slo.itl_seconds = 2 instead of 0.3\n" in laxer
    assert "judged with stall.floor_seconds = 1.2 instead of 0.5\n" in laxer
    assert missed(recorded[1]) > 20
    assert missed(laxer) == 0


def missed(text: str) -> float:
    (line,) = (line for line in text.splitlines() if line.startswith("engine 0: missed"))
    return float(line.split()[3])


def test_text_tells_the_story(case: tuple[Watched, Path, Path]) -> None:
    """A person reads what was watched, how it stood every so often, each stall with its cause, and the sum."""
    _, path, bundle = case
    status, text, err = call("replay", str(bundle), "--every", "20")
    print(text)

    assert (status, err) == (0, "")
    assert text.startswith("an incident by stallwatch ")
    assert "beside vLLM 0.32.0 with tiny\n" in text
    assert "on 1 x NVIDIA H100" in text
    for words in (
        "stall 0-1 opens: engine",
        "stall 0-1: prefill, it seems",
        "stall 0-1 is over: decode, cause prefill",
    ):
        assert sum(words in line for line in text.splitlines()) == 1, words
    assert sum("serving | longest wait" in line for line in text.splitlines()) == 3
    assert call("replay", str(path))[1].startswith("a recording by stallwatch ")


def test_json_is_one_object_a_line(case: tuple[Watched, Path, Path]) -> None:
    """A program gets the session, findings, stalls and the end, each a strict JSON object."""
    _, path, _ = case
    status, text, _ = call("replay", str(path), "--json", "--every", "30")
    rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    kinds = [row["type"] for row in rows]

    assert status == 0
    assert (kinds[0], kinds[-1]) == ("session", "end")
    assert kinds.count("findings") == 2
    assert [row["change"] for row in rows if row["type"] == "stall"] == ["opened", "cause", "closed"]
    assert rows[-1]["stalls"][0]["cause"] == "prefill"
    assert rows[-1]["findings"]["engines"][0]["missed_seconds"] > 20
    assert text == call("replay", str(path), "--json", "--every", "30")[1]


def test_two_sessions_are_judged_apart(tmp_path: Path) -> None:
    """A file that a restart appended to has two sessions, each with its own clock and its own findings."""
    late = [codec.encode(ServerFacts(at=1e6, version="0.31.0")), codec.encode(ObserverSample(1e6 + 1, 0.0))]
    early = [codec.encode_note("lost", {"observations": 7}), codec.encode(ObserverSample(5.0, 0.0))]
    path = recording(tmp_path / "case", *late, HEADER.line(), *early)
    told = list(judged(Recording(path), [], every=1e9))

    assert [type(one) for one in told] == [Begun, Ended, Begun, Lost, Ended]
    first, second = (one for one in told if isinstance(one, Ended))
    assert (first.findings.version, second.findings.version) == ("0.31.0", None)


def test_a_hole_of_hours_is_not_printed(tmp_path: Path) -> None:
    """A laptop that slept, or a hostile file, does not make a line for every ten seconds until doomsday."""
    path = recording(tmp_path / "case", *(codec.encode(ObserverSample(at, 0.0)) for at in (0.0, 11.0, 1e300)))
    told = list(judged(Recording(path), [], every=10.0))

    assert sum(isinstance(one, Stands) for one in told) == 1
    status, text, _ = call("replay", str(path))
    assert status == 0
    assert text


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("none.jsonl",), 1, "stallwatch: none.jsonl: no such file or directory\n"),
        ((), 2, "the file comes first: stallwatch replay FILE"),
        (("--json", "FILE"), 2, "the file comes first"),
        (("FILE", "--every", "0"), 2, "--every: 0 is not a number of seconds above 0"),
        (("FILE", "--slo.itl_secs", "1"), 2, "--slo.itl_secs: not a setting; did you mean --slo.itl_seconds?"),
        (("FILE", "--slo.target", "99"), 2, "--slo.target = 99: too large"),
        (
            ("FILE", "--config", "x.yaml"),
            2,
            "--config: a recording brings its own settings; give what differs as flags",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, arguments: tuple[str, ...], status: int, says: str) -> None:
    """A wrong file or a wrong flag is one line and the right exit status."""
    path = str(recording(tmp_path / "case", codec.encode(ObserverSample(0.0, 0.0))))
    got, _, err = call("replay", *(path if argument == "FILE" else argument for argument in arguments))

    assert got == status
    assert says in err
    assert err.count("\n") == 1


def test_settings_of_another_version_are_no_obstacle() -> None:
    """A recorded setting that this version does not have is passed over, and paths and addresses are not used."""
    settings: dict[str, dict[str, Value]] = {
        "slo": {"itl_seconds": 0.2, "colour": "green"},
        "engine": {"url": "ftp://?"},
        "moon": {"phase": 1},
    }
    header = Header(stallwatch="0.9", unix_offset=0.0, settings=settings)

    assert settings_for(header, []).slo.itl_seconds == 0.2


def test_what_the_file_says_cannot_drive_the_terminal(tmp_path: Path) -> None:
    """Names in a recording from elsewhere are shown without control characters."""
    facts = ServerFacts(at=0.0, version="\x1b[2J", model_name="\x1b]0;owned\x07")
    header = Header(stallwatch="\x1b[31m", unix_offset=1e300, server=facts, incident={"name": "\x1b"})
    lines = [codec.encode(facts), codec.encode(ObserverSample(20.0, 0.0)), '{"type":"\\u001b[5m"}']
    status, text, err = call("replay", str(recording(tmp_path / "case", *lines, header=header)))

    assert status == 0
    assert "\x1b" not in text + err
    assert "\x07" not in text + err
    assert "1 lines were passed over" in err


def test_a_torn_file_is_judged_and_said(tmp_path: Path) -> None:
    """What is there is judged, and one line says that the rest is missing."""
    path = recording(tmp_path / "case", codec.encode(ObserverSample(0.0, 0.0)), '{"type":"obs')
    path.write_text(path.read_text().rstrip("\n"))
    status, text, err = call("replay", str(path))

    assert status == 0
    assert "1 observation over 0.0 s" in text
    assert err == "stallwatch: the end of the file is missing, or of a part of it: what came before was judged\n"


def test_record_is_short_for_the_setting(tmp_path: Path) -> None:
    """`run --record FILE` means `--recorder.file FILE`, and a folder is refused before anything starts."""
    status, _, err = call("run", "--record", str(tmp_path))

    assert status == 2
    assert f"--recorder.file = {tmp_path}: is a directory; give the path of a file" in err
    assert cli._without_short_names(["--record=x", "--record", "y", "--recorder.minutes", "3"]) == [
        "--recorder.file=x", "--recorder.file", "y", "--recorder.minutes", "3",
    ]  # fmt: skip
