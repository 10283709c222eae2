"""An independent load client for a vLLM server: it tells the tests what a reader really saw.

It shares no line with `stallwatch` and runs as a process of its own (`python load.py PLAN.json OUT.jsonl`, standard
library only), so that neither side's misunderstanding of SSE, nor its event loop, can hide in the other's numbers.
Every socket read is stamped with `time.monotonic()` (CLOCK_MONOTONIC: comparable between the processes of one
machine) right after the read and before any parsing; parsing happens in another turn of the loop.

The plan is a list of `Request`s. Times are seconds, counts are tokens. Only a plan or a result that is not what this
module wrote raises; whatever the server does ends up in the `end` event's `outcome`.
"""

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

_WORDS = "the reader waits while a long prompt is computed and nothing on the dashboard moves at all "


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One streamed completion. It is sent `delay` seconds after `after` has `after_tokens` tokens (or after the start).

    `hang_up_after` closes the connection once that many tokens have come, as a reader who leaves does.
    """

    name: str
    prompt_tokens: int = 16
    tokens: int = 400
    salt: str | None = None
    seed: int = 0
    after: str | None = None
    after_tokens: int = 1
    delay: float = 0.0
    hang_up_after: int | None = None
    timeout: float = 900.0
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Read:
    """One socket read that carried at least one new token: when it returned, and how many tokens were new."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one request saw. `ended` is None while it runs; `prompt_tokens` is the server's own count."""

    name: str
    sent: float
    reads: tuple[Read, ...]
    ended: float | None = None
    outcome: str = "open"
    status: int | None = None
    prompt_tokens: int | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens that came, all reads together."""
        return sum(read.tokens for read in self.reads)

    @property
    def first_token_wait(self) -> float | None:
        """Seconds from send to the first token; None when none has come."""
        return self.reads[0].at - self.sent if self.reads else None


def decode_stream(name: str = "victim", *, tokens: int = 400, **more: Any) -> Request:
    """A reader: a short prompt, then `tokens` tokens of decoding."""
    return Request(name=name, tokens=tokens, **more)


def long_prompt(name: str = "long", *, prompt_tokens: int = 12_000, salt: str | None = None, **more: Any) -> Request:
    """The other one: a long prompt and one token. A `salt` of its own keeps it out of the prefix cache."""
    return Request(name=name, prompt_tokens=prompt_tokens, tokens=1, salt=salt, **more)


def prompt_text(tokens: int, *, seed: int = 0) -> str:
    """ASCII text of `tokens` bytes, which is as many tokens for the byte-level tokenizer; it adds no `<s>` itself."""
    head = f"{seed:06d} " if seed else ""
    return (head + _WORDS * (tokens // len(_WORDS) + 1))[:tokens]


def streams(events: Iterable[Mapping[str, Any]]) -> dict[str, Stream]:
    """Folds the client's events into one `Stream` a request; requests not sent yet are absent."""
    sent: dict[str, float] = {}
    reads: dict[str, list[Read]] = {}
    ends: dict[str, Mapping[str, Any]] = {}
    for event in events:
        name = event["stream"]
        if event["event"] == "send":
            sent[name], reads[name] = event["at"], []
        elif event["event"] == "read":
            reads[name].append(Read(event["at"], event["tokens"]))
        elif event["event"] == "end":
            ends[name] = event
    return {
        name: Stream(
            name=name,
            sent=at,
            reads=tuple(reads[name]),
            ended=ends[name]["at"] if name in ends else None,
            outcome=ends[name]["outcome"] if name in ends else "open",
            status=ends[name]["status"] if name in ends else None,
            prompt_tokens=ends[name]["prompt_tokens"] if name in ends else None,
            error=ends[name]["error"] if name in ends else None,
        )
        for name, at in sent.items()
    }


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events written so far; a last line that is still being written is left out."""
    complete, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


class Load:
    """A load client at work in its own process. Build it with `load`."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self.output = output

    def streams(self) -> dict[str, Stream]:
        """What has been seen up to now."""
        return streams(read_events(self.output))

    def wait_for_tokens(self, name: str, tokens: int, *, timeout: float = 240.0) -> Stream:
        """Waits until `name` has `tokens` tokens or has ended; TimeoutError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            stream = self.streams().get(name)
            if stream is not None and (stream.tokens >= tokens or stream.ended is not None):
                return stream
            if self._process.poll() is not None:
                return self.streams()[name]
            time.sleep(0.05)
        raise TimeoutError(f"{name} had no {tokens} tokens after {timeout:g} s")

    def finish(self, *, timeout: float = 900.0) -> dict[str, Stream]:
        """Waits for every request to end and returns what each saw; TimeoutExpired after `timeout` seconds."""
        code = self._process.wait(timeout)
        if code != 0:
            raise RuntimeError(f"the load client ended with exit code {code}")
        return self.streams()


@contextmanager
def load(url: str, plan: Iterable[Request], *, model: str = "tiny") -> Iterator[Load]:
    """Runs `plan` against the server at `url` in a process of its own, which ends with the block at the latest."""
    with tempfile.TemporaryDirectory(prefix="stallwatch-load-") as folder:
        plan_path, output = Path(folder, "plan.json"), Path(folder, "events.jsonl")
        requests = [asdict(request) for request in plan]
        plan_path.write_text(json.dumps({"url": url, "model": model, "requests": requests}))
        output.touch()
        process = subprocess.Popen([sys.executable, "-I", __file__, str(plan_path), str(output)])
        try:
            yield Load(process, output)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(10)


def run(url: str, *plan: Request, model: str = "tiny", timeout: float = 900.0) -> dict[str, Stream]:
    """Runs `plan` to its end and returns what each request saw."""
    with load(url, plan, model=model) as running:
        return running.finish(timeout=timeout)


# What follows runs in the client's process.


class _StampedReads(asyncio.Protocol):
    """Hands every socket read over with the time at which it returned; None marks the end of the connection."""

    def __init__(self) -> None:
        self.reads: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()

    def data_received(self, data: bytes) -> None:
        self.reads.put_nowait((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the interface's name
        self.reads.put_nowait(None)


class _Body:
    """Undoes HTTP/1.1: takes reads, gives the body's bytes. Knows chunked and plain bodies, no trailers."""

    def __init__(self) -> None:
        self._pending = b""
        self.status: int | None = None
        self._chunked = False
        self._left = 0  # bytes of the current chunk (or, unchunked, of the body) still to come
        self.done = False

    def feed(self, data: bytes) -> bytes:
        self._pending += data
        if self.status is None and not self._take_head():
            return b""
        body = b""
        while not self.done and self._pending:
            if self._left == 0 and not self._take_chunk_size():
                break
            body += self._pending[: self._left]
            taken = min(self._left, len(self._pending))
            self._left -= taken
            self._pending = self._pending[taken:]
            if self._left == 0 and not self._chunked:
                self.done = True
        return body

    def _take_head(self) -> bool:
        head, separator, rest = self._pending.partition(b"\r\n\r\n")
        if not separator:
            return False
        lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        self.status = int(lines[0].split()[1])
        self._chunked = headers.get("transfer-encoding") == "chunked"
        self._left = 0 if self._chunked else int(headers.get("content-length", 0))
        self.done = not self._chunked and self._left == 0
        self._pending = rest
        return True

    def _take_chunk_size(self) -> bool:
        line, separator, rest = self._pending.removeprefix(b"\r\n").partition(b"\r\n")
        if not separator:
            return False
        self._left, self._pending = int(line, 16), rest
        self.done = self._left == 0
        return not self.done


