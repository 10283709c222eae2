"""A server that is well-behaved, then hostile, then well-behaved again; the whole sidecar beside it, in virtual time.

Every byte goes through real loopback sockets, ours and the server's. What is asserted of every fault alike stands here:
pages and documents of ours that parse strictly, counters that never fall, memory that is given back.
"""

import asyncio
import gc
import json
import math
import random
import subprocess
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from stallwatch.app import Sidecar
from stallwatch.recorder.scribe import InlineScribe
from stallwatch.settings import Settings
from stallwatch.simulator.nvml import ScriptedNvml
from stallwatch.web import server
from tests import virtual
from tests.artifacts.promtool import program
from tests.harness import inline
from tests.raw_server import SSE_HEAD, Asked, Peer, Script, answer, models, serve

GOOD_SECONDS, BAD_SECONDS, RECOVERY_SECONDS = 3.0, 9.0, 9.0
SCRAPE_SECONDS = 3.0
CANARY_SECONDS = 3.0  # between two pulses, and what one may take without a token
TOKENS = 16
TOKEN_SECONDS = 0.03
_UPTIME = 1000.0  # seconds for which the server has run when a test begins
_EDGES = (0.01, 0.025, 0.05, 0.1, 0.5, 1.0, math.inf)

Value = Callable[[str, float], str]
"""What a page says for a series: its name and its true value in, the text of the sample's value out."""


def truly(_name: str, value: float) -> str:
    """The true value."""
    return repr(value)


def page(
    now: float,
    *,
    engines: Sequence[str] = ("0",),
    model: str = "tiny",
    value: Value = truly,
    start: float = 1.7e9,
    more: str = "",
) -> str:
    """A metrics page of one busy server at `now`: every engine decodes three streams, a step every 33 ms."""
    steps = math.floor((now + _UPTIME) * 30)
    lines: list[str] = []

    def add(name: str, number: float, **labels: str) -> None:
        shown = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value(name, number)}" if shown else f"{name} {value(name, number)}")

    lines.append("# TYPE vllm:num_requests_running gauge")
    for engine in engines:
        who = {"engine": engine, "model_name": model}
        add("vllm:num_requests_running", 3, **who)
        add("vllm:num_requests_waiting", 0, **who)
        for reason in ("capacity", "deferred"):
            add("vllm:num_requests_waiting_by_reason", 0, **who, reason=reason)
        add("vllm:kv_cache_usage_perc", 0.1 + (steps % 1000) * 1e-4, **who)
        add("vllm:engine_sleep_state", 1, **who, sleep_state="awake")
        add("vllm:prefix_cache_queries_total", 5000, **who)
        add("vllm:prefix_cache_hits_total", 100, **who)
        add("vllm:generation_tokens_total", 3 * steps, **who)
        add("vllm:num_preemptions_total", 0, **who)
        add("vllm:request_success_total", 10, **who, finished_reason="stop")
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            add("vllm:prompt_tokens_by_source_total", 4900 if source == "local_compute" else 0, **who, source=source)
        for name, each, mean in (
            ("vllm:inter_token_latency_seconds", 3, 0.033),
            ("vllm:iteration_tokens_total", 1, 3.0),
            ("vllm:time_to_first_token_seconds", 0, 0.1),
        ):
            for edge in _EDGES:
                shown = "+Inf" if math.isinf(edge) else repr(edge)
                add(f"{name}_bucket", each * steps if edge > mean else 0, **who, le=shown)
            add(f"{name}_count", each * steps, **who)
            add(f"{name}_sum", each * steps * mean, **who)
        add("vllm:cache_config_info", 1, engine=engine, block_size="16", num_gpu_blocks="1001")
    add("process_start_time_seconds", start)
    return "\n".join(lines) + "\n" + more


def only(text: str, path: str) -> bytes:
    """The page as vLLM filters it: the samples whose names stand in the query."""
    query = path.partition("?")[2]
    if not query:
        return text.encode()
    names = {part.partition("=")[2] for part in query.split("&")}
    kept = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in names]
    return ("\n".join(kept) + "\n").encode()


