"""What every answer of ours has in common, and which questions get none."""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

METHODS: Final = ("GET", "HEAD")

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


async def harden(_: web.Request, response: web.StreamResponse) -> None:
    """Adds the headers that a handler did not set itself."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    # Which releases of which libraries we run is nobody's business.
    response.headers["Server"] = "stallwatch"


@web.middleware
async def only_reading(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses what would change something: nothing here can be changed."""
    if request.method not in METHODS:
        raise web.HTTPMethodNotAllowed(request.method, METHODS)
    return await handler(request)
