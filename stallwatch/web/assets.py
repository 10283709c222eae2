"""The files of the live page: read once, kept packed, known by what is in them."""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from stallwatch.drawing import files

PAGE: Final = Path(__file__).parent / "static"

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    content_type: str
    body: bytes
    packed: bytes
    tag: str

    def page(self) -> web.Response:
        """The file as a page of its own, which is never kept."""
        return web.Response(body=self.body, headers={**_HEADERS, "Content-Type": self.content_type})

    def answer(self, request: web.Request) -> web.Response:
        """The file, or that it is still the same."""
        # Asked for again each time, so that a new version shows at once, and answered 304 while it is the same.
        headers = {**_HEADERS, "Cache-Control": "no-cache", "ETag": self.tag}
        if self.tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        headers["Content-Type"] = self.content_type
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=self.packed, headers={**headers, "Content-Encoding": "gzip"})
        return web.Response(body=self.body, headers=headers)


def assets() -> Mapping[str, Asset]:
    """Every file by its name; names are unique over our own and the shared ones."""
    found = [path for folder in (files.STATIC, PAGE) for path in sorted(folder.iterdir()) if path.suffix in _TYPES]
    return {path.name: _read(path) for path in found}


def _read(path: Path) -> Asset:
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return Asset(_TYPES[path.suffix], body, gzip.compress(body, mtime=0), tag)
