import asyncio
import os
import ssl
from pathlib import Path

import aiohttp
import pytest

from stallwatch.observations import Failure
from stallwatch.scheduling import SourceError
from stallwatch.sources.http import KeyFile, Target, network_failures, plain, refusal
from tests.raw_server import Asked, Peer, Script, answer, serve
from tests.virtual import run


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        pytest.param("all is well", "all is well", id="plain"),
        pytest.param("two\nlines\r\n\tand more", "two lines and more", id="lines"),
        pytest.param("\x1b[31mred\x00", "\\x1b[31mred\\x00", id="control"),
        pytest.param("right\u202eleft\u2028", "right\\u202eleft", id="direction"),
        pytest.param("größer", "größer", id="letters"),
        pytest.param("x" * 1_000_000, "x" * 197 + "...", id="long"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_a_servers_words_fit_on_one_line(said: str, shown: str) -> None:
    """What a server says is shown on one bounded line without control characters."""
    assert plain(said) == shown


@pytest.mark.parametrize(
    ("base", "path", "url"),
    [
        ("http://127.0.0.1:8000", "/v1/models", "http://127.0.0.1:8000/v1/models"),
        ("http://127.0.0.1:8000/", "v1/models", "http://127.0.0.1:8000/v1/models"),
        ("https://gateway/team/a/", "/v1/models", "https://gateway/team/a/v1/models"),
        ("http://[::1]:8000", "/metrics/?name[]=a", "http://[::1]:8000/metrics/?name[]=a"),
    ],
)
def test_paths_are_joined_below_the_prefix(base: str, path: str, url: str) -> None:
    """A path prefix stays, an IPv6 address stays, and a query goes out as it was written."""
    assert str(Target(base).url(path)) == url


def test_a_key_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """A new key in the file is sent with the next request."""
    path = tmp_path / "key"
    path.write_text("one\n")
    key = KeyFile(path)
    first = key.headers()
    path.write_text("another\n")

    assert (first, key.headers()) == ({"Authorization": "Bearer one"}, {"Authorization": "Bearer another"})


def test_a_refused_key_is_read_again_although_the_file_looks_the_same(tmp_path: Path) -> None:
    """After a 401 the file is read even if neither its time nor its size moved."""
    path = tmp_path / "key"
    path.write_text("one\n")
    stat = path.stat()
    key = KeyFile(path)
    key.headers()
    path.write_text("two\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    unchanged = key.headers()
    key.refused()

    assert (unchanged, key.headers()) == ({"Authorization": "Bearer one"}, {"Authorization": "Bearer two"})


def test_a_key_file_that_vanishes_leaves_the_old_key(tmp_path: Path) -> None:
    """A secret that is just being replaced does not stop requests."""
    path = tmp_path / "key"
    path.write_text("one\n")
    key = KeyFile(path)
    key.headers()
    path.unlink()

    assert key.headers() == {"Authorization": "Bearer one"}


@pytest.mark.parametrize("content", [b"two\nlines", b"not utf-8 \xff", b"h\xc3\xa4", b"a\x00b"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_told(tmp_path: Path, content: bytes) -> None:
    """A key that is not one line of printable ASCII is an authentication failure whose message shows none of it."""
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(SourceError) as caught:
        KeyFile(path).headers()

    assert caught.value.reason is Failure.AUTH
    assert "lines" not in caught.value.detail


def test_a_fixed_key_is_sent_and_redacted() -> None:
    """A key without a file is sent as it is, and is taken out of what a server repeats."""
    key = Target("http://localhost", api_key="sesame").key

    assert key.headers() == {"Authorization": "Bearer sesame"}
    assert key.redact("bad key sesame") == "bad key ..."


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (200, None),
        (101, Failure.MALFORMED),
        (204, Failure.MALFORMED),
        (302, Failure.REDIRECT),
        (400, Failure.REJECTED),
        (401, Failure.AUTH),
        (403, Failure.AUTH),
        (404, Failure.REJECTED),
        (422, Failure.REJECTED),
        (429, Failure.BUSY),
        (500, Failure.SERVER_ERROR),
        (503, Failure.BUSY),
    ],
)
def test_statuses_have_their_reasons(status: int, reason: Failure | None) -> None:
    """Each HTTP status but 200 is a failure with its reason."""
    refused = refusal(status, "why")

    assert (refused.reason if refused else None) is reason


def failure_of(script: Script | None, *, url: str | None = None, ask_at_most: float = 60.0) -> SourceError | None:
    """What `network_failures` makes of a GET against `script`, or against `url`."""

    async def nothing(_asked: Asked, _peer: Peer) -> None:
        return

    async def main() -> SourceError | None:
        async with serve(script or nothing) as server:
            target = Target(url or server.url)
            async with target.session() as session:
                try:
                    with network_failures():
                        async with asyncio.timeout(ask_at_most), session.get(target.url("/")) as response:
                            await response.read()
                except SourceError as error:
                    return error
                return None

    return run(main())


def sends(raw: bytes) -> Script:
    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(raw)

    return script


async def resets(_asked: Asked, peer: Peer) -> None:
    peer.reset()


async def hangs(_asked: Asked, _peer: Peer) -> None:
    await asyncio.sleep(1000)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(sends(answer("200 OK", b"fine")), None, id="fine"),
        pytest.param(sends(b""), Failure.REFUSED, id="hung-up"),
        pytest.param(sends(b"HTTP/1.1 200 OK\r\nContent-Le"), Failure.REFUSED, id="hung-up-in-headers"),
        pytest.param(resets, Failure.REFUSED, id="reset"),
        pytest.param(hangs, Failure.TIMEOUT, id="hangs"),
        pytest.param(sends(b"garbage\r\n\r\n"), Failure.MALFORMED, id="garbage"),
        pytest.param(
            sends(b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\n\r\n"), Failure.MALFORMED, id="long-header"
        ),
        pytest.param(sends(b"HTTP/1.1 200 " + b"x" * 70_000), Failure.MALFORMED, id="endless-status"),
        pytest.param(sends(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), Failure.MALFORMED, id="negative-length"),
        pytest.param(sends(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"), Failure.CUT, id="short"),
        pytest.param(sends(CHUNKED + b"5\r\nab"), Failure.CUT, id="cut-chunk"),
        pytest.param(sends(CHUNKED + b"5\r\nabcde\r\nzz\r\n"), Failure.MALFORMED, id="bad-chunk"),
    ],
)
def test_what_a_broken_server_does_has_a_reason(script: Script, reason: Failure | None) -> None:
    """Whatever a server does to a request is a named failure, never a traceback."""
    failed = failure_of(script)

    assert (failed.reason if failed else None) is reason


def test_plain_text_where_tls_is_expected() -> None:
    """A server without TLS behind an https address is a TLS failure."""

    async def plain_text(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main() -> SourceError:
        server = await asyncio.start_server(plain_text, "127.0.0.1", 0)
        async with server:
            target = Target(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with target.session() as session:
                with pytest.raises(SourceError) as caught, network_failures():
                    async with session.get(target.url("/")):
                        pass
                return caught.value

    assert run(main()).reason is Failure.TLS


def test_a_ca_file_that_is_none_is_told_at_once(tmp_path: Path) -> None:
    """A CA file without certificates fails when the session is made, not at some later request."""
    path = tmp_path / "ca.pem"
    path.write_text("nothing")

    async def main() -> aiohttp.ClientSession:
        return Target("https://localhost", ca_file=path).session()

    with pytest.raises(ssl.SSLError):
        run(main())


A_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBbzCCARWgAwIBAgIUAWUELNFjLp99xzQVvX1qbXK+MwUwCgYIKoZIzj0EAwIw
DDEKMAgGA1UEAwwBYTAgFw0yNjEyMDEwNDQ2NThaGA8yMTI2MTEwNzA0NDY1OFow
DDEKMAgGA1UEAwwBYTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABBFMRnAktc3I
Zf9Z45RvjrbP+6brbIPNe8E8lF6aT5PAiAiuVZKQ5lXW+YPGdYDpKwil45MHFW2B
L4cY8BbgLr6jUzBRMB0GA1UdDgQWBBSD6kW1wdyCTOfJwTTPNHsQNt6I0jAfBgNV
HSMEGDAWgBSD6kW1wdyCTOfJwTTPNHsQNt6I0jAPBgNVHRMBAf8EBTADAQH/MAoG
CCqGSM49BAMCA0gAMEUCIQDVdkBRlaSMJuR8mf5/p9QYehE4sGPQULZ4fqQFnbT6
HAIgffGG2H6cquK/KbWh/3l5REiYOpwJVPOOFHibeCOQF2U=
-----END CERTIFICATE-----
"""  # public, of no use to anybody: its key was thrown away


def test_a_ca_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """Replaced authorities hold from the next request on; a file that is broken for a moment leaves the old ones."""
    path = tmp_path / "ca.pem"
    path.write_text(A_CERTIFICATE)
    target = Target("https://localhost", ca_file=path)
    first = target.tls()
    same = target.tls()
    path.write_text("half a fi")
    broken = target.tls()
    path.write_text("# new\n" + A_CERTIFICATE)

    assert first is same is broken
    assert target.tls() is not first
    assert Target("http://localhost").tls() is True


def test_proxies_and_cookies_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxy variables do not divert requests, and a server's cookies are not sent back."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    async def main() -> list[Asked]:
        async with serve(sends(answer("200 OK", headers="Set-Cookie: a=b\r\n"))) as server:
            target = Target(server.url)
            async with target.session() as session:
                for _ in range(2):
                    async with session.get(target.url("/")) as response:
                        await response.read()
            return server.asked

    asked = run(main())

    assert [("cookie" in one.headers, one.headers["accept-encoding"]) for one in asked] == [(False, "identity")] * 2
