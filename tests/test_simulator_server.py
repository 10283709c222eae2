import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from aiohttp import ClientConnectionError, ClientError, ClientSession, ClientTimeout
from aiohttp.test_utils import TestServer

from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.cost import Cause, Pause
from stallwatch.simulator.exposition import Family, Kind, labels
from stallwatch.simulator.faults import Fault, FaultKind
from stallwatch.simulator.load import Arrival, Load, Users
from stallwatch.simulator.scenario import Scenario, ServerConfig
from stallwatch.simulator.server import SERVER, Serving, create_app, serve
from stallwatch.simulator.step import Step
from stallwatch.simulator.truth import true_cause
from tests import virtual

T = TypeVar("T")

QUIET = Scenario(name="test", sentence="A server for a test.")


@dataclass
class Client:
    """A client of one simulated server, and the loop's clock."""

    serving: Serving
    session: ClientSession

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def text(self, path: str, **kwargs: Any) -> tuple[int, str]:
        async with self.session.request(kwargs.pop("method", "GET"), self.serving.url + path, **kwargs) as response:
            return response.status, await response.text()

    async def values(self, *names: str) -> dict[str, float]:
        query = "&".join(f"name[]={name}" for name in names)
        _, page = await self.text(f"/metrics/?{query}")
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
        return {series.partition("{")[0] if "source" not in series else series: float(v) for series, v in lines}

    async def value(self, name: str) -> float:
        return (await self.values(name))[name]

    async def stream(self, path: str = "/v1/completions", *, headers: Any = None, **body: Any) -> "Heard":
        heard = Heard()
        body = {"model": "tiny", "prompt": "hello", "stream": True, "ignore_eos": True} | body
        async with self.session.post(self.serving.url + path, json=body, headers=headers) as response:
            heard.status = response.status
            buffer = b""
            async for data in response.content.iter_any():
                buffer += data
                heard.reads.append(self.now)
                *events, buffer = buffer.split(b"\n\n")
                for event in events:
                    assert event.startswith(b"data: ")
                    payload = event.removeprefix(b"data: ").decode()
                    heard.events.append(payload if payload == "[DONE]" else json.loads(payload))
                    heard.times.append(self.now)
        return heard


@dataclass
class Heard:
    """What a client of a stream heard, and when."""

    status: int = 0
    events: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [e for e in self.events if isinstance(e, dict) and e.get("choices")]

    @property
    def text(self) -> str:
        choices = [c["choices"][0] for c in self.chunks]
        return "".join(c["delta"]["content"] if "delta" in c else c["text"] for c in choices)

    @property
    def widest(self) -> float:
        return max(b - a for a, b in pairwise(self.times))


@asynccontextmanager
async def client_of(scenario: Scenario, **kwargs: Any) -> AsyncIterator[Client]:
    loop = asyncio.get_running_loop()
    async with (
        serve(scenario, clock=loop.time, **kwargs) as serving,
        ClientSession(timeout=ClientTimeout(total=600)) as session,
    ):
        yield Client(serving, session)


def ask(scenario: Scenario, body: Callable[[Client], Awaitable[T]], **kwargs: Any) -> T:
    async def main() -> T:
        async with client_of(scenario, **kwargs) as client:
            return await body(client)

    return virtual.run(main())


def test_a_completion_streams_one_chunk_a_step() -> None:
    """Tokens come at the pace of the steps, with running usage, a final usage chunk and the end marker."""
    options = {"include_usage": True, "continuous_usage_stats": True}

    heard = ask(QUIET, lambda c: c.stream(max_tokens=30, stream_options=options))

    assert [c["usage"]["completion_tokens"] for c in heard.chunks] == list(range(1, 31))
    assert heard.chunks[0]["usage"] == {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1}
    assert heard.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert "system_fingerprint" not in heard.chunks[-1]
    assert heard.events[-2]["choices"] == []
    assert heard.events[-2]["usage"]["completion_tokens"] == 30
    assert heard.events[-2]["system_fingerprint"].startswith("vllm-0.32.0-")
    assert heard.events[-1] == "[DONE]"
    assert heard.widest == pytest.approx(0.0305, abs=0.0001)


