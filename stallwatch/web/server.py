"""The listener: the live page, `/metrics`, the probes and the JSON views of what is known.

Handlers read what is already in memory and never wait for vLLM, so a scrape answers in milliseconds while the server
that is watched hangs. Text is rendered in a thread: milliseconds on the loop would look like latency of the canary.
"""

import asyncio
import errno
import gzip
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import structlog
from aiohttp import web
from prometheus_client.core import Metric

from stallwatch import exporter
from stallwatch.drawing.plain import as_json
from stallwatch.web.access import Guard
from stallwatch.web.assets import assets
from stallwatch.web.connections import Limits, Reception, patience
from stallwatch.web.events import Events
from stallwatch.web.hygiene import harden, only_reading
from stallwatch.web.tls import Certificates

log = structlog.get_logger()

_MAX_BODY = 16 * 1024  # we take no bodies; a client that sends one is told so before it is read
_TIMELINE_SECONDS = 900.0
_MOST_TIMELINE_SECONDS = 7200.0
_RENDERS = 2  # pages that are rendered at once, whoever asks
_SAME_SECONDS = 2.0  # for which everybody gets the same timeline: many pages may come at once
_SHUTDOWN = 1.0  # seconds that requests under way are given
_LIMITS = Limits()

T = TypeVar("T")
_Shown = tuple[bytes, str]  # body and content type


class RunBlocking(Protocol):
    """Runs a function off the loop."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Gives what `work` returns."""


EVENTS = web.AppKey("events", Events)


class Views(Protocol):
    """What the listener shows; each call answers from memory."""

    def families(self) -> tuple[Metric, ...]:
        """What `/metrics` says now."""

    def status(self) -> Mapping[str, Any]:
        """What `/api/v1/status` says now, ready for JSON."""

    def stalls(self) -> Mapping[str, Any]:
        """What `/api/v1/stalls` says now, ready for JSON."""

    def stall(self, wanted: str) -> Mapping[str, Any] | None:
        """What `/api/v1/stalls/{id}` says now; None when no such stall is remembered."""

    def timeline(self, seconds: float) -> Callable[[], Mapping[str, Any]]:
        """What `/api/v1/timeline` says of the last `seconds`, by a call that may be made in a thread."""

    def live(self) -> Callable[[], Mapping[str, Any]]:
        """What an open page hears now, by a call that may be made in a thread."""

    def alive(self) -> bool:
        """Whether the loop turns and the heartbeat is fresh."""