def shows(
    make: Callable[[float], str],
    *,
    kind: str = "text/plain; version=0.0.4",
    headers: Callable[[float], str] = lambda _now: "",
    filtered: bool = True,
) -> Script:
    """A server whose metrics page is what `make` says at that moment, with the `headers` of that moment."""

    async def script(asked: Asked, peer: Peer) -> None:
        if asked.path.startswith("/version"):
            await peer.send(answer("200 OK", b'{"version": "0.32.0"}'))
            return
        now = asyncio.get_running_loop().time()
        text = make(now)
        body = only(text, asked.path) if filtered else text.encode()
        await peer.send(answer("200 OK", body, kind=kind, headers=headers(now)))

    return script


def chunk(number: int, *, last: int = TOKENS, usage: Any = None) -> dict[str, Any]:
    """One token of a streamed completion."""
    return {
        "choices": [{"index": 0, "text": "x", "finish_reason": "length" if number == last else None}],
        "usage": {"prompt_tokens": 9, "completion_tokens": number} if usage is None else usage,
    }


async def _good_stream(asked: Asked, peer: Peer) -> None:
    if asked.path == "/v1/models":
        await peer.send(models({"id": "tiny", "max_model_len": 4096}))
        return
    await peer.send(SSE_HEAD)
    for number in range(1, TOKENS + 1):
        await asyncio.sleep(TOKEN_SECONDS)
        await peer.data(chunk(number))
    await peer.data("[DONE]")


GOOD_PAGE = shows(page)
GOOD_STREAM: Script = _good_stream


@dataclass(slots=True)
class Run:
    """What came of one fault. Memory is in bytes allocated since the fault began."""

    log: Sequence[Mapping[str, Any]] = ()
    pages: list[str] = field(default_factory=list)
    bad_page: str = ""  # the last one while the server was hostile
    peak: int = 0
    kept: int = 0
    most_series: int = 0
    most_bytes: int = 0
    values: list[Mapping[str, float]] = field(default_factory=list)  # of each scrape, by the text of the series
    times: list[float] = field(default_factory=list)
    highest: dict[str, float] = field(default_factory=dict)  # of every counter, by the text of the series
    tasks_left: int = 0
    descriptors_left: int = 0

    def lines(self, event: str, **keys: object) -> list[Mapping[str, Any]]:
        """The log lines of one event."""
        return [line for line in self.log if line["event"] == event and keys.items() <= line.items()]

    @property
    def warnings(self) -> Counter[str]:
        """Log lines from warnings up, by event."""
        return Counter(line["event"] for line in self.log if line["log_level"] in {"warning", "error", "critical"})

    def value(self, series: str) -> float | None:
        """A sample of the last page."""
        return self.values[-1].get(series)

    def grew(self, series: str, seconds: float) -> float:
        """What a counter grew by over the last seconds."""
        since = next(number for number, at in enumerate(self.times) if at >= self.times[-1] - seconds - 0.01)
        return self.values[-1].get(series, 0.0) - self.values[since].get(series, 0.0)


def strict(text: str) -> Any:
    """A JSON document of ours. Raises `ValueError` for what only Python takes for JSON."""

    def never(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=never)


def read_page(text: str) -> dict[str, float]:
    """Our own metrics page, by the text of each series, with what must be true of each line.

    It is quicker than a parser; the client library's own reads a page of each run in `lint`.
    """
    values: dict[str, float] = {}
    for line in text.split("\n"):  # of all that ends lines elsewhere, a label value may have the rest
        if not line or line.startswith("#"):
            continue
        key, _, shown = line.rpartition(" ")
        value = float(shown)
        assert key not in values, f"{key} is there twice"
        assert math.isfinite(value), line
        assert key.startswith(("stallwatch_", "process_")), line
        assert len(key) <= 1000, line
        values[key] = value
    return values


def is_counter(key: str) -> bool:
    """Whether a series of ours may never fall."""
    name = key.partition("{")[0]
    return name.startswith("stallwatch_") and name.endswith(("_total", "_bucket", "_count"))


def lint(text: str) -> str:
    """What Prometheus' own linter says of a page; nothing is good. Raises `ValueError` where it cannot be parsed."""
    for family in text_string_to_metric_families(text):
        assert family.name.startswith(("stallwatch_", "process_")), family.name
    command = [program("promtool", "prometheus"), "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def endure(
    play: Script, *, where: str, good_first: bool = True, recovery_seconds: float = RECOVERY_SECONDS, **rooms: Any
) -> Run:
    """Runs the sidecar beside a server that plays `play` for a while on its `page` or its `stream`."""
    before = descriptors()
    with capture_logs() as log:
        try:
            found = virtual.run(_endure(play, where, GOOD_SECONDS if good_first else 0.0, recovery_seconds, rooms))
        finally:
            tracemalloc.stop()
    found.log = log
    found.descriptors_left = descriptors() - before
    return found


