"""What a Prometheus would have scraped beside a recording: the page at regular moments, as series with their samples.

Left out are series of the recorder and of the process, of which a recording says nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stallwatch import catalogue as c
from stallwatch import exporter
from stallwatch.analysis.monitor import Monitor
from stallwatch.commands.rejudging import Begun, Stands, Told
from stallwatch.health import Health
from stallwatch.observations import (
    EngineSample,
    GpuSample,
    HostSample,
    Observation,
    PollFailure,
    Source,
    StreamTokens,
)
from stallwatch.scheduling import Poll
from stallwatch.settings import Settings

Samples = Mapping[str, Sequence[tuple[float, float]]]
"""Series as the text format writes them -> unix time and value of each sample."""

_UNRECORDED = frozenset(spec.family for spec in (c.INCIDENTS_WRITTEN, c.INCIDENTS_FAILED, c.RECORDING_FAILURES))
_UNKNOWN = math.nan
"""A duration that was not recorded: what is not a number gets no series."""


@dataclass(slots=True)
class Scraper:
    """Scrapes whenever it is told how things stand; `labels` are those that a scraper attaches."""

    labels: Mapping[str, str]
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _settings: Settings = field(default_factory=Settings)
    _health: Health = field(default_factory=Health)

    def beside(self, _monitor: Monitor, seen: Observation) -> None:
        """Hears an observation, for the health of its source."""
        poll = _poll(seen)
        if poll is not None:
            self._health.remember(poll)

    def take(self, told: Told) -> None:
        """Adds the samples of a moment; anything else that is told only changes what holds from here on."""
        if isinstance(told, Begun):
            self._settings, self._health = told.settings, Health()
        elif isinstance(told, Stands):
            offset = told.unix - told.findings.at
            families = exporter.families(told.findings, self._health, self._settings, wall_offset=offset)
            self._add("up", {}, told.unix, 1.0)
            for family in families:
                if family.name not in _UNRECORDED:
                    for sample in family.samples:
                        self._add(sample.name, sample.labels, told.unix, sample.value)

    def _add(self, name: str, labels: Mapping[str, str], at: float, value: float) -> None:
        self.samples.setdefault(series_name(name, {**labels, **self.labels}), []).append((at, value))


def series_name(name: str, labels: Mapping[str, str]) -> str:
    """A series as the text format writes it."""
    named = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
    return f"{name}{{{named}}}" if named else name


def number(value: float) -> str:
    """A value as the text format writes it."""
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(str(value), repr(float(value)))


def openmetrics(samples: Samples) -> Iterator[str]:
    """The lines that `promtool tsdb create-blocks-from openmetrics` reads, series after series."""
    for name, points in samples.items():
        for at, value in points:
            yield f"{name} {number(value)} {at:.3f}\n"
    yield "# EOF\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _poll(seen: Observation) -> Poll | None:
    """The poll that an observation came from, if it tells of one."""
    match seen:
        case PollFailure():
            return Poll(seen.source, _UNKNOWN, seen.at, seen)
        case EngineSample():
            return Poll(Source.ENGINE, seen.sent_at, seen.at, None)
        case StreamTokens():
            return Poll(Source.CANARY, _UNKNOWN, seen.at, None)
        case GpuSample():
            return Poll(Source.GPU, _UNKNOWN, seen.at, None)
        case HostSample():
            return Poll(Source.HOST, _UNKNOWN, seen.at, None)
        case _:
            return None
