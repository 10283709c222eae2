"""The directory of incident bundles: whole files only, few enough and small enough, the oldest go first.

Everything here may block, so it runs in the recorder's thread. Only files whose names this program gives are ever
counted or removed.
"""

import contextlib
import errno
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOST_FILES: Final = 500
_OURS: Final = re.compile(r"incident-\d{8}T\d{6}\.\d{3}Z-[0-9a-f]{4}\.jsonl\.gz")
_UNFINISHED: Final = re.compile(r"\.incident-[0-9TZ.]+-[0-9a-f]{4}\.jsonl\.gz\.part")
_UNFINISHED_SECONDS: Final = 3600.0


def file_name(began_unix: float, run: str) -> str:
    """The name of a bundle: names sort by the beginning of the incident, in UTC; `run` is four hexadecimal digits."""
    milliseconds = round(began_unix * 1000)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(milliseconds // 1000))
    return f"incident-{stamp}.{milliseconds % 1000:03d}Z-{run}.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where bundles are kept, and how much of them."""

    directory: Path
    max_bytes: int
    max_files: int = MOST_FILES

    def write(self, name: str, parts: Sequence[bytes]) -> int:
        """Writes a bundle, or replaces it, and returns its bytes; a reader sees the old file or the whole new one.

        Raises `OSError`; nothing is left behind then.
        """
        size = sum(len(part) for part in parts)
        if size > self.max_bytes:
            raise OSError(errno.EFBIG, "larger than recorder.max_bytes")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._make_room(name, size)
        unfinished = self.directory / f".{name}.part"
        try:
            with open(unfinished, "wb", opener=_private) as stream:
                stream.writelines(parts)
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.replace(self.directory / name)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return size

    def _make_room(self, name: str, size: int) -> None:
        kept: list[tuple[str, int]] = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    continue
                if _OURS.fullmatch(entry.name) and entry.name != name:
                    kept.append((entry.name, entry.stat(follow_symlinks=False).st_size))
                elif _UNFINISHED.fullmatch(entry.name) and _is_forsaken(entry):
                    Path(entry.path).unlink(missing_ok=True)
        kept.sort()
        total = size + sum(bytes_ for _, bytes_ in kept)
        while kept and (total > self.max_bytes or len(kept) >= self.max_files):
            oldest, freed = kept.pop(0)
            (self.directory / oldest).unlink(missing_ok=True)
            total -= freed


def _is_forsaken(entry: "os.DirEntry[str]") -> bool:
    # Another sidecar may be writing into the same directory right now.
    return time.time() - entry.stat(follow_symlinks=False).st_mtime > _UNFINISHED_SECONDS


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o640)