def test_a_chunk_has_the_fields_of_the_real_one() -> None:
    """Every field is there in the server's order, nulls included."""
    heard = ask(QUIET, lambda c: c.stream(max_tokens=2, return_token_ids=True))

    assert list(heard.chunks[0]) == ["id", "object", "created", "model", "choices"]
    choice = heard.chunks[0]["choices"][0]
    expected = ["index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"]
    assert list(choice) == expected
    assert choice["prompt_token_ids"] == [*b"hello"]
    assert len(choice["token_ids"]) == 1
    assert heard.chunks[1]["choices"][0]["prompt_token_ids"] is None


def test_a_chat_opens_with_a_role_chunk_that_carries_no_token() -> None:
    """The role leaves in the same write as the first token, with a usage count of zero."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "content": "hi"}]

    heard = ask(
        QUIET,
        lambda c: c.stream("/v1/chat/completions", messages=messages, max_tokens=3, stream_options=options),
    )

    first, second = heard.chunks[:2]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["usage"]["completion_tokens"] == 0
    assert second["usage"]["completion_tokens"] == 1
    assert heard.times[0] == heard.times[1]


def test_some_chunks_carry_a_token_and_no_text() -> None:
    """A character of two bytes is held back until it is whole; the chunk of its first byte is empty."""
    heard = ask(QUIET, lambda c: c.stream(max_tokens=120))

    texts = [c["choices"][0]["text"] for c in heard.chunks]
    assert len(texts) == 120
    assert "" in texts
    assert "café" in heard.text


def test_echo_puts_the_prompt_in_front() -> None:
    """A completion repeats its prompt in the first chunk; a chat has a chunk for the message it continues."""
    completion = ask(QUIET, lambda c: c.stream(max_tokens=2, echo=True))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    chat = ask(QUIET, lambda c: c.stream("/v1/chat/completions", messages=messages, max_tokens=2, echo=True))

    assert completion.text.startswith("hello")
    assert [c["choices"][0]["delta"]["content"] for c in chat.chunks][:2] == ["", "well"]


@pytest.mark.parametrize(("path", "prompt"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
def test_an_answer_without_streaming_comes_whole(path: str, prompt: str) -> None:
    """The same text as the stream's, with usage."""
    asked = {"prompt": "hello"} if prompt == "prompt" else {"messages": [{"role": "user", "content": "hello"}]}
    body = {"model": "tiny", "max_tokens": 12, "ignore_eos": True} | asked

    status, raw = ask(QUIET, lambda c: c.text(path, method="POST", json=body))
    heard = ask(QUIET, lambda c: c.stream(path, max_tokens=12, **asked))

    answer = json.loads(raw)
    choice = answer["choices"][0]
    assert status == 200
    assert choice["finish_reason"] == "length"
    assert (choice.get("text") or choice["message"]["content"]) == heard.text
    assert answer["usage"]["completion_tokens"] == 12


def test_an_answer_that_nobody_limits_ends_by_itself() -> None:
    """Without `ignore_eos` the model stops at some point and says so."""
    messages = [{"role": "user", "content": "hi"}]

    heard = ask(QUIET, lambda c: c.stream("/v1/chat/completions", messages=messages, ignore_eos=False))

    assert heard.chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert 50 < len(heard.chunks) < 400


@dataclass(frozen=True)
class Refusal:
    name: str
    body: dict[str, Any]
    status: int
    word: str
    kind: str = "BadRequestError"


