"""Server-sent events from bytes, however the network cut them.

Pure and incremental: bytes in, events out, the same events for any split. It follows the WHATWG rules (CR, LF or CRLF;
comments; several data lines an event; one byte order mark), except that `id` and `retry` are dropped, because nothing
here reconnects. A line or an event beyond its bound is an error, so that no server can fill our memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

_MIB = 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class SseOverflowError(Exception):
    """The server sent a line or an event longer than allowed."""


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched event; bytes that are not UTF-8 are replaced."""

    data: str
    name: str = "message"


class SseDecoder:
    """Turns chunks of bytes into events."""

    def __init__(self, *, max_line_bytes: int = _MIB, max_event_bytes: int = _MIB) -> None:
        self._max_line = max_line_bytes
        self._max_event = max_event_bytes
        self._tail = bytearray()  # the line that has not ended yet
        self._after_cr = False  # a LF that comes next belongs to the line end already seen
        self._started = False
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = b""

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that `chunk` completes. The iterator must be used up before the next call.

        Raises `SseOverflowError` after the events before the offending line; the decoder is of no use afterwards.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk[0] == 0x0A:
                chunk = chunk[1:]
        if b"\n" not in chunk and b"\r" not in chunk:
            # Joining only at a line's end keeps an endless line that drips in linear.
            self._tail += chunk
            self._check_tail()
            return
        if self._tail:
            chunk = bytes(self._tail) + chunk
            self._tail.clear()
        lines = chunk.splitlines()
        if chunk[-1] in b"\r\n":
            self._after_cr = chunk[-1] == 0x0D
        else:
            self._tail += lines.pop()
        for line in lines:
            if line.startswith(b"data: ") and self._started and len(line) <= self._max_line:
                self._add_data(line[6:])
            elif line:
                self._field(line)
            else:
                self._started = True
                if self._data:
                    yield self._dispatch()
                self._name = b""
        self._check_tail()

    def _check_tail(self) -> None:
        # The mark, which does not count, is still in the tail.
        if len(self._tail) > self._max_line + len(_BOM):
            raise SseOverflowError(f"a line of more than {self._max_line} bytes")

    def _field(self, line: bytes) -> None:
        if not self._started:
            self._started = True
            line = line.removeprefix(_BOM)
        if len(line) > self._max_line:
            raise SseOverflowError(f"a line of more than {self._max_line} bytes")
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._add_data(value)
        elif field == b"event":
            self._name = value

    def _add_data(self, value: bytes) -> None:
        self._data.append(value)
        self._data_bytes += len(value) + 1
        if self._data_bytes > self._max_event + 1:
            raise SseOverflowError(f"an event of more than {self._max_event} bytes")

    def _dispatch(self) -> Event:
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data.clear()
        self._data_bytes = 0
        text = data.decode("utf-8", "replace")
        return Event(text, self._name.decode("utf-8", "replace")) if self._name else Event(text)
