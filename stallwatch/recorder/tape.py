"""The last minutes of observations, as the compressed lines of a recording.

Kept in chunks that are whole gzip members: members put one after another are a gzip file again, so a bundle is written
without decoding or compressing anything anew, and the bound on bytes is exact. A chunk is small enough to be compressed
on the loop, a fifth of a millisecond.
"""

import gzip
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

CHUNK_BYTES: Final = 64 * 1024  # of text
CHUNK_SECONDS: Final = 10.0
_LEVEL: Final = 3  # 6 packs a fifth better and takes five times as long


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines that follow one another; `first` and `last` are the times of their observations."""

    first: float
    last: float
    lines: int
    packed: bytes


@dataclass(slots=True)
class Tape:
    """Lines in the order in which they were added; the oldest chunks go when there are too many minutes or bytes."""

    seconds: float
    max_bytes: int
    sealed: Callable[[Chunk], None] = lambda _chunk: None  # hears of each chunk once
    size: int = 0  # bytes of the chunks kept
    _chunks: deque[Chunk] = field(default_factory=deque)
    _open: list[str] = field(default_factory=list)
    _open_bytes: int = 0
    _first: float = 0.0
    _last: float = 0.0

    def add(self, line: str, at: float) -> None:
        """Adds the line of an observation made at `at`."""
        if not self._open:
            self._first = at
        self._open.append(line)
        self._open_bytes += len(line) + 1
        self._last = at
        if self._open_bytes >= CHUNK_BYTES or at - self._first >= CHUNK_SECONDS:
            self.seal()

    def seal(self) -> None:
        """Closes the chunk that is being filled."""
        if not self._open:
            return
        chunk = Chunk(self._first, self._last, len(self._open), pack(self._open))
        self._open, self._open_bytes = [], 0
        self._chunks.append(chunk)
        self.size += len(chunk.packed)
        while self._chunks and (self.size > self.max_bytes or self._chunks[0].last < self._last - self.seconds):
            self.size -= len(self._chunks.popleft().packed)
        self.sealed(chunk)

    def chunks(self) -> tuple[Chunk, ...]:
        """Everything that is kept."""
        self.seal()
        return tuple(self._chunks)


def pack(lines: list[str]) -> bytes:
    """Lines as one gzip member; the same lines give the same bytes."""
    return gzip.compress(("\n".join(lines) + "\n").encode("ascii"), compresslevel=_LEVEL, mtime=0)
