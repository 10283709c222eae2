"""What one-shot commands share: the quiet log, the progress line, numbers for people, text that a terminal can show."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TextIO, TypeVar

from stallwatch import logs
from stallwatch.scheduling import SourceError
from stallwatch.settings import Access, LogSettings
from stallwatch.sources.http import target_of

T = TypeVar("T")

WIDTH = 100


def redactor(*accesses: Access) -> Callable[[str], str]:
    """What takes the keys out of a text, for servers that repeat what they were sent."""
    keys = [target_of(access).key for access in accesses]
    for key in keys:
        with suppress(SourceError):
            key.headers()  # reads the file

    def redact(text: str) -> str:
        for key in keys:
            text = key.redact(text)
        return text

    return redact


def switch_threads_fast() -> None:
    """As `run` does: a thread that holds the interpreter for the default 5 ms would delay time stamps by as much."""
    sys.setswitchinterval(0.0005)


def quiet_log(settings: LogSettings, stderr: TextIO) -> None:
    """Keeps the sources' log out of the answer, which says the same in sentences; `log.level` debug shows it."""
    logs.configure("debug" if settings.level == "debug" else "error", settings.format, stream=stderr)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end on the loop that `stallwatch run` uses. Ctrl-C cancels it."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 (absent on some platforms)
    except ImportError:
        return None
    return uvloop.new_event_loop


class StatusLine:
    """One line on a terminal that is written over; silent where nobody looks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._dirty = False

    def show(self, text: str) -> None:
        """Replaces what stands there."""
        if self._shown:
            self._stream.write("\r\x1b[K" + text[: WIDTH - 1])
            self._stream.flush()
            self._dirty = True

    def clear(self) -> None:
        """Takes it away."""
        if self._dirty:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._dirty = False


def can_show(text: str, stream: TextIO) -> bool:
    """Whether the stream's encoding has these characters."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def showable(text: str, stream: TextIO) -> str:
    """`text` with what the stream's encoding lacks replaced, instead of an exception."""
    encoding = stream.encoding or "utf-8"
    try:
        return text.encode(encoding, "replace").decode(encoding)
    except LookupError:
        return text.encode("ascii", "replace").decode("ascii")


def duration(seconds: float | None) -> str:
    """Three figures and a unit."""
    if seconds is None:
        return "-"
    if seconds < 0.0995:
        return f"{_figures(seconds * 1000)} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    return f"{seconds:,.1f} s" if seconds < 99.95 else f"{seconds:,.0f} s"


def _figures(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 9.995 else f"{milliseconds:.1f}"


def percent(share: float) -> str:
    """Two figures."""
    return f"{share * 100:.2g} %" if share < 0.0995 else f"{share * 100:,.0f} %"
