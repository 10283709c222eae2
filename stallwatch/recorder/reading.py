"""Reads a recording or a bundle: headers, observations and notes, in the order in which they were written.

A file that came from somebody else is not trusted: lines and depth are bounded, every value is checked, and what is
wrong is said with its line. A recording whose end is torn off, by a full disk or a killed process, is read up to there.
"""

import gzip
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stallwatch.observations import Observation
from stallwatch.recorder import codec
from stallwatch.recorder.header import Header, header_of

_MAX_LINE: Final = 4 * 1024 * 1024
_GZIP_MAGIC: Final = b"\x1f\x8b"
_NOTES: Final = ("stall", "findings", "lost")


class RecordingError(Exception):
    """The file cannot be read as a recording; one sentence for a person."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line that is no observation: what was found, or how many observations were lost."""

    kind: str
    content: Mapping[str, Any]


Entry = Header | Observation | Note


@dataclass(slots=True)
class Recording:
    """One file. Iterating reads it once; the rest is known afterwards."""

    path: Path
    torn: bool = False  # the end, or the end of a session in it, is missing
    passed_over: Counter[str] = field(default_factory=Counter)  # lines with words of a newer version, by what they say

    def __iter__(self) -> Iterator[Entry]:
        """The entries, a header first. Raises `RecordingError`."""
        begun = False
        broken: tuple[int, codec.UnreadableError] | None = None
        for number, line in self._lines():
            if not line.endswith(b"\n"):
                self.torn = True
                if not begun:
                    raise RecordingError(f"{self.path.name}: not a recording of stallwatch")
                return
            try:
                found = codec.parse(line)
                entry = self._entry(found, begun=begun)
            except codec.UnreadableError as error:
                if not begun:
                    raise RecordingError(f"{self.path.name}: {error}") from error
                if broken is not None:
                    raise RecordingError(f"{self.path.name}: line {broken[0]}: {broken[1]}") from broken[1]
                broken = number, error
                continue
            if broken is not None:
                # A session that ended in the middle of a line is followed by the header of the next.
                if not isinstance(entry, Header):
                    raise RecordingError(f"{self.path.name}: line {broken[0]}: {broken[1]}") from broken[1]
                self.torn, broken = True, None
            begun = True
            if entry is not None:
                yield entry
        if broken is not None:
            raise RecordingError(f"{self.path.name}: line {broken[0]}: {broken[1]}") from broken[1]
        if not begun:
            raise RecordingError(f"{self.path.name}: empty")

    def _entry(self, found: Mapping[str, Any], *, begun: bool) -> Entry | None:
        kind = found["type"]
        if kind == "header":
            return header_of(found)
        if not begun:
            raise codec.UnreadableError("not a recording of stallwatch")
        if kind in _NOTES:
            return Note(kind, {name: value for name, value in found.items() if name != "type"})
        try:
            seen = codec.decode(found)
        except codec.UnknownWordError as error:
            self.passed_over[str(error)] += 1
            return None
        if not math.isfinite(seen.at):
            raise codec.UnreadableError("at: not a time")
        return seen

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as raw:
                packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
                raw.seek(0)
                stream = gzip.GzipFile(fileobj=raw) if packed else raw
                number = 0
                while line := stream.readline(_MAX_LINE):
                    number += 1
                    if len(line) >= _MAX_LINE:
                        raise RecordingError(f"{self.path.name}: line {number}: longer than 4 MiB")
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error):
            self.torn = True
        except OSError as error:
            raise RecordingError(f"{self.path}: {(error.strerror or str(error)).lower()}") from error
