"""The whole sidecar beside servers that are broken or mean it badly: it stays up, bounded and valid, and recovers."""

import asyncio
import gzip
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from stallwatch.observations import Failure
from tests.hostile import (
    GOOD_STREAM,
    RECOVERY_SECONDS,
    SCRAPE_SECONDS,
    TOKENS,
    Run,
    chunk,
    endure,
    is_counter,
    lint,
    page,
    shows,
)
from tests.raw_server import SSE_HEAD, Asked, Peer, Script, answer, models

MIB = 1024 * 1024
PAUSE = 0.001  # virtual: time must pass in a flood, or no deadline would ever come
UNREAD = "parts of the metrics page cannot be read"
TOLD = {
    *("source down", UNREAD, "metrics filter not honoured, reading full pages"),
    *("stall opened", "stall closed", "stall cause changed"),
}


@dataclass(frozen=True)
class Fault:
    """One way to be hostile, and what must be said of it.

    `down` is the reason for which the source is down meanwhile, logged once; without it the source stays up. `unread`
    is how one of the parts begins that the log names as not read, each once. `peak` bounds the bytes allocated while it
    goes on and `kept` those that are still held at its end; `series` bounds our own page.
    """

    play: Script
    down: Failure | None = None
    unread: str = ""
    peak: int = 8 * MIB
    kept: int = 3 * MIB
    series: int = 520
    recovery: float = RECOVERY_SECONDS
    long: bool = False
    flaps: bool = False  # tokens come before what is wrong, so the source is up again and again
    good_first: bool = True
    rooms: Mapping[str, Any] = field(default_factory=dict)


def sends(*parts: bytes) -> Script:
    """Sends these bytes and closes."""

    async def script(_: Asked, peer: Peer) -> None:
        await peer.send(*parts)

    return script


def floods(head: bytes, flood: bytes, pause: float = PAUSE) -> Script:
    """Sends `head`, then the same again and again without an end."""

    async def script(_: Asked, peer: Peer) -> None:
        await peer.send(head)
        while True:
            await peer.send(flood)
            await asyncio.sleep(pause)

    return script


def holds(*parts: bytes, half_closed: bool = False, reset: bool = False) -> Script:
    """Sends these bytes and nothing more, the connection left open, half closed or broken."""

    async def script(_: Asked, peer: Peer) -> None:
        await peer.send(*parts)
        if reset:
            await asyncio.sleep(PAUSE)
            peer.reset()
            return
        if half_closed:
            peer.half_close()
        await asyncio.sleep(1e6)  # until the other side hangs up

    return script


def ok(body: bytes, *, kind: str = "text/plain; version=0.0.4", headers: str = "") -> bytes:
    """A whole answer as a metrics page has it."""
    return answer("200 OK", body, kind=kind, headers=headers)


def in_stream(play: Script) -> Script:
    """Lists its model as it should and is hostile in streams."""

    async def script(asked: Asked, peer: Peer) -> None:
        await (GOOD_STREAM if asked.path == "/v1/models" else play)(asked, peer)

    return script