def descriptors() -> int:
    """Open file descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def _endure(play: Script, where: str, bad_from: float, recovery_seconds: float, rooms: dict[str, Any]) -> Run:
    loop = asyncio.get_running_loop()
    bad_until = bad_from + BAD_SECONDS
    found = Run()

    async def script(asked: Asked, peer: Peer) -> None:
        is_page = asked.path.startswith(("/metrics", "/version"))
        hostile = bad_from <= loop.time() < bad_until and where == ("page" if is_page else "stream")
        await (play if hostile else GOOD_PAGE if is_page else GOOD_STREAM)(asked, peer)

    async with serve(script) as target, watching(target.url, rooms) as own:
        await _scrape_until(own, found, bad_from)
        gc.collect()
        tracemalloc.start()  # what was allocated before does not count, and costs no time
        await _scrape_until(own, found, bad_until)
        _, found.peak = tracemalloc.get_traced_memory()
        gc.collect()
        found.kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        found.bad_page = found.pages[-1]
        await _scrape_until(own, found, bad_until + recovery_seconds)
    await asyncio.sleep(1.0)
    found.tasks_left = len(asyncio.all_tasks()) - 1
    return found


@asynccontextmanager
async def watching(target: str, rooms: Mapping[str, Any]) -> AsyncIterator["Own"]:
    """The whole sidecar with its listener; any task of it that ends is an error."""
    settings = Settings.model_validate(
        {
            "host": {"enabled": False},
            "gpu": {"enabled": "false"},
            **rooms,
            "engine": {"url": target, **rooms.get("engine", {})},
            "canary": {
                "interval_seconds": CANARY_SECONDS,
                "tokens": TOKENS,
                "timeout_seconds": CANARY_SECONDS,
                **rooms.get("canary", {}),
            },
            "slo": {"ttft_seconds": 1},
            "stall": {"ttft_seconds": 2},
        }
    )
    loop = asyncio.get_running_loop()
    sidecar = Sidecar(
        settings,
        clock=loop.time,
        rng=random.Random(7),
        nvml=ScriptedNvml(lambda _now: [], loop.time),
        run_blocking=inline,
        scribe=InlineScribe(),
    )
    listener = server.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with (
        server.serving(server.create_app(sidecar, run_blocking=inline), listener),
        sidecar.tasks() as plan,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        tasks = [asyncio.create_task(task, name=name) for name, task in plan.items()]
        try:
            yield Own(session, tasks, sidecar)
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


@dataclass(slots=True)
class Own:
    """The running sidecar."""

    session: aiohttp.ClientSession
    tasks: list[asyncio.Task[None]]
    sidecar: Sidecar

    async def get(self, path: str) -> str:
        """One of its own pages."""
        async with self.session.get(path) as response:
            assert response.status == 200, path
            return await response.text()

    def check(self) -> None:
        """Raises what ended a task."""
        for task in self.tasks:
            if task.done():
                task.result()
                raise AssertionError(f"{task.get_name()} has ended")


async def _scrape_until(own: Own, found: Run, end: float) -> None:
    loop = asyncio.get_running_loop()
    while loop.time() < end:
        await asyncio.sleep(min(SCRAPE_SECONDS, end - loop.time()))
        own.check()
        text = await own.get("/metrics")
        values = read_page(text)
        counters = {key: value for key, value in values.items() if is_counter(key)}
        fallen = [key for key, value in counters.items() if value < found.highest.get(key, 0.0)]
        assert not fallen, fallen
        found.highest |= counters
        found.pages = [*found.pages[-1:], text]
        found.values.append(values)
        found.times.append(loop.time())
        found.most_series = max(found.most_series, len(values))
        found.most_bytes = max(found.most_bytes, len(text))
    for path in ("/api/v1/status", "/api/v1/stalls", "/api/v1/timeline?seconds=60"):
        strict(await own.get(path))
    assert await own.get("/livez") == "ok\n"