REFUSALS = (
    Refusal("unknown model", {"model": "other"}, 404, "The model `other` does not exist.", "NotFoundError"),
    Refusal("min_tokens above the clamp", {"max_tokens": 9999, "min_tokens": 9999}, 400, "max_tokens=995"),
    Refusal("prompt too long", {"prompt": "x" * 1000}, 400, "maximum context length is 1000 tokens"),
    Refusal("no tokens", {"max_tokens": 0}, 400, "max_tokens must be at least 1"),
    Refusal("empty salt", {"cache_salt": ""}, 400, "non-empty string"),
    Refusal("salt with a slash", {"cache_salt": "a/b"}, 400, "at most 128 characters"),
    Refusal("usage without a stream", {"stream_options": {"include_usage": True}}, 400, "stream=True"),
)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in REFUSALS])
def test_what_the_server_refuses(case: Refusal) -> None:
    """A bad request is answered with the real server's status, type and words."""
    small = replace(QUIET, engine=EngineConfig(max_model_len=1000))
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5} | case.body

    status, raw = ask(small, lambda c: c.text("/v1/completions", method="POST", json=body))

    error = json.loads(raw)["error"]
    assert status == case.status
    assert error["type"] == case.kind
    assert error["code"] == case.status
    assert case.word in error["message"]


def test_the_key_guards_v1_and_nothing_else() -> None:
    """Metrics, health, load and version stay open; the OpenAI paths need the bearer token."""
    guarded = replace(QUIET, server=ServerConfig(api_key="secret"))

    async def statuses(client: Client) -> list[int]:
        paths = ["/metrics", "/health", "/load", "/version", "/ping", "/v1/models"]
        found = [(await client.text(path))[0] for path in paths]
        found.append((await client.text("/v1/models", headers={"Authorization": "Bearer secret"}))[0])
        return found

    assert ask(guarded, statuses) == [200, 200, 200, 200, 200, 401, 200]


def test_the_small_pages() -> None:
    """Version, load and models say what a sidecar asks them for."""

    async def pages(client: Client) -> list[Any]:
        return [json.loads((await client.text(path))[1]) for path in ("/version", "/load", "/v1/models")]

    version, load, models = ask(QUIET, pages)

    assert version == {"version": "0.32.0"}
    assert load == {"server_load": 0}
    assert models["data"][0]["id"] == "tiny"
    assert models["data"][0]["max_model_len"] == 131072


def test_the_filter_works_only_behind_the_slash() -> None:
    """`/metrics/?name[]=` gives the named samples, `/metrics?name[]=` the whole page."""

    async def pages(client: Client) -> tuple[str, str, str]:
        query = "?name[]=vllm:num_requests_running&name[]=vllm:iteration_tokens_total_count&name[]=vllm:nonsense"
        whole = await client.text("/metrics" + query)
        return (await client.text("/metrics/" + query))[1], whole[1], (await client.text("/metrics/"))[1]

    filtered, whole, slashed = ask(QUIET, pages)

    samples = [line for line in filtered.splitlines() if not line.startswith("#")]
    assert samples == [
        'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0',
        'vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 0.0',
    ]
    assert len(whole) > 40_000
    assert whole == slashed


def test_openmetrics_is_given_to_those_who_ask_behind_the_slash() -> None:
    """The mounted page negotiates: counters lose their suffix in the type line, and an end marker follows."""
    header = {"Accept": "application/openmetrics-text; version=1.0.0"}

    _, page = ask(QUIET, lambda c: c.text("/metrics/", headers=header))

    assert page.endswith("# EOF\n")
    assert "# TYPE vllm:generation_tokens counter" in page


LONG = replace(
    QUIET,
    engine=EngineConfig(max_num_batched_tokens=512),
    load=Load(
        (Arrival(at=5.0, prompt_tokens=6_000, output_tokens=5),),
        (Users(count=1, prompt_tokens=20, output_tokens=2_000),),
    ),
)


