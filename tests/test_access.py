import asyncio
import base64
import io
import json
import re
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from prometheus_client.core import GaugeMetricFamily, Metric
from structlog.testing import capture_logs

from stallwatch import cli
from stallwatch.settings import WebSettings
from stallwatch.web import server
from stallwatch.web.access import Guard, Guesses, Verdict, guard_for, load_users
from stallwatch.web.connections import Limits, Reception, Seats
from stallwatch.web.credentials import hash_password, read_tokens, read_users
from stallwatch.web.reloading import Reloading
from stallwatch.web.tls import certificates_for, server_context
from tests import virtual
from tests.certificates import ca_file, issue

CHEAP = 2**4  # of scrypt: what is right is right at any cost


LOOPS = pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


class Shown:
    """Views with a page that can be long."""

    lines = 1

    def families(self) -> tuple[Metric, ...]:
        family = GaugeMetricFamily("stallwatch_open_gap_seconds", "Gap.", labels=["n"])
        for number in range(self.lines):
            family.add_metric([str(number)], 1.5)
        return (family,)

    def status(self) -> Mapping[str, Any]:
        return {}

    def stalls(self) -> Mapping[str, Any]:
        return {"stalls": []}

    def stall(self, wanted: str) -> Mapping[str, Any] | None:
        return {"id": wanted} if wanted == "0-1" else None

    def timeline(self, seconds: float) -> Callable[[], Mapping[str, Any]]:
        return lambda: {"seconds": seconds}

    def live(self) -> Callable[[], Mapping[str, Any]]:
        return lambda: {"at_unix": 1.0}

    def alive(self) -> bool:
        return True


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


@asynccontextmanager
async def listening(
    settings: WebSettings | None = None, *, clock: Clock | None = None, limits: Limits | None = None, lines: int = 1
) -> AsyncIterator[tuple[int, Reception]]:
    settings, clock = settings or WebSettings(), clock or Clock()
    views = Shown()
    views.lines = lines
    listener = server.listen("127.0.0.1", 0)
    app = server.create_app(views, guard=guard_for(settings, clock=clock), run_blocking=at_once)
    certificates = certificates_for(settings, clock=clock)
    async with server.serving(app, listener, certificates=certificates, limits=limits or Limits()) as reception:
        yield listener.getsockname()[1], reception