def streams(*events: Any) -> Script:
    """Answers every request for a stream with these events in one segment."""

    async def script(_: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        await peer.data(*events)

    return in_stream(script)


def lists(body: bytes) -> Script:
    """Lists models in its own way; streams are good."""

    async def script(asked: Asked, peer: Peer) -> None:
        await (peer.send(body) if asked.path == "/v1/models" else GOOD_STREAM(asked, peer))

    return script


def says(text: str) -> Script:
    """Every sample of the page has this value."""
    return shows(lambda now: page(now, value=lambda _name, _value: text))


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SSE_OPEN_HEAD = SSE_HEAD.removesuffix(b"\r\n")
ALERT = bytes.fromhex("15030100020246")  # what a TLS server answers to plain text
BOMB = gzip.compress(bytes(64 * MIB))
REDIRECT = answer("307 Temporary Redirect", headers="Location: http://127.0.0.1:9/\r\n")
BREAKOUT = 'x\\"} 1\\nstallwatch_forged_total{a=\\"\\\\'  # in a page's label value
ABSURD: list[Any] = [math.nan, math.inf, -1, 2**60, 1e308, "7", None, True, []]
BREAKOUT_PLAIN = 'x"} 1\nstallwatch_forged_total{a="\\\x1b[31m'
TOKEN = b'data: {"choices":[{"text":"x"}]}\n\n'


def _label_flood(now: float) -> str:
    """Every page has other labels and other names."""
    flood = "".join(
        f'vllm:num_requests_waiting{{engine="0",request="{now:.3f}-{n}"}} 1\nname_{now * 1000:.0f}_{n} 1\n'
        for n in range(5000)
    )
    return page(now, more=flood)


def _many_models(now: float) -> str:
    adapters = (f'vllm:num_requests_running{{engine="0",model_name="adapter-{n}"}} 0\n' for n in range(1000))
    return page(now, more="".join(adapters))


_NINE_MEGABYTES = "".join(f'other{{n="{n}"}} 1\n' for n in range(450_000))


def _nine_megabytes(now: float) -> str:
    return page(now) + _NINE_MEGABYTES


def _all_sorts(now: float) -> str:
    values = iter(["NaN", "+Inf", "-1", "1e308", "-0.0", "5e-324", "1e999", "0x1", "1_000", "", "-Inf"] * 1000)
    return page(now, value=lambda _name, _value: next(values))


def _ever_older(now: float) -> str:
    """Every page is of a process that is older than the one before, with counters that fall."""
    return page(1000.0 - now, start=1.7e9 - now)


def _swinging(now: float) -> str:
    """Counters jump to absurd heights and back below zero."""
    high = math.floor(now * 4) % 2 == 0
    return page(
        now, value=lambda name, value: repr(value + 1e15 if high else -value) if "vllm" in name else repr(value)
    )


PAGES = {
    "slow drip": Fault(floods(HEAD + b"Content-Length: 100000\r\n\r\n", b"#", 0.5), Failure.TIMEOUT),
    "no answer": Fault(holds(), Failure.TIMEOUT),
    "half closed": Fault(holds(HEAD + b"Content-Length: 1000\r\n\r\nvllm:num", half_closed=True), Failure.CUT),
    "reset in the answer": Fault(holds(HEAD + b"Content-Length: 1000\r\n\r\nvllm:num", reset=True), Failure.CUT),
    "reset at once": Fault(holds(reset=True), Failure.REFUSED),
    "endless header": Fault(floods(HEAD + b"X-Long: ", b"x" * 65536), Failure.MALFORMED),
    "endless headers": Fault(floods(HEAD, b"X-Another: header\r\n" * 1000), Failure.MALFORMED),
    "endless interim answers": Fault(floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, 0.02), Failure.TIMEOUT),
    "endless line": Fault(
        floods(HEAD + b'\r\nvllm:num_requests_running{x="', b"y" * 65536), Failure.TOO_LARGE, peak=24 * MIB
    ),
    "endless chunk size": Fault(floods(CHUNKED, b"0" * 65536), Failure.TIMEOUT),
    "endless chunk": Fault(floods(CHUNKED + b"f" * 16 + b"\r\n", b"y" * 65536), Failure.TOO_LARGE, peak=24 * MIB),
    "endless trailers": Fault(floods(CHUNKED + b"0\r\n", b"X-Another: header\r\n" * 1000), Failure.MALFORMED),
    "negative length": Fault(sends(HEAD + b"Content-Length: -5\r\n\r\nhello"), Failure.MALFORMED),
    "absurd length": Fault(floods(HEAD + b"Content-Length: 99999999999999\r\n\r\n", b"#" * 100, 0.5), Failure.TIMEOUT),
    "gzip bomb": Fault(sends(ok(BOMB, headers="Content-Encoding: gzip\r\n")), Failure.MALFORMED),
    "12 MB page": Fault(sends(ok(b"a 1\n" * 3_000_000)), Failure.TOO_LARGE, peak=24 * MIB),
    "9 MB page": Fault(shows(_nine_megabytes, filtered=False), peak=48 * MIB, long=True),
    "garbage": Fault(sends(ok(b"\x00\xff{}\n" * 9000)), Failure.MALFORMED),
    "some garbage": Fault(
        shows(lambda now: "\ufffd}{\n" + page(now).replace("\n", "\r\n}\r\n"), filtered=False),
        unread="lines that are no samples",
    ),
    "label flood": Fault(
        shows(_label_flood, filtered=False),
        unread="series of vllm:num_requests_waiting beyond those that are read",
        peak=24 * MIB,
    ),
    "names that break out": Fault(shows(lambda now: page(now, engines=("0", BREAKOUT), model=BREAKOUT)), series=900),
    "web page": Fault(sends(ok(b"<!DOCTYPE html>\n<html>hello\n</html>", kind="text/html")), Failure.MALFORMED),
    "wrong content type": Fault(shows(page, kind="application/json")),
    "time goes backwards": Fault(
        shows(_ever_older, headers=lambda now: f"Date: Thu, 01 Jan 1970 00:{59 - now:02.0f}:00 GMT\r\n")
    ),
    "swinging counters": Fault(shows(_swinging), unread="impossible values of vllm:"),
    "a thousand models": Fault(shows(_many_models)),
    "200 engines": Fault(
        shows(lambda now: page(now, engines=[str(n) for n in range(200)])),
        unread="engines beyond 64",
        peak=64 * MIB,
        kept=32 * MIB,
        series=20_000,
        long=True,
    ),
    "ever other engines": Fault(
        shows(lambda now: page(now, engines=[f"{now:.0f}-{n}" for n in range(20)])),
        unread="engines beyond 64",
        peak=64 * MIB,
        kept=32 * MIB,
        series=20_000,
        long=True,
    ),
    "redirect": Fault(sends(REDIRECT), Failure.REDIRECT),
    "TLS": Fault(sends(ALERT), Failure.MALFORMED),
    "a stream": Fault(floods(SSE_HEAD, TOKEN, 0.05), Failure.TIMEOUT),
    "NaN": Fault(says("NaN"), unread="impossible values of vllm:"),
    "infinity": Fault(says("+Inf"), unread="impossible values of vllm:"),
    "below zero": Fault(says("-1"), unread="impossible values of vllm:"),
    "too high": Fault(says("1e308"), unread="impossible values of vllm:"),
    "highest": Fault(says("1e24")),
    "zero": Fault(says("0")),
    "all sorts": Fault(shows(_all_sorts), unread="impossible values of vllm:"),
}

