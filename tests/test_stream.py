import asyncio
import gzip
import json
import time
import tracemalloc
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.observations import Failure, Outcome, StreamClosed, StreamOpened, StreamTokens
from stallwatch.scheduling import SourceError
from stallwatch.sources.chunks import TokenCounter
from stallwatch.sources.http import Target
from stallwatch.sources.stream import CanaryStream, Ended, StreamRequest
from tests.raw_server import SSE_HEAD, Asked, Peer, RawServer, Script, answer, serve
from tests.virtual import VirtualLoop, run

GOLDEN = sorted((Path(__file__).parent / "golden" / "sse").glob("*.txt"))

PROMPT = "0a1b2c3d-1: count upwards"


def text(said: str, *, count: int | None = None, end: str | None = None) -> dict[str, Any]:
    """A chunk of `/v1/completions`."""
    chunk: dict[str, Any] = {"choices": [{"index": 0, "text": said, "finish_reason": end}]}
    return chunk if count is None else chunk | {"usage": {"prompt_tokens": 9, "completion_tokens": count}}


def delta(said: dict[str, Any], *, count: int | None = None) -> dict[str, Any]:
    """A chunk of `/v1/chat/completions`."""
    chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": said, "finish_reason": None}]}
    return chunk if count is None else chunk | {"usage": {"prompt_tokens": 9, "completion_tokens": count}}


@dataclass
class Followed:
    """What one stream against a script came to."""

    server: RawServer
    emitted: list[StreamOpened | StreamTokens | StreamClosed] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def outcome(self) -> Outcome:
        assert self.ended is not None
        return self.ended.closed.outcome

    @property
    def detail(self) -> str:
        assert self.ended is not None
        return self.ended.closed.detail

    @property
    def tokens(self) -> list[tuple[float, int]]:
        return [(seen.at, seen.tokens) for seen in self.emitted if isinstance(seen, StreamTokens)]


def follow(
    script: Script,
    *,
    tokens: int = 64,
    timeout_seconds: float = 120.0,
    api: Literal["completions", "chat"] = "completions",
    key_file: Path | None = None,
    rank: str | None = None,
    cancel_at: float | None = None,
) -> Followed:
    """Runs one stream against `script` in virtual time."""

    async def main() -> Followed:
        loop = asyncio.get_running_loop()
        async with serve(script) as server:
            followed = Followed(server)
            target = Target(server.url, api_key_file=key_file)
            stream = CanaryStream(
                StreamRequest(
                    stream=1,
                    engine=rank or "0",
                    request_id="stallwatch-canary-0a1b2c3d-1",
                    model="some-model",
                    prompt=PROMPT,
                    tokens=tokens,
                    api=api,
                    rank=rank,
                    served="served: some-other-model",
                ),
                target,
                emit=followed.emitted.append,
                clock=loop.time,
                timeout_seconds=timeout_seconds,
            )
            async with target.session(keep_alive=False) as session:
                task = asyncio.create_task(stream.run(session))
                if cancel_at is not None:
                    await asyncio.sleep(cancel_at)
                    task.cancel()
                await asyncio.wait({task})
                followed.ended = None if task.cancelled() else task.result()
                await asyncio.sleep(0.001)
            return followed

    return run(main())


def plays(*events: Any, head: bytes = SSE_HEAD) -> Script:
    """A script that sends all events in one segment and closes."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(head)
        await peer.data(*events)

    return script


def answers(raw: bytes) -> Script:
    """A script that sends these bytes and closes."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(raw)

    return script


def test_gaps_are_timed_exactly() -> None:
    """The times of tokens are those at which the server sent them, to the nanosecond in virtual time."""
    sent: list[float] = []

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        for n in range(1, 65):
            await asyncio.sleep(2.5 if n == 40 else 0.0371 + n * 1e-6)
            sent.append(asyncio.get_running_loop().time())
            await peer.data(text("x", count=n, end="length" if n == 64 else None))
        await peer.data({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 64}}, "[DONE]")

    followed = follow(script)

    assert followed.tokens == [(at, 1) for at in sent]
    assert followed.outcome is Outcome.COMPLETED
    assert followed.ended is not None
    assert followed.ended.closed.prompt_tokens == 9