def test_a_long_prefill_shows_only_where_the_real_one_shows() -> None:
    """While it lasts KV, queries and iterations move; prompt tokens and first tokens jump in one lump at its end."""

    async def watch(client: Client) -> list[dict[str, float]]:
        rows = []
        for at in (4.9, 6.0, 7.0, 14.0):
            await asyncio.sleep(at - client.now)
            rows.append(
                await client.values(
                    "vllm:prompt_tokens_total",
                    "vllm:time_to_first_token_seconds_count",
                    "vllm:prefix_cache_queries_total",
                    "vllm:kv_cache_usage_perc",
                    "vllm:iteration_tokens_total_count",
                    "vllm:iteration_tokens_total_sum",
                )
            )
        return rows

    before, early, later, after = ask(LONG, watch)

    assert [r["vllm:prompt_tokens_total"] for r in (before, early, later, after)] == [20, 20, 20, 6020]
    assert [r["vllm:time_to_first_token_seconds_count"] for r in (before, early, later, after)] == [1, 1, 1, 2]
    assert [r["vllm:prefix_cache_queries_total"] for r in (before, early, later, after)] == [20, 6020, 6020, 6020]
    assert early["vllm:kv_cache_usage_perc"] < later["vllm:kv_cache_usage_perc"]
    steps = later["vllm:iteration_tokens_total_count"] - early["vllm:iteration_tokens_total_count"]
    assert steps == later["vllm:iteration_tokens_total_sum"] - early["vllm:iteration_tokens_total_sum"]
    assert after["vllm:iteration_tokens_total_sum"] - later["vllm:iteration_tokens_total_sum"] > 6000


def test_a_reader_feels_the_long_prefill_and_the_truth_names_it() -> None:
    """A stream that is already decoding sees every step's gap, and each maps to the steps that filled it."""

    async def read(client: Client) -> tuple[Heard, Cause]:
        heard = await client.stream(max_tokens=250)
        start, end = max(pairwise(heard.times), key=lambda pair: pair[1] - pair[0])
        return heard, true_cause(client.serving.server.world, start, end).cause

    heard, cause = ask(LONG, read)

    assert 0.2 < heard.widest < 0.3
    assert cause is Cause.PREFILL


def test_a_client_that_goes_away_is_aborted_and_not_counted() -> None:
    """After a disconnect the request leaves the engine at the next step, and no success counter moves."""

    async def leave(client: Client) -> tuple[float, float, float]:
        task = asyncio.create_task(client.stream(max_tokens=500))
        await asyncio.sleep(1.0)
        during = await client.value("vllm:num_requests_running")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.2)
        _, page = await client.text("/metrics/?name[]=vllm:request_success_total")
        finished = sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if not line.startswith("#"))
        return during, await client.value("vllm:num_requests_running"), finished

    assert ask(QUIET, leave) == (1.0, 0.0, 0.0)


def test_too_many_unfinished_requests_are_refused_and_counted() -> None:
    """Over the limit the answer is 503, and the rejection shows under its reason."""
    scenario = replace(
        QUIET,
        server=ServerConfig(max_num_queued_reqs=2),
        load=Load(users=(Users(count=2, prompt_tokens=10, output_tokens=500),)),
    )

    async def knock(client: Client) -> tuple[int, str]:
        await asyncio.sleep(1.0)
        status, _ = await client.text("/v1/completions", method="POST", json={"prompt": "x"})
        return status, (await client.text("/metrics/?name[]=vllm:admission_rejections_total"))[1]

    status, page = ask(scenario, knock)

    assert status == 503
    assert 'reason="max_num_queued_reqs"} 1.0' in page


def test_a_request_is_booked_when_it_finishes() -> None:
    """Latency histograms, success and HTTP counters move once, at the end, and agree with what the client saw."""

    async def finish(client: Client) -> dict[str, float]:
        await client.stream(max_tokens=20)
        return await client.values(
            "vllm:e2e_request_latency_seconds_count",
            "vllm:request_prompt_tokens_sum",
            "vllm:request_generation_tokens_sum",
            "vllm:inter_token_latency_seconds_count",
            "vllm:generation_tokens_total",
            "http_requests_total",
        )

    assert ask(QUIET, finish) == {
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_prompt_tokens_sum": 5,
        "vllm:request_generation_tokens_sum": 20,
        "vllm:inter_token_latency_seconds_count": 19,
        "vllm:generation_tokens_total": 20,
        "http_requests_total": 1,
    }