def _request_bytes(request: Request, model: str, authority: str) -> bytes:
    body = {
        "model": model,
        "prompt": prompt_text(request.prompt_tokens, seed=request.seed),
        "max_tokens": request.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({"cache_salt": request.salt} if request.salt else {}),
        **request.extra,
    }
    payload = json.dumps(body).encode()
    headers = {
        "Host": authority,
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Content-Length": str(len(payload)),
        "X-Request-Id": f"load-{request.name}",
        "Connection": "close",
        **request.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + payload


async def _events(protocol: _StampedReads, body: _Body) -> AsyncIterator[tuple[float, list[str]]]:
    """The `data:` payloads that each socket read completed, with the read's time."""
    pending = b""
    while (read := await protocol.reads.get()) is not None:
        at, data = read
        pending += body.feed(data)
        if body.status != 200:
            if body.done:
                yield at, [pending.decode()]
                return
            continue
        *blocks, pending = pending.split(b"\n\n")
        yield at, [block.removeprefix(b"data: ").decode() for block in blocks if block.startswith(b"data: ")]
        if body.done:
            return


class _Client:
    def __init__(self, url: str, model: str, output: TextIO) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._model = model
        self._output = output
        self._counts: dict[str, int] = {}
        self._moved = asyncio.Condition()
        self._ended: set[str] = set()

    def _say(self, event: str, stream: str, at: float, **more: Any) -> None:
        self._output.write(json.dumps({"event": event, "stream": stream, "at": at, **more}) + "\n")
        self._output.flush()

    async def send(self, request: Request) -> None:
        """Waits for the request's turn, runs it, and writes its events."""
        if request.after is not None:
            other, tokens = request.after, request.after_tokens
            async with self._moved:
                await self._moved.wait_for(lambda: self._counts.get(other, 0) >= tokens or other in self._ended)
        await asyncio.sleep(request.delay)
        end: dict[str, Any] = {"outcome": "cut", "status": None, "prompt_tokens": None, "error": None}
        try:
            async with asyncio.timeout(request.timeout):
                await self._stream(request, end)
        except TimeoutError:
            end["outcome"] = "timeout"
        except OSError as error:
            end.update(outcome="refused", error=str(error))
        self._say("end", request.name, time.monotonic(), **end)
        async with self._moved:
            self._ended.add(request.name)
            self._moved.notify_all()

    async def _stream(self, request: Request, end: dict[str, Any]) -> None:
        wanted = _request_bytes(request, self._model, f"{self._host}:{self._port}")
        self._say("send", request.name, time.monotonic())
        transport, protocol = await asyncio.get_running_loop().create_connection(_StampedReads, self._host, self._port)
        body = _Body()
        try:
            transport.write(wanted)
            async for at, payloads in _events(protocol, body):
                end["status"] = body.status
                if body.status != 200:
                    end.update(outcome="status", error="".join(payloads))
                    return
                before = self._counts.get(request.name, 0)
                for payload in payloads:
                    self._take(request.name, payload, end)
                new = self._counts.get(request.name, 0) - before
                if new > 0:
                    self._say("read", request.name, at, tokens=new, chunks=len(payloads))
                    async with self._moved:
                        self._moved.notify_all()
                if request.hang_up_after is not None and before + new >= request.hang_up_after:
                    end["outcome"] = "hung_up"
                    return
        finally:
            transport.abort()

    def _take(self, name: str, payload: str, end: dict[str, Any]) -> None:
        if payload == "[DONE]":
            if end["outcome"] != "error":
                end["outcome"] = "complete"
            return
        chunk = json.loads(payload)
        if "error" in chunk:
            end.update(outcome="error", error=json.dumps(chunk["error"]))
            return
        usage = chunk.get("usage")
        if usage:
            self._counts[name] = max(self._counts.get(name, 0), usage["completion_tokens"])
            end["prompt_tokens"] = usage["prompt_tokens"]


async def _send_all(plan: Mapping[str, Any], output: TextIO) -> None:
    client = _Client(plan["url"], plan["model"], output)
    async with asyncio.TaskGroup() as group:
        for request in plan["requests"]:
            group.create_task(client.send(Request(**request)))


if __name__ == "__main__":
    gc.disable()  # a collection would be booked as a gap; the process is short-lived
    with Path(sys.argv[2]).open("a") as events:
        asyncio.run(_send_all(json.loads(Path(sys.argv[1]).read_text()), events))