def test_the_request_is_what_vllm_accepts() -> None:
    """The request asks for exactly N timed tokens, is marked as ours and may be pinned to a rank."""
    followed = follow(plays(text("a", count=1, end="length"), "[DONE]"), rank="3")
    asked = followed.server.asked[0]

    assert (asked.method, asked.path) == ("POST", "/v1/completions")
    assert asked.body == {
        "model": "some-model",
        "prompt": PROMPT,
        "max_tokens": 64,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "cache_salt": "stallwatch-canary-0a1b2c3d-1",
    }
    assert asked.headers["x-request-id"] == "stallwatch-canary-0a1b2c3d-1"
    assert asked.headers["x-stallwatch-canary"] == "1"
    assert asked.headers["x-data-parallel-rank"] == "3"
    assert asked.headers["accept-encoding"] == "identity"
    assert asked.headers["content-type"] == "application/json"


def test_the_chat_form_counts_deltas() -> None:
    """In chat mode role chunks carry nothing, and text, reasoning and tool calls carry tokens."""
    followed = follow(
        plays(
            delta({"role": "assistant", "content": ""}, count=1),
            delta({"content": "a"}, count=1),
            delta({"reasoning": "b"}, count=2),
            delta({"reasoning_content": "c"}, count=3),
            delta({"tool_calls": [{"index": 0}]}, count=5),
            delta({"content": ""}, count=5),
            "[DONE]",
        ),
        api="chat",
    )

    assert followed.server.asked[0].path == "/v1/chat/completions"
    assert followed.server.asked[0].body["messages"] == [{"role": "user", "content": PROMPT}]
    assert [tokens for _, tokens in followed.tokens] == [5]
    assert followed.outcome is Outcome.COMPLETED


@dataclass(frozen=True)
class Counted:
    chunks: list[Any]
    new: list[int]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Counted([text("a", count=1), text("b", count=4)], [1, 3]), id="several-tokens-a-chunk"),
        pytest.param(
            Counted([text("a", count=1), text("", count=2), text("", count=2)], [1, 1, 0]), id="half-a-character"
        ),
        pytest.param(Counted([text("a"), text(""), text("b")], [1, 0, 1]), id="no-count"),
        pytest.param(Counted([{"choices": [{"text": "ab", "token_ids": [1, 2]}]}], [2]), id="token-ids"),
        pytest.param(Counted([{"choices": [{"text": "", "token_ids": [1]}]}], [1]), id="token-ids-of-half-a-character"),
        pytest.param(
            Counted([text("a", count=0), text("b", count=0), text("c", count=3)], [1, 1, 1]), id="count-at-end"
        ),
        pytest.param(Counted([text("a", count=5), text("b", count=2), text("c", count=3)], [5, 1, 1]), id="backwards"),
        pytest.param(Counted([text("a", count=10**12), text("b", count=10**12 + 1)], [1, 1]), id="absurd"),
        pytest.param(Counted([text("a", count=1) | {"usage": {"completion_tokens": True}}], [1]), id="bool"),
        pytest.param(Counted([text("a") | {"usage": {"completion_tokens": 2.5}}], [1]), id="fraction"),
        pytest.param(Counted([text("a") | {"usage": {"completion_tokens": -3}}], [1]), id="negative"),
        pytest.param(Counted([text("a") | {"usage": {"completion_tokens": "7"}}], [1]), id="string"),
        pytest.param(Counted([text("a") | {"usage": None}, text("b") | {"usage": [1]}], [1, 1]), id="null-usage"),
        pytest.param(
            Counted([{"choices": None}, {"choices": [None]}, {"choices": "x"}, {}], [0, 0, 0, 0]), id="choices"
        ),
        pytest.param(Counted([{"choices": [{"delta": None}]}, {"choices": [{"text": None}]}], [0, 0]), id="null-text"),
        pytest.param(
            Counted([text("a", count=1), {"choices": [], "usage": {"completion_tokens": 9}}], [1, 0]), id="usage-only"
        ),
        pytest.param(Counted([delta({"role": "assistant", "content": "a"}, count=1)], [1]), id="role-with-text"),
        pytest.param(
            Counted([delta({}, count=0), delta({"content": "a"}, count=1), delta({}, count=1)], [0, 1, 0]),
            id="empty-delta",
        ),
    ],
)
def test_tokens_of_a_chunk(case: Counted) -> None:
    """Tokens come from the server's count where it makes sense, else from token ids, else one for a chunk with text."""
    counter = TokenCounter(64)

    assert [counter.read(json.dumps(chunk)) for chunk in case.chunks] == case.new


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "usage",
                    "text",
                    "delta",
                    "content",
                    "role",
                    "completion_tokens",
                    "error",
                    "detail",
                    "message",
                    "token_ids",
                    "finish_reason",
                    "prompt_tokens_details",
                    "cached_tokens",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=25,
)


