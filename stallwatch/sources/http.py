"""How we speak HTTP to the watched server: one address, its key and its certificates.

The key goes to the configured host only: redirects are never followed and proxy variables are ignored. Every expected
failure of the network becomes a `SourceError`; the mapping stands here once, for the metrics endpoint and the canary.
"""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from yarl import URL

from stallwatch.observations import Failure
from stallwatch.scheduling import SourceError


class KeyFile:
    """A bearer key kept in a file, read again when the file changes or when the server refuses the key."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._key: str | None = None

    def headers(self) -> dict[str, str]:
        """The header to send. Raises `SourceError` when the file cannot be read and no key was ever read."""
        if self._path is None:
            return {}
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if stamp != self._stamp:
                self._key = self._path.read_text(encoding="utf-8").strip()
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            # A secret that is being replaced is unreadable for a moment; the old key still works or gives a 401.
            if self._key is None:
                raise SourceError(Failure.AUTH, f"key file {self._path} cannot be read: {error}") from error
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def refused(self) -> None:
        """The server said 401: the file is read again at the next request even if its time stamp did not move."""
        self._stamp = None


class Target:
    """One server: its address with an optional path prefix, its key, its certificates."""

    def __init__(
        self,
        url: str,
        *,
        api_key_file: Path | None = None,
        ca_file: Path | None = None,
        server_name: str | None = None,
        insecure_skip_verify: bool = False,
    ) -> None:
        self.base = URL(url)
        self.key = KeyFile(api_key_file)
        self._ca_file = ca_file
        self._server_name = server_name
        self._insecure = insecure_skip_verify

    def url(self, path: str) -> URL:
        """The address of `path` (which may carry a query) below the configured prefix."""
        return URL(str(self.base).rstrip("/") + "/" + path.lstrip("/"), encoded=True)

    def session(self, *, connections: int = 4) -> aiohttp.ClientSession:
        """A session with no timeouts of its own: each caller bounds its own requests. Must be closed.

        Raises `ssl.SSLError` or `OSError` when the CA file cannot be loaded; settings have checked it before.
        """
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, ssl=self._tls(), ttl_dns_cache=10),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "User-Agent": "stallwatch"},
        )

    @property
    def server_name(self) -> str | None:
        """Name that the certificate must carry when it is not the host of the address."""
        return self._server_name

    def _tls(self) -> ssl.SSLContext | bool:
        if self.base.scheme != "https":
            return True
        context = ssl.create_default_context(cafile=str(self._ca_file) if self._ca_file else None)
        if self._insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@contextmanager
def network_failures() -> Iterator[None]:
    """Turns what a broken network or server does to a request into a `SourceError`."""
    try:
        yield
    except aiohttp.ClientConnectorDNSError as error:
        raise SourceError(Failure.DNS, str(error)) from error
    except (aiohttp.ClientSSLError, ssl.SSLError) as error:
        raise SourceError(Failure.TLS, str(error)) from error
    except aiohttp.ClientConnectorError as error:
        raise SourceError(Failure.REFUSED, str(error)) from error
    except aiohttp.ServerDisconnectedError as error:
        raise SourceError(Failure.REFUSED, "the connection was closed before an answer came") from error
    except aiohttp.ClientPayloadError as error:
        raise SourceError(Failure.CUT, str(error)) from error
    except (TimeoutError, aiohttp.ServerTimeoutError) as error:
        raise SourceError(Failure.TIMEOUT, str(error) or "no answer in time") from error
    except (aiohttp.ClientResponseError, aiohttp.InvalidURL) as error:
        # Also what aiohttp says of an answer that is not HTTP, or of headers beyond its limits.
        raise SourceError(Failure.MALFORMED, str(error)[:200]) from error
    except (aiohttp.ClientError, OSError) as error:
        raise SourceError(Failure.CUT, str(error)[:200]) from error


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
