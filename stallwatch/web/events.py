"""`/api/v1/events`: one event a second for every open page, as server-sent events.

An event is made once, off the loop, however many pages listen, and not at all while none does. Each page has a short
queue; one that does not take its events in time is dropped, and comes back by itself. Pages are served a few at a
time, so that a token of the canary never waits behind all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web

from stallwatch.drawing.plain import as_json

INTERVAL_SECONDS: Final = 1.0
MOST_PAGES: Final = 100
_BACKLOG: Final = 5  # events that wait for a slow page
_AT_ONCE: Final = 4  # pages that are served in one turn of the loop
_APART_SECONDS: Final = 0.01  # between two such turns
_LONGEST_SECONDS: Final = 3600.0  # for which one stream lasts: then its credentials are judged anew

Render = Callable[[], Mapping[str, Any]]


class Page:
    """One client that listens."""

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop = drop
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue(_BACKLOG)

    def offer(self, event: bytes | None) -> None:
        """Gives an event, or None for the end; a page whose queue is full is dropped."""
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            self._drop()

    async def next(self) -> bytes | None:
        """The next event; None at the end."""
        return await self._events.get()


class Events:
    """Makes events and gives them to the pages that listen."""

    def __init__(
        self,
        content: Callable[[], Render],
        run_blocking: Callable[[Callable[[], bytes]], Awaitable[bytes]],
        *,
        most: int = MOST_PAGES,
    ) -> None:
        """`content` is called on the loop; what it returns is called by `run_blocking`, off the loop."""
        self._content = content
        self._run_blocking = run_blocking
        self._most = most
        self._pages: set[Page] = set()
        self._somebody = asyncio.Event()
        self._closed = False
        self.made = 0  # events so far

    def __len__(self) -> int:
        """Pages that listen."""
        return len(self._pages)

    async def run(self) -> None:
        """Makes an event a second while somebody listens."""
        loop = asyncio.get_running_loop()
        while True:
            await self._somebody.wait()
            began = loop.time()
            render = self._content()
            event = await self._run_blocking(lambda: packed(render()))  # noqa: B023 (called before the next turn)
            self.made += 1
            for place, page in enumerate(tuple(self._pages)):
                if place and place % _AT_ONCE == 0:
                    await asyncio.sleep(_APART_SECONDS)
                page.offer(event)
            await asyncio.sleep(max(0.0, began + INTERVAL_SECONDS - loop.time()))

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answers one request with events until the client goes."""
        headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return web.Response(headers=headers)
        if self._closed or len(self._pages) >= self._most:
            return web.Response(status=503, text="too many pages are open\n", headers={"Retry-After": "5"})
        response = web.StreamResponse(headers=headers)
        page = Page(lambda: _hang_up(request))
        self._pages.add(page)
        self._somebody.set()
        try:
            await response.prepare(request)
            async with asyncio.timeout(_LONGEST_SECONDS):
                while (event := await page.next()) is not None:
                    await response.write(event)
        except (ConnectionError, TimeoutError):
            pass  # the page was closed, or has to ask anew
        finally:
            self._pages.discard(page)
            if not self._pages:
                self._somebody.clear()
        return response

    async def close(self) -> None:
        """Ends every stream, so that nothing waits for them."""
        self._closed = True
        for page in tuple(self._pages):
            page.offer(None)


def packed(content: Mapping[str, Any]) -> bytes:
    """An event as it goes over the wire."""
    return b"data: " + as_json(content).encode() + b"\n\n"


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
