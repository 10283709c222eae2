import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from stallwatch.analysis.causes import Cause, StallKind
from stallwatch.analysis.episodes import Stall
from stallwatch.app import monitor_for
from stallwatch.health import Writing
from stallwatch.observations import GpuReading, GpuSample, ObserverSample, ServerFacts
from stallwatch.recorder import bundles, codec
from stallwatch.recorder.bundles import Shelf, file_name
from stallwatch.recorder.header import Header
from stallwatch.recorder.incidents import AGAIN_SECONDS, LONG_SECONDS, REST_SECONDS, SETTLE_SECONDS, Incidents
from stallwatch.recorder.reading import Note, Recording
from stallwatch.recorder.recorder import Recorder
from stallwatch.recorder.scribe import InlineScribe, Job, ScribeThread
from stallwatch.recorder.tape import Chunk, Tape
from stallwatch.settings import Settings

STALL = Stall(
    id="0-1", engine="0", kind=StallKind.DECODE, start=100.0, end=None, detected=100.5, seconds=0.5,
    reader_seconds=1.0, longest=0.5, cause=Cause.UNKNOWN, evidence=(),
)  # fmt: skip
UNIX = 1_764_561_600.0  # 2025-12-01 04:00 UTC


# --- tape


def test_the_tape_keeps_minutes_and_bytes() -> None:
    """The oldest chunks go when the tape is longer or larger than allowed."""
    by_time, by_bytes = Tape(60.0, 1 << 20), Tape(1e9, 2_000)
    for second in range(600):
        for tape in (by_time, by_bytes):
            tape.add(codec.encode(ObserverSample(float(second), second / 7)), float(second))

    assert 60 <= 599 - by_time.chunks()[0].first <= 60 + 11
    assert sum(len(chunk.packed) for chunk in by_bytes.chunks()) == by_bytes.size <= 2_000
    assert by_bytes.chunks()[-1].last == 599


def test_a_busy_minute_makes_small_chunks() -> None:
    """However much is observed, a chunk stays small enough to be packed on the loop."""
    heard: list[Chunk] = []
    tape = Tape(1e9, 1 << 24, heard.append)
    line = codec.encode(ServerFacts(at=1.0, model_name="m" * 1000))
    for _ in range(200):
        tape.add(line, 1.0)

    assert [chunk.lines for chunk in heard] == [63, 63, 63]
    assert tape.chunks()[-1].lines == 200 - 3 * 63


# --- which stalls belong together


class Times:
    """Plays stalls and heartbeats into `Incidents`, and notes when a bundle is due, with its number and its stalls."""

    def __init__(self, span: float = 450.0) -> None:
        self.incidents = Incidents(span)
        self.due: list[tuple[float, int, tuple[str, ...]]] = []
        self.now = 0.0

    def until(self, end: float) -> "Times":
        while self.now < end:
            self.now += 0.25
            found = self.incidents.due(self.now)
            if found is not None:
                self.due.append((self.now, found.number, tuple(found.stalls)))
        return self

    def stall(self, begin: float, end: float, name: str) -> "Times":
        stall = replace(STALL, id=name, start=begin)
        self.until(begin).incidents.opened(stall, self.now)
        self.until(end).incidents.closed(replace(stall, end=end), self.now)
        return self


def test_a_stall_is_written_when_it_has_settled() -> None:
    """A bundle is due a few seconds after the stall's end, once."""
    assert Times().stall(100.0, 110.0, "a").until(1000.0).due == [(110.0 + SETTLE_SECONDS, 1, ("a",))]


def test_a_long_stall_is_written_while_it_is_open() -> None:
    """What is known of a freeze is on disk before it ends, and again as it goes on."""
    due = Times().stall(100.0, 300.0, "a").until(1000.0).due

    assert [at for at, _, _ in due[:3]] == [
        100 + LONG_SECONDS, 100 + LONG_SECONDS + AGAIN_SECONDS, 100 + LONG_SECONDS + 2 * AGAIN_SECONDS
    ]  # fmt: skip
    assert {number for _, number, _ in due} == {1}
    assert due[-1][0] == pytest.approx(305.0, abs=REST_SECONDS)


