"""Captures the goldens from a real vLLM: `/metrics` pages, SSE streams, error answers, and one interference run.

`python3 -m tests.vllm.capture` from the repository's root writes them into `tests/golden/vllm` and `tests/golden/sse`
(about three minutes: two servers are started). Every file says in its header how and when it was captured. Only the
response's own bytes are stored, after HTTP's chunking is undone; nothing of this machine gets into a file.
"""

import contextlib
import datetime as dt
import http.client
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.vllm import environment, load
from tests.vllm.server import VllmServer

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
HOW = "python3 -m tests.vllm.capture"

# The names that stallwatch asks for at 4 Hz, as a filtered answer shows them.
DETECTION = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:iteration_tokens_total_count",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_count",
    "vllm:prefix_cache_queries_total",
)
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"day": {"enum": ["today", "tomorrow"]}}, "required": ["day"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request whose answer becomes a golden."""

    name: str
    path: str = "/v1/completions"
    body: Mapping[str, Any] | str = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, the headers that mean something to a client, and the body."""

    status: int
    headers: dict[str, str]
    body: bytes


def completion(name: str, headers: Mapping[str, str] | None = None, **body: Any) -> Exchange:
    """A streamed completion of eight tokens, unless `body` says otherwise."""
    base = {"model": "tiny", "prompt": "The reader waits.", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return Exchange(name=name, body={**base, "stream": True, **body}, headers=headers or {})


def chat(name: str, **body: Any) -> Exchange:
    """A streamed chat answer of eight tokens, unless `body` says otherwise."""
    base = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    messages = [{"role": "user", "content": "How long?"}]
    return Exchange(name=name, path="/v1/chat/completions", body={**base, "messages": messages, **body})


TOOL_CALL: dict[str, Any] = {
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "max_tokens": 32,
    "ignore_eos": False,
    "stream_options": CONTINUOUS,
}


STREAMS = (
    completion("completions-plain", temperature=1, seed=3),
    completion("completions-usage", stream_options={"include_usage": True}),
    completion("completions-continuous-usage", stream_options=CONTINUOUS),
    completion("completions-token-ids", return_token_ids=True),
    completion("completions-echo", echo=True, stream_options=CONTINUOUS),
    completion("completions-logprobs", logprobs=1, max_tokens=3),
    completion("completions-two-choices", n=2, temperature=1, seed=7, max_tokens=4, stream_options=CONTINUOUS),
    completion("completions-one-token", max_tokens=1, stream_options=CONTINUOUS),
    completion("completions-bad-rank", headers={"X-data-parallel-rank": "7"}, stream_options=CONTINUOUS),
    chat("chat-plain"),
    chat("chat-continuous-usage", stream_options=CONTINUOUS),
    chat("chat-token-ids", return_token_ids=True, stream_options=CONTINUOUS),
)
FLAGGED_STREAMS = (
    completion("completions-stream-interval", max_tokens=10, stream_options=CONTINUOUS),
    completion("completions-stream-interval-plain", max_tokens=10),
    chat("chat-stream-interval", max_tokens=10, stream_options=CONTINUOUS),
    chat("chat-reasoning", stream_options=CONTINUOUS),
    chat(
        "chat-keep-alive",
        messages=[{"role": "user", "content": load.prompt_text(12_000, seed=9)}],
        max_tokens=2,
        stream_options=CONTINUOUS,
    ),
    chat("chat-reasoning-tool-call", **TOOL_CALL),
)
PLAIN_ANSWERS = (
    Exchange(name="version", path="/version", method="GET"),
    Exchange(name="models", path="/v1/models", method="GET"),
    Exchange(name="health", path="/health", method="GET"),
    completion("completion not streamed", stream=False),
)
ERRORS = (
    Exchange(name="no such path", path="/v1/nothing", method="GET"),
    Exchange(name="wrong method", path="/v1/completions", method="GET"),
    completion("no such model", model="absent"),
    completion("negative max_tokens", max_tokens=-1),
    completion("min_tokens above max_tokens", min_tokens=9),
    completion("prompt longer than the context", prompt="x" * 16_385),
    completion("bad cache_salt", cache_salt="a/b"),
    completion("max_tokens not a number", max_tokens="many"),
    completion("usage asked for without streaming", stream=False, stream_options=CONTINUOUS),
    Exchange(name="body is not JSON", body="{", headers={"Content-Type": "application/json"}),
    Exchange(name="body is not declared as JSON", body="hello", headers={"Content-Type": "text/plain"}),
    Exchange(name="body without a prompt", body={"model": "tiny"}),
)
KEY_ERRORS = (
    completion("no key", headers={"Authorization": ""}),
    completion("wrong key", headers={"Authorization": "Bearer wrong"}),
)
KEY = "golden-key"


def ask(url: str, exchange: Exchange) -> Answer:
    """Sends one exchange and reads its whole answer; OSError when the server is gone."""
    parts = urlsplit(url)
    body = exchange.body if isinstance(exchange.body, str) else json.dumps(exchange.body)
    headers = {"Content-Type": "application/json", **exchange.headers}
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    with contextlib.closing(connection):
        connection.request(exchange.method, exchange.path, body if exchange.method == "POST" else None, headers)
        answer = connection.getresponse()
        kept = {key.lower(): value for key, value in answer.getheaders() if key.lower() in {"content-type", "allow"}}
        return Answer(answer.status, kept, answer.read())


def with_key(exchange: Exchange) -> Exchange:
    """The same exchange with the API key of the second server."""
    return Exchange(
        name=exchange.name,
        path=exchange.path,
        body=exchange.body,
        method=exchange.method,
        headers={"Authorization": f"Bearer {KEY}", **exchange.headers},
    )


def provenance(flags: str, what: str) -> str:
    """The one-line header of a golden."""
    today = dt.datetime.now(tz=dt.UTC).date()
    flags = f" with {flags}" if flags else ""
    return f"Captured on {today} by `{HOW}` from vLLM {environment.VLLM} on CPU (tiny model){flags}: {what}"


def write_page(name: str, page: str, *, flags: str, what: str) -> None:
    """Stores a `/metrics` page under a comment line."""
    path = GOLDEN / "vllm" / name
    path.write_text(f"# {provenance(flags, what)}\n{page}")
    print(f"{path.relative_to(GOLDEN)}: {len(page.splitlines())} lines")


def write_stream(url: str, exchange: Exchange, *, flags: str) -> None:
    """Stores the bytes of a stream after an SSE comment, which every decoder has to ignore."""
    answer = ask(url, exchange)
    body = exchange.body if isinstance(exchange.body, str) else json.dumps(shortened(exchange.body))
    headers = {key: value for key, value in exchange.headers.items() if key != "Authorization"}
    asked = f"POST {exchange.path} {json.dumps(headers) + ' ' if headers else ''}{body}"
    if answer.status != 200:
        raise RuntimeError(f"{exchange.name}: {answer.status} {answer.body!r}")
    path = GOLDEN / "sse" / f"{exchange.name}.txt"
    path.write_bytes(f": {provenance(flags, asked)}\n\n".encode() + answer.body)
    print(f"{path.relative_to(GOLDEN)}: {len(answer.body)} bytes, {answer.headers['content-type']}")


def shortened(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body for a header: long prompts are told by their length."""
    told = json.loads(json.dumps(body))
    for message in told.get("messages", []):
        if len(message["content"]) > 200:
            message["content"] = f"<{len(message['content'])} characters>"
    if len(told.get("prompt", "")) > 200:
        told["prompt"] = f"<{len(told['prompt'])} characters>"
    return dict(told)


def told(url: str, exchange: Exchange) -> dict[str, Any]:
    """One answer as an entry of a JSON golden; `body` is the text as it came."""
    answer = ask(url, exchange)
    body = exchange.body if isinstance(exchange.body, str) else shortened(exchange.body)
    request = {"method": exchange.method, "path": exchange.path, "body": body if exchange.method == "POST" else None}
    return {
        "name": exchange.name,
        "request": request,
        "status": answer.status,
        "headers": answer.headers,
        "body": answer.body.decode(),
    }


def traffic(url: str, headers: Mapping[str, str]) -> dict[str, load.Stream]:
    """Four decoders, a 12,000-token prompt beside them, the same prompt again from the cache, an abort, a refusal."""
    salt = "golden"
    return load.run(
        url,
        *(load.decode_stream(f"reader-{n}", seed=n + 1, tokens=300, delay=0.1 * n, headers=headers) for n in range(4)),
        load.long_prompt(salt=salt, after="reader-0", after_tokens=30, headers=headers),
        load.long_prompt("cached", salt=salt, after="long", delay=0.5, headers=headers),
        load.decode_stream("leaves", after="cached", hang_up_after=20, tokens=400, headers=headers),
        load.decode_stream("refused", after="leaves", tokens=-1, headers=headers),
    )


def get(url: str, path: str, accept: str) -> str:
    """The text at `path`."""
    return ask(url, Exchange(name="", path=path, method="GET", headers={"Accept": accept})).body.decode()


def capture_default(found: environment.Environment, folder: Path) -> None:
    """Everything that default flags show."""
    text = "text/plain;version=0.0.4"
    with VllmServer(found, folder) as server:
        write_page("0.32.0-idle.prom", server.metrics(), flags="", what="GET /metrics before the first request")
        for exchange in STREAMS:
            write_stream(server.url, exchange, flags="")
        answers = [told(server.url, exchange) for exchange in (*PLAIN_ANSWERS, *ERRORS)]
        streams = traffic(server.url, {})
        print({name: (stream.outcome, stream.tokens) for name, stream in streams.items()})
        what = "GET /metrics after the traffic of capture.py"
        write_page("0.32.0.prom", server.metrics(), flags="", what=what)
        query = "&".join(f"name[]={name}" for name in DETECTION)
        filtered = get(server.url, f"/metrics/?{query}", text)
        write_page("0.32.0-filtered.prom", filtered, flags="", what=f"GET /metrics/?{query}")
        openmetrics = get(server.url, "/metrics/", OPENMETRICS)
        (GOLDEN / "vllm" / "0.32.0.openmetrics").write_text(openmetrics)  # the format knows no comment: see README.md
        capture_run(server)
    flags = ["--api-key", KEY, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--max-num-seqs", "1", "--max-num-queued-reqs", "1"]
    with VllmServer(found, folder, flags=flags) as server:
        answers += [told(server.url, exchange) for exchange in KEY_ERRORS]
        write_stream(server.url, with_key(chat("chat-tool-call", **TOOL_CALL)), flags=" ".join(flags[2:]))
        answers.append(refusal_of_a_full_queue(server.url))
    path = GOLDEN / "sse" / "answers.json"
    what = "answers that are not streams; 401 and 503: --api-key, --max-num-seqs 1, --max-num-queued-reqs 1"
    header = provenance("", what)
    path.write_text(json.dumps({"header": header, "answers": answers}, indent=1) + "\n")
    for answer in answers:
        print(answer["status"], answer["name"], answer["body"][:150])


def refusal_of_a_full_queue(url: str) -> dict[str, Any]:
    """What the third of three requests is told where one may run and one may wait."""
    headers = {"Authorization": f"Bearer {KEY}"}
    plan = [
        load.decode_stream("runs", tokens=3_000, headers=headers),
        load.decode_stream("waits", tokens=10, after="runs", after_tokens=5, headers=headers),
    ]
    with load.load(url, plan) as running:
        running.wait_for_tokens("runs", 200)
        return told(url, with_key(completion("queue is full")))


def capture_run(server: VllmServer) -> None:
    """One decoding stream beside a 12,000-token prompt, as the load client saw it."""
    plan = [load.decode_stream(tokens=400, seed=50), load.long_prompt(salt="run", after="victim", after_tokens=100)]
    with load.load(server.url, plan) as running:
        running.finish()
        events = load.read_events(running.output)
    start = events[0]["at"]
    what = "400 tokens decoded beside a 12,000-token uncached prompt, by tests/vllm/load.py; `at` counts from the start"
    lines = [{"header": provenance("", what)}, *({**event, "at": round(event["at"] - start, 6)} for event in events)]
    (GOLDEN / "vllm" / "interference.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def capture_flags(found: environment.Environment, folder: Path) -> None:
    """What other flags add."""
    flags = ["--enable-mfu-metrics", "--stream-interval", "4", "--reasoning-parser", "deepseek_r1"]
    flags += ["--sse-keep-alive-interval", "1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with VllmServer(found, folder, flags=flags) as server:
        told_flags = " ".join(flags)
        for exchange in FLAGGED_STREAMS:
            write_stream(server.url, exchange, flags=told_flags)
        traffic(server.url, {})
        what = "GET /metrics after the traffic of capture.py"
        write_page("0.32.0-mfu.prom", server.metrics(), flags=told_flags, what=what)


def main() -> int:
    """Returns 1 when the environment is not there."""
    found = environment.find()
    if found is None:
        print("no vLLM environment; run: python3 tests/vllm/environment.py", file=sys.stderr)
        return 1
    for room in ("vllm", "sse"):
        (GOLDEN / room).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stallwatch-capture-") as folder:
        capture_default(found, Path(folder))
        capture_flags(found, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
