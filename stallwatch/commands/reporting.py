"""What a report says, as one object for JSON: gathered from a bundle by judging its observations again.

Stalls are told as the sidecar judged them at the time, since it knew what came before the bundle; where judging them
again says otherwise, both are told. Of a longer recording the last hour is drawn; of several sessions, the last that
has stalls.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

import stallwatch
from stallwatch.analysis.episodes import Stall
from stallwatch.analysis.monitor import Monitor
from stallwatch.commands.rejudging import Begun, Ended, Happened, Lost, judged
from stallwatch.health import Health
from stallwatch.observations import EngineSample, Observation, PollFailure
from stallwatch.recorder import codec
from stallwatch.recorder.header import Header
from stallwatch.recorder.reading import Entry, Note, Recording, RecordingError
from stallwatch.recorder.timeline import Timeline
from stallwatch.web.sentences import advice, because, reservations, seconds
from stallwatch.web.stalls import stall_document
from stallwatch.web.status import status

DRAWN_SECONDS: Final = 3600.0


@dataclass(slots=True)
class _Session:
    header: Header
    begun: Begun
    timeline: Timeline = field(default_factory=lambda: Timeline(DRAWN_SECONDS))
    notes: list[Stall] = field(default_factory=list)
    lost: int = 0
    ended: Ended | None = None

    def observe(self, monitor: Monitor, seen: Observation | PollFailure) -> None:
        """Draws what the monitor has just judged."""
        if isinstance(seen, EngineSample):
            for engine, watch in monitor.engines.items():
                if watch.work.last is not None:
                    self.timeline.prefilled(engine, watch.work.last)
        self.timeline.observe(seen)


def reported(recording: Recording, flags: Sequence[str]) -> Mapping[str, Any]:
    """Everything that a report says. Raises `RecordingError`, and `BadConfiguration` for the flags."""
    sessions: list[_Session] = []

    def entries() -> Iterator[Entry]:
        for entry in recording:
            # Notes come after the observations of their session.
            if isinstance(entry, Note) and entry.kind == "stall" and sessions:
                sessions[-1].notes.append(_noted(entry))
            yield entry

    def beside(monitor: Monitor, seen: Observation | PollFailure) -> None:
        sessions[-1].observe(monitor, seen)

    for told in judged(entries(), flags, every=DRAWN_SECONDS, beside=beside):
        match told:
            case Begun():
                sessions = [*sessions[-1:], _Session(told.header, told)]
            case Happened():
                sessions[-1].timeline.stall(told.news.stall)
            case Lost():
                sessions[-1].lost += told.observations
            case Ended():
                sessions[-1].ended = told
                if len(sessions) > 1 and sessions[0].ended and sessions[0].ended.stalls and not told.stalls:
                    del sessions[-1]
    return _document(sessions[-1], recording, anew=bool(flags))


def _noted(note: Note) -> Stall:
    try:
        return codec.from_fields(Stall, note.content)
    except codec.UnreadableError as error:
        raise RecordingError(f"a stall that cannot be read: {error}") from error


def _document(session: _Session, recording: Recording, *, anew: bool) -> Mapping[str, Any]:
    ended, header = session.ended, session.header
    if ended is None:
        raise RecordingError(f"{recording.path.name}: no observations")
    offset, findings, settings = header.unix_offset, ended.findings, session.begun.settings
    again = {stall.id: stall for stall in ended.stalls}
    stalls = list(ended.stalls) if anew or not session.notes else session.notes
    timeline = dict(session.timeline.document(DRAWN_SECONDS, unix_offset=offset)())
    documents = [_stall(stall, findings.at, offset) for stall in stalls]
    timeline["stalls"] = documents
    return {
        "file": recording.path.name,
        "incident": header.incident is not None,
        "began": _moment(ended.began_unix),
        "began_unix": round(ended.began_unix, 3),
        "ended_unix": round(ended.unix, 3),
        "observations": ended.observations,
        "lost": session.lost,
        "torn": recording.torn,
        "written_by": header.stallwatch,
        "made_by": stallwatch.__version__,
        "server": None
        if header.server is None
        else {
            "version": header.server.version,
            "model": header.server.model_name,
            "caches": {engine: codec.plain(cache) for engine, cache in header.server.caches.items()},
        },
        "gpus": [] if header.gpus is None else [{"gpu": gpu.gpu, "name": gpu.name} for gpu in header.gpus.gpus],
        "driver": None if header.gpus is None else header.gpus.driver,
        "settings": {room: dict(values) for room, values in header.settings.items()},
        "changed": {name: list(values) for name, values in session.begun.changed.items()},
        "objectives": {"itl_seconds": settings.slo.itl_seconds, "ttft_seconds": settings.slo.ttft_seconds},
        "stalls": documents,
        "differs": list(_differences(stalls, again)) if not anew else [],
        "status": status(findings, Health(), settings, now=findings.at, hardware={}),
        "advice": {
            engine.engine: {
                "sentence": advice(engine.work, settings.slo.itl_seconds),
                "holds_for": reservations(engine.work),
            }
            for engine in findings.engines
        },
        "compared": {engine: compared(timeline, engine) for engine in timeline["engines"]},
        "timeline": timeline,
    }


def _stall(stall: Stall, now: float, offset: float) -> Mapping[str, Any]:
    sentence = f"Readers stood still for {seconds(stall.seconds)} within {seconds(stall.duration(now))}"
    return {
        **stall_document(stall, now, wall_offset=offset),
        "sentence": f"{sentence}: {because(stall)}.",
    }


def _differences(noted: Iterable[Stall], again: Mapping[str, Stall]) -> Iterator[str]:
    """Where judging the bundle alone says otherwise; ids are counted anew, so stalls are found by their time."""
    for stall in noted:
        same = [
            other
            for other in again.values()
            if other.engine == stall.engine
            and other.start < (stall.end if stall.end is not None else float("inf"))
            and stall.start < (other.end if other.end is not None else float("inf"))
        ]
        if not same:
            yield f"Stall {stall.id} is not found when the bundle is judged alone: it needs what came before."
        elif stall.cause not in {other.cause for other in same}:
            causes = " and ".join(sorted({other.cause for other in same}))
            yield f"Stall {stall.id} was {stall.cause} at the time; judged by the bundle alone it is {causes}."


FIGURES: Final[tuple[tuple[str, str, str], ...]] = (
    ("gap_seconds", "longest gap of a quarter second", "seconds"),
    ("first_token_seconds", "first token (TTFT)", "seconds"),
    ("step_seconds", "engine step", "seconds"),
    ("prefill_per_step", "prefill tokens in a step", "tokens"),
    ("decode_per_step", "decode tokens in a step", "tokens"),
    ("running", "requests running", "requests"),
    ("waiting", "requests waiting", "requests"),
    ("kv_usage", "KV cache in use", "ratio"),
    ("prompt_cached_tokens", "cached prompt tokens booked", "tokens"),
    ("prompt_computed_tokens", "computed prompt tokens booked", "tokens"),
    ("preemptions", "preemptions", "count"),
    ("utilization", "GPU utilisation", "ratio"),
    ("memory_utilization", "GPU memory activity", "ratio"),
    ("sm_clock_hertz", "SM clock", "hertz"),
    ("power_watts", "GPU power", "watts"),
    ("lag_seconds", "our own lateness", "seconds"),
)
"""Column of the timeline, what it is called, its unit; in the order of a report."""

_TOLD_LATER: Final = 2  # slots
_SUMMED: Final = {"prompt_cached_tokens", "prompt_computed_tokens", "preemptions"}


def compared(timeline: Mapping[str, Any], engine: str) -> Sequence[Mapping[str, Any]]:
    """Each figure in quiet slots and in those of stalls: median and largest, or the sum of what is counted.

    A figure that is known in neither has no row. Those of a GPU are the first one's.
    """
    start, width, slots = timeline["start_unix"], timeline["slot_seconds"], timeline["slots"]
    inside = [False] * slots
    for stall in timeline["stalls"]:
        if stall["engine"] != engine:
            continue
        first = int((stall["start_unix"] - start) / width)
        # What was computed in the last frozen step is booked by the poll after it.
        last = slots if stall["end_unix"] is None else int((stall["end_unix"] - start) / width) + 3
        for slot in range(max(0, first), min(slots, last)):
            inside[slot] = True
    columns = {**timeline["engines"][engine], **_first_gpu(timeline), **timeline["sidecar"]}
    steps = columns.get("steps", [])
    columns["prefill_per_step"] = list(_per_step(columns.get("prefill_tokens", []), steps))
    columns["decode_per_step"] = list(_per_step(columns.get("generation_tokens", []), steps))
    rows = []
    for name, words, unit in FIGURES:
        column = columns.get(name, [])
        row: dict[str, Any] = {"figure": words, "unit": unit, "summed": name in _SUMMED}
        for when, wanted in (("quiet", False), ("stalled", True)):
            values = [
                value for value, within in zip(column, inside, strict=False) if within is wanted and value is not None
            ]
            summed = round(sum(values), 3) if name in _SUMMED and values else None
            row[when] = {
                "typical": summed if name in _SUMMED else round(median(values), 6) if values else None,
                "most": None if name in _SUMMED else max(values, default=None),
            }
        if any(row[when]["typical"] is not None for when in ("quiet", "stalled")):
            rows.append(row)
    return rows


def _first_gpu(timeline: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(timeline["gpus"].values()), {})


def _per_step(tokens: Sequence[float | None], steps: Sequence[float | None]) -> Iterator[float | None]:
    """Tokens of the steps that ended over their number, in the slots in which some ended.

    What a step carried may be told up to two slots after it was seen to end, by another look at the server's page.
    """
    told = [grown or 0.0 for grown in tokens]
    last: int | None = None
    for slot, ended in enumerate(steps[: len(told)]):
        if ended:
            last = slot
        elif last is not None and slot - last <= _TOLD_LATER:
            told[last] += told[slot]
            told[slot] = 0.0
    carried = 0.0
    for grown, ended in zip(told, steps, strict=False):
        carried += grown
        if ended:
            yield carried / ended
            carried = 0.0
        else:
            yield None


def _moment(unix: float) -> str:
    # A file of somebody else's may say anything.
    at = datetime.fromtimestamp(min(max(unix, 0.0), 253402300799.0), tz=UTC)
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