def test_mfu_counters_are_an_exact_line_in_scheduled_tokens() -> None:
    """Bytes written are alpha per scheduled token and beta per row, and stay at zero unless asked for."""

    async def written(client: Client) -> float:
        await client.stream(max_tokens=20)
        return await client.value("vllm:estimated_write_bytes_per_gpu_total")

    tokens, rows = 5 + 19, 1 + 19
    assert ask(replace(QUIET, server=ServerConfig(mfu_metrics=True)), written) == 26624 * tokens + 640 * rows
    assert ask(QUIET, written) == 0


def test_the_stream_interval_sends_first_every_nth_and_last() -> None:
    """With an interval of four the chunks carry 1, 4, 4, ... tokens and whatever is left at the end."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    scenario = replace(QUIET, server=ServerConfig(stream_interval=4))

    heard = ask(scenario, lambda c: c.stream(max_tokens=16, stream_options=options))

    assert [c["usage"]["completion_tokens"] for c in heard.chunks] == [1, 5, 9, 13, 16]


def test_speculation_gives_several_tokens_a_chunk_and_counts_drafts() -> None:
    """Tokens outnumber chunks, and the draft counters say how many were accepted."""
    scenario = replace(QUIET, engine=EngineConfig(num_speculative_tokens=3, acceptance=0.8))

    async def read(client: Client) -> tuple[Heard, dict[str, float]]:
        heard = await client.stream(max_tokens=90, return_token_ids=True)
        return heard, await client.values(
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
            "vllm:inter_token_latency_seconds_count",
        )

    heard, counted = ask(scenario, read)

    assert sum(len(c["choices"][0]["token_ids"]) for c in heard.chunks) == 90
    assert len(heard.chunks) < 50
    assert counted["vllm:inter_token_latency_seconds_count"] == len(heard.chunks) - 1
    drafts, accepted = (counted[f"vllm:spec_decode_num_{n}_total"] for n in ("drafts", "accepted_tokens"))
    assert counted["vllm:spec_decode_num_draft_tokens_total"] == 3 * drafts
    assert 1 + drafts + accepted >= 90


def test_a_rank_can_be_chosen_and_a_bad_one_is_refused_inside_the_stream() -> None:
    """The header pins a request; a rank that does not exist answers 200 and an error object before the end marker."""
    scenario = replace(QUIET, server=ServerConfig(data_parallel_size=2))

    async def both(client: Client) -> tuple[Heard, list[int], int]:
        await client.stream(max_tokens=10, headers={"X-data-parallel-rank": "1"})
        steps = [len(e.steps) for e in client.serving.server.world.engines]
        bad = await client.stream(max_tokens=10, headers={"X-data-parallel-rank": "7"})
        status, _ = await client.text(
            "/v1/completions", method="POST", json={"prompt": "x"}, headers={"X-data-parallel-rank": "7"}
        )
        return bad, steps, status

    bad, steps, status = ask(scenario, both)

    assert steps[0] == 0
    assert steps[1] >= 10
    assert (bad.status, status) == (200, 400)
    assert bad.events == [
        {
            "error": {
                "message": "data_parallel_rank 7 is out of range [0, 2).",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            }
        },
        "[DONE]",
    ]


def test_silent_streams_are_kept_alive_by_comments() -> None:
    """A comment comes into a stream that waits, and is no event."""
    scenario = replace(
        QUIET,
        server=ServerConfig(keep_alive_seconds=1.0),
        pauses=(Pause(at=0.2, seconds=3.5, cause=Cause.GPU_IDLE),),
    )

    async def read(client: Client) -> bytes:
        body = {"prompt": "x", "max_tokens": 10, "ignore_eos": True, "stream": True}
        async with client.session.post(client.serving.url + "/v1/completions", json=body) as response:
            return await response.read()

    raw = ask(scenario, read)

    assert raw.count(b": keep-alive\n\n") == 3
    assert raw.count(b"data: {") == 10


def test_an_error_in_the_middle_of_a_stream_is_an_object_and_the_end_marker() -> None:
    """The status stays 200, as it was sent long before."""
    scenario = replace(QUIET, faults=(Fault(FaultKind.STREAM_ERROR, 1.0, 2.0),))

    heard = ask(scenario, lambda c: c.stream(max_tokens=200))

    assert heard.status == 200
    assert heard.events[-2]["error"]["type"] == "InternalServerError"
    assert heard.events[-1] == "[DONE]"


def test_a_restart_refuses_connections_cuts_streams_and_resets_counters() -> None:
    """While the process is gone the port is closed; afterwards it started later and has counted nothing."""
    scenario = replace(QUIET, faults=(Fault(FaultKind.RESTART, 2.0, 5.0),))

    async def live_through(client: Client) -> list[Any]:
        before = await client.value("process_start_time_seconds")
        seen: list[Any] = []
        with pytest.raises(ClientError):
            await client.stream(max_tokens=500)
        seen.append(round(client.now, 1))
        with pytest.raises(ClientConnectionError):
            await client.text("/health")
        await asyncio.sleep(4.0)
        seen.append((await client.text("/health"))[0])
        seen.append(await client.value("process_start_time_seconds") - before)
        seen.append(await client.value("vllm:generation_tokens_total"))
        return seen

    assert ask(scenario, live_through) == [2.0, 200, 5.0, 0.0]


def test_a_frozen_process_accepts_and_does_not_answer() -> None:
    """Requests made during the freeze are answered when it ends, and streams are silent for its length."""
    scenario = replace(QUIET, faults=(Fault(FaultKind.FROZEN, 2.0, 8.0),))

    async def live_through(client: Client) -> tuple[float, float]:
        stream = asyncio.create_task(client.stream(max_tokens=120))
        await asyncio.sleep(3.0)
        await client.text("/health")
        answered = client.now
        return answered, (await stream).widest

    answered, widest = ask(scenario, live_through)

    assert answered == pytest.approx(8.0)
    assert widest == pytest.approx(6.03, abs=0.05)


def test_a_busy_frontend_delays_tokens_but_not_the_engine() -> None:
    """The reader sees a gap of a second and merged tokens; the engine's own latencies stay at its step time."""
    scenario = replace(QUIET, faults=(Fault(FaultKind.FRONTEND, 1.0, 2.2),))

    async def read(client: Client) -> tuple[Heard, str]:
        heard = await client.stream(max_tokens=100, return_token_ids=True)
        return heard, (await client.text("/metrics/?name[]=vllm:inter_token_latency_seconds_bucket"))[1]

    heard, page = ask(scenario, read)

    assert heard.widest == pytest.approx(1.2, abs=0.04)
    assert max(len(c["choices"][0]["token_ids"]) for c in heard.chunks) > 30
    assert 'le="0.05",model_name="tiny"} 99.0' in page


