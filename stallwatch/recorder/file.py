"""The file of `recorder.file`: everything that is observed, appended until it is full.

A file that is there already and is a recording gets another session, with a header of its own: a restart must not cost
the case that somebody is after. What cannot be appended whole is taken back, so the file never ends in half a line.
Everything here may block, so it runs in the recorder's thread.
"""

import errno
import gzip
import os
from contextlib import suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

from stallwatch.recorder import codec
from stallwatch.recorder.header import Header
from stallwatch.recorder.reading import Recording, RecordingError
from stallwatch.recorder.tape import Chunk, pack


class FullError(Exception):
    """The file has reached its bound, or is somebody else's; nothing more is written."""


@dataclass(slots=True)
class RecordingFile:
    """The file, compressed if its name ends in .gz."""

    path: Path
    max_bytes: int
    header: Header
    _begun: bool = False
    _lost: int = 0
    _ended: str = ""

    def lose(self, lines: int) -> None:
        """So many observations will not be written; the file will say so where they are missing."""
        self._lost += lines

    def append(self, chunk: Chunk) -> None:
        """Appends a chunk. Raises `OSError` when it is lost, and `FullError` when all that follow are lost too."""
        if self._ended:
            return
        if not self._begun:
            self._look_at_what_is_there()
        head = [] if self._begun else [self.header.line()]
        if self._lost:
            head.append(codec.encode_note("lost", {"observations": self._lost}))
        if self.path.suffix == ".gz":
            content = (pack(head) if head else b"") + chunk.packed
        else:
            content = "".join(f"{line}\n" for line in head).encode("ascii") + gzip.decompress(chunk.packed)
        try:
            self._append(content)
        except OSError:
            self._lost += chunk.lines
            raise
        self._begun, self._lost = True, 0

    def _look_at_what_is_there(self) -> None:
        try:
            if self.path.stat().st_size == 0:
                return
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return
        try:
            next(iter(Recording(self.path)))
        except (RecordingError, StopIteration):
            self._end("is there already and is not a recording")

    def _append(self, content: bytes) -> None:
        with self.path.open("ab", buffering=0) as stream:
            size = stream.tell()
            if size + len(content) > self.max_bytes:
                self._end("has reached recorder.max_bytes")
            try:
                _write_all(stream, content)
            except OSError:
                with suppress(OSError):
                    stream.truncate(size)
                raise

    def _end(self, problem: str) -> None:
        self._ended = problem
        raise FullError(problem)


def _write_all(stream: RawIOBase, content: bytes) -> None:
    written = stream.write(content)
    if written is None or written < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