STREAMS = {
    "slow drip": Fault(in_stream(floods(SSE_HEAD, b"x", 0.5)), Failure.TIMEOUT),
    "comments only": Fault(in_stream(floods(SSE_HEAD, b": keep-alive\n\n", 0.5)), Failure.TIMEOUT),
    "no answer": Fault(in_stream(holds()), Failure.TIMEOUT),
    "half closed": Fault(in_stream(holds(SSE_HEAD, b"data: {", half_closed=True)), Failure.CUT),
    "reset in the answer": Fault(in_stream(holds(SSE_HEAD, TOKEN, reset=True)), Failure.CUT),
    "endless header": Fault(in_stream(floods(SSE_OPEN_HEAD + b"X-Long: ", b"x" * 65536)), Failure.MALFORMED),
    "endless interim answers": Fault(
        in_stream(floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, 0.02)), Failure.TIMEOUT
    ),
    "endless line": Fault(in_stream(floods(SSE_HEAD, b"x" * 65536)), Failure.MALFORMED),
    "endless event": Fault(in_stream(floods(SSE_HEAD, b"data: x\n" * 5000)), Failure.MALFORMED),
    "gzip bomb": Fault(in_stream(sends(SSE_OPEN_HEAD + b"Content-Encoding: gzip\r\n\r\n", BOMB)), Failure.MALFORMED),
    "a metrics page": Fault(in_stream(shows(page)), Failure.MALFORMED),
    "one document": Fault(in_stream(sends(ok(b"{}", kind="application/json"))), Failure.MALFORMED),
    "token flood": Fault(in_stream(floods(SSE_HEAD, TOKEN * 1000)), Failure.MALFORMED),
    "redirect": Fault(in_stream(sends(REDIRECT)), Failure.REDIRECT),
    "TLS": Fault(in_stream(sends(ALERT)), Failure.MALFORMED),
    "an error that breaks out": Fault(streams({"error": {"message": BREAKOUT_PLAIN * 1000}}), Failure.SERVER_ERROR),
    "absurd usage": Fault(
        streams(
            *(chunk(n, usage={"prompt_tokens": usage, "completion_tokens": usage}) for n, usage in enumerate(ABSURD)),
            chunk(TOKENS),
            "[DONE]",
        )
    ),
    "a thousand models": Fault(
        lists(models(*({"id": f"adapter-{n}", "parent": "tiny"} for n in range(1000)), {"id": "tiny"})),
        good_first=False,
    ),
    "no models": Fault(lists(models()), Failure.MALFORMED, good_first=False),
    "a long list of models": Fault(
        lists(models(*({"id": "x" * 1000} for n in range(10_000)))), Failure.TOO_LARGE, good_first=False, peak=24 * MIB
    ),
    "models that break out": Fault(
        lists(models({"id": BREAKOUT_PLAIN}, {"id": 7}, {"id": "y" * 9999}, {"id": BREAKOUT})), good_first=False
    ),
    "persistent: slow drip": Fault(
        in_stream(floods(SSE_HEAD, b"x", 0.5)), Failure.TIMEOUT, rooms={"canary": {"mode": "persistent"}}
    ),
    "persistent: token flood": Fault(
        in_stream(floods(SSE_HEAD, TOKEN * 1000)),
        Failure.MALFORMED,
        rooms={"canary": {"mode": "persistent"}},
        flaps=True,
        recovery=24.0,  # it backs off
    ),
}


