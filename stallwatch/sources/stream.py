"""One canary request, timed token by token.

The clock is read right after each socket read, before anything is parsed, and one `StreamTokens` is emitted for each
read that carried a new token. The request asks for as many tokens as it wants to time (`ignore_eos`), salts the prefix
cache so that no other request profits or suffers, and samples greedily: a greedy request costs its batch nothing, while
one that samples can drag a batch of greedy neighbours onto a slower path. Every bound is ours: deadlines, bytes, line
length, tokens. Nothing is tried twice. No message of ours quotes what the model wrote.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import aiohttp

from stallwatch.observations import Failure, Outcome, StreamClosed, StreamOpened, StreamTokens
from stallwatch.scheduling import SourceError
from stallwatch.sources.chunks import TokenCounter, error_message
from stallwatch.sources.http import Target, network_failures, plain, read_bounded, refusal
from stallwatch.sources.sse import SseDecoder, SseOverflowError

# Overall deadline as a multiple of the deadline without a token.
PATIENCE = 10
_BYTES_PER_TOKEN = 4096  # a chunk of vLLM has 250 to 450 bytes
_SPARE_BYTES = 1024 * 1024
_READ_BYTES = 32 * 1024
_REFUSAL_BYTES = 64 * 1024
_REFUSAL_SECONDS = 5.0

OUTCOMES = MappingProxyType(
    {
        Failure.REFUSED: Outcome.REFUSED,
        Failure.DNS: Outcome.REFUSED,
        Failure.TLS: Outcome.REFUSED,
        Failure.UNAVAILABLE: Outcome.REFUSED,
        Failure.TIMEOUT: Outcome.TIMEOUT,
        Failure.REDIRECT: Outcome.REJECTED,
        Failure.REJECTED: Outcome.REJECTED,
        Failure.AUTH: Outcome.AUTH,
        Failure.BUSY: Outcome.BUSY,
        Failure.SERVER_ERROR: Outcome.SERVER_ERROR,
        Failure.TOO_LARGE: Outcome.MALFORMED,
        Failure.MALFORMED: Outcome.MALFORMED,
        Failure.CUT: Outcome.CUT,
    }
)

StreamObservation = StreamOpened | StreamTokens | StreamClosed


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What one canary request asks for."""

    stream: int
    engine: str
    request_id: str
    model: str
    prompt: str
    tokens: int
    api: Literal["completions", "chat"] = "completions"
    rank: str | None = None  # data-parallel rank to pin to
    served: str = ""  # the server's models in a few words, for the message about a wrong one
    salt: str | None = None  # of the prefix cache; None: the request's own, so that it hits nothing

    @property
    def path(self) -> str:
        """Where it is sent."""
        return "/v1/completions" if self.api == "completions" else "/v1/chat/completions"

    def headers(self) -> dict[str, str]:
        """Headers that name the canary, and its rank if it is pinned."""
        headers = {
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            "X-Request-Id": self.request_id,
            "X-Stallwatch-Canary": "1",
        }
        if self.rank is not None:
            headers["X-data-parallel-rank"] = self.rank
        return headers

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        asked: dict[str, Any] = (
            {"prompt": self.prompt}
            if self.api == "completions"
            else {"messages": [{"role": "user", "content": self.prompt}]}
        )
        return asked | {
            "model": self.model,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "cache_salt": self.salt or self.request_id,
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """How a stream ended: the observation for the caller to emit, and the failure behind it, if it was one."""

    closed: StreamClosed
    failure: SourceError | None = None


class CanaryStream:
    """One stream, from the request to its end.

    `tokens` says how many came so far. Whoever cancels `run` may set `cancelled_as` first. `on_tokens` is called after
    each emitted `StreamTokens`. `tap` hears the data of each event with the time of its read, before it is judged.
    """

    def __init__(
        self,
        request: StreamRequest,
        target: Target,
        *,
        emit: Callable[[StreamObservation], None],
        clock: Callable[[], float],
        timeout_seconds: float,
        on_tokens: Callable[[], None] = lambda: None,
        tap: Callable[[float, str], None] = lambda _at, _data: None,
    ) -> None:
        self._request = request
        self._target = target
        self._emit = emit
        self._clock = clock
        self._timeout = timeout_seconds
        self._on_tokens = on_tokens
        self._tap = tap
        self._counter = TokenCounter(request.tokens, clean=lambda said: _clean(said, request, target))
        self.cancelled_as = Outcome.CANCELLED

    @property
    def wanted(self) -> int:
        """Tokens that were asked for."""
        return self._request.tokens

    @property
    def tokens(self) -> int:
        """New tokens so far."""
        return self._counter.tokens

    async def run(self, session: aiohttp.ClientSession) -> Ended:
        """Sends the request and follows its answer to the end.

        The last observation is left to the caller to emit, except when the call is cancelled: then the connection is
        closed at once, so that the server aborts the request, and `StreamClosed` is emitted here.
        """
        self._emit(StreamOpened(self._clock(), self._request.stream, self._request.engine, self._request.request_id))
        try:
            await self._exchange(session)
        except SourceError as failure:
            return Ended(self._closed(OUTCOMES[failure.reason], failure.detail), failure)
        except asyncio.CancelledError:
            self._emit(self._closed(self.cancelled_as))
            raise
        return Ended(self._closed(Outcome.COMPLETED))

    def _closed(self, outcome: Outcome, detail: str = "") -> StreamClosed:
        counter = self._counter
        return StreamClosed(
            self._clock(), self._request.stream, outcome, detail, counter.prompt_tokens, counter.cached_tokens
        )

    async def _exchange(self, session: aiohttp.ClientSession) -> None:
        target = self._target
        now = asyncio.get_running_loop().time()
        deadline, last = now + self._timeout, now + PATIENCE * self._timeout
        try:
            with network_failures():
                async with asyncio.timeout_at(deadline):
                    response = await session.post(
                        target.url(self._request.path),
                        data=json.dumps(self._request.body()).encode(),
                        headers=target.key.headers() | self._request.headers(),
                        ssl=target.tls(),
                        server_hostname=target.server_name,
                        allow_redirects=False,
                        read_bufsize=_READ_BYTES,
                    )
        except SourceError as error:
            if error.reason is Failure.TIMEOUT and asyncio.get_running_loop().time() >= deadline:
                raise SourceError(Failure.TIMEOUT, f"no answer within {self._timeout:g} s") from error
            raise
        try:
            if response.status != 200:
                raise await _refused(response, self._request, target)
            _require_stream(response)
            await self._follow(response, deadline, last)
        finally:
            response.close()

    async def _follow(self, response: aiohttp.ClientResponse, deadline: float, last: float) -> None:
        loop = asyncio.get_running_loop()
        decoder = SseDecoder()
        budget = self._request.tokens * _BYTES_PER_TOKEN + _SPARE_BYTES
        events = 0
        while True:
            piece = await _read(response.content, min(deadline, last))
            at = self._clock()
            if piece is None:
                raise self._late(overall=loop.time() >= last)
            if not piece:
                break
            budget -= len(piece)
            if budget < 0:
                raise SourceError(Failure.MALFORMED, "far more bytes than the tokens asked for can take")
            new, done = 0, False
            try:
                for event in decoder.feed(piece):
                    events += 1
                    self._tap(at, event.data)
                    done = event.data == "[DONE]"
                    if done:
                        break
                    new += self._counter.read(event.data)
            except SseOverflowError as error:
                raise SourceError(Failure.MALFORMED, f"{error} in the stream") from error
            finally:
                # Tokens that came before an error in the same read did come.
                if new:
                    self._emit(StreamTokens(at, self._request.stream, new))
                    self._on_tokens()
            if done:
                break
            now = loop.time()
            if new:
                deadline = now + self._timeout
            # A flood that carries nothing never lets the read itself time out.
            if now >= min(deadline, last):
                raise self._late(overall=now >= last)
        self._require_end(response, done=bool(piece), events=events)

    def _late(self, *, overall: bool) -> SourceError:
        if overall:
            return SourceError(Failure.TIMEOUT, f"not finished after {PATIENCE * self._timeout:g} s")
        return SourceError(Failure.TIMEOUT, f"no new token for {self._timeout:g} s")

    def _require_end(self, response: aiohttp.ClientResponse, *, done: bool, events: int) -> None:
        if events == 0 and _kind(response) == "text/event-stream":
            raise SourceError(Failure.CUT, "the stream ended before its first event")
        if events == 0:
            kind = plain(response.headers.get("Content-Type", "no content type"), 60)
            raise SourceError(Failure.MALFORMED, f"the answer ({kind}) holds no event: is canary.url the API's root?")
        if not done and not self._counter.finished:
            raise SourceError(Failure.CUT, "the stream ended before it was finished")
        if self._counter.tokens == 0:
            raise SourceError(Failure.MALFORMED, "the stream finished without a token")


async def _read(content: aiohttp.StreamReader, deadline: float) -> bytes | None:
    """What the socket gave; b"" at the end of the answer, None when nothing came until the deadline."""
    # Only here and not around the whole stream: an OSError of a consumer is a bug, not a broken network.
    with network_failures():
        try:
            async with asyncio.timeout_at(deadline):
                return await content.readany()
        except TimeoutError:
            # When it was we who were late (a frozen container), the answer lies here already and is not to be blamed.
            return content.read_nowait() or None


def _require_stream(response: aiohttp.ClientResponse) -> None:
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        # Unpacking what a server chose to pack is how a kilobyte becomes a gigabyte.
        raise SourceError(Failure.MALFORMED, f"the answer is packed ({plain(encoding, 40)}) although that was declined")
    kind = _kind(response)
    if kind == "application/json":
        raise SourceError(Failure.MALFORMED, "one JSON answer instead of a stream: something on the path buffers it")
    if kind == "text/html":
        raise SourceError(Failure.MALFORMED, "a web page instead of a stream: is canary.url the API's root?")


def _kind(response: aiohttp.ClientResponse) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def _refused(response: aiohttp.ClientResponse, request: StreamRequest, target: Target) -> SourceError:
    """What a status other than 200 means, in the server's words and with what to do about it."""
    status = response.status
    if status == 401:
        target.key.refused()
    said = "" if status < 400 else _clean(await _said(response), request, target)
    detail = "; ".join(part for part in (said, _remedy(status, request)) if part)
    return refusal(status, detail) or SourceError(Failure.MALFORMED, f"HTTP {status}")


def _clean(said: str, request: StreamRequest, target: Target) -> str:
    """A server's words without what it may have repeated of ours. Cut last: half a key is a key's half."""
    return plain(target.key.redact(said).replace(request.prompt, "..."))


async def _said(response: aiohttp.ClientResponse) -> str:
    """The message in a refusal's body. A body that is slow, broken or no JSON object says nothing."""
    try:
        with network_failures():
            async with asyncio.timeout(_REFUSAL_SECONDS):
                return error_message(json.loads(await read_bounded(response, _REFUSAL_BYTES)))
    except (SourceError, ValueError, RecursionError):
        return ""


def _remedy(status: int, request: StreamRequest) -> str:
    if status in {401, 403}:
        return "set canary.api_key_file"
    if status == 404:
        return request.served or "set canary.model, or canary.api, or give canary.url without /v1"
    if status == 405:
        return "is canary.url the API's root?"
    if status in {429, 503}:
        return "turned away by admission control"
    if 300 <= status < 400:
        return "redirects are not followed: set canary.url to the final address"
    return ""