def create_app(
    views: Views, *, guard: Guard | None = None, run_blocking: RunBlocking = asyncio.to_thread
) -> web.Application:
    """The routes over `views`; `run_blocking` runs a function off the loop (in tests: at once)."""
    rendering = asyncio.Semaphore(_RENDERS)
    shared: dict[float, tuple[float, asyncio.Future[tuple[bytes, bytes]]]] = {}
    files = assets()
    events = Events(views.live, run_blocking)

    async def metrics(request: web.Request) -> web.Response:
        shown = views.families()
        accept = request.headers.get("Accept", "")
        return await rendered(request, lambda: exporter.render(shown, accept))

    async def rendered(request: web.Request, render: Callable[[], _Shown]) -> web.Response:
        takes_gzip = "gzip" in request.headers.get("Accept-Encoding", "")

        def packed() -> _Shown:
            body, content_type = render()
            # Level 1 costs a twentieth of the default level and a page still shrinks tenfold.
            return gzip.compress(body, compresslevel=1) if takes_gzip else body, content_type

        async with rendering:
            body, content_type = await run_blocking(packed)
        encoding = {"Content-Encoding": "gzip"} if takes_gzip else {}
        return web.Response(body=body, headers={"Content-Type": content_type, **encoding})

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if views.alive() else web.Response(status=503, text="heartbeat is late\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def status(_: web.Request) -> web.Response:
        return web.json_response(views.status(), dumps=as_json)

    async def stalls(_: web.Request) -> web.Response:
        return web.json_response(views.stalls(), dumps=as_json)

    async def stall(request: web.Request) -> web.Response:
        found = views.stall(request.match_info["id"])
        if found is None:
            return web.json_response({"error": "no such stall is remembered"}, status=404)
        return web.json_response(found, dumps=as_json)

    async def timeline(request: web.Request) -> web.Response:
        asked = request.query.get("seconds", f"{_TIMELINE_SECONDS:g}")
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= _MOST_TIMELINE_SECONDS:
            problem = f"seconds: write a number above 0 and up to {_MOST_TIMELINE_SECONDS:g}"
            return web.json_response({"error": problem}, status=400)
        now = asyncio.get_running_loop().time()
        if seconds not in shared or now - shared[seconds][0] >= _SAME_SECONDS:
            shared.clear()
            shared[seconds] = now, asyncio.ensure_future(drawn(views.timeline(seconds)))
        body, packed = await asyncio.shield(shared[seconds][1])
        if "gzip" not in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=body, content_type="application/json")
        return web.Response(body=packed, content_type="application/json", headers={"Content-Encoding": "gzip"})

    async def drawn(document: Callable[[], Mapping[str, Any]]) -> tuple[bytes, bytes]:
        def both() -> tuple[bytes, bytes]:
            body = as_json(document()).encode()
            return body, gzip.compress(body, compresslevel=1)

        async with rendering:
            return await run_blocking(both)

    async def index(_: web.Request) -> web.Response:
        return files["index.html"].page()

    async def static(request: web.Request) -> web.Response:
        asset = files.get(request.match_info["name"])
        return asset.answer(request) if asset is not None else web.Response(status=404, text="no such file\n")

    middlewares = (patience, only_reading) if guard is None else (patience, only_reading, guard.middleware())
    app = web.Application(client_max_size=_MAX_BODY, middlewares=middlewares)
    app.on_response_prepare.append(harden)
    app[EVENTS] = events
    app.on_shutdown.append(lambda _: events.close())
    app.router.add_get("/", index)
    app.router.add_get("/static/{name}", static)
    app.router.add_get("/api/v1/events", events.serve)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/api/v1/status", status)
    app.router.add_get("/api/v1/timeline", timeline)
    app.router.add_get("/api/v1/stalls", stalls)
    app.router.add_get("/api/v1/stalls/{id}", stall)
    return app


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: dual-stack for `::`, IPv4 where the machine has no IPv6.

    Raises `OSError` when the port is taken or the address is not ours.
    """
    if ":" not in host:
        family = socket.AF_INET
    else:
        family = socket.AF_INET6
        try:
            return _bound(family, host, port)
        except OSError as error:
            missing = error.errno in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
            if host != "::" or not missing:
                raise
            log.info("no ipv6 here, listening on ipv4", port=port)
            family, host = socket.AF_INET, "0.0.0.0"  # noqa: S104  (the address that was asked for, in IPv4)
    return _bound(family, host, port)


@asynccontextmanager
async def serving(
    app: web.Application,
    listener: socket.socket,
    *,
    certificates: Certificates | None = None,
    limits: Limits = _LIMITS,
) -> AsyncIterator[Reception]:
    """Serves `app` on `listener`, over TLS if there are certificates, while the context is open."""
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=_SHUTDOWN)
    await runner.setup()
    if runner.server is None:
        raise RuntimeError("the runner has no server after its setup")
    reception = Reception(runner.server, listener, certificates=certificates, limits=limits)
    raised: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(reception.accept(), name="listener"),
                group.create_task(app[EVENTS].run(), name="events"),
            ]
            try:
                yield reception
            except BaseException as error:
                raised.append(error)
                raise
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as together:
        if list(together.exceptions) == raised:
            raise raised[0] from None  # what the body raised stays what it is
        raise
    finally:
        listener.close()
        await runner.cleanup()


def _bound(family: int, host: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(128)
        listener.setblocking(False)  # noqa: FBT003  (the standard library's signature)
    except OSError:
        listener.close()
        raise
    return listener