def test_a_buffering_proxy_delivers_in_bursts() -> None:
    """Reads are few and large although tokens leave the engine one by one."""
    scenario = replace(QUIET, faults=(Fault(FaultKind.BUFFERING, 0.0, value=4096.0),))

    heard = ask(scenario, lambda c: c.stream(max_tokens=100))

    assert len(heard.chunks) == 100
    assert len(set(heard.times)) < 12
    assert heard.widest > 0.4


def test_metrics_can_be_down_or_slow_while_text_flows() -> None:
    """The page answers 503 or late, and streams do not notice."""
    scenario = replace(
        QUIET, faults=(Fault(FaultKind.METRICS_DOWN, 1.0, 2.0), Fault(FaultKind.METRICS_SLOW, 2.0, 9.0, value=0.7))
    )

    async def read(client: Client) -> tuple[int, float, float]:
        stream = asyncio.create_task(client.stream(max_tokens=100))
        await asyncio.sleep(1.5)
        status, _ = await client.text("/metrics")
        await asyncio.sleep(1.0)
        began = client.now
        await client.text("/metrics")
        return status, client.now - began, (await stream).widest

    status, took, widest = ask(scenario, read)

    assert status == 503
    assert took == pytest.approx(0.7)
    assert widest < 0.04


def test_sleep_is_shown_and_stops_the_engine_until_it_is_woken() -> None:
    """The sleep state moves, and a request made meanwhile is answered after the wake-up."""
    scenario = replace(QUIET, server=ServerConfig(dev_mode=True))

    async def nap(client: Client) -> tuple[str, float]:
        await client.text("/sleep?level=1", method="POST")
        _, page = await client.text("/metrics/?name[]=vllm:engine_sleep_state")
        stream = asyncio.create_task(client.stream(max_tokens=5))
        await asyncio.sleep(3.0)
        await client.text("/wake_up", method="POST")
        return page, (await stream).times[0]

    page, first = ask(scenario, nap)

    assert 'sleep_state="awake"} 0.0' in page
    assert 'sleep_state="weights_offloaded"} 1.0' in page
    assert first > 3.0


