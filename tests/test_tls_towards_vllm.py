import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stallwatch.observations import Failure
from stallwatch.scheduling import SourceError
from stallwatch.settings import EngineSettings
from stallwatch.sources.engine import EngineSource
from stallwatch.sources.http import Target
from stallwatch.sources.served import list_models
from tests.certificates import Pair, ca_file, issue
from tests.raw_server import answer, models
from tests.virtual import run

PAGE = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="tiny"} 7.0
"""


class Server:
    """A server behind TLS whose certificate and key can be changed while it runs."""

    def __init__(self, pair: Pair) -> None:
        self.port = 0
        self.key: str | None = None
        self.authorizations: list[str | None] = []
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.show(pair)

    def show(self, pair: Pair) -> None:
        """From the next connection on, this certificate."""
        self.context.load_cert_chain(pair.cert, pair.key)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        sent = next((line.partition(": ")[2] for line in head.splitlines() if line.startswith("Authorization")), None)
        self.authorizations.append(sent)
        if self.key is not None and sent != f"Bearer {self.key}":
            writer.write(answer("401 Unauthorized"))
        elif path.startswith("/metrics"):
            writer.write(answer("200 OK", PAGE, kind="text/plain; version=0.0.4"))
        else:
            writer.write(models({"id": "tiny"}))
        writer.close()


@asynccontextmanager
async def behind_tls(pair: Pair) -> AsyncIterator[Server]:
    shown = Server(pair)
    listening = await asyncio.start_server(shown.talk, "127.0.0.1", 0, ssl=shown.context)
    async with listening:
        shown.port = listening.sockets[0].getsockname()[1]
        yield shown


async def asked(target: Target, session: aiohttp.ClientSession) -> Failure | None:
    """Asks for the models, as the canary does: the reason why there was no answer."""
    try:
        await list_models(target, session)
    except SourceError as error:
        return error.reason
    return None


async def scraped(target: Target, session: aiohttp.ClientSession) -> Failure | None:
    """Asks for the metrics, as the polling loop does."""
    source = EngineSource(session, target, EngineSettings(), clock=asyncio.get_running_loop().time)
    try:
        sample = await source.poll()
    except SourceError as error:
        return error.reason
    assert sample.engines
    return None


BOTH = pytest.mark.parametrize("ask", [asked, scraped], ids=["canary", "engine"])
Ask = Callable[[Target, aiohttp.ClientSession], Any]


def failure(pair: Pair, ask: Ask, *, host: str = "127.0.0.1", **access: Any) -> Failure | None:
    async def main() -> Failure | None:
        async with behind_tls(pair) as server:
            target = Target(f"https://{host}:{server.port}", **access)
            async with target.session() as session:
                reason: Failure | None = await ask(target, session)
                return reason

    return run(main())


@BOTH
def test_the_configured_authority_is_believed_and_no_other(tmp_path: Path, ask: Ask) -> None:
    """A certificate by the authority of the CA file is accepted; any other is a TLS failure."""
    pair = issue(tmp_path)

    assert failure(pair, ask, ca_file=ca_file(tmp_path)) is None
    assert failure(pair, ask, ca_file=ca_file(tmp_path, "strangers")) is Failure.TLS
    assert failure(pair, ask) is Failure.TLS


@BOTH
def test_the_name_in_the_certificate_counts(tmp_path: Path, ask: Ask) -> None:
    """A certificate for another name is a TLS failure, unless that is the name that was configured."""
    pair = issue(tmp_path, "vllm.internal")
    ours = ca_file(tmp_path)

    assert failure(pair, ask, ca_file=ours) is Failure.TLS
    assert failure(pair, ask, ca_file=ours, server_name="vllm.internal") is None
    assert failure(pair, ask, ca_file=ours, server_name="vllm.external") is Failure.TLS


@BOTH
def test_verification_can_be_switched_off(tmp_path: Path, ask: Ask) -> None:
    """Whoever says so connects to any certificate, by any authority, for any name."""
    pair = issue(tmp_path, "elsewhere", by="strangers")

    assert failure(pair, ask, insecure_skip_verify=True) is None


@BOTH
def test_a_replaced_authority_holds_from_the_next_request_on(tmp_path: Path, ask: Ask) -> None:
    """When server and CA file move to another authority, the same session goes on, in both directions of the race."""
    old, new = issue(tmp_path / "old"), issue(tmp_path / "new", by="strangers")
    path = tmp_path / "ca.pem"

    async def main() -> list[Failure | None]:
        path.write_bytes(ca_file(tmp_path).read_bytes())
        async with behind_tls(old) as server:
            target = Target(f"https://127.0.0.1:{server.port}", ca_file=path)
            async with target.session(keep_alive=False) as session:
                seen = [await ask(target, session)]
                server.show(new)
                seen.append(await ask(target, session))
                path.write_bytes(ca_file(tmp_path, "strangers").read_bytes())
                return [*seen, await ask(target, session)]

    assert run(main()) == [None, Failure.TLS, None]


@BOTH
def test_keys_are_rotated_by_file_and_by_401(tmp_path: Path, ask: Ask) -> None:
    """A changed key file is read at the next request; one that looks unchanged is read again after a 401."""
    key = tmp_path / "key"

    async def main() -> tuple[list[Failure | None], list[str | None]]:
        key.write_text("key-1\n")
        async with behind_tls(issue(tmp_path)) as server:
            server.key = "key-1"
            target = Target(f"https://127.0.0.1:{server.port}", ca_file=ca_file(tmp_path), api_key_file=key)
            async with target.session() as session:
                seen = [await ask(target, session)]
                key.write_text("key-22\n")
                server.key = "key-22"
                seen.append(await ask(target, session))
                before = key.stat()
                key.write_text("key-33\n")
                os.utime(key, ns=(before.st_atime_ns, before.st_mtime_ns))
                server.key = "key-33"
                seen.append(await ask(target, session))
                seen.append(await ask(target, session))
                return seen, server.authorizations

    seen, sent = run(main())

    assert seen == [None, None, Failure.AUTH, None]
    assert list(dict.fromkeys(sent)) == ["Bearer key-1", "Bearer key-22", "Bearer key-33"]


def test_the_key_never_leaves_before_the_certificate_is_believed(tmp_path: Path) -> None:
    """A server that cannot prove who it is does not learn the key."""
    key = tmp_path / "key"
    key.write_text("key-1\n")

    async def main() -> tuple[Failure | None, list[str | None]]:
        async with behind_tls(issue(tmp_path, by="strangers")) as server:
            target = Target(f"https://127.0.0.1:{server.port}", ca_file=ca_file(tmp_path), api_key_file=key)
            async with target.session() as session:
                return await asked(target, session), server.authorizations

    assert run(main()) == (Failure.TLS, [])


def test_a_server_that_hangs_in_the_handshake_is_given_up(tmp_path: Path) -> None:
    """A port that is open and shakes no hands is a timeout, not a wait for ever."""

    async def main() -> Failure | None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            target = Target(f"https://127.0.0.1:{silent.getsockname()[1]}", ca_file=ca_file(tmp_path))
            async with target.session() as session:
                return await asked(target, session)

    assert run(main()) is Failure.TIMEOUT
