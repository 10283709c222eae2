"""Connections of our own listener: how many, and how long each may keep us waiting.

aiohttp bounds the size of a line and of a field, and closes idle connections; it bounds neither how many there are nor
how slowly a request may arrive. So we accept connections ourselves, which also lets each have the newest certificates.
"""

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from stallwatch.web.tls import Certificates

log = structlog.get_logger()

_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NOT_LISTENING = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
_QUIET_SECONDS = 60.0  # between two lines in the log about refused connections


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take of us."""

    connections: int = 512
    per_address: int = 384
    """So that one client cannot keep all others out; fifty browsers behind one port-forward open six each."""
    head_seconds: float = 10.0
    """From the first moment of a connection, or the first byte of a later request, to the end of its header."""
    handshake_seconds: float = 10.0
    idle_seconds: float = 75.0
    """Between two requests; longer than Prometheus' usual interval of a minute."""
    unread_seconds: float = 30.0
    """While a client reads nothing of what it is sent."""
    lingering_seconds: float = 2.0
    """For the rest of a body that nobody wants."""
    line_bytes: int = 8190
    head_bytes: int = 65536


class Seats:
    """Who is connected, by address."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._taken: Counter[str] = Counter()
        self._total = 0

    @property
    def taken(self) -> int:
        """Connections now, those that are still shaking hands among them."""
        return self._total

    def take(self, address: str) -> Callable[[], None] | None:
        """Takes a seat and returns how to leave it, any number of times; None when there is no seat left."""
        if self._total >= self._limits.connections or self._taken[address] >= self._limits.per_address:
            self._forget(address)
            return None
        self._total += 1
        self._taken[address] += 1
        seated = True

        def leave() -> None:
            nonlocal seated
            if seated:
                seated = False
                self._total -= 1
                self._taken[address] -= 1
                self._forget(address)

        return leave

    def _forget(self, address: str) -> None:
        if not self._taken[address]:
            del self._taken[address]


class Connection(web.RequestHandler):
    """One client; it is dropped when it takes too long over the header of a request."""

    __slots__ = ("_busy", "_head", "_leave", "_limits", "_timer")

    def __init__(self, manager: web.Server, limits: Limits, leave: Callable[[], None], **options: Any) -> None:
        super().__init__(
            manager,
            keepalive_timeout=limits.idle_seconds,
            max_line_size=limits.line_bytes,
            max_field_size=limits.line_bytes,
            lingering_time=limits.lingering_seconds,
            # A body is never read, so nobody shall make us unpack one.
            auto_decompress=False,
            **options,
        )
        self._limits = limits
        self._leave = leave
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False
        self._head = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Gives the client its time for the first header."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Bounds what belongs to no request yet."""
        if not self._busy:
            if self._head > self._limits.head_bytes:
                self._drop()
                return
            # Counted read by read, because the end of a header is known only after this read.
            self._head += len(data)
            if self._timer is None:
                self._await_head()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Leaves the seat."""
        self._leave()
        self._cancel_timer()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answers what was not HTTP, with neither a traceback in the log nor an echo; a bug keeps its traceback."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = web.Response(status=status, text="not a request that can be understood\n")
        response.headers.update({"X-Content-Type-Options": "nosniff", "Server": "stallwatch"})
        response.force_close()
        return response

    def begin(self) -> None:
        """A whole header was read."""
        self._busy = True
        self._head = 0
        self._cancel_timer()

    def end(self) -> None:
        """The request has its answer."""
        self._busy = False

    def _await_head(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limits.head_seconds, self._drop)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self) -> None:
        self._cancel_timer()
        if self.transport is not None:
            self.transport.abort()


@web.middleware
async def patience(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells the connection when a request begins and ends."""
    connection = request.protocol
    if not isinstance(connection, Connection):
        return await handler(request)
    connection.begin()
    try:
        return await handler(request)
    finally:
        connection.end()


class Reception:
    """Accepts the connections of a server."""

    def __init__(
        self, manager: web.Server, listener: socket.socket, *, certificates: Certificates | None, limits: Limits
    ) -> None:
        self._manager = manager
        self._listener = listener
        self._certificates = certificates
        self._limits = limits
        self.seats = Seats(limits)
        self._told = -_QUIET_SECONDS
        self._refused = 0

    async def accept(self) -> None:
        """Accepts until it is cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as handshakes:
            while True:
                try:
                    client, address = await loop.sock_accept(self._listener)
                except OSError as error:
                    if error.errno in _NOT_LISTENING:
                        raise
                    if error.errno in _OUT_OF_RESOURCES:
                        self._refuse(loop.time(), reason="out of file descriptors or memory")
                        await asyncio.sleep(1)
                    continue  # else the client was gone before we came
                leave = self.seats.take(address[0])
                if leave is None:
                    client.close()
                    self._refuse(loop.time(), reason="as many as we serve at once are open")
                    continue
                handshakes.create_task(self._welcome(client, leave))

    async def _welcome(self, client: socket.socket, leave: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        made = False

        def protocol() -> Connection:
            nonlocal made
            made = True
            return Connection(self._manager, self._limits, leave, loop=loop, access_log=None)

        try:
            _set_write_patience(client, self._limits.unread_seconds)
            context = await self._certificates.fresh() if self._certificates else None
            await loop.connect_accepted_socket(
                protocol,
                client,
                ssl=context,
                ssl_handshake_timeout=self._limits.handshake_seconds if context else None,
                ssl_shutdown_timeout=1.0 if context else None,
            )
        except (OSError, TimeoutError) as error:
            # Whatever a client may do to a handshake; a probe that only connects does it every few seconds.
            log.debug("connection failed", kind=type(error).__name__)
            leave()
        except BaseException:
            leave()
            raise
        finally:
            if not made:
                client.close()

    def _refuse(self, now: float, *, reason: str) -> None:
        self._refused += 1
        if now - self._told >= _QUIET_SECONDS:
            log.warning("connections refused", count=self._refused, reason=reason)
            self._told = now
            self._refused = 0


def _set_write_patience(client: socket.socket, seconds: float) -> None:
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        with suppress(OSError):  # not a TCP socket, or gone already
            client.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