@given(st.lists(JSON, max_size=8))
def test_no_chunk_crashes_or_takes_tokens_back(chunks: list[Any]) -> None:
    """Whatever JSON comes, the count of tokens only grows, or the stream ends with a named error."""
    counter = TokenCounter(8)
    for chunk in chunks:
        before = counter.tokens
        try:
            new = counter.read(json.dumps(chunk))
        except SourceError:
            return

        assert new >= 0
        assert counter.tokens == before + new <= 32


@dataclass(frozen=True)
class Ending:
    script: Script
    outcome: Outcome
    detail: str
    tokens: int = 0


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "code": 500}}


ENDINGS = [
    pytest.param(
        Ending(plays(text("a", count=1)), Outcome.CUT, "the stream ended before it was finished", 1), id="cut"
    ),
    pytest.param(
        Ending(answers(SSE_HEAD + b"data: {"), Outcome.CUT, "the stream ended before its first event"),
        id="cut-in-first-event",
    ),
    pytest.param(Ending(plays(text("a", count=1, end="length")), Outcome.COMPLETED, "", 1), id="finished-without-done"),
    pytest.param(
        Ending(
            plays(text("a", count=1), error("boom\n\x1b[31mred"), "[DONE]"),
            Outcome.SERVER_ERROR,
            "error inside the stream: boom \\x1b[31mred",
            1,
        ),
        id="error-inside",
    ),
    pytest.param(
        Ending(
            plays({"object": "error", "message": "bad rank", "code": 400}),
            Outcome.SERVER_ERROR,
            "error inside the stream: bad rank",
        ),
        id="error-inside-old-form",
    ),
    pytest.param(
        Ending(
            plays(error(f"cannot do {PROMPT}" + "x" * 500)),
            Outcome.SERVER_ERROR,
            "error inside the stream: cannot do ..." + "x" * 184 + "...",
        ),
        id="error-inside-long-and-quoting",
    ),
    pytest.param(Ending(plays("[DONE]"), Outcome.MALFORMED, "the stream finished without a token"), id="done-at-once"),
    pytest.param(Ending(plays("not json"), Outcome.MALFORMED, "an event of the stream is not JSON"), id="not-json"),
    pytest.param(Ending(plays("[" * 200_000), Outcome.MALFORMED, "an event of the stream is not JSON"), id="deep-json"),
    pytest.param(Ending(plays("9" * 5000), Outcome.MALFORMED, "an event of the stream is not JSON"), id="huge-number"),
    pytest.param(
        Ending(plays("[1]"), Outcome.MALFORMED, "an event of the stream is not a JSON object"), id="no-object"
    ),
    pytest.param(
        Ending(
            plays(*[text("a")] * 145), Outcome.MALFORMED, "more than 144 tokens: the server ignores max_tokens", 144
        ),
        id="too-many-tokens",
    ),
    pytest.param(
        Ending(
            answers(answer("200 OK", b'{"choices": []}')),
            Outcome.MALFORMED,
            "one JSON answer instead of a stream: something on the path buffers it",
        ),
        id="json-body",
    ),
    pytest.param(
        Ending(
            answers(answer("200 OK", b"<html>", kind="text/html")),
            Outcome.MALFORMED,
            "a web page instead of a stream: is canary.url the API's root?",
        ),
        id="web-page",
    ),
    pytest.param(
        Ending(
            answers(answer("200 OK", b"hello", kind="text/plain")),
            Outcome.MALFORMED,
            "the answer (text/plain) holds no event: is canary.url the API's root?",
        ),
        id="plain-text",
    ),
    pytest.param(
        Ending(
            answers(
                answer(
                    "200 OK",
                    gzip.compress(b"\0" * 10_000_000),
                    kind="text/event-stream",
                    headers="Content-Encoding: gzip\r\n",
                )
            ),
            Outcome.MALFORMED,
            "the answer is packed (gzip) although that was declined",
        ),
        id="gzip-bomb",
    ),
    pytest.param(
        Ending(answers(b"SSH-2.0-OpenSSH_9.2\r\n"), Outcome.MALFORMED, "not an HTTP answer: *"), id="not-http"
    ),
    pytest.param(
        Ending(answers(b"HTTP/1.1 200 OK\r\nX-Endless: " + b"x" * 100_000), Outcome.MALFORMED, "not an HTTP answer: *"),
        id="endless-header",
    ),
    pytest.param(
        Ending(
            answers(b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: x\r\n" % n for n in range(100_000))),
            Outcome.MALFORMED,
            "not an HTTP answer: *",
        ),
        id="endless-headers",
    ),
    pytest.param(
        Ending(answers(b""), Outcome.REFUSED, "the connection was closed before an answer came"), id="hung-up"
    ),
    pytest.param(
        Ending(
            answers(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
            Outcome.MALFORMED,
            "not an HTTP answer: *",
        ),
        id="bad-chunked-encoding",
    ),
    pytest.param(
        Ending(
            answers(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndat"
            ),
            Outcome.CUT,
            "the answer broke off",
        ),
        id="cut-in-chunked-encoding",
    ),
    pytest.param(
        Ending(
            answers(answer("400 Bad Request", json.dumps({"error": {"message": f"no: {PROMPT}"}}).encode())),
            Outcome.REJECTED,
            "HTTP 400: no: ...",
        ),
        id="400",
    ),
    pytest.param(
        Ending(
            answers(answer("401 Unauthorized", b'{"error":"Unauthorized"}')),
            Outcome.AUTH,
            "HTTP 401: Unauthorized; set canary.api_key_file",
        ),
        id="401",
    ),
    pytest.param(
        Ending(
            answers(answer("404 Not Found", b'{"error":{"message":"The model does not exist."}}')),
            Outcome.REJECTED,
            "HTTP 404: The model does not exist.; served: some-other-model",
        ),
        id="404",
    ),
    pytest.param(
        Ending(
            answers(answer("422 Unprocessable Entity", b'{"detail":[{"msg":"Field required","loc":["body"]}]}')),
            Outcome.REJECTED,
            "HTTP 422: Field required",
        ),
        id="422",
    ),
    pytest.param(
        Ending(
            answers(answer("429 Too Many Requests", b"slow down", kind="text/plain")),
            Outcome.BUSY,
            "HTTP 429: turned away by admission control",
        ),
        id="429",
    ),
    pytest.param(
        Ending(
            answers(answer("503 Service Unavailable", b'{"message":"queue is full"}')),
            Outcome.BUSY,
            "HTTP 503: queue is full; turned away by admission control",
        ),
        id="503",
    ),
    pytest.param(
        Ending(
            answers(answer("502 Bad Gateway", b"<html>" * 50_000, kind="text/html")), Outcome.SERVER_ERROR, "HTTP 502"
        ),
        id="502",
    ),
    pytest.param(
        Ending(
            answers(answer("307 Temporary Redirect", headers="Location: http://127.0.0.1:1/elsewhere\r\n")),
            Outcome.REJECTED,
            "HTTP 307: redirects are not followed: set canary.url to the final address",
        ),
        id="redirect",
    ),
    pytest.param(
        Ending(
            answers(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
            Outcome.MALFORMED,
            "HTTP 101",
        ),
        id="101",
    ),
]


@pytest.mark.parametrize("case", ENDINGS)
def test_endings(case: Ending) -> None:
    """Each way in which a stream can end has its outcome, and a detail that helps and quotes nothing of ours."""
    followed = follow(case.script)
    detail = case.detail.removesuffix("*")

    assert followed.outcome is case.outcome
    assert followed.detail == case.detail or (case.detail != detail and followed.detail.startswith(detail))
    assert sum(tokens for _, tokens in followed.tokens) == case.tokens
    assert len(followed.server.asked) == 1


def test_a_freeze_before_the_first_token_times_out() -> None:
    """A stream without any token ends at the deadline, as a censored wait."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        await asyncio.sleep(1000)

    followed = follow(script, timeout_seconds=120)

    assert followed.outcome is Outcome.TIMEOUT
    assert followed.detail == "no new token for 120 s"
    assert followed.ended is not None
    assert followed.ended.closed.at == pytest.approx(120)
    assert followed.server.hung_up == [pytest.approx(120)]


def test_a_server_that_never_answers_times_out() -> None:
    """A request without any answer ends at the deadline."""

    async def script(_asked: Asked, _peer: Peer) -> None:
        await asyncio.sleep(1000)

    followed = follow(script, timeout_seconds=30)

    assert (followed.outcome, followed.detail) == (Outcome.TIMEOUT, "no answer within 30 s")
    assert followed.server.hung_up == [pytest.approx(30)]


def test_each_token_moves_the_deadline() -> None:
    """Only time without a new token counts; a stall after tokens is censored one deadline after the last of them."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        for n in range(1, 4):
            await asyncio.sleep(100)
            await peer.data(text("a", count=n))
        await asyncio.sleep(1000)

    followed = follow(script, timeout_seconds=120)

    assert [at for at, _ in followed.tokens] == [100, 200, 300]
    assert followed.outcome is Outcome.TIMEOUT
    assert followed.ended is not None
    assert followed.ended.closed.at == pytest.approx(420)


@pytest.mark.parametrize(
    "drip",
    [
        pytest.param(b": keep-alive\n\n", id="comments"),
        pytest.param(b"x", id="bytes-of-one-line"),
        pytest.param(b'data: {"choices":[{"text":""}]}\n\n', id="empty-chunks"),
        pytest.param(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', id="role-chunks"),
    ],
)
def test_a_drip_without_tokens_does_not_hold_a_stream(drip: bytes) -> None:
    """Bytes that carry no token do not move the deadline."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        while True:
            await asyncio.sleep(1)
            await peer.send(drip)

    followed = follow(script, timeout_seconds=60)

    assert followed.tokens == []
    assert (followed.outcome, followed.detail) == (Outcome.TIMEOUT, "no new token for 60 s")
    assert followed.server.hung_up[0] <= 61


def test_a_slow_stream_ends_at_ten_deadlines() -> None:
    """A token just in time, again and again, does not hold a stream for ever."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        for n in range(1, 1000):
            await asyncio.sleep(50)
            await peer.data(text("a", count=n))

    followed = follow(script, timeout_seconds=60)

    assert (followed.outcome, followed.detail) == (Outcome.TIMEOUT, "not finished after 600 s")
    assert followed.server.hung_up == [pytest.approx(600)]


def test_a_half_closed_stream_is_cut() -> None:
    """A server that ends its direction without finishing has cut the stream."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        await peer.data(text("a", count=1))
        peer.half_close()
        await asyncio.sleep(1000)

    followed = follow(script)

    assert (followed.outcome, len(followed.tokens)) == (Outcome.CUT, 1)


def test_a_reset_stream_is_cut() -> None:
    """A connection that breaks within a stream has cut it, and the tokens before count."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        await peer.data(text("a", count=1))
        await asyncio.sleep(1)
        peer.reset()

    followed = follow(script)

    assert (followed.outcome, len(followed.tokens)) == (Outcome.CUT, 1)


def test_a_reset_before_the_answer_is_a_refusal() -> None:
    """A connection that breaks before any answer is refused, not cut."""

    async def script(_asked: Asked, peer: Peer) -> None:
        peer.reset()

    assert follow(script).outcome is Outcome.REFUSED


@pytest.mark.parametrize(
    ("flood", "detail"),
    [
        pytest.param(b"x" * 65536, "a line of more than 1048576 bytes in the stream", id="endless-line"),
        pytest.param(
            (b"data: " + b"x" * 1000 + b"\n") * 64,
            "an event of more than 1048576 bytes in the stream",
            id="endless-event",
        ),
        pytest.param(b":\n\n" * 20_000, "far more bytes than the tokens asked for can take", id="a-million-comments"),
        pytest.param(
            b'data: {"choices":[{"text":""}]}\n\n' * 2000,
            "far more bytes than the tokens asked for can take",
            id="a-million-empty-chunks",
        ),
    ],
)
def test_floods_are_bounded(flood: bytes, detail: str) -> None:
    """An endless line, an endless event and a million chunks end the stream after a few megabytes at most."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        for _ in range(500):
            await peer.send(flood)

    tracemalloc.start()
    try:
        followed = follow(script)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (followed.outcome, followed.detail) == (Outcome.MALFORMED, detail)
    assert peak < 16 * 1024 * 1024


def test_a_million_tokens_are_followed_to_the_end() -> None:
    """A stream that was asked for a million tokens passes whole: nothing is kept of what was read."""
    total = 1_000_000
    chunk = b'data: {"choices":[{"text":"a"}]}\n\n' * 10_000

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        for _ in range(total // 10_000):
            await peer.send(chunk)
        await peer.data("[DONE]")

    started = time.perf_counter()
    followed = follow(script, tokens=total)
    seconds = time.perf_counter() - started
    print(f"\na million chunks through a socket: {seconds:.1f} s, {len(followed.tokens)} reads")

    assert followed.outcome is Outcome.COMPLETED
    assert sum(tokens for _, tokens in followed.tokens) == total
    assert seconds < 60


def test_cancelling_closes_the_connection_at_once() -> None:
    """A cancelled stream hangs up at once, so that vLLM aborts the request, and says so."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        await peer.data(text("a", count=1))
        await asyncio.sleep(1000)

    followed = follow(script, cancel_at=5)

    assert followed.server.hung_up == [5]
    assert followed.emitted[-1] == StreamClosed(5, 1, Outcome.CANCELLED, "", 9, None)
    assert followed.ended is None


def test_cancelling_before_the_answer_closes_the_connection_too() -> None:
    """A request that still waits for its answer is given up at once as well."""

    async def script(_asked: Asked, _peer: Peer) -> None:
        await asyncio.sleep(1000)

    followed = follow(script, cancel_at=5)

    assert followed.server.hung_up == [5]
    assert [type(seen) for seen in followed.emitted] == [StreamOpened, StreamClosed]


def test_our_own_lateness_is_not_blamed_on_the_server() -> None:
    """When our loop was frozen beyond the deadline, the tokens that wait in the socket are read, not given up."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        await peer.data(text("a", count=1))
        await asyncio.sleep(59)
        await peer.data(text("b", count=2))
        _jump(10.0)
        await asyncio.sleep(1)
        await peer.data(text("c", count=3, end="length"), "[DONE]")

    followed = follow(script, timeout_seconds=60)

    assert followed.outcome is Outcome.COMPLETED
    assert [at for at, _ in followed.tokens] == [0, 69, 70]


def _jump(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._jumping.now += seconds


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 900), max_size=10))
def test_any_split_gives_the_same_tokens(cuts: list[int]) -> None:
    """However the network cuts a stream, the same number of tokens is counted and it ends the same way."""
    chunks = [json.dumps(text("ä", count=n)).encode() for n in (1, 2, 4, 5, 6, 9, 10)]
    raw = b"".join(b"data: " + chunk + b"\r\n\r\n" for chunk in chunks) + b": bye\n\ndata: [DONE]\n\n"
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        for start, end in pairwise(edges):
            await peer.send(raw[start:end])
            await asyncio.sleep(0.001)

    followed = follow(script)

    assert sum(tokens for _, tokens in followed.tokens) == 10
    assert followed.outcome is Outcome.COMPLETED


def test_a_refused_key_is_never_told(tmp_path: Path) -> None:
    """A server that repeats the key it was sent does not get it into our messages, not even a part of it."""
    key_file = tmp_path / "key"
    key_file.write_text("sesame\n")
    body = json.dumps({"error": {"message": "x" * 197 + "sesame"}}).encode()
    followed = follow(answers(answer("401 Unauthorized", body)), key_file=key_file)

    assert followed.server.asked[0].headers["authorization"] == "Bearer sesame"
    assert followed.detail == f"HTTP 401: {'x' * 197}...; set canary.api_key_file"
    assert followed.ended is not None
    assert followed.ended.failure is not None
    assert followed.ended.failure.reason is Failure.AUTH


def test_nobody_listens() -> None:
    """A port where nothing listens is a refusal, and the stream is closed with it."""

    async def main() -> Ended:
        async with serve(answers(b"")) as server:
            target = Target(server.url)
        request = StreamRequest(stream=1, engine="0", request_id="r", model="m", prompt=PROMPT, tokens=2)
        async with target.session(keep_alive=False) as session:
            clock = asyncio.get_running_loop().time
            stream = CanaryStream(request, target, emit=lambda _seen: None, clock=clock, timeout_seconds=60)
            return await stream.run(session)

    assert run(main()).closed.outcome is Outcome.REFUSED


def test_a_slow_refusal_is_still_a_refusal() -> None:
    """A refusal whose body never ends is told by its status alone, within seconds."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 500 Oops\r\nContent-Length: 1000\r\n\r\n{")
        await asyncio.sleep(1000)

    followed = follow(script)

    assert (followed.outcome, followed.detail) == (Outcome.SERVER_ERROR, "HTTP 500")
    assert followed.server.hung_up == [pytest.approx(5)]


def test_goldens_are_there() -> None:
    """Streams of a real server are part of the tests; without them the next test proves nothing."""
    assert GOLDEN


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_real_streams_give_the_tokens_that_were_asked_for(path: Path) -> None:
    """A stream captured from a real vLLM, played again, gives each token once where the request asked to count them."""
    raw = path.read_bytes()
    asked = raw.split(b"\n")[0].decode()  # the header of a golden says what was sent
    tokens = int(asked.partition('"max_tokens": ')[2].partition(",")[0])
    followed = follow(answers(SSE_HEAD + raw), tokens=tokens)
    seen = sum(tokens for _, tokens in followed.tokens)

    assert seen <= tokens
    if b'"error"' in raw:
        assert followed.outcome is Outcome.SERVER_ERROR
    elif '"n":' not in asked and ("continuous_usage_stats" in asked or "return_token_ids" in asked):
        assert (followed.outcome, seen) == (Outcome.COMPLETED, tokens)


def test_a_real_wrong_rank_is_an_error_inside_the_stream() -> None:
    """A rank that the server does not have is answered with 200 and an error, which the detail tells."""
    raw = (GOLDEN[0].parent / "completions-bad-rank.txt").read_bytes()

    assert "data_parallel_rank 7 is out of range" in follow(answers(SSE_HEAD + raw), rank="7").detail