def test_a_request_reaches_an_idle_rank_while_another_hangs() -> None:
    """The stepping loop wakes up for a request although the next step it knew of is far away."""
    scenario = replace(
        QUIET,
        server=ServerConfig(data_parallel_size=2),
        pauses=(Pause(at=0.5, seconds=1e9, cause=Cause.ENGINE_HANG, rank=0),),
        load=Load(users=(Users(count=1, prompt_tokens=10, output_tokens=1000, rank=0),)),
    )

    async def read(client: Client) -> float:
        await asyncio.sleep(2.0)
        return (await client.stream(max_tokens=10, headers={"X-data-parallel-rank": "1"})).times[-1]

    assert ask(scenario, read) == pytest.approx(2.31, abs=0.02)


class Counted:
    """An extra provider that counts steps."""

    def __init__(self) -> None:
        self.family = Family("stallwatch_plugin_test_steps", Kind.COUNTER, help="Steps.")
        self.family.child(labels(engine=0))

    def families(self) -> list[Family]:
        return [self.family]

    def observe(self, step: Step) -> None:
        self.family.add(labels(engine=step.rank), 1)


def test_others_may_put_families_on_the_page() -> None:
    """An extra provider sees every step and appears on the page; the plugin's families only when asked for."""

    async def read(client: Client) -> tuple[float, str]:
        await client.stream(max_tokens=10)
        return await client.value("stallwatch_plugin_test_steps_total"), (await client.text("/metrics"))[1]

    steps, page = ask(QUIET, read, extras=lambda _: [Counted()])
    _, asked = ask(replace(QUIET, server=ServerConfig(plugin=True)), read, extras=lambda _: [Counted()])

    assert steps == 10
    assert "stallwatch_plugin_step_duration_seconds" not in page
    assert "stallwatch_plugin_step_duration_seconds" in asked


def test_the_application_alone_drops_connections_while_it_is_dead() -> None:
    """Where a test server owns the port, a dead process closes connections without an answer."""
    scenario = replace(QUIET, faults=(Fault(FaultKind.RESTART, 1.0, 2.0),))

    async def main() -> list[Any]:
        app = create_app(scenario, clock=asyncio.get_running_loop().time)
        seen: list[Any] = []
        async with TestServer(app) as server, ClientSession() as session:
            await asyncio.sleep(1.5)
            with pytest.raises(ClientConnectionError):
                await session.get(server.make_url("/health"))
            await asyncio.sleep(1.0)
            async with session.get(server.make_url("/health")) as response:
                seen.append(response.status)
            seen.append(app[SERVER].now > 2.0)
        return seen

    assert virtual.run(main()) == [200, True]


def test_two_runs_over_http_give_identical_pages_and_times() -> None:
    """The same scenario with the same client is the same to the last digit."""

    async def read(client: Client) -> tuple[list[float], str]:
        heard = await client.stream(max_tokens=200)
        return heard.times, (await client.text("/metrics"))[1]

    assert ask(LONG, read) == ask(LONG, read)


def test_time_can_run_faster() -> None:
    """At ten times the speed the same scenario takes a tenth of the time."""
    heard = ask(QUIET, lambda c: c.stream(max_tokens=30), speed=10.0)

    assert heard.widest == pytest.approx(0.00305, abs=0.00001)