def test_stalls_that_follow_closely_are_one_bundle() -> None:
    """A server that stalls every ten seconds gets one bundle in half of the minutes kept, not written all the time."""
    times = Times()
    for number in range(90):
        times.stall(100.0 + 10 * number, 102.0 + 10 * number, str(number))
    times.until(2000.0)
    last = {number: stalls for _, number, stalls in times.due}

    assert set(last) == {1, 2}
    for number in last:
        writes = [at for at, one, _ in times.due if one == number]
        assert min(later - earlier for earlier, later in itertools.pairwise(writes[:-1])) >= REST_SECONDS
    assert sorted(int(name) for stalls in last.values() for name in stalls) == list(range(90))


def test_an_endless_stall_gets_bundle_after_bundle() -> None:
    """No bundle claims minutes that are no longer kept: the next one takes over with the stall that goes on."""
    due = Times().stall(100.0, 2000.0, "a").until(3000.0).due

    assert {number for _, number, _ in due} == {1, 2, 3, 4, 5}
    assert all(stalls == ("a",) for _, _, stalls in due)


# --- the directory


def test_names_sort_and_harm_nobody() -> None:
    """Names are in the order of time, in UTC, of characters that every file system takes."""
    names = [file_name(UNIX + offset, "0a1b") for offset in (0.0, 0.0004, 0.9996, 59.0, 86400.0)]

    assert names[0] == "incident-20251201T040000.000Z-0a1b.jsonl.gz"
    assert names[2] == "incident-20251201T040001.000Z-0a1b.jsonl.gz"
    assert names == sorted(names)


def test_the_oldest_bundles_go_first(tmp_path: Path) -> None:
    """The directory keeps its bounds on bytes and files, and what is not ours stays."""
    (tmp_path / "incident-report.docx").write_bytes(b"x" * 5_000)
    names = [file_name(UNIX + day * 86400, "0a1b") for day in range(6)]
    shelf = Shelf(tmp_path, max_bytes=1_000, max_files=3)
    for name in names[:4]:
        shelf.write(name, [b"x" * 200])
    assert {path.name for path in tmp_path.glob("*.gz")} == set(names[1:4])
    shelf.write(names[4], [b"x" * 300, b"y" * 400])

    assert {path.name for path in tmp_path.glob("*.gz")} == {names[3], names[4]}
    assert (tmp_path / "incident-report.docx").exists()
    with pytest.raises(OSError, match="larger than"):
        shelf.write(names[5], [b"x" * 1_001])


def test_a_reader_never_sees_half_a_bundle(tmp_path: Path) -> None:
    """A write that fails leaves the old file and no leftovers; those of a crash are swept after an hour."""
    name = file_name(UNIX, "0a1b")
    shelf = Shelf(tmp_path, max_bytes=1_000)
    shelf.write(name, [b"old"])
    old, recent = (tmp_path / f".{file_name(UNIX, run)}.part" for run in ("dead", "beef"))
    for leftover in (old, recent):
        leftover.write_bytes(b"?")
    os.utime(old, (time.time() - 7200,) * 2)
    unfinished = tmp_path / f".{name}.part"
    unfinished.mkdir()
    with pytest.raises(IsADirectoryError):
        shelf.write(name, [b"new"])
    unfinished.rmdir()

    assert (tmp_path / name).read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([recent.name, name])
    assert bundles._UNFINISHED.fullmatch(old.name)


# --- the recorder


class Recorded:
    """A recorder with a clock of its own and a heartbeat every quarter of a second."""

    def __init__(self, scribe: Any = None, **recorder: object) -> None:
        settings = Settings.model_validate({"recorder": recorder})
        self.now = 0.0
        self.writing = Writing()
        self.recorder = Recorder(
            settings,
            findings=monitor_for(settings).findings,
            clock=lambda: self.now,
            wall=lambda: UNIX + self.now,
            writing=self.writing,
            scribe=scribe or InlineScribe(),
        )

    def until(self, end: float) -> None:
        while self.now < end:
            self.now += 0.25
            self.recorder.observe(ObserverSample(self.now, 0.001))

    def stall(self, begin: float, end: float, name: str = "0-1", cause: Cause = Cause.PREFILL) -> None:
        stall = replace(STALL, id=name, start=begin, cause=cause)
        self.until(begin)
        self.recorder.stall_open(stall, begin)
        self.until(end)
        self.recorder.stall_closed(replace(stall, end=end), end)


