"""The paths of vLLM's HTTP server, and the layers that every request passes: faults, the key, the counters."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from stallwatch.simulator.asking import BadRequest, parse, read_body
from stallwatch.simulator.faults import FaultKind, active, blocked_until
from stallwatch.simulator.frontend import SERVER, SimulatedServer, Stream
from stallwatch.simulator.protocol import DONE, KEEP_ALIVE, Detokenizer, Writer, compact, sse_error

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_UNCOUNTED = frozenset({"/metrics", "/metrics/", "/health", "/load", "/ping", "/version", "/server_info"})
_TEXT = "text/plain; version=1.0.0; charset=utf-8"
_BUSY = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
_OLD_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def routes(*, dev_mode: bool) -> web.RouteTableDef:
    """All paths that are served; putting the engine to sleep only in development mode."""
    table = web.RouteTableDef()
    _basic_routes(table)
    _metrics_routes(table)
    _text_routes(table)
    if dev_mode:
        _dev_routes(table)
    return table


@web.middleware
async def path_faults(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses, delays or silences what the way to the server does not let through."""
    server = request.app[SERVER]
    server.connection(request.transport)
    if server.refuses():
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("refused")
    faults = server.scenario.faults
    while (until := blocked_until(faults, server.now)) > server.now:
        await server.wait_until(until)
    if request.path.startswith("/metrics"):
        if active(faults, FaultKind.METRICS_DOWN, server.now):
            return web.Response(status=503, text="Service Unavailable")
        if slow := active(faults, FaultKind.METRICS_SLOW, server.now):
            await server.wait_until(server.now + slow.value)
    return await handler(request)


