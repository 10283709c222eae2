"""The recorder: takes what is observed, keeps the last minutes of it, and writes them down when readers were stalled.

Called on the loop; whatever touches a disk happens in the scribe's thread, and what became of it is heard at the next
heartbeat. A disk that is full, slow or read-only costs bundles and a counter, never the watching.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from stallwatch.analysis.causes import Cause
from stallwatch.analysis.episodes import Stall
from stallwatch.analysis.findings import Findings
from stallwatch.analysis.prefill import PrefillInterval
from stallwatch.health import Writing
from stallwatch.observations import GpuSample, Observation, ObserverSample, ServerFacts
from stallwatch.recorder import codec
from stallwatch.recorder.bundles import Shelf, file_name
from stallwatch.recorder.file import FullError, RecordingFile
from stallwatch.recorder.header import header_for
from stallwatch.recorder.incidents import REST_SECONDS, Incident, Incidents
from stallwatch.recorder.scribe import Scribe, ScribeThread
from stallwatch.recorder.tape import Chunk, Tape, pack
from stallwatch.recorder.timeline import Timeline
from stallwatch.settings import Settings

log = structlog.get_logger()

TAPE_BYTES: Final = 32 * 1024 * 1024
"""Compressed observations that are kept at most, however many minutes are asked for."""

_BESIDE_BYTES: Final = 256 * 1024  # of a bundle for its header and findings
_CHUNKS_WAITING: Final = 16  # for a slow disk; more are given up
_HANGS_SECONDS: Final = 60.0
_CLOSING_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one job; `problem` is empty when it was done."""

    what: str  # incident | recording
    name: str
    problem: str = ""
    bytes: int = 0
    over: bool = False  # nothing of the kind is tried again