def series(name: str, **labels: str) -> str:
    """A series as its line on the page begins."""
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"stallwatch_{name}{{{inner}}}" if inner else f"stallwatch_{name}"


def cases(faults: Mapping[str, Fault]) -> list[Any]:
    """The faults as parameters, those that take long marked so."""
    return [pytest.param(fault, id=name, marks=[pytest.mark.long] * fault.long) for name, fault in faults.items()]


def _told_once(found: Run, fault: Fault, source: str) -> None:
    downs = [(line["source"], line["reason"]) for line in found.lines("source down")]
    parts = [part for line in found.lines(UNREAD) for part in line["parts"]]

    assert set(downs) == ({(source, fault.down)} if fault.down else set())
    assert len(downs) <= (3 if fault.flaps else 1)
    if fault.down is not None:
        assert (found.value(series("source_failures_total", source=source, reason=fault.down)) or 0) >= 1
    assert len(parts) == len(set(parts))
    assert any(part.startswith(fault.unread) for part in parts) if fault.unread else not parts
    assert set(found.warnings) <= TOLD
    assert all(count <= 4 for count in found.warnings.values()), found.warnings
    for line in found.log:
        assert len(repr(line)) < 2000
        assert "\x1b" not in str(line.get("detail", ""))


def _bounded(found: Run, fault: Fault) -> None:
    print(
        f"peak {found.peak / MIB:.1f} MiB, kept {found.kept / MIB:.1f} MiB; our page: {found.most_series} series, "
        f"{found.most_bytes:,} bytes"
    )

    assert found.peak < fault.peak
    assert found.kept < fault.kept
    assert found.most_series <= fault.series
    assert found.tasks_left == 0
    assert found.descriptors_left <= 0


def _recovered(found: Run) -> None:
    last = RECOVERY_SECONDS - SCRAPE_SECONDS

    assert found.value(series("source_up", source="engine")) == 1
    assert found.value(series("source_up", source="canary")) == 1
    assert found.value(series("target_phase", phase="serving")) == 1
    assert found.grew(series("engine_steps_total", engine="0"), last) == pytest.approx(30 * last, rel=0.2)
    assert found.grew(series("canary_tokens_total"), last) >= TOKENS


def _valid(found: Run) -> None:
    assert lint(found.bad_page) == ""
    assert not any("forged" in name for name in found.highest if is_counter(name) and name.startswith("stallwatch_f"))


@pytest.mark.parametrize("fault", cases(PAGES))
def test_a_hostile_metrics_page(fault: Fault) -> None:
    """The sidecar stays up and valid in bounded memory, says once what is wrong, and works again afterwards."""
    found = endure(
        fault.play, where="page", good_first=fault.good_first, recovery_seconds=fault.recovery, **fault.rooms
    )

    _valid(found)
    _told_once(found, fault, "engine")
    _bounded(found, fault)
    _recovered(found)


@pytest.mark.parametrize("fault", cases(STREAMS))
def test_a_hostile_stream(fault: Fault) -> None:
    """The same, where the canary's requests are answered so."""
    found = endure(
        fault.play, where="stream", good_first=fault.good_first, recovery_seconds=fault.recovery, **fault.rooms
    )

    _valid(found)
    _told_once(found, fault, "canary")
    _bounded(found, fault)
    _recovered(found)