async def wait_until(condition: Callable[[], bool], *, seconds: float = 3.0) -> None:
    for _ in range(int(seconds * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def both(tmp_path: Path) -> WebSettings:
    tokens, users = tmp_path / "tokens", tmp_path / "users"
    tokens.write_text("# old, then new\ntoken-one\n\ntoken-two\n")
    users.write_text(f"prometheus:{hash_password('sesame', n=CHEAP)}\nürsel:{hash_password('a:b ü', n=CHEAP)}\n")
    return WebSettings(bearer_token_file=tokens, basic_auth_file=users)


ASKED = [
    ("/metrics", "Bearer token-one", 200),
    ("/metrics", "bearer   token-two", 200),
    ("/", "Bearer token-two", 200),
    ("/api/v1/status", basic("prometheus", "sesame"), 200),
    ("/metrics", basic("ürsel", "a:b ü"), 200),
    ("/metrics", None, 401),
    ("/", None, 401),
    ("/api/v1/status", None, 401),
    ("/unknown", None, 401),
    ("/livez/", None, 401),
    ("/livez/../metrics", None, 401),
    ("/metrics", "Bearer token", 401),
    ("/metrics", "Bearer token-one token-two", 401),
    ("/metrics", "Bearer # old, then new", 401),
    ("/metrics", "Bearer", 401),
    ("/metrics", "Bearer \xff", 401),
    ("/metrics", "Digest token-one", 401),
    ("/metrics", basic("prometheus", "wrong"), 401),
    ("/metrics", basic("nobody", "sesame"), 401),
    ("/metrics", basic("prometheus", ""), 401),
    ("/metrics", basic("ürsel", "a"), 401),
    ("/metrics", "Basic !!!", 401),
    ("/metrics", "Basic " + base64.b64encode(b"no colon").decode(), 401),
    ("/metrics", "Basic " + base64.b64encode(b"\xff:\xfe").decode(), 401),
    ("/livez", None, 200),
    ("/readyz", None, 200),
    ("/livez", "Bearer wrong", 200),
]


@pytest.mark.parametrize(("path", "authorization", "status"), ASKED)
def test_what_opens_what(both: WebSettings, path: str, authorization: str | None, status: int) -> None:
    """Only a right token or password opens a page, and the probes are open to everyone."""

    async def main() -> tuple[int, list[str]]:
        async with listening(both) as (port, _), connect(port) as talk:
            head = f"GET {path} HTTP/1.1\r\nHost: a\r\n"
            if authorization is not None:
                head += f"Authorization: {authorization}\r\n"
            answer = await talk(head.encode("latin-1") + b"\r\n")
            challenges = [line for line in answer.decode().splitlines() if line.startswith("WWW-Authenticate")]
            return int(answer.split()[1]), challenges

    answered, challenges = asyncio.run(main())

    assert answered == status
    assert challenges == (
        [
            'WWW-Authenticate: Basic realm="stallwatch", charset="UTF-8"',
            'WWW-Authenticate: Bearer realm="stallwatch"',
        ]
        if status == 401
        else []
    )


@asynccontextmanager
async def connect(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
    """A connection; what it is given it sends, and returns what comes back in one answer, nothing when cut off."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)

    async def talk(sent: bytes) -> bytes:
        try:
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length")
            )
            return head if sent.startswith(b"HEAD") else head + await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            return b""

    try:
        yield talk
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


GET = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"


def test_tokens_are_rotated_without_a_restart(both: WebSettings) -> None:
    """A replaced file holds within a second; one that is broken for a moment leaves the old tokens and is told once."""
    path, clock = both.bearer_token_file, Clock()
    assert path is not None

    async def main() -> list[int]:
        async with listening(both, clock=clock) as (port, _), aiohttp.ClientSession() as session:

            async def ask(token: str) -> int:
                clock.now += 1
                url = f"http://127.0.0.1:{port}/metrics"
                async with session.get(url, headers={"Authorization": f"Bearer {token}"}) as answer:
                    return answer.status

            seen = [await ask("token-one"), await ask("token-new")]
            path.with_suffix(".new").write_text("token-new\n")
            path.with_suffix(".new").rename(path)
            seen += [await ask("token-one"), await ask("token-new")]
            for broken in ("", "two words\n", "two words \n"):
                path.write_text(broken)
                seen.append(await ask("token-new"))
            path.unlink()
            seen.append(await ask("token-new"))
            path.write_text("token-last\n")
            return [*seen, await ask("token-new"), await ask("token-last")]

    with capture_logs() as logged:
        assert asyncio.run(main()) == [200, 401, 401, 200, 200, 200, 200, 200, 401, 200]

    problems = [str(line["problem"]).replace(str(path), "FILE") for line in logged if "problem" in line]
    assert problems == [
        "FILE: holds no token",
        "FILE: line 1 is no token, which is one word of printable ASCII",
        "FILE: No such file or directory",
    ]
    assert sum(line["event"] == "file read again" for line in logged) == 2
    assert "token-" not in str(logged)


class Verifier:
    """Counts verifications, and holds them while told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.most_at_once = 0
        self._now = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, work: Callable[[], bool]) -> bool:
        self.calls += 1
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await self.gate.wait()
        self._now -= 1
        return work()


def guarding(tmp_path: Path, verifier: Verifier, clock: Clock) -> tuple[Guard, Path]:
    path = tmp_path / "users"
    path.write_text(f"prometheus:{hash_password('sesame', n=CHEAP)}\n")
    users = Reloading([path], lambda: load_users(path.read_text()), run_blocking=at_once, clock=clock)
    return Guard(users=users, run_blocking=verifier, clock=clock), path


def test_a_right_password_is_verified_once(tmp_path: Path) -> None:
    """The second time it comes from memory, until the file changes; a wrong one is never remembered as right."""

    async def main() -> None:
        verifier, clock = Verifier(), Clock()
        guard, path = guarding(tmp_path, verifier, clock)
        right, wrong = basic("prometheus", "sesame"), basic("prometheus", "sesame2")
        assert [await guard.judge(right, "a") for _ in range(20)] == [Verdict.ADMITTED] * 20
        assert verifier.calls == 1
        assert [await guard.judge(wrong, "a") for _ in range(2)] == [Verdict.WRONG_CREDENTIALS] * 2
        assert verifier.calls == 3
        clock.now += 1
        path.write_text(f"prometheus:{hash_password('changed', n=CHEAP)}\n")
        assert await guard.judge(right, "a") is Verdict.WRONG_CREDENTIALS
        assert await guard.judge(basic("prometheus", "changed"), "a") is Verdict.ADMITTED

    asyncio.run(main())


def test_an_unknown_user_costs_as_much_as_a_known_one(tmp_path: Path) -> None:
    """Whether a name exists cannot be told from the work that it makes."""

    async def main() -> None:
        verifier = Verifier()
        guard, path = guarding(tmp_path, verifier, Clock())
        assert await guard.judge(basic("nobody", "x"), "a") is Verdict.WRONG_CREDENTIALS
        assert verifier.calls == 1
        users = load_users(path.read_text())
        real = users.hashes["prometheus"]
        assert (users.decoy.n, users.decoy.r, users.decoy.p) == (real.n, real.r, real.p)
        assert len(users.decoy.digest) == len(real.digest)

    asyncio.run(main())


def test_guesses_are_few_and_do_not_starve_who_is_known(tmp_path: Path) -> None:
    """An address has five wrong passwords, then one every five seconds; others, and the remembered, are not held up."""

    async def main() -> None:
        verifier, clock = Verifier(), Clock()
        guard, _ = guarding(tmp_path, verifier, clock)
        right = basic("prometheus", "sesame")
        assert await guard.judge(right, "bad") is Verdict.ADMITTED
        guessed = [await guard.judge(basic("prometheus", str(n)), "bad") for n in range(50)]
        assert guessed == [Verdict.WRONG_CREDENTIALS] * 5 + [Verdict.TOO_MANY_GUESSES] * 45
        assert await guard.judge(basic("prometheus", "x"), "other") is Verdict.WRONG_CREDENTIALS
        assert await guard.judge(right, "bad") is Verdict.ADMITTED
        clock.now += 5
        later = [await guard.judge(basic("prometheus", f"later {n}"), "bad") for n in range(2)]
        assert later == [Verdict.WRONG_CREDENTIALS, Verdict.TOO_MANY_GUESSES]
        assert verifier.calls == 1 + 5 + 1 + 1

    asyncio.run(main())


def test_passwords_are_verified_one_at_a_time(tmp_path: Path) -> None:
    """Many addresses together occupy one thread and a short queue; the same password asked for twice is one look."""

    async def main() -> None:
        verifier = Verifier()
        guard, _ = guarding(tmp_path, verifier, Clock())
        verifier.gate.clear()
        same = [asyncio.create_task(guard.judge(basic("prometheus", "sesame"), "a")) for _ in range(5)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(guard.judge(basic("prometheus", str(n)), f"b{n}")) for n in range(20)]
        for _ in range(5):
            await asyncio.sleep(0)
        verifier.gate.set()
        assert await asyncio.gather(*same) == [Verdict.ADMITTED] * 5
        verdicts = await asyncio.gather(*others)
        assert verdicts.count(Verdict.WRONG_CREDENTIALS) == 7
        assert verdicts.count(Verdict.TOO_MANY_GUESSES) == 13
        assert (verifier.calls, verifier.most_at_once) == (8, 1)

    asyncio.run(main())


def test_a_client_that_leaves_does_not_spoil_the_answer_of_another(tmp_path: Path) -> None:
    """Two requests share one verification; the first is cancelled and the second still gets in."""

    async def main() -> None:
        verifier = Verifier()
        guard, _ = guarding(tmp_path, verifier, Clock())
        verifier.gate.clear()
        first, second = (asyncio.create_task(guard.judge(basic("prometheus", "sesame"), "a")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        verifier.gate.set()
        assert await second is Verdict.ADMITTED

    asyncio.run(main())


def test_addresses_that_guess_are_bounded() -> None:
    """A flood of addresses does not grow the memory."""
    guesses = Guesses(Clock())
    assert all(guesses.take(str(address)) for address in range(5000))
    assert len(guesses._left) == 1024


def test_no_credential_is_logged(both: WebSettings) -> None:
    """Refusals are one line a minute with a number, an address and a reason."""
    clock = Clock()

    async def main() -> list[int]:
        async with listening(both, clock=clock) as (port, _), aiohttp.ClientSession() as session:
            seen = []
            for authorization in (None, "Bearer hunter2", basic("hunter2", "hunter2"), "Bearer hunter2"):
                headers = {} if authorization is None else {"Authorization": authorization}
                async with session.get(f"http://127.0.0.1:{port}/?hunter2", headers=headers) as answer:
                    seen.append(answer.status)
                    assert "hunter2" not in await answer.text()
                clock.now += 25
            return seen

    with capture_logs() as logged:
        assert asyncio.run(main()) == [401] * 4
    refused = [line for line in logged if line["event"] == "requests refused"]
    assert [(line["count"], line["reason"]) for line in refused] == [(1, "no credentials"), (3, "wrong credentials")]
    assert {line["address"] for line in refused} == {"127.0.0.1"}
    assert "hunter2" not in str(logged)
    assert base64.b64encode(b"hunter2").decode()[:8] not in str(logged)


H = str(hash_password("x", n=CHEAP))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no user"),
        ("# only a comment\n", "holds no user"),
        ("prometheus\n", "line 1 is not of the form user:hash"),
        ("\n:HASH\n", "line 2: no user"),
        ("a:HASH\nb:HASH\na:HASH", "line 3 names a user for the second time"),
        ("a:hunter2", "line 1: not a hash of the form scrypt$n$r$p$salt$hash"),
        ("a:$2y$05$hunter2", "line 1: bcrypt hashes are not understood, only those of `stallwatch hash-password`"),
        (
            "a:scrypt$15$8$1$AAAAAAAAAAA=$AAAAAAAAAAAAAAAAAAAAAA==",
            "line 1: n is a power of two, and r and p are at least 1",
        ),
        (
            "a:scrypt$16$0$1$AAAAAAAAAAA=$AAAAAAAAAAAAAAAAAAAAAA==",
            "line 1: n is a power of two, and r and p are at least 1",
        ),
        ("a:scrypt$1048576$8$1$AAAAAAAAAAA=$AAAAAAAAAAAAAAAAAAAAAA==", "line 1: costs too much to verify"),
        ("a:scrypt$16384$8$9999$AAAAAAAAAAA=$AAAAAAAAAAAAAAAAAAAAAA==", "line 1: costs too much to verify"),
        ("a:scrypt$16$8$1$AAAA$AAAAAAAAAAAAAAAAAAAAAA==", "line 1: a salt has 8 bytes or more, a hash 16 to 64"),
        ("a:scrypt$16$8$1$AAAAAAAAAAA=$AAAA", "line 1: a salt has 8 bytes or more, a hash 16 to 64"),
        ("a:scrypt$16$8$1$AAAAAAAAAAA$AAAA", "line 1: salt or hash is not base64"),
    ],
)
def test_a_file_of_users_says_which_line_is_wrong(text: str, problem: str) -> None:
    """Every mistake is told by its line, and none of the line's words is repeated."""
    with pytest.raises(ValueError, match=re.escape(problem)) as wrong:
        read_users(text.replace("HASH", H))
    assert str(wrong.value) == problem


def test_files_with_windows_lines_and_marks_are_read() -> None:
    """A byte order mark, carriage returns, blank lines and comments are not part of anything."""
    assert read_tokens("\ufeffone\r\n\r\n# two\r\n three \r\n") == (b"one", b"three")
    assert set(read_users(f"\ufeffa:{H}\r\n#b:x\r\n")) == {"a"}


def hashed(monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    return cli.main(["hash-password", *arguments], environ={}, stdout=out, stderr=err), out.getvalue(), err.getvalue()


def test_hash_password_writes_the_line_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed line goes into the file as it is; the same password gives another line each time."""
    status, line, err = hashed(monkeypatch, "prometheus", stdin="open sesame \r\n")
    assert (status, err) == (0, "")
    users = read_users(line)
    assert users["prometheus"].matches(b"open sesame ")
    assert not users["prometheus"].matches(b"open sesame")
    assert line != hashed(monkeypatch, "prometheus", stdin="open sesame \n")[1]
    assert "sesame" not in line


@pytest.mark.parametrize(
    ("arguments", "stdin", "status"),
    [(["a"], "", 1), (["a"], "\n", 1), (["a:b"], "x", 2), (["#a"], "x", 2), ([], "x", 2)],
)
def test_hash_password_refuses_what_could_not_be_read_again(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], stdin: str, status: int
) -> None:
    """No password, or a name that breaks the line, is one line on standard error."""
    assert hashed(monkeypatch, *arguments, stdin=stdin)[:2] == (status, "")


def test_the_cost_of_a_password() -> None:
    """A verification is slow enough to hinder guessing and leaves the interpreter alone; a remembered one is free."""
    one = hash_password("sesame")
    beats, done = 0, threading.Event()

    def beat() -> None:
        nonlocal beats
        while not done.wait(0.001):
            beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    started = time.perf_counter()
    assert one.matches(b"sesame")
    cost = time.perf_counter() - started
    done.set()
    thread.join()

    async def remembered() -> float:
        guard = Guard(users=Reloading([], lambda: load_users(f"a:{hash_password('x', n=CHEAP)}")))
        assert await guard.judge(basic("a", "x"), "b") is Verdict.ADMITTED
        started = time.perf_counter()
        for _ in range(1000):
            await guard.judge(basic("a", "x"), "b")
        return (time.perf_counter() - started) / 1000

    again = asyncio.run(remembered())
    print(f"one scrypt verification: {cost * 1000:.0f} ms, {beats} beats of 1 ms meanwhile")
    print(f"one that is remembered: {again * 1e6:.1f} us")
    assert cost > 0.01
    assert beats > cost * 1000 / 10
    assert again < 0.001


# --- TLS -----------------------------------------------------------------------------------------------------------


def client_context(folder: Path, *, certificate_by: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca_file(folder)))
    if certificate_by is not None:
        pair = issue(folder / f"client-{certificate_by}", "client", by=certificate_by)
        context.load_cert_chain(pair.cert, pair.key)
    return context


def with_tls(folder: Path, **more: Any) -> WebSettings:
    pair = issue(folder / "server")
    return WebSettings(tls_cert_file=pair.cert, tls_key_file=pair.key, **more)


def test_a_listener_with_a_certificate(tmp_path: Path) -> None:
    """Its certificate verifies, its TLS is 1.2 or later, and whoever speaks plain HTTP gets nothing, unlogged."""
    settings = with_tls(tmp_path)

    async def main() -> tuple[bytes, bytes]:
        async with listening(settings) as (port, reception):
            async with connect(port, client_context(tmp_path)) as talk:
                secure = await talk(GET)
            async with connect(port) as talk:
                plain = await talk(GET)
            async with connect(port):  # as a probe does that only connects
                pass
            await wait_until(lambda: not reception.seats.taken)
            assert reception.seats.taken == 0
            return secure, plain

    with capture_logs() as logged:
        secure, plain = asyncio.run(main())
    assert secure.startswith(b"HTTP/1.1 200 OK")
    assert plain == b""
    assert {line["log_level"] for line in logged} <= {"debug"}
    assert settings.tls_cert_file is not None
    assert settings.tls_key_file is not None
    context = server_context(settings.tls_cert_file, settings.tls_key_file)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(("by", "status"), [(None, None), ("strangers", None), ("ours", 200)])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_clients_need_a_certificate_where_it_is_asked_for(
    tmp_path: Path, by: str | None, status: int | None, version: ssl.TLSVersion
) -> None:
    """Without one, or with one of another authority, not even the probes answer."""

    async def main() -> bytes:
        context = client_context(tmp_path, certificate_by=by)
        context.maximum_version = version
        async with listening(with_tls(tmp_path, client_ca_file=ca_file(tmp_path))) as (port, _):
            try:
                async with connect(port, context) as talk:
                    return await talk(GET)
            except OSError:
                return b""

    answer = asyncio.run(main())

    assert (int(answer.split()[1]) if answer else None) == status


def serial(port: int, context: ssl.SSLContext) -> str:
    with (
        socket.create_connection(("127.0.0.1", port)) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as tls,
    ):
        certificate = tls.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def test_certificates_are_replaced_as_mounted_secrets_are(tmp_path: Path) -> None:
    """After a swap of links new connections see the new certificate and old ones live on; a broken one waits."""
    issue(tmp_path / "v1")
    issue(tmp_path / "v2")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tls.crt").write_bytes((tmp_path / "v1" / "tls.crt").read_bytes())
    (tmp_path / "broken" / "tls.key").write_bytes((tmp_path / "v2" / "tls.key").read_bytes())
    data = tmp_path / "..data"

    def point(version: str) -> None:
        new = tmp_path / "..new"
        new.symlink_to(version)
        new.rename(data)

    point("v1")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(Path("..data") / name)
    settings = WebSettings(tls_cert_file=tmp_path / "tls.crt", tls_key_file=tmp_path / "tls.key")
    clock, context = Clock(), client_context(tmp_path)

    async def main() -> list[str]:
        async with listening(settings, clock=clock) as (port, _), connect(port, context) as talk:
            seen = [await asyncio.to_thread(serial, port, context)]
            for version in ("broken", "broken", "v2"):
                if version != str(data.readlink()):
                    point(version)
                clock.now += 1
                seen.append(await asyncio.to_thread(serial, port, context))
                assert (await talk(GET)).startswith(b"HTTP/1.1 200")
            return seen

    with capture_logs() as logged:
        first, *during, last = asyncio.run(main())
    assert during == [first, first]
    assert last != first
    warnings = [line for line in logged if line["log_level"] == "warning"]
    assert [line["event"] for line in warnings] == ["changed file cannot be used, the old content stays in force"]
    assert "KEY_VALUES_MISMATCH" in warnings[0]["problem"]


def test_a_file_system_that_hangs_does_not_hold_up_requests(tmp_path: Path) -> None:
    """While a look at the files does not return, requests go by what is known, after two seconds at first."""

    async def main() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        calls = 0

        async def hang(_: Callable[[], Any]) -> Any:
            nonlocal calls
            calls += 1
            await asyncio.sleep(100)

        path = tmp_path / "file"
        path.write_text("x")
        reloading = Reloading([path], lambda: "known", run_blocking=hang, clock=loop.time)
        await asyncio.sleep(1)
        before = loop.time()
        assert await asyncio.gather(*(reloading.fresh() for _ in range(10))) == ["known"] * 10
        return loop.time() - before, calls

    assert virtual.run(main()) == (2, 1)


# --- limits --------------------------------------------------------------------------------------------------------


async def until_closed(reader: asyncio.StreamReader) -> float:
    with suppress(OSError):
        while await reader.read(65536):
            pass
    return asyncio.get_running_loop().time()


def test_a_client_that_says_nothing_or_too_little_is_dropped() -> None:
    """Ten seconds for a header, however the bytes come; the same for a later one; 75 seconds for a client at rest."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        async with listening() as (port, _):

            async def silent(first: bytes, drip: bytes, *, each: float = 1.0) -> float:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                began = loop.time()
                writer.write(first)
                closed = asyncio.create_task(until_closed(reader))
                while not closed.done():
                    await asyncio.wait({closed}, timeout=each)
                    if drip and not closed.done():
                        writer.write(drip)
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
                return round(closed.result() - began)

            return [
                await silent(b"", b""),
                await silent(b"GET /livez HT", b""),
                await silent(b"GET /livez HTTP/1.1\r\n", b"X: y\r\n"),
                await silent(GET + b"GET /livez HTTP/1.1\r\n", b"X: y\r\n"),
                await silent(GET, b"", each=1000),
            ]

    assert virtual.run(main()) == pytest.approx([10, 10, 10, 11, 75], abs=1)


@pytest.mark.parametrize("hello", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_does_not_go_on_is_given_up(tmp_path: Path, hello: bytes) -> None:
    """A client of a TLS listener that says nothing, or begins and stops, leaves its seat after ten seconds."""

    async def main() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        async with listening(with_tls(tmp_path)) as (port, reception):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            began = loop.time()
            writer.write(hello)
            seconds = await until_closed(reader) - began
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            return seconds, reception.seats.taken

    seconds, seats = virtual.run(main())
    assert seconds == pytest.approx(10, abs=0.1)
    assert seats == 0


def test_pages_are_rendered_two_at_a_time() -> None:
    """A crowd of clients does not take every thread and every CPU."""
    now, most = 0, 0

    async def rendering(work: Callable[[], Any]) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.1)
        now -= 1
        return work()

    async def main() -> list[bytes]:
        listener = server.listen("127.0.0.1", 0)
        port = listener.getsockname()[1]

        async def ask() -> bytes:
            async with connect(port) as talk:
                return await talk(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")

        async with server.serving(server.create_app(Shown(), run_blocking=rendering), listener):
            return await asyncio.gather(*(ask() for _ in range(20)))

    answers = virtual.run(main())
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert most == 2


def test_connections_are_bounded() -> None:
    """Beyond the limits new clients are turned away, told once, and let in again when others have left."""
    limits = Limits(connections=4, per_address=3)

    async def main() -> list[bool]:
        async with listening(limits=limits) as (port, reception):

            async def is_answered(host: str) -> bool:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
                try:
                    writer.write(GET)
                    return await reader.read(1) == b"H"
                except OSError:
                    return False
                finally:
                    opened.append(writer)

            opened: list[asyncio.StreamWriter] = []
            seen = [await is_answered("127.0.0.1") for _ in range(5)]
            seen += [await is_answered("127.0.0.2") for _ in range(2)]
            for writer in opened:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
            await wait_until(lambda: not reception.seats.taken)
            seen.append(await is_answered("127.0.0.1"))
            opened[-1].close()
            return seen

    with capture_logs() as logged:
        assert asyncio.run(main()) == [True] * 3 + [False] * 2 + [True, False, True]
    assert [line["event"] for line in logged if line["log_level"] == "warning"] == ["connections refused"]


def test_seats_can_be_left_twice() -> None:
    """Leaving again frees nothing that is not ours, and an address without seats is forgotten."""
    seats = Seats(Limits(connections=2, per_address=2))
    first, second = seats.take("a"), seats.take("b")
    assert first is not None
    assert second is not None
    assert seats.take("c") is None
    first()
    first()
    assert seats.taken == 1
    assert set(seats._taken) == {"b"}


@LOOPS
def test_a_client_that_does_not_read_is_dropped(loop_factory: LoopFactory) -> None:
    """An answer that nobody takes does not stay for ever."""
    limits = replace(Limits(), unread_seconds=0.5)

    async def main() -> float:
        async with listening(limits=limits, lines=60_000) as (port, reception):
            with closing(socket.socket()) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", port))
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
                began = time.monotonic()
                await wait_until(lambda: reception.seats.taken == 1)
                await wait_until(lambda: reception.seats.taken == 0, seconds=20)
                return time.monotonic() - began

    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            assert runner.run(main()) < 15


HOSTILE = [
    pytest.param(b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", 405, id="post"),
    pytest.param(b"DELETE /livez HTTP/1.1\r\nHost: a\r\n\r\n", 405, id="delete"),
    pytest.param(b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", 405, id="options"),
    pytest.param(b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", 405, id="trace"),
    pytest.param(b"HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n", 200, id="head"),
    pytest.param(b"GET /unknown HTTP/1.1\r\nHost: a\r\n\r\n", 404, id="unknown"),
    pytest.param(b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 400, id="line"),
    pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 400, id="field"),
    pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, id="tls"),
    pytest.param(b"GET / HTTP/9.9\r\n\r\n", 400, id="version"),
    pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400, id="length"),
    pytest.param(
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, id="smuggling"
    ),
]


@pytest.mark.parametrize(("request_bytes", "status"), HOSTILE)
def test_what_is_no_proper_question_is_refused_without_noise(
    request_bytes: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is answered by its status, none with a traceback in the log, and the next client is served."""

    async def main() -> tuple[bytes, bytes]:
        async with listening() as (port, _):
            async with connect(port) as talk:
                answer = await talk(request_bytes)
            async with connect(port) as talk:
                return answer, await talk(GET)

    answer, after = asyncio.run(main())
    assert int(answer.split()[1]) == status
    assert b"x" * 20 not in answer
    assert b"aiohttp" not in answer.lower()
    assert b"X-Content-Type-Options: nosniff" in answer
    if status == 405:
        assert b"Allow: GET,HEAD" in answer
    assert after.startswith(b"HTTP/1.1 200")
    assert not caplog.records


@pytest.mark.parametrize("size", [10, 1000, 8000])
def test_an_endless_header_is_cut_off(size: int) -> None:
    """A client that sends header after header is dropped long before its ten seconds are over."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        async with listening() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            began = loop.time()
            closed = asyncio.create_task(until_closed(reader))
            writer.write(b"GET / HTTP/1.1\r\n")
            # As many as aiohttp takes without an objection of its own, then silence.
            for _ in range(120 if size > 1000 else 10_000):
                writer.write(b"X: " + b"y" * size + b"\r\n")
                await asyncio.sleep(0.01)
                if closed.done():
                    break
            await closed
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            return closed.result() - began

    assert virtual.run(main()) < 3


def test_an_answer_that_takes_long_is_waited_for(both: WebSettings) -> None:
    """The time for a header does not run while we are the ones who are slow."""

    async def slow(work: Callable[[], Any]) -> Any:
        await asyncio.sleep(60)
        return work()

    async def main() -> tuple[bytes, bytes]:
        listener = server.listen("127.0.0.1", 0)
        app = server.create_app(Shown(), guard=guard_for(both, clock=Clock()), run_blocking=slow)
        request = b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-one\r\nContent-Length: 1\r\n\r\n"
        async with server.serving(app, listener):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            writer.write(request)
            await asyncio.sleep(20)
            writer.write(b"x")
            answer = await reader.readuntil(b"\r\n")
            writer.close()
            await writer.wait_closed()
            async with connect(listener.getsockname()[1]) as talk:
                return answer, await talk(GET)

    answer, after = virtual.run(main())
    assert answer == b"HTTP/1.1 200 OK\r\n"
    assert after.startswith(b"HTTP/1.1 200 OK")


def test_a_body_is_not_taken() -> None:
    """A client that announces a body and sends it for ever is answered at once and closed soon after."""

    async def main() -> tuple[bytes, float]:
        loop = asyncio.get_running_loop()
        async with listening() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            began = loop.time()
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 99999999\r\n\r\n")
            answer = await reader.readuntil(b"\r\n")
            closed = asyncio.create_task(until_closed(reader))
            while not closed.done():
                writer.write(b"z" * 1000)
                await asyncio.sleep(0.1)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            return answer, closed.result() - began

    answer, seconds = virtual.run(main())
    assert answer == b"HTTP/1.1 405 Method Not Allowed\r\n"
    assert seconds < 5


def test_every_page_carries_the_headers_that_keep_browsers_careful(both: WebSettings) -> None:
    """No framing, no sniffing, no cache, and no word about what we are made of, on refusals too."""

    async def main() -> None:
        async with listening(both) as (port, _), aiohttp.ClientSession() as session:
            for path in ("/", "/metrics", "/api/v1/status", "/livez", "/unknown"):
                for headers in ({}, {"Authorization": "Bearer token-one"}):
                    async with session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as answer:
                        assert answer.headers["X-Content-Type-Options"] == "nosniff"
                        assert answer.headers["Cache-Control"] == "no-store"
                        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
                        assert answer.headers["Server"] == "stallwatch"

    asyncio.run(main())


@LOOPS
def test_resets_at_any_moment_leave_nothing_behind(tmp_path: Path, loop_factory: LoopFactory) -> None:
    """Clients that break off during accept, handshake or request cost no descriptor and no seat."""
    settings = with_tls(tmp_path)
    context = client_context(tmp_path)

    def rude(port: int) -> None:
        for number in range(40):
            with closing(socket.create_connection(("127.0.0.1", port))) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with suppress(OSError):
                    if number % 4 == 1:
                        client.sendall(b"\x16\x03\x01\x02\x00\x01")
                    elif number % 4 == 2:
                        context.wrap_socket(client, server_hostname="127.0.0.1").close()
                    elif number % 4 == 3:
                        with context.wrap_socket(client, server_hostname="127.0.0.1") as tls:
                            tls.sendall(GET[:-4])

    async def main() -> tuple[int, int, int]:
        async with listening(settings) as (port, reception):
            await asyncio.to_thread(rude, port)
            before = open_files()
            await asyncio.gather(*(asyncio.to_thread(rude, port) for _ in range(2)))
            await wait_until(lambda: not reception.seats.taken)
            return reception.seats.taken, before, open_files()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        seats, before, after = runner.run(main())
    assert seats == 0
    assert after <= before + 1


def test_an_error_in_the_body_stays_what_it_is() -> None:
    """Whatever happens while we serve is raised as it was, and the port is free again."""

    async def main() -> int:
        with pytest.raises(ZeroDivisionError):
            async with listening() as (port, _):
                raise ZeroDivisionError
        return port

    port = asyncio.run(main())
    server.listen("127.0.0.1", port).close()


def test_a_listener_that_breaks_ends_the_process() -> None:
    """A listening socket that vanishes is not something to live on with in silence."""

    async def main() -> None:
        listener = server.listen("127.0.0.1", 0)
        listener.close()
        async with server.serving(server.create_app(Shown(), run_blocking=at_once), listener):
            await asyncio.sleep(10)

    with pytest.raises(ExceptionGroup):
        asyncio.run(main())


# --- healthcheck ---------------------------------------------------------------------------------------------------


def healthcheck(*arguments: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    return cli.main(["healthcheck", *arguments], environ={}, stdout=out, stderr=err), err.getvalue()


@pytest.mark.parametrize("wants_clients", [False, True])
def test_healthcheck_reaches_a_listener_with_tls(tmp_path: Path, *, wants_clients: bool) -> None:
    """The settings of the listener are enough; where it wants client certificates a handshake is an answer."""
    more = {"client_ca_file": ca_file(tmp_path)} if wants_clients else {}
    settings = with_tls(tmp_path, **more)
    flags = [f"--web.tls_cert_file={settings.tls_cert_file}", f"--web.tls_key_file={settings.tls_key_file}"]
    flags += [f"--web.{name}={path}" for name, path in more.items()]

    async def main() -> tuple[tuple[int, str], tuple[int, str]]:
        async with listening(settings) as (port, _):
            right = await asyncio.to_thread(healthcheck, f"--web.port={port}", "--web.host=127.0.0.1", *flags)
            plain = await asyncio.to_thread(healthcheck, f"--web.port={port}", "--web.host=127.0.0.1")
            return right, plain

    right, plain = asyncio.run(main())
    assert right == (0, "")
    assert plain[0] == 1


def test_healthcheck_is_not_content_with_an_open_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose loop is stuck still has its port open, and shakes no hands."""
    monkeypatch.setattr(cli, "HEALTHCHECK_TIMEOUT_SECONDS", 0.2)
    with closing(server.listen("127.0.0.1", 0)) as stuck:
        port = stuck.getsockname()[1]
        status, problem = healthcheck(
            f"--web.port={port}",
            "--web.host=127.0.0.1",
            f"--web.tls_cert_file={tmp_path}",
            f"--web.client_ca_file={tmp_path}",
        )
    assert (status, problem) == (1, f"stallwatch: https://127.0.0.1:{port}/livez: no answer within 0.2 s\n")


# --- the whole command ---------------------------------------------------------------------------------------------


def test_run_serves_what_its_settings_say(tmp_path: Path) -> None:
    """`run` with a certificate and tokens: pages for who has one, probes for all, no secret logged."""
    settings = with_tls(tmp_path)
    (tmp_path / "tokens").write_text("hunter2-token\n")
    flags = [f"--web.tls_cert_file={settings.tls_cert_file}", f"--web.tls_key_file={settings.tls_key_file}"]
    flags += [f"--web.bearer_token_file={tmp_path / 'tokens'}", "--web.host=127.0.0.1"]
    command = [sys.executable, "-m", "stallwatch", "run", *flags, "--web.port=0", "--no-canary.enabled"]
    with subprocess.Popen(
        [*command, "--gpu.enabled=false", "--engine.url=http://127.0.0.1:1", "--log.format=json"],
        cwd=Path(__file__).parent.parent,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            logged, port = "", 0
            while not port:
                line = process.stderr.readline()
                assert line, logged
                logged += line
                port = json.loads(line).get("port", 0)

            async def ask() -> list[int]:
                token = {"Authorization": "Bearer hunter2-token"}
                seen = []
                async with aiohttp.ClientSession() as session:
                    for path, headers in (("metrics", token), ("metrics", {}), ("livez", {})):
                        url, tls = f"https://127.0.0.1:{port}/{path}", client_context(tmp_path)
                        async with session.get(url, headers=headers, ssl=tls) as answer:
                            seen.append(answer.status)
                return seen

            assert asyncio.run(ask()) == [200, 401, 200]
            assert healthcheck(f"--web.port={port}", *flags) == (0, "")
        finally:
            process.terminate()
            logged += process.communicate()[1]
    assert process.returncode == 0
    assert "hunter2" not in logged


def test_a_file_that_vanished_since_the_settings_were_read_is_one_line(tmp_path: Path) -> None:
    """`guard_for` and `certificates_for` raise what `run` turns into a line, never something else."""
    missing = tmp_path / "none"
    with pytest.raises(OSError, match="No such file"):
        guard_for(WebSettings(bearer_token_file=missing))
    with pytest.raises(OSError, match="No such file"):
        certificates_for(WebSettings(tls_cert_file=missing, tls_key_file=missing))
    missing.write_text("\n")
    with pytest.raises(ValueError, match="holds no user"):
        guard_for(WebSettings(basic_auth_file=missing))