def test_a_bundle_holds_what_is_needed(tmp_path: Path) -> None:
    """Header with versions, server, GPU and settings; the observations around; the stall and the findings."""
    recorded = Recorded(directory=tmp_path / "new", minutes=2)
    recorded.recorder.observe(ServerFacts(at=0.0, version="0.32.0", model_name="tiny"))
    gpu = GpuReading(gpu="0", uuid="GPU-1", name="H200")
    recorded.recorder.observe(GpuSample(at=0.0, gpus=(gpu,), scope="container", driver="580.1"))
    with capture_logs() as logs:
        recorded.stall(300.0, 310.0)
        recorded.until(400.0)
    (path,) = (tmp_path / "new").iterdir()
    header, *rest = Recording(path)
    notes = [entry for entry in rest if isinstance(entry, Note)]
    times = [entry.at for entry in rest if isinstance(entry, ObserverSample)]

    assert path.name.startswith("incident-20251201T040500.000Z-")
    assert isinstance(header, Header)
    assert (header.unix_offset, header.server and header.server.version) == (UNIX, "0.32.0")
    assert header.gpus is not None
    assert (header.gpus.driver, header.gpus.gpus[0].name) == ("580.1", "H200")
    assert header.settings["recorder"]["minutes"] == 2
    assert header.incident is not None
    assert header.incident["stalls"] == 1
    assert [note.kind for note in notes] == ["stall", "findings"]
    assert (notes[0].content["cause"], notes[0].content["end"]) == ("prefill", 310.0)
    assert times[0] == pytest.approx(315.0 - 120.0, abs=11)
    assert times[-1] == 315.0
    assert recorded.writing == Writing(incidents_written=1)
    assert [(one["event"], one["log_level"]) for one in logs] == [("incident bundle written", "info")]


def test_one_incident_is_counted_once(tmp_path: Path) -> None:
    """A bundle that is written again as its incident goes on is one file and one count."""
    recorded = Recorded(directory=tmp_path)
    recorded.stall(100.0, 300.0)
    recorded.until(400.0)

    assert len(list(tmp_path.iterdir())) == 1
    assert recorded.writing == Writing(incidents_written=1)


def test_our_own_lateness_is_no_incident(tmp_path: Path) -> None:
    """A gap that we caused ourselves is on the timeline and makes no bundle."""
    recorded = Recorded(directory=tmp_path)
    recorded.until(50.0)
    recorded.recorder.stall_closed(replace(STALL, start=40.0, end=45.0, cause=Cause.OBSERVER), 50.0)
    recorded.until(100.0)

    assert list(tmp_path.iterdir()) == []
    assert len(recorded.recorder.document(900.0)()["stalls"]) == 1


def test_the_end_of_the_process_loses_nothing(tmp_path: Path) -> None:
    """A sidecar that is stopped in the middle of a stall writes what it has."""
    recorded = Recorded(directory=tmp_path / "incidents", file=tmp_path / "case.jsonl")
    recorded.until(100.0)
    recorded.recorder.stall_open(STALL, 100.0)
    recorded.until(103.0)
    recorded.recorder.close()
    (path,) = (tmp_path / "incidents").iterdir()

    for written in (path, tmp_path / "case.jsonl"):
        assert [entry.at for entry in Recording(written) if isinstance(entry, ObserverSample)][-1] == 103.0
    assert recorded.writing.incidents_written == 1


def blocked_by_a_file(folder: Path) -> Path:
    (folder / "blocked").write_text("a file where a directory should be")
    return folder / "blocked" / "incidents"


def test_a_disk_that_refuses_costs_a_counter_and_one_warning(tmp_path: Path) -> None:
    """Every bundle that fails is counted, the first is a warning, and when it works again that is said once."""
    recorded = Recorded(directory=blocked_by_a_file(tmp_path), minutes=1)
    with capture_logs() as logs:
        for number in range(3):
            recorded.stall(100.0 * (number + 1), 100.0 * (number + 1) + 5, str(number))
        recorded.until(400.0)
        (tmp_path / "blocked").unlink()
        recorded.stall(500.0, 505.0, "last")
        recorded.until(600.0)

    assert recorded.writing == Writing(incidents_written=1, incidents_failed=3)
    assert [(one["event"], one["log_level"]) for one in logs] == [
        ("incident bundle not written", "warning"), ("incident bundle written", "info"),
    ]  # fmt: skip
    assert logs[0]["problem"] == "not a directory"


