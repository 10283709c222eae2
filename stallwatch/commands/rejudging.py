"""A recording judged again: its observations through the same monitor as live ones, with the time that they bring.

Objectives and thresholds are those that were recorded, unless others are given.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from stallwatch import configuration
from stallwatch.analysis.episodes import Stall, StallNews
from stallwatch.analysis.findings import Findings
from stallwatch.analysis.monitor import Monitor
from stallwatch.app import monitor_for
from stallwatch.observations import Observation
from stallwatch.recorder.header import Header
from stallwatch.recorder.reading import Entry, Note
from stallwatch.settings import Settings, SloSettings, StallSettings

_JUDGING: Final[Mapping[str, tuple[str, ...]]] = {
    "engine": ("interval_seconds",),
    "canary": ("enabled", "mode", "interval_seconds", "tokens", "timeout_seconds"),
    "slo": tuple(SloSettings.model_fields),
    "stall": tuple(StallSettings.model_fields),
}
"""Settings that judging depends on; where the server was and how it was reached does not matter any more."""

_LONGEST_SILENCE: Final = 3600.0  # seconds over which nothing is printed for want of observations


@dataclass(frozen=True, slots=True)
class Begun:
    """A session: a stretch of observations with one clock."""

    header: Header
    settings: Settings
    changed: Mapping[str, tuple[Any, Any]]  # setting -> (recorded, judged by)


@dataclass(frozen=True, slots=True)
class Stands:
    """How things stood at a moment."""

    findings: Findings
    unix: float


@dataclass(frozen=True, slots=True)
class Happened:
    """What became of a stall."""

    news: StallNews
    unix: float


@dataclass(frozen=True, slots=True)
class Lost:
    """Observations that the recorder could not write."""

    observations: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a session."""

    findings: Findings
    unix: float
    began_unix: float
    observations: int
    stalls: tuple[Stall, ...]


Told = Begun | Stands | Happened | Lost | Ended

Beside = Callable[[Monitor, Observation], None]
"""Hears each observation right after the monitor."""


@dataclass(slots=True)
class _Session:
    header: Header
    monitor: Monitor
    beside: Beside
    began: float | None = None
    last: float = 0.0
    due: float = 0.0
    observations: int = 0
    stalls: dict[str, Stall] = field(default_factory=dict)

    def observe(self, seen: Observation, every: float) -> Iterator[Told]:
        if self.began is None:
            self.began, self.due = seen.at, seen.at + every
            # A bundle begins between two looks at the slow facts.
            if self.header.incident is not None and self.header.server is not None:
                self.monitor.observe(replace(self.header.server, at=seen.at))
        if seen.at - self.due > _LONGEST_SILENCE:
            self.due = seen.at
        while self.due < seen.at:
            yield Stands(self.monitor.findings(self.due), self.due + self.header.unix_offset)
            self.due += every
        self.monitor.observe(seen)
        self.beside(self.monitor, seen)
        self.last = max(self.last, seen.at)
        self.observations += 1
        for news in self.monitor.news():
            self.stalls[news.stall.id] = news.stall
            yield Happened(news, news.at + self.header.unix_offset)

    def end(self) -> Ended:
        began = self.last if self.began is None else self.began
        offset = self.header.unix_offset
        stalls = tuple(sorted(self.stalls.values(), key=lambda stall: stall.start))
        findings = self.monitor.findings(self.last)
        return Ended(findings, self.last + offset, began + offset, self.observations, stalls)


def judged(
    entries: Iterable[Entry],
    flags: Sequence[str],
    *,
    every: float,
    beside: Beside = lambda _monitor, _seen: None,
) -> Iterator[Told]:
    """What would have been said, in the order of time. Raises `RecordingError`, and `BadConfiguration` for the flags.

    Args:
        entries: The recording.
        flags: Settings to judge by instead of the recorded ones, as on a command line.
        every: Seconds between two moments at which it is told how things stand.
        beside: Hears each observation right after it was judged.
    """
    session: _Session | None = None
    for entry in entries:
        if isinstance(entry, Header):
            if session is not None:
                yield session.end()
            settings = settings_for(entry, flags)
            session = _Session(entry, monitor_for(settings), beside)
            yield Begun(entry, settings, _changed(settings_for(entry, ()), settings))
        elif isinstance(entry, Note):
            if entry.kind == "lost":
                yield Lost(int(entry.content.get("observations", 0)))
        elif session is not None:
            yield from session.observe(entry, every)
    if session is not None:
        yield session.end()


def settings_for(header: Header, flags: Sequence[str]) -> Settings:
    """The settings to judge by. Raises `BadConfiguration`."""
    if any(flag == "--config" or flag.startswith("--config=") for flag in flags):
        raise configuration.BadConfiguration(
            [configuration.Fault("--config", "a recording brings its own settings", "give what differs as flags")]
        )
    recorded = [
        f"--{room}.{name}={_text(value)}"
        for room, names in _JUDGING.items()
        for name, value in header.settings.get(room, {}).items()
        if name in names and value is not None
    ]
    return configuration.load([*recorded, *flags], {}).settings


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _changed(recorded: Settings, settings: Settings) -> Mapping[str, tuple[Any, Any]]:
    found = {}
    for room, names in _JUDGING.items():
        for name in names:
            before, after = (getattr(getattr(one, room), name) for one in (recorded, settings))
            if before != after:
                found[f"{room}.{name}"] = before, after
    return found
