"""How we speak HTTP to the watched server: one address, its key and its certificates.

The key goes to the configured host only: redirects are never followed and proxy variables are ignored. Every expected
failure of the network becomes a `SourceError`; the mapping stands here once, for the metrics endpoint and the canary.
What a server said reaches a detail only through `plain`, so that it can neither flood a log nor forge its lines.
"""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from yarl import URL

from stallwatch.observations import Failure
from stallwatch.scheduling import SourceError
from stallwatch.settings import Access

DETAIL_LENGTH = 200  # characters

Stamp = tuple[int, int, int]  # of a file: when it changes, the file did


def plain(text: str, length: int = DETAIL_LENGTH) -> str:
    """`text` on one line: unprintable characters escaped, white space folded, cut to `length` characters."""
    # Cut first: what is beyond the bound must not cost time either.
    line = " ".join(text[: 4 * length].split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return line if len(line) <= length else line[: length - 3] + "..."


class KeyFile:
    """A bearer key kept in a file, read again when the file changes or when the server refuses the key.

    Without a file it is the fixed `key`, if there is one.
    """

    def __init__(self, path: Path | None, key: str | None = None) -> None:
        self._path = path
        self._stamp: Stamp | None = None
        self._key = key

    def headers(self) -> dict[str, str]:
        """The header to send. Raises `SourceError` when the file gives no usable key and none was ever read."""
        if self._path is not None:
            try:
                self._read(self._path)
            except (OSError, ValueError) as error:
                # A secret that is being replaced is unreadable for a moment; the old key still works or gives a 401.
                if self._key is None:
                    detail = f"key file {self._path} cannot be used: {plain(str(error))}"
                    raise SourceError(Failure.AUTH, detail) from error
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def redact(self, text: str) -> str:
        """`text` without the key, for a server that repeats what it was sent."""
        return text.replace(self._key, "...") if self._key else text

    def _read(self, path: Path) -> None:
        stamp = _stamp(path)
        if stamp != self._stamp:
            self._key = _key(path.read_text(encoding="utf-8"))
            self._stamp = stamp

    def refused(self) -> None:
        """The server said 401: the file is read again at the next request even if its time stamp did not move."""
        self._stamp = None


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _key(text: str) -> str:
    key = text.strip()
    if not (key.isascii() and key.isprintable()):
        # Sent as it is, it would break the header; and no message may show any of it.
        raise ValueError("a key is one line of printable ASCII")
    return key


class Target:
    """One server: its address with an optional path prefix, its key, its certificates."""

    def __init__(
        self,
        url: str,
        *,
        api_key_file: Path | None = None,
        api_key: str | None = None,
        ca_file: Path | None = None,
        server_name: str | None = None,
        insecure_skip_verify: bool = False,
    ) -> None:
        self.base = URL(url)
        self.key = KeyFile(api_key_file, api_key)
        self._ca_file = ca_file
        self._server_name = server_name
        self._insecure = insecure_skip_verify
        self._context: ssl.SSLContext | None = None
        self._context_stamp: Stamp | None = None

    def url(self, path: str) -> URL:
        """The address of `path` (which may carry a query) below the configured prefix."""
        return URL(str(self.base).rstrip("/") + "/" + path.lstrip("/"), encoded=True)

    def session(self, *, connections: int = 4, keep_alive: bool = True) -> aiohttp.ClientSession:
        """A session with no timeouts of its own: each caller bounds its own requests. Must be closed.

        Without `keep_alive` every request has a connection of its own: one that the server closed while it was idle
        then cannot look like a refusal, and closing an answer is seen by the server at once.
        Raises `ssl.SSLError` or `OSError` when the CA file cannot be loaded; settings have checked it before.
        """
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=connections, ssl=self.tls(), ttl_dns_cache=10, force_close=not keep_alive
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "User-Agent": "stallwatch"},
            max_line_size=8190,
            max_field_size=8190,
        )

    @property
    def server_name(self) -> str | None:
        """Name that the certificate must carry when it is not the host of the address."""
        return self._server_name

    def tls(self) -> ssl.SSLContext | bool:
        """What to pass as `ssl` with a request, so that a CA file that was replaced holds from the next request on.

        Raises as `session` does while no certificates were ever loaded.
        """
        if self.base.scheme != "https":
            return True
        try:
            stamp = _stamp(self._ca_file) if self._ca_file else None
            if self._context is None or stamp != self._context_stamp:
                self._context = self._load()
                self._context_stamp = stamp
        except OSError:  # which ssl.SSLError is
            if self._context is None:
                raise
            # A file that is being replaced; the old authorities still hold.
        return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self._ca_file) if self._ca_file else None)
        if self._insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def target_of(access: Access) -> Target:
    """The server that settings name."""
    return Target(
        access.url,
        api_key_file=access.api_key_file,
        api_key=access.api_key.get_secret_value() if access.api_key else None,
        ca_file=access.ca_file,
        server_name=access.server_name,
        insecure_skip_verify=access.insecure_skip_verify,
    )


@contextmanager
def network_failures() -> Iterator[None]:
    """Turns what a broken network or server does to a request into a `SourceError`."""
    try:
        yield
    except aiohttp.ClientConnectorDNSError as error:
        raise SourceError(Failure.DNS, plain(str(error))) from error
    except (aiohttp.ClientSSLError, ssl.SSLError) as error:
        raise SourceError(Failure.TLS, plain(str(error))) from error
    except aiohttp.ClientConnectorError as error:
        raise SourceError(Failure.REFUSED, plain(str(error))) from error
    except aiohttp.ServerDisconnectedError as error:
        raise SourceError(Failure.REFUSED, "the connection was closed before an answer came") from error
    except aiohttp.ClientPayloadError as error:
        raise SourceError(Failure.CUT, "the answer broke off") from error
    except (TimeoutError, aiohttp.ServerTimeoutError) as error:
        raise SourceError(Failure.TIMEOUT, plain(str(error)) or "no answer in time") from error
    except (aiohttp.ClientResponseError, aiohttp.InvalidURL) as error:
        # Also what aiohttp says of an answer that is not HTTP, or of headers beyond its limits.
        message = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
        raise SourceError(Failure.MALFORMED, f"not an HTTP answer: {plain(message, 120)}") from error
    except (ConnectionError, aiohttp.ClientOSError) as error:
        # What breaks while an answer's body is read is a ClientPayloadError.
        raise SourceError(Failure.REFUSED, f"before an answer came: {plain(str(error))}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise SourceError(Failure.CUT, plain(str(error))) from error


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, or a little more than `limit` bytes of it."""
    body = bytearray()
    while len(body) <= limit and (piece := await response.content.readany()):
        body += piece
    return bytes(body)


def refusal(status: int, detail: str = "") -> SourceError | None:
    """What an HTTP status other than 200 means, or None for 200."""
    if status == 200:
        return None
    if status in {401, 403}:
        reason = Failure.AUTH
    elif 300 <= status < 400:
        reason = Failure.REDIRECT
    elif status in {429, 503}:
        reason = Failure.BUSY
    elif 400 <= status < 500:
        reason = Failure.REJECTED
    elif status >= 500:
        reason = Failure.SERVER_ERROR
    else:
        reason = Failure.MALFORMED
    return SourceError(reason, f"HTTP {status}" + (f": {detail}" if detail else ""))