@web.middleware
async def authentication(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Asks for the key on the OpenAI paths, and nowhere else."""
    key = request.app[SERVER].scenario.server.api_key
    if key is not None and request.path.startswith(_GUARDED) and request.method != "OPTIONS":
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or given != key:
            return web.json_response({"error": "Unauthorized"}, status=401)
    return await handler(request)


@web.middleware
async def counting(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers errors as vLLM does, and counts every request but those of probes."""
    server = request.app[SERVER]
    began, status, size = server.now, 500, 0
    server.in_flight += 1
    try:
        response = await handler(request)
    except BadRequest as error:
        response = web.Response(status=error.status, body=compact(error.body), content_type="application/json")
    except web.HTTPNotFound:
        response = web.json_response({"detail": "Not Found"}, status=404)
    except web.HTTPMethodNotAllowed:
        response = web.json_response({"detail": "Method Not Allowed"}, status=405)
    finally:
        server.in_flight -= 1
    status = response.status
    if isinstance(response, web.Response) and isinstance(response.body, bytes):
        size = len(response.body)
    if request.path not in _UNCOUNTED:
        server.world.http.count(
            "none" if status == 404 and request.match_info.http_exception is not None else request.path,
            method=request.method,
            status=status,
            seconds=server.now - began,
            size_in=int(request.headers.get("Content-Length", 0)),
            size_out=size,
        )
    return response


def _basic_routes(routes: web.RouteTableDef) -> None:
    async def empty(_: web.Request) -> web.Response:
        return web.Response()

    routes.get("/health")(empty)
    for method in (routes.get, routes.post):
        method("/ping")(empty)

    @routes.get("/version")
    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": request.app[SERVER].scenario.server.version})

    @routes.get("/load")
    async def load(request: web.Request) -> web.Response:
        server = request.app[SERVER]
        busy = server.scenario.server.load_tracking
        waiting = sum(len(e.scheduler.requests()) for e in server.world.engines)
        return web.json_response({"server_load": waiting if busy else 0})

    @routes.get("/v1/models")
    async def models(request: web.Request) -> web.Response:
        server = request.app[SERVER]
        name, created = server.scenario.server.model, int(server.world.epoch)
        permission = {
            "id": "modelperm-simulated",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": name,
            "parent": None,
            "max_model_len": server.scenario.engine.max_model_len,
            "permission": [permission],
        }
        return web.json_response({"object": "list", "data": [card]})


def _metrics_routes(routes: web.RouteTableDef) -> None:
    @routes.get("/metrics")
    async def whole(request: web.Request) -> web.Response:
        # Without the trailing slash the instrumentator's own route answers, which knows no filter.
        server = request.app[SERVER]
        server.pump()
        return web.Response(body=server.world.page.render().encode(), headers={"Content-Type": _TEXT})

    @routes.get("/metrics/")
    async def filtered(request: web.Request) -> web.Response:
        server = request.app[SERVER]
        server.pump()
        names = frozenset(request.query.getall("name[]", []))
        accepted = request.headers.get("Accept", "")
        open_format = "application/openmetrics-text" in accepted
        text = server.world.page.render(names or None, openmetrics=open_format)
        kind = _TEXT if "version=1.0.0" in accepted else _OLD_TEXT
        return web.Response(body=text.encode(), headers={"Content-Type": _OPENMETRICS if open_format else kind})


def _dev_routes(routes: web.RouteTableDef) -> None:
    @routes.post("/sleep")
    async def sleep(request: web.Request) -> web.Response:
        server = request.app[SERVER]
        level = int(request.query.get("level", "1"))
        server.pump()
        for delivery in server.world.sleep(level, server.now):
            if stream := server.stream(delivery.request.id):
                stream.push(delivery)
        return web.json_response({"status": "sleeping", "level": level})

    @routes.post("/wake_up")
    async def wake_up(request: web.Request) -> web.Response:
        server = request.app[SERVER]
        server.pump()
        server.world.wake_up(server.now)
        server.nudge()
        return web.json_response({"status": "awake", "tags": None})

    @routes.get("/is_sleeping")
    async def is_sleeping(request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": request.app[SERVER].world.asleep is not None})


def _text_routes(routes: web.RouteTableDef) -> None:
    @routes.post("/v1/completions")
    async def completions(request: web.Request) -> web.StreamResponse:
        return await _text(request, chat=False)

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: web.Request) -> web.StreamResponse:
        return await _text(request, chat=True)


async def _text(http: web.Request, *, chat: bool) -> web.StreamResponse:
    server = http.app[SERVER]
    config = server.scenario.server
    body = read_body(await http.read(), http.content_type)
    ask = parse(body, chat=chat, models=(config.model,), max_model_len=server.scenario.engine.max_model_len)
    number = server.next_number()
    given = http.headers.get("X-Request-Id") or f"{number:016x}"
    prefix = "chatcmpl" if chat else "cmpl"
    writer = Writer(
        ask,
        f"{prefix}-{given}",
        int(server.world.epoch + server.now),
        f"vllm-{config.version}-{_fingerprint(config.model)}",
    )
    rank, misdirected = _rank(http.headers.get("X-data-parallel-rank"), config.data_parallel_size)
    if misdirected is not None and not ask.stream:
        raise BadRequest(misdirected)
    server.pump()
    if server.world.full():
        raise BadRequest(_BUSY, status=503, kind="Service Unavailable")
    if not ask.stream:
        async with server.open(ask, rank=rank, request_id=f"{writer.id}-{number}") as stream:
            while stream.reason is None and not stream.failed:
                await stream.news()
            if stream.failed:
                raise BadRequest("Internal server error", status=500, kind="InternalServerError")
            text = Detokenizer().feed(stream.request.output, last=True)
            answer = writer.answer(stream.request, text, stream.reason or "stop")
        return web.Response(body=answer, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    wire = _Wire(server, response)
    if misdirected is not None:
        await wire.send(sse_error(misdirected, kind="BadRequestError", code=400), DONE, last=True)
        return response
    async with server.open(ask, rank=rank, request_id=f"{writer.id}-{number}") as stream:
        await _stream(server, http, wire, writer=writer, stream=stream)
    return response


async def _stream(server: SimulatedServer, http: web.Request, wire: "_Wire", *, writer: Writer, stream: Stream) -> None:
    ask = writer.ask
    interval = max(server.scenario.server.stream_interval, ask.stream_interval)
    detokenizer = Detokenizer()
    sent = 0
    broken = _stream_error(server)
    keep_alive = server.scenario.server.keep_alive_seconds
    while True:
        while keep_alive is not None and not await stream.news_within(server.wait_until(server.now + keep_alive)):
            await wire.send(KEEP_ALIVE)
        await stream.news()
        if stream.failed:
            if server.world.down or server.refuses():
                if http.transport is not None:
                    http.transport.abort()
                return
            await wire.send(_internal_error(), DONE, last=True)
            return
        if broken is None:
            broken = _stream_error(server)
        if broken is not None and server.now >= broken:
            stream.failed = True
            server.world.abort(stream.request, server.now)
            await wire.send(_internal_error(), DONE, last=True)
            return
        upto, reason = stream.upto, stream.reason
        if reason is None and sent and upto - sent < interval:
            continue
        parts: list[bytes] = []
        if ask.chat and sent == 0:
            parts.append(writer.role_chunk())
            if ask.echo and ask.last_message:
                parts.append(writer.echo_chunk())
        text = detokenizer.feed(stream.request.output[sent:upto], last=reason is not None)
        parts.append(writer.token_chunk(stream.request, text, first=sent, upto=upto, reason=reason))
        sent = upto
        if reason is None:
            await wire.send(*parts)
            continue
        if ask.include_usage:
            parts.append(writer.usage_chunk(sent))
        await wire.send(*parts, DONE, last=True)
        return


def _stream_error(server: SimulatedServer) -> float | None:
    fault = active(server.scenario.faults, FaultKind.STREAM_ERROR, server.now)
    return fault.start if fault is not None else None


def _internal_error() -> bytes:
    return sse_error("Internal server error", kind="InternalServerError", code=500)


def _rank(header: str | None, ranks: int) -> tuple[int | None, str | None]:
    try:
        rank = int(header) if header is not None else None
    except ValueError:
        rank = None
    if rank is not None and not 0 <= rank < ranks:
        return None, f"data_parallel_rank {rank} is out of range [0, {ranks})."
    return rank, None


def _fingerprint(model: str) -> str:
    return f"{sum(model.encode()) * 2654435761 % 2**32:08x}"


class _Wire:
    """The path to one reader: straight through, or a proxy that passes on only full buffers."""

    def __init__(self, server: SimulatedServer, response: web.StreamResponse) -> None:
        self._server = server
        self._response = response
        self._buffer = bytearray()

    async def send(self, *events: bytes, last: bool = False) -> None:
        fault = active(self._server.scenario.faults, FaultKind.BUFFERING, self._server.now)
        self._buffer += b"".join(events)
        if fault is None or last or len(self._buffer) >= fault.value:
            data, self._buffer = bytes(self._buffer), bytearray()
            await self._response.write(data)
        if last:
            await self._response.write_eof()