class Recorder:
    """One sidecar's memory of the last minutes."""

    def __init__(
        self,
        settings: Settings,
        *,
        findings: Callable[[float], Findings],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        writing: Writing | None = None,
        scribe: Scribe | None = None,
    ) -> None:
        """`findings` says what analysis has to say at a moment; `wall` is unix time; counts go to `writing`."""
        chosen = settings.recorder
        kept = chosen.minutes * 60
        self.timeline = Timeline(kept)
        self.writing = writing if writing is not None else Writing()
        self._settings = settings
        self._findings = findings
        self._clock = clock
        self._wall = wall
        self._scribe = scribe if scribe is not None else ScribeThread()
        self._incidents = Incidents(max(kept / 2, REST_SECONDS))
        self._server: ServerFacts | None = None
        self._gpus: GpuSample | None = None
        self._run = secrets.token_hex(2)
        self._name: tuple[int, str] = (0, "")  # of the incident that was written last
        self._counted = ""
        self._outcomes: deque[_Outcome] = deque()
        self._writing_since: float | None = None
        self._hanging = False
        self._failing: set[str] = set()
        self._chunks_waiting = 0
        self._shelf: Shelf | None = None
        if chosen.directory is not None:
            self._shelf = Shelf(chosen.directory, chosen.max_bytes)
        self._file: RecordingFile | None = None
        if chosen.file is not None:
            self._file = RecordingFile(
                chosen.file, chosen.max_bytes, header_for(settings, unix_offset=self._unix_offset())
            )
        self._tape: Tape | None = None
        if self._shelf is not None or self._file is not None:
            self._tape = Tape(
                kept if self._shelf is not None else 0.0,
                min(TAPE_BYTES, chosen.max_bytes - _BESIDE_BYTES),
                self._sealed,
            )

    def observe(self, seen: Observation) -> None:
        """Takes one observation; a heartbeat also moves on what is to be written."""
        self.timeline.observe(seen)
        if self._tape is not None:
            self._tape.add(codec.encode(seen), seen.at)
        if isinstance(seen, ServerFacts):
            self._server = seen
        elif isinstance(seen, GpuSample):
            self._gpus = seen
        elif isinstance(seen, ObserverSample):
            self._move_on(seen.at)

    def prefilled(self, engine: str, interval: PrefillInterval) -> None:
        """Takes what analysis says of the prompt tokens of an interval."""
        self.timeline.prefilled(engine, interval)

    def stall_open(self, stall: Stall, now: float) -> None:
        """A stall has begun, or more is known of it."""
        self.timeline.stall(stall)
        if self._shelf is not None:
            self._incidents.opened(stall, now)

    def stall_closed(self, stall: Stall, now: float) -> None:
        """A stall has ended with its last verdict."""
        self.timeline.stall(stall)
        # Our own lateness is no incident of the server's.
        if self._shelf is not None and (stall.cause is not Cause.OBSERVER or self._incidents.knows(stall)):
            self._incidents.closed(stall, now)

    def document(self, seconds: float) -> Callable[[], Mapping[str, Any]]:
        """The last `seconds` of the timeline for JSON, by a call that may be made in a thread."""
        return self.timeline.document(seconds, unix_offset=self._unix_offset())

    def close(self) -> None:
        """Writes what is left, and waits a few seconds for the disk."""
        now = self._clock()
        if self._tape is not None:
            self._tape.seal()
        for incident in self._incidents.left():
            self._write(incident, now)
        if not self._scribe.close(_CLOSING_SECONDS):
            log.warning("recorder gives up on a slow disk", seconds=_CLOSING_SECONDS)
        self._hear()

    def _move_on(self, now: float) -> None:
        self._hear()
        if self._writing_since is not None:
            if now - self._writing_since > _HANGS_SECONDS and not self._hanging:
                self._hanging = True
                self.writing.incidents_failed += 1
                log.warning("incident bundle not written", problem="the disk does not answer")
            return
        due = self._incidents.due(now)
        if due is not None:
            self._write(due, now)

    def _write(self, incident: Incident, now: float) -> None:
        shelf, tape = self._shelf, self._tape
        if shelf is None or tape is None:
            return
        offset = self._unix_offset()
        if incident.number != self._name[0]:
            self._name = incident.number, file_name(incident.began + offset, self._run)
        name = self._name[1]
        stalls = sorted(incident.stalls.values(), key=lambda stall: stall.start)
        header = header_for(
            self._settings,
            unix_offset=offset,
            server=self._server,
            gpus=self._gpus,
            incident={"name": name, "began": incident.began, "written": now, "stalls": len(stalls)},
        )
        chunks, findings = tape.chunks(), self._findings(now)

        def job() -> None:
            notes = [codec.encode_note("stall", codec.plain(stall)) for stall in stalls]
            notes.append(codec.encode_note("findings", codec.plain(findings)))
            parts = [pack([header.line()]), *(chunk.packed for chunk in chunks), pack(notes)]
            try:
                size = shelf.write(name, parts)
            except OSError as error:
                self._outcomes.append(_Outcome("incident", name, _problem(error)))
            else:
                self._outcomes.append(_Outcome("incident", name, bytes=size))

        self._writing_since = now
        self._scribe.submit(job)

    def _sealed(self, chunk: Chunk) -> None:
        file = self._file
        if file is None:
            return
        if self._chunks_waiting >= _CHUNKS_WAITING:
            self._scribe.submit(lambda: file.lose(chunk.lines))
            self._count_recording_failure("the disk is too slow")
            return

        def job() -> None:
            try:
                file.append(chunk)
            except OSError as error:
                self._outcomes.append(_Outcome("recording", file.path.name, _problem(error)))
            except FullError as error:
                self._outcomes.append(_Outcome("recording", file.path.name, str(error), over=True))
            else:
                self._outcomes.append(_Outcome("recording", file.path.name))

        self._chunks_waiting += 1
        self._scribe.submit(job)

    def _hear(self) -> None:
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if outcome.what == "incident":
                self._writing_since, self._hanging = None, False
                self._hear_of_incident(outcome)
            else:
                self._chunks_waiting -= 1
                self._hear_of_recording(outcome)

    def _hear_of_incident(self, outcome: _Outcome) -> None:
        if outcome.problem:
            self.writing.incidents_failed += 1
            if "incident" not in self._failing:
                self._failing.add("incident")
                log.warning("incident bundle not written", file=outcome.name, problem=outcome.problem)
            return
        self._failing.discard("incident")
        if outcome.name != self._counted:
            self._counted = outcome.name
            self.writing.incidents_written += 1
            log.info("incident bundle written", file=outcome.name, bytes=outcome.bytes)

    def _hear_of_recording(self, outcome: _Outcome) -> None:
        if outcome.over:
            self._file = None
            log.warning("recording has ended", file=outcome.name, problem=outcome.problem)
        elif outcome.problem:
            self._count_recording_failure(outcome.problem)
        elif "recording" in self._failing:
            self._failing.discard("recording")
            log.info("recording goes on", file=outcome.name)

    def _count_recording_failure(self, problem: str) -> None:
        self.writing.recording_failures += 1
        if "recording" not in self._failing:
            self._failing.add("recording")
            log.warning("recording has a hole", problem=problem)

    def _unix_offset(self) -> float:
        return self._wall() - self._clock()


def _problem(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
