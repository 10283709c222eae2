"""A loopback HTTP server whose every byte is the test's own: for what a well-made server never sends."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Asked:
    """One request as it came in."""

    at: float
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: Any


@dataclass
class RawServer:
    """What a test may ask of the running server."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    hung_up: list[float] = field(default_factory=list)  # when clients closed before the script had ended
    open: int = 0
    most_open: int = 0


class Peer:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *parts: bytes) -> None:
        """Writes at once; each call arrives as one read, if the client keeps up."""
        self._writer.write(b"".join(parts))
        await self._writer.drain()

    async def data(self, *payloads: Any) -> None:
        """Writes SSE events, all in one segment."""
        await self.send(*(b"data: " + _text(payload) + b"\n\n" for payload in payloads))

    def half_close(self) -> None:
        """Ends our direction only."""
        self._writer.write_eof()

    def reset(self) -> None:
        """Breaks the connection, as a crash does: what is under way is lost."""
        lost_at_once = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lost_at_once)
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Returns when the client has closed."""
        with suppress(ConnectionError):
            while await self._reader.read(65536):
                pass


def _text(payload: Any) -> bytes:
    return payload.encode() if isinstance(payload, str) else json.dumps(payload).encode()


Script = Callable[[Asked, Peer], Awaitable[None]]


@asynccontextmanager
async def serve(script: Script) -> AsyncIterator[RawServer]:
    """Runs `script` for every request; the connection is closed when it returns, or when the client hangs up."""
    state = RawServer()
    tasks: set[asyncio.Task[None]] = set()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        state.open += 1
        state.most_open = max(state.most_open, state.open)
        ending = asyncio.ensure_future(over.wait())
        reading = asyncio.ensure_future(_read_request(reader, loop.time()))
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return
            asked = reading.result()
            state.asked.append(asked)
            peer = Peer(reader, writer)
            playing = asyncio.ensure_future(script(asked, peer))
            watching = asyncio.ensure_future(peer.gone())
            try:
                await asyncio.wait({playing, watching, ending}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done() and not playing.done():
                    state.hung_up.append(loop.time())
                elif playing.done() and not isinstance(playing.exception(), ConnectionError | None):
                    playing.result()
            finally:
                playing.cancel()
                watching.cancel()
                await asyncio.gather(playing, watching, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            ending.cancel()
            reading.cancel()
            state.open -= 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            tasks.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        over.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def _read_request(reader: asyncio.StreamReader, at: float) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(at, method, path, headers, json.loads(body) if body else None)


def answer(status: str, body: bytes = b"", *, kind: str = "application/json", headers: str = "") -> bytes:
    """A whole answer with a length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{headers}"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def models(*entries: dict[str, Any]) -> bytes:
    """The answer of `/v1/models`."""
    return answer("200 OK", json.dumps({"object": "list", "data": list(entries)}).encode())