def test_a_recording_that_fails_costs_a_counter_and_one_warning(tmp_path: Path) -> None:
    """While the file cannot be written its parts are counted as lost; it goes on when it can."""
    file = tmp_path / "case.jsonl"
    recorded = Recorded(file=file)
    recorded.until(15.0)
    file.rename(tmp_path / "away")
    file.mkdir()
    with capture_logs() as logs:
        recorded.until(45.0)
        file.rmdir()
        (tmp_path / "away").rename(file)
        recorded.until(60.0)
    lost = [entry.content["observations"] for entry in Recording(file) if isinstance(entry, Note)]

    assert recorded.writing.recording_failures == 3
    assert [one["event"] for one in logs] == ["recording has a hole", "recording goes on"]
    assert lost == [3 * 41]


def test_a_full_recording_is_said_once(tmp_path: Path) -> None:
    """At its bound the recording ends with one warning, which is no failure."""
    recorded = Recorded(file=tmp_path / "case.jsonl", max_bytes=1 << 20)
    with capture_logs() as logs:
        recorded.until(6_000.0)

    assert [one["event"] for one in logs] == ["recording has ended"]
    assert recorded.writing == Writing()
    assert 1_000_000 < (tmp_path / "case.jsonl").stat().st_size <= 1 << 20


class StuckScribe:
    """A disk that does not answer: jobs pile up until it is let go."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, job: Job, /) -> None:
        self.jobs.append(job)

    def close(self, patience_seconds: float, /) -> bool:
        del patience_seconds
        return not self.jobs

    def recover(self) -> None:
        for job in self.jobs:
            job()
        self.jobs.clear()


def test_a_disk_that_hangs_holds_nothing_up(tmp_path: Path) -> None:
    """One write is under way at a time, chunks that wait are bounded, and what was lost is told when it recovers."""
    scribe = StuckScribe()
    recorded = Recorded(scribe, directory=tmp_path / "incidents", file=tmp_path / "case.jsonl")
    with capture_logs() as logs:
        recorded.stall(100.0, 105.0)
        for number in range(10):
            recorded.stall(1000.0 * (number + 1), 1000.0 * (number + 1) + 5, str(number))
        recorded.until(11_000.0)
        held = len(scribe.jobs)
        scribe.recover()
        recorded.until(11_040.0)
        scribe.recover()
        recorded.until(11_041.0)
    lost = [entry.content["observations"] for entry in Recording(tmp_path / "case.jsonl") if isinstance(entry, Note)]

    assert held < 1 + 16 + 11_000 / 10
    assert sum("bundle not written" in one["event"] for one in logs) == 1
    assert recorded.writing.incidents_failed == 1
    assert recorded.writing.incidents_written == 2
    assert len(lost) == 1
    assert lost[0] > 40_000


def test_without_a_directory_or_a_file_nothing_is_encoded() -> None:
    """The timeline alone is kept where nothing is to be written."""
    recorded = Recorded()
    recorded.stall(100.0, 105.0)
    recorded.until(200.0)
    recorded.recorder.close()

    assert recorded.recorder._tape is None
    assert recorded.writing == Writing()


# --- the thread


def test_jobs_are_done_in_order_and_off_the_loop() -> None:
    """The scribe's thread does one job after another, and is done when it says so."""
    scribe, done = ScribeThread(), []
    for number in range(5):
        scribe.submit(lambda number=number: done.append((number, threading.current_thread().name)))  # type: ignore[misc]

    assert scribe.close(5.0)
    assert done == [(number, "recorder") for number in range(5)]
    assert ScribeThread().close(0.0)


def test_a_hanging_job_does_not_hold_the_end_up() -> None:
    """A write that never returns is left behind after the patience asked for."""
    scribe, gate = ScribeThread(), threading.Event()
    scribe.submit(lambda: void(gate.wait))

    assert not scribe.close(0.05)
    gate.set()


def test_a_bug_in_a_job_is_raised_where_it_is_seen() -> None:
    """What no job expects ends the process like any other bug, at the next job."""
    scribe = ScribeThread()
    scribe.submit(lambda: void(lambda: int("missing")))

    assert scribe.close(5.0)
    with pytest.raises(ValueError, match="missing"):
        scribe.submit(lambda: None)


def void(work: Callable[[], object]) -> None:
    work()
