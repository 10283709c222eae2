"""The first line of a recording: which program wrote it, by which settings it judged, and what it watched."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import stallwatch
from stallwatch.observations import GpuSample, ServerFacts
from stallwatch.recorder import codec
from stallwatch.settings import Settings

NOT_RECORDED = ("api_key", "file", "directory", "proc_path", "sys_path", "engine_cgroup")
"""Ends of the names of settings that a recording does not carry: secrets, and paths of the machine."""

Value = str | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is known of a recording before its observations."""

    stallwatch: str  # version of the program
    unix_offset: float  # what turns the recording's times into unix time
    settings: Mapping[str, Mapping[str, Value]] = field(default_factory=lambda: MappingProxyType({}))
    server: ServerFacts | None = None
    gpus: GpuSample | None = None
    incident: Mapping[str, Any] | None = None

    def line(self) -> str:
        """The header as a line of the recording."""
        about: dict[str, Any] = {
            "format": codec.FORMAT,
            "version": codec.VERSION,
            "stallwatch": self.stallwatch,
            "unix_offset": self.unix_offset,
            "settings": self.settings,
        }
        if self.server is not None:
            about["server"] = codec.fields_of(self.server)
        if self.gpus is not None:
            about["gpus"] = codec.fields_of(self.gpus)
        if self.incident is not None:
            about["incident"] = self.incident
        return codec.encode_note("header", about)


def header_for(
    settings: Settings,
    *,
    unix_offset: float,
    server: ServerFacts | None = None,
    gpus: GpuSample | None = None,
    incident: Mapping[str, Any] | None = None,
) -> Header:
    """The header of a recording that begins now."""
    return Header(
        stallwatch=stallwatch.__version__,
        unix_offset=unix_offset,
        settings=recorded_settings(settings),
        server=server,
        gpus=gpus,
        incident=incident,
    )


def recorded_settings(settings: Settings) -> Mapping[str, Mapping[str, Value]]:
    """Every setting in force, without secrets and without paths of the machine."""
    rooms: dict[str, dict[str, Value]] = {}
    for room, values in settings.model_dump(mode="json").items():
        rooms[room] = {name: value for name, value in values.items() if not name.endswith(NOT_RECORDED)}
    return rooms


def header_of(found: Mapping[str, Any]) -> Header:
    """The header in the object of a line. Raises `UnreadableError` with what to do about it."""
    if found.get("format") != codec.FORMAT:
        raise codec.UnreadableError("not a recording of stallwatch")
    version = found.get("version")
    if version != codec.VERSION:
        by = f" by stallwatch {found['stallwatch']}" if isinstance(found.get("stallwatch"), str) else ""
        raise codec.UnreadableError(
            f"written{by} in version {version!r} of the format, and stallwatch {stallwatch.__version__} reads version "
            f"{codec.VERSION}"
        )
    offset = found.get("unix_offset")
    settings = found.get("settings", {})
    if not isinstance(offset, int | float) or isinstance(offset, bool):
        raise codec.UnreadableError("a header without unix_offset")
    if not isinstance(settings, dict) or not all(isinstance(room, dict) for room in settings.values()):
        raise codec.UnreadableError("a header whose settings are not groups of settings")
    incident = found.get("incident")
    return Header(
        stallwatch=str(found.get("stallwatch", "")),
        unix_offset=float(offset),
        settings={
            room: {name: value for name, value in group.items() if isinstance(value, str | int | float | bool)}
            for room, group in settings.items()
        },
        server=codec.from_fields(ServerFacts, found["server"]) if "server" in found else None,
        gpus=codec.from_fields(GpuSample, found["gpus"]) if "gpus" in found else None,
        incident=incident if isinstance(incident, dict) else None,
    )
