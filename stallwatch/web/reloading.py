"""Files that a person or an operator replaces while we run: certificates, tokens, passwords.

They are looked at when something needs them, at most once a second, in a thread because a mounted file may block. What
was last right stays in force while the new content is broken, which between two renames it often is for a moment.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")

Clock = Callable[[], float]

CHECK_SECONDS = 1.0
_PATIENCE = 2.0  # seconds that a request waits for a file system that does not answer

_Stamps = tuple[tuple[int, int, int, int], ...]
_Outcome = tuple[_Stamps, T] | str | None
"""What a look at the files gave: new content, what is wrong with it, or nothing new."""

RunCheck = Callable[[Callable[[], _Outcome[T]]], Awaitable[_Outcome[T]]]


class Reloading(Generic[T]):
    """What `load` makes of the files, made anew when one of them changes. The first `load` may raise whatever it does.

    Later an `OSError` or a `ValueError` of it leaves the old value, and is logged once.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        load: Callable[[], T],
        *,
        run_blocking: RunCheck[T] = asyncio.to_thread,
        clock: Clock = time.monotonic,
    ) -> None:
        self._paths = tuple(paths)
        self._load = load
        self._run_blocking = run_blocking
        self._clock = clock
        self._stamps = _stamps(self._paths)
        self._value = load()
        self._checked = clock()
        self._check: asyncio.Task[None] | None = None
        self._told: str | None = None

    async def fresh(self) -> T:
        """The value that the files hold now, or held last when they were right."""
        check = self._check
        if check is None and self._clock() - self._checked >= CHECK_SECONDS:
            check = self._check = asyncio.create_task(self._look())
        if check is not None:
            # Shared by all who ask meanwhile; none of them may cancel it for the others.
            done, _ = await asyncio.wait({check}, timeout=_PATIENCE)
            for one in done:
                one.result()
        return self._value

    async def _look(self) -> None:
        try:
            outcome = await self._run_blocking(self._read)
        finally:
            self._check = None
            self._checked = self._clock()
        if isinstance(outcome, str):
            if outcome != self._told:
                log.warning("changed file cannot be used, the old content stays in force", problem=outcome)
            self._told = outcome
            return
        self._told = None
        if outcome is not None:
            self._stamps, self._value = outcome
            log.info("file read again", files=[str(path) for path in self._paths])

    def _read(self) -> _Outcome[T]:
        try:
            # Before the content: a change between the two is then seen at the next look.
            stamps = _stamps(self._paths)
            return None if stamps == self._stamps else (stamps, self._load())
        except (OSError, ValueError) as error:
            return f"{', '.join(str(path) for path in self._paths)}: {problem_of(error)}"


def problem_of(error: OSError | ValueError) -> str:
    """What was wrong, on one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())


def _stamps(paths: Sequence[Path]) -> _Stamps:
    # Through symbolic links, which is how mounted secrets are swapped; the change time also moves with permissions.
    stats = [path.stat() for path in paths]
    return tuple((stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size) for stat in stats)
