import asyncio
import gzip
import itertools
import math
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from structlog.testing import capture_logs

from stallwatch.analysis.monitor import MOST_ENGINES
from stallwatch.observations import CacheFacts, EngineCounters, EngineSample, Failure, Lane, PollFailure, ServerFacts
from stallwatch.observations import Source as SourceName
from stallwatch.scheduling import every
from stallwatch.settings import EngineSettings
from stallwatch.simulator.scenario import Scenario, ServerConfig
from stallwatch.simulator.scenarios import SCENARIOS
from stallwatch.simulator.server import create_app
from stallwatch.sources import engine, families, lanes
from stallwatch.sources.engine import EngineSource
from stallwatch.sources.engine_page import (
    MAX_ENGINES,
    MAX_PLUGIN_SAMPLES,
    Known,
    Meaning,
    Reading,
    read,
    resolve,
    wanted,
)
from stallwatch.sources.exposition import Exposition, Page
from stallwatch.sources.http import Target
from tests import raw_server
from tests.raw_server import Asked, Peer
from tests.virtual import run

GOLDEN = Path(__file__).parent / "golden" / "vllm"
LABELS = ("model_name", "engine")
CACHE = {"block_size": "16", "num_gpu_blocks": "101", "enable_prefix_caching": "True", "sliding_window": "None"}


def interpret(text: str | bytes, lane: Lane = Lane.FULL, known: Known | None = None) -> Reading:
    """What a page says."""
    body = text.encode() if isinstance(text, str) else text
    parser: Exposition[Meaning] = Exposition(wanted, resolve)
    return read(parser.parse(body), lane, known or Known())


class Vllm:
    """A metrics page as the real server makes it: prometheus_client's registry, with its own filter."""

    def __init__(self, *, engines: int = 1, model: str = "tiny", start: float = 1.7e9) -> None:
        self.registry = CollectorRegistry()
        self.model = model
        self.engines = [str(number) for number in range(engines)]
        self.filter = "works"  # "ignored", "empty" (several API processes), or an HTTP status
        self.version: Any = {"version": "0.32.0"}
        self.cost: Callable[[int], float] = lambda _names: 0.0
        self.asked: list[tuple[float, Lane | str, int]] = []
        registry = self.registry

        def gauge(name: str, *more: str) -> Gauge:
            return Gauge(name, "help", (*LABELS, *more), registry=registry)

        def count(name: str, *more: str) -> Counter:
            return Counter(name, "help", (*LABELS, *more), registry=registry)

        def histogram(name: str) -> Histogram:
            return Histogram(name, "help", LABELS, buckets=(0.01, 0.1, 1.0), registry=registry)

        self.running = gauge("vllm:num_requests_running")
        self.waiting = gauge("vllm:num_requests_waiting")
        self.kv = gauge("vllm:kv_cache_usage_perc")
        self.sleep = gauge("vllm:engine_sleep_state", "sleep_state")
        self.generation = count("vllm:generation_tokens")
        self.queries = count("vllm:prefix_cache_queries")
        self.by_source = count("vllm:prompt_tokens_by_source", "source")
        self.itl = histogram("vllm:inter_token_latency_seconds")
        self.ttft = histogram("vllm:time_to_first_token_seconds")
        self.iterations = histogram("vllm:iteration_tokens_total")
        cache = Gauge("vllm:cache_config_info", "help", (*CACHE, "engine"), registry=self.registry)
        for number in self.engines:
            cache.labels(*CACHE.values(), number).set(1)
            for state in ("awake", "weights_offloaded", "discard_all"):
                self.sleep.labels(model, number, state).set(state == "awake")
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
                self.by_source.labels(model, number, source)
            for metric in (self.running, self.waiting, self.kv, self.generation, self.queries):
                metric.labels(model, number)
            for distribution in (self.itl, self.ttft, self.iterations):
                distribution.labels(model, number)
        Gauge("process_start_time_seconds", "help", registry=self.registry).set(start)
        Counter("http_requests", "help", ("handler",), registry=self.registry).labels("/v1/completions").inc()

    def step(self, engine_number: str = "0", tokens: int = 1) -> None:
        """One decode step of one engine."""
        self.generation.labels(self.model, engine_number).inc(tokens)
        self.itl.labels(self.model, engine_number).observe(0.02)
        self.iterations.labels(self.model, engine_number).observe(tokens)

    def app(self, clock: Callable[[], float]) -> web.Application:
        """The routes: the plain page, the filtered one behind the trailing slash, the release."""

        async def whole(_: web.Request) -> web.Response:
            self.asked.append((clock(), Lane.FULL, 0))
            await asyncio.sleep(self.cost(0))
            return web.Response(body=generate_latest(self.registry), content_type="text/plain")

        async def filtered(request: web.Request) -> web.Response:
            names = request.query.getall("name[]")
            lane = Lane.ESTIMATOR if families.PROCESS_START in names else Lane.DETECTION
            self.asked.append((clock(), lane, len(names)))
            await asyncio.sleep(self.cost(len(names)))
            if self.filter.isdigit():
                return web.Response(status=int(self.filter), headers={"Location": "/metrics"})
            if self.filter == "empty":
                return web.Response(body=b"", content_type="text/plain")
            asked_for = self.registry if self.filter == "ignored" else self.registry.restricted_registry(names)
            return web.Response(body=generate_latest(asked_for), content_type="text/plain")

        async def release(_: web.Request) -> web.Response:
            self.asked.append((clock(), "version", 0))
            return web.json_response(self.version)

        app = web.Application()
        app.add_routes([web.get("/metrics", whole), web.get("/metrics/", filtered), web.get("/version", release)])
        return app

    def lanes(self) -> list[tuple[float, Lane | str]]:
        """What was asked for, and when, the release aside."""
        return [(round(at, 3), lane) for at, lane, _ in self.asked if lane != "version"]


@dataclass
class Watch:
    """An engine source and what it emitted."""

    source: EngineSource
    seen: list[EngineSample | PollFailure] = field(default_factory=list)
    facts: list[ServerFacts] = field(default_factory=list)

    @property
    def samples(self) -> list[EngineSample]:
        return [each for each in self.seen if isinstance(each, EngineSample)]

    @property
    def failures(self) -> list[PollFailure]:
        return [each for each in self.seen if isinstance(each, PollFailure)]


@asynccontextmanager
async def source_of(url: str, *, key: Path | None = None, **chosen: Any) -> AsyncIterator[Watch]:
    settings = EngineSettings(**chosen)
    target = Target(url, api_key_file=key)
    async with target.session() as session:
        facts: list[ServerFacts] = []
        clock = asyncio.get_running_loop().time
        yield Watch(EngineSource(session, target, settings, clock=clock, emit_facts=facts.append), facts=facts)


async def poll_for(watch: Watch, seconds: float) -> None:
    """Polls as the sidecar does."""
    source = watch.source
    loop = asyncio.get_running_loop()
    polling = every(
        0.25,
        source.deadline_seconds,
        source=SourceName.ENGINE,
        observe=source.poll,
        emit=watch.seen.append,
        clock=loop.time,
    )
    task = asyncio.create_task(polling)
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])


@asynccontextmanager
async def serving(vllm: Vllm, port: int = 0) -> AsyncIterator[str]:
    clock = asyncio.get_running_loop().time
    runner = web.AppRunner(vllm.app(clock), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def watched(vllm: Vllm, seconds: float, *, steps_every: float = 0.0, **chosen: Any) -> Watch:
    """A source beside a server for some seconds, the server decoding or not."""

    async def scenario() -> Watch:
        async with serving(vllm) as url, source_of(url, **chosen) as watch:
            decoding = asyncio.create_task(_decode(vllm, steps_every))
            await poll_for(watch, seconds)
            decoding.cancel()
            return watch

    return run(scenario())


async def _decode(vllm: Vllm, interval: float) -> None:
    while interval:
        await asyncio.sleep(interval)
        for number in vllm.engines:
            vllm.step(number)


# --- what a page says


def test_counters_of_a_page() -> None:
    """Counters, gauges, histograms and label conditions land in their fields."""
    reading = interpret(
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 4.0\n'
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 50.0\n'
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 60.0\n'
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0\n'
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 2.0\n'
        'vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="in_progress"} 1.0\n'
        'vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="waiting_to_start"} 2.0\n'
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 5.0\n'
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 7.0\n'
        'vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 7.0\n'
        'vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 0.5\n'
        "process_start_time_seconds 1.7e9\n"
    )

    counters = reading.engines["0"]
    assert (counters.running, counters.waiting_capacity, counters.waiting_deferred) == (2.0, 3.0, 4.0)
    assert (counters.prompt_local_compute, counters.prompt_external) == (50.0, 60.0)
    assert counters.prompt_local_cache_hit is None
    assert (counters.finished, counters.kv_fetch_waiting) == (3.0, 3.0)
    assert counters.itl_buckets is not None
    assert (counters.itl_buckets.edges, counters.itl_buckets.counts) == ((0.01, math.inf), (5.0, 7.0))
    assert (counters.itl_count, counters.itl_sum) == (7.0, 0.5)
    assert (reading.process_start, reading.model_name, reading.asleep) == (1.7e9, "m", None)
    assert "prompt_local_cache_hit" in reading.missing
    assert "running" not in reading.missing
    assert "spec_draft_tokens" not in reading.missing


def test_of_two_names_the_new_one_is_read() -> None:
    """Releases that show a quantity under its old and its new name are not counted twice."""
    counters = interpret(
        'vllm:gpu_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        'vllm:time_per_output_token_seconds_count{engine="0"} 9\n'
        'vllm:inter_token_latency_seconds_count{engine="0"} 9\n'
        'vllm:gpu_prefix_cache_queries_total{engine="0"} 8\nvllm:prefix_cache_queries_total{engine="0"} 8\n'
    ).engines["0"]

    assert (counters.kv_usage, counters.itl_count, counters.prefix_queries) == (0.5, 9.0, 8.0)


def test_a_page_without_engine_labels_is_engine_0() -> None:
    """The old engine has no engine label, and its names are read all the same."""
    reading = interpret(
        'vllm:num_requests_running{model_name="m"} 1\nvllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        'vllm:time_per_output_token_seconds_count{model_name="m"} 3\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    )

    assert reading.engines == {"0": EngineCounters(running=1, kv_usage=0.5, itl_count=3)}
    assert reading.caches == {"0": CacheFacts(block_size=16, num_gpu_blocks=100)}


@pytest.mark.parametrize(
    ("in_blocks", "expected"), [(True, 800.0), (False, 50.0), (None, None)], ids=["blocks", "tokens", "unsaid"]
)
def test_old_prefix_counters_are_tokens_or_unknown(*, in_blocks: bool | None, expected: float | None) -> None:
    """Where the old names count blocks they are multiplied, and where nothing says what they count they are unknown."""
    page = (
        'vllm:gpu_prefix_cache_queries_total{engine="0"} 50\n'
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1\n'
    )

    assert interpret(page, known=Known(prefix_in_blocks=in_blocks)).engines["0"].prefix_queries == expected


def test_several_models_on_one_engine_are_folded() -> None:
    """Counters and queues of several model names add up, and of ratios the largest counts."""
    counters = interpret(
        'vllm:num_requests_running{engine="0",model_name="a"} 1\n'
        'vllm:num_requests_running{engine="0",model_name="b"} 2\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.9\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="b"} 0.1\n'
    ).engines["0"]

    assert (counters.running, counters.kv_usage) == (3.0, 0.9)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1"])
def test_a_number_that_cannot_be_is_unknown(value: str) -> None:
    """A value that no counter can have makes the whole sum unknown, not smaller."""
    reading = interpret(
        f'vllm:request_success_total{{finished_reason="stop"}} {value}\n'
        'vllm:request_success_total{finished_reason="abort"} 0\nvllm:num_requests_running 1\n'
    )

    assert reading.engines["0"].finished is None
    assert "finished" in reading.missing


@pytest.mark.parametrize(
    "buckets",
    [
        pytest.param([("0.1", 1), ("1", 2)], id="no +Inf"),
        pytest.param([("0.1", 5), ("+Inf", 2)], id="falling"),
        pytest.param([("0.1", 1), ("+Inf", math.nan)], id="NaN"),
        pytest.param([("0.1", -1), ("+Inf", 2)], id="negative"),
        pytest.param([("NaN", 1), ("x", 2)], id="no edges"),
        pytest.param([*((str(n), n) for n in range(300)), ("+Inf", 300)], id="too many"),
    ],
)
def test_a_histogram_that_makes_no_sense_is_unknown(buckets: list[tuple[str, float]]) -> None:
    """Quantiles of a broken histogram would be inventions."""
    lines = [f'vllm:inter_token_latency_seconds_bucket{{le="{edge}"}} {count}\n' for edge, count in buckets]

    assert interpret("vllm:num_requests_running 1\n" + "".join(lines)).engines["0"].itl_buckets is None


def test_kv_load_times_of_two_connectors_add_up_and_their_aliases_do_not() -> None:
    """Offloading and NIXL are different work; the old and the new name of offloading are the same."""
    counters = interpret(
        "vllm:kv_offload_load_time_total 2\n"
        'vllm:kv_offload_total_time_total{transfer_type="CPU_to_GPU"} 2\n'
        'vllm:kv_offload_total_time_total{transfer_type="GPU_to_CPU"} 40\n'
        "vllm:nixl_xfer_time_seconds_sum 3\n"
    ).engines["0"]

    assert counters.kv_load_seconds == 5.0


def test_plugin_families_pass_through() -> None:
    """What our plugin adds inside vLLM is kept by name and labels, without the engine, and in a bounded number."""
    many = "".join(f'stallwatch_plugin_flood{{engine="0",x="{n}"}} 1\n' for n in range(1000))
    reading = interpret(
        'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 1\n'
        'stallwatch_plugin_steps_total{engine="1",model_name="m",phase="mixed"} 7\n'
        'stallwatch_plugin_steps_created{engine="1",phase="mixed"} 1.7e9\n'
        "stallwatch_plugin_info 1\n" + many
    )

    assert reading.engines["1"].plugin == {'stallwatch_plugin_steps_total{model_name="m",phase="mixed"}': 7.0}
    assert reading.engines["0"].plugin["stallwatch_plugin_info"] == 1.0
    assert len(reading.engines["0"].plugin) == MAX_PLUGIN_SAMPLES


@pytest.mark.parametrize(
    ("states", "asleep"),
    [
        ({"awake": 1, "weights_offloaded": 0, "discard_all": 0}, False),
        ({"awake": 0, "weights_offloaded": 1, "discard_all": 0}, True),
        ({}, None),
    ],
)
def test_sleep_state(states: dict[str, int], asleep: bool | None) -> None:  # noqa: FBT001
    """A server is asleep when it says that it is not awake."""
    lines = "".join(f'vllm:engine_sleep_state{{engine="0",sleep_state="{s}"}} {v}\n' for s, v in states.items())

    assert interpret("vllm:num_requests_running 1\n" + lines).asleep is asleep


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        pytest.param(
            'block_size="128",num_gpu_blocks="8192",enable_prefix_caching="True",sliding_window="None"',
            CacheFacts(block_size=128, num_gpu_blocks=8192, prefix_caching=True, hybrid=False),
            id="plain",
        ),
        pytest.param(
            'block_size="16",num_gpu_blocks="9",enable_prefix_caching="False",sliding_window="4096"',
            CacheFacts(block_size=16, num_gpu_blocks=9, prefix_caching=False, hybrid=True),
            id="window",
        ),
        pytest.param(
            'block_size="16",num_gpu_blocks="9",sliding_window="None",mamba_block_size="528"',
            CacheFacts(block_size=16, num_gpu_blocks=9, hybrid=True),
            id="mamba",
        ),
        pytest.param('block_size="None",num_gpu_blocks="1e3"', CacheFacts(), id="nothing usable"),
    ],
)
def test_cache_facts(labels: str, expected: CacheFacts) -> None:
    """The cache's layout is read from the labels of the info line, as far as they say it."""
    page = f'vllm:num_requests_running{{engine="0"}} 1\nvllm:cache_config_info{{engine="0",{labels}}} 1\n'

    assert interpret(page).caches == {"0": expected}


def test_engines_are_bounded() -> None:
    """A flood of engine labels ends in a bounded number of engines."""
    page = "".join(f'vllm:num_requests_running{{engine="{n}"}} 1\n' for n in range(1000))

    assert len(interpret(page).engines) == MAX_ENGINES


def test_a_flooded_family_is_unknown() -> None:
    """A family of which not every series was read has no sum."""
    flood = "".join(f'vllm:request_success_total{{user="{n}"}} 1\n' for n in range(5000))
    counters = interpret("vllm:num_requests_running 1\n" + flood).engines["0"]

    assert (counters.finished, counters.running) == (None, 1.0)


def test_a_thousand_models_are_read_whole() -> None:
    """A thousand label values in every family are added up, none lost."""
    page = "".join(
        f'vllm:num_requests_running{{engine="0",model_name="m{n}"}} 1\n'
        f'vllm:generation_tokens_total{{engine="0",model_name="m{n}"}} 2\n'
        for n in range(1000)
    )

    assert interpret(page).engines["0"] == EngineCounters(running=1000, generation_tokens=2000)


def test_the_table_names_fields_that_exist() -> None:
    """Every row fills a field of the counters, every field has a row, and lanes hold the names that movement needs."""
    fields = set(EngineCounters.__dataclass_fields__) - {"plugin"}

    assert {row.field for row in families.ROWS} == fields
    assert {row.field for row in families.rows_of(Lane.DETECTION)} == {*lanes._SIGNALS, "itl_sum"}
    assert families.rows_of(Lane.FULL) == families.ROWS


# --- against a server


def test_lanes_of_an_idle_server() -> None:
    """Full first, then detection four times a second, the estimator every two seconds, a full page every thirty."""
    vllm = Vllm()

    watch = watched(vllm, 31)

    asked = vllm.lanes()
    assert [at for at, lane in asked if lane is Lane.FULL] == [0.0, 30.0]
    # The first sample of all counts as movement, so the estimator's names come at once; then they rest.
    assert [at for at, lane in asked if lane is Lane.ESTIMATOR][:4] == [0.25, 2.25, 4.25, 6.25]
    assert len(asked) == 124
    assert {names for _, lane, names in vllm.asked if lane is Lane.DETECTION} == {8}
    assert [sample.lane for sample in watch.samples] == [lane for _, lane in asked]
    assert not watch.failures
    assert watch.source.filter_works is True


def test_lanes_of_a_decoding_server() -> None:
    """While steps go on every request carries the estimator's names."""
    vllm = Vllm()

    watch = watched(vllm, 10, steps_every=0.05)

    assert {lane for _, lane in vllm.lanes()[1:]} == {Lane.ESTIMATOR}
    last = watch.samples[-1].engines["0"]
    assert last.generation_tokens == last.itl_count == last.iterations
    assert last.itl_buckets is not None
    assert last.itl_buckets.counts[-1] == last.itl_count


def test_a_sample_carries_only_what_its_lane_asked_for() -> None:
    """Fields of other lanes are unknown, not zero, and not called missing."""
    samples = watched(Vllm(), 2).samples

    detection = next(sample for sample in samples if sample.lane is Lane.DETECTION)
    assert detection.engines["0"] == EngineCounters(
        running=0, waiting=0, kv_usage=0, prefix_queries=0, iterations=0, generation_tokens=0, itl_count=0, itl_sum=0
    )
    assert detection.missing == frozenset()
    assert "waiting_capacity" in samples[0].missing


def test_facts_come_with_the_full_page() -> None:
    """Release, model, cache and start time are told once a full page, the release asked for once a process."""
    vllm = Vllm()

    watch = watched(vllm, 61)

    cache = CacheFacts(block_size=16, num_gpu_blocks=101, prefix_caching=True, hybrid=False)
    assert len(watch.facts) == 3
    assert watch.facts[0] == ServerFacts(
        at=0.0, version="0.32.0", model_name="tiny", process_start_unix=1.7e9, caches={"0": cache}
    )
    assert len([1 for _, what, _ in vllm.asked if what == "version"]) == 1


@pytest.mark.parametrize("version", [{"version": 3}, [], {"version": "a\nb"}, None])
def test_a_strange_release_is_unknown(version: object) -> None:
    """A release that is no plain word is None and fails nothing."""
    vllm = Vllm()
    vllm.version = version

    watch = watched(vllm, 1)

    assert watch.facts[0].version is None
    assert not watch.failures


@pytest.mark.parametrize("broken", ["ignored", "empty", "404", "307"])
def test_without_a_working_filter_full_pages_come_once_a_second(broken: str) -> None:
    """A filter that is ignored, answered with nothing, or refused leads to one lane at 1 Hz, said once in the log."""
    vllm = Vllm()
    vllm.filter = broken

    with capture_logs() as logs:
        watch = watched(vllm, 30)

    assert not watch.failures
    assert {sample.lane for sample in watch.samples} == {Lane.FULL}
    assert [sample.filtered for sample in watch.samples[:3]] == [True, False, False]
    at = [sample.at for sample in watch.samples[1:]]
    assert {round(after - before, 3) for before, after in itertools.pairwise(at)} == {1.0}
    assert [entry["event"] for entry in logs] == ["metrics filter not honoured, reading full pages"]
    assert len(watch.facts) <= 3


def test_the_filter_is_tried_again() -> None:
    """A filter that starts to work, as after a gateway was replaced, is used after some minutes."""
    vllm = Vllm()
    vllm.filter = "ignored"

    async def scenario() -> Watch:
        async with serving(vllm) as url, source_of(url) as watch:
            await poll_for(watch, 10)
            vllm.filter = "works"
            await poll_for(watch, engine.FILTER_RETRY_SECONDS)
            return watch

    watch = run(scenario())

    assert watch.samples[-1].filtered
    assert watch.samples[-1].lane is not Lane.FULL


def test_engines_are_kept_apart() -> None:
    """Data-parallel ranks are told by their label."""
    vllm = Vllm(engines=2)
    vllm.step("1", tokens=5)

    engines = watched(vllm, 1).samples[-1].engines

    assert {number: counters.generation_tokens for number, counters in engines.items()} == {"0": 0.0, "1": 5.0}


def test_a_slow_server_stretches_the_lanes() -> None:
    """Scrapes that cost a server much become rarer until the duty is met, the estimator's first."""
    vllm = Vllm()
    vllm.cost = lambda names: 0.001 * (names or 30) / 2

    watch = watched(vllm, 120, steps_every=0.05, full_interval_seconds=30)

    late = [(at, lane, names) for at, lane, names in vllm.asked if at > 30 and lane != "version"]
    spent = sum(vllm.cost(names) for _, _, names in late) / 90
    rates = {lane: sum(1 for _, each, _ in late if each is lane) / 90 for lane in Lane}
    print(f"duty {spent:.4f}, requests per second {rates}")
    assert spent <= 0.0205
    assert rates[Lane.DETECTION] > 3
    assert 0.2 < rates[Lane.ESTIMATOR] < 1
    assert not watch.failures


def test_a_server_slower_than_the_budget_is_still_looked_at() -> None:
    """Detection goes no slower than its floor."""
    vllm = Vllm()
    vllm.cost = lambda names: 0.2 if names else 0.4

    watch = watched(vllm, 60)

    gaps = [after.sent_at - before.sent_at for before, after in itertools.pairwise(watch.samples[40:])]
    assert max(gaps) == pytest.approx(lanes.DETECTION_FLOOR)
    assert watch.source.plan.at_floors


def test_a_restart_is_learnt_anew() -> None:
    """A new process, told by falling counters or its start time, is read whole at once, its release asked for again."""
    first, second = Vllm(), Vllm(start=1.8e9)
    first.step(tokens=100)
    second.version = {"version": "0.33.0"}

    async def scenario() -> Watch:
        async with serving(first) as url, source_of(url) as watch:
            await poll_for(watch, 5)
            first.registry, first.asked = second.registry, second.asked
            first.version = second.version
            await poll_for(watch, 5)
            return watch

    watch = run(scenario())

    assert next(at for at, lane in second.lanes() if lane is Lane.FULL) <= 5.6
    assert [facts.version for facts in watch.facts] == ["0.32.0", "0.33.0"]
    assert watch.facts[-1].process_start_unix == 1.8e9
    assert not watch.failures


def test_a_server_that_goes_and_comes_back() -> None:
    """While nothing listens polls fail as refused; the first answer after it is a full page."""
    vllm = Vllm()

    async def scenario() -> Watch:
        async with serving(vllm) as url, source_of(url) as watch:
            await poll_for(watch, 2)
        port = int(url.rpartition(":")[2])
        async with source_of(url) as again:
            await poll_for(again, 2)
            async with serving(vllm, port) as _:
                await poll_for(again, 2)
        return again

    watch = run(scenario())

    assert {failure.reason for failure in watch.failures} == {Failure.REFUSED}
    assert watch.samples[0].lane is Lane.FULL


def test_a_frozen_server_times_out_and_finds_no_heap_of_full_pages() -> None:
    """A server that stops answering is a timeout, and is asked for small pages while it stands still."""
    vllm = Vllm()

    async def scenario() -> Watch:
        async with serving(vllm) as url, source_of(url) as watch:
            await poll_for(watch, 29)
            vllm.cost = lambda _: 1000.0
            await poll_for(watch, 20)
            vllm.cost = lambda _: 0.0
            await poll_for(watch, 3)
            return watch

    watch = run(scenario())

    frozen = [lane for at, lane in vllm.lanes() if 29 <= at < 49]
    assert {failure.reason for failure in watch.failures} == {Failure.TIMEOUT}
    assert frozen.count(Lane.FULL) == 1
    assert watch.samples[-1].at > 51
    assert watch.source.cost_seconds(Lane.DETECTION) == 0.0


def test_a_fresh_v0_server_has_families_but_no_samples() -> None:
    """The old engine's page has names only until its first request: that is no failure, and samples are found later."""
    quiet = b"# HELP vllm:num_requests_running help\n# TYPE vllm:num_requests_running gauge\n"
    busy = quiet + b'vllm:num_requests_running{model_name="m"} 1\n'
    pages = iter([quiet, quiet, quiet])

    async def script(asked: Asked, peer: Peer) -> None:
        body = next(pages, busy) if asked.path.startswith("/metrics") else b"{}"
        await peer.send(raw_server.answer("200 OK", body, kind="text/plain"))

    watch = against(script, 3)

    assert not watch.failures
    assert watch.samples[0].engines == {}
    assert watch.samples[-1].engines["0"].running == 1.0


def beside(scenario: Scenario, seconds: float, **chosen: Any) -> Watch:
    """A source beside the simulated server, which knows nothing of our table of names."""

    async def watching() -> Watch:
        clock = asyncio.get_running_loop().time
        runner = web.AppRunner(create_app(scenario, clock=clock), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with source_of(f"http://127.0.0.1:{runner.addresses[0][1]}", **chosen) as watch:
            await poll_for(watch, seconds)
        await runner.cleanup()
        return watch

    return run(watching())


def test_beside_the_simulated_server() -> None:
    """Every field is found, the filter works, and both ranks and the plugin's families are told apart."""
    server = ServerConfig(data_parallel_size=2, plugin=True)

    watch = beside(replace(SCENARIOS["quiet"], server=server), 10)

    assert not watch.failures
    assert watch.source.filter_works is True
    assert watch.samples[0].missing == frozenset()
    estimator = next(sample for sample in watch.samples if sample.lane is Lane.ESTIMATOR)
    assert estimator.missing == frozenset()
    assert set(estimator.engines) == {"0", "1"}
    assert all(counters.plugin for counters in estimator.engines.values())
    assert watch.facts[0].version == "0.32.0"


# --- broken and hostile servers

GOOD = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="m"} 1\n'


def against(script: raw_server.Script, seconds: float, *, key: Path | None = None, **chosen: Any) -> Watch:
    """A source beside a server that sends what the script says."""

    async def scenario() -> Watch:
        async with raw_server.serve(script) as server, source_of(server.url, key=key, **chosen) as watch:
            await poll_for(watch, seconds)
            return watch

    return run(scenario())


def text(body: bytes, *, kind: str = "text/plain", headers: str = "") -> bytes:
    return raw_server.answer("200 OK", body, kind=kind, headers=headers)


async def _slow_drip(_: Asked, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        await peer.send(b"#")
        await asyncio.sleep(0.5)


async def _half_close(_: Asked, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm:num")
    peer.half_close()
    await peer.gone()


async def _reset(_: Asked, peer: Peer) -> None:
    peer.reset()


async def _endless_header(_: Asked, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while True:
        await peer.send(b"x" * 65536)
        await asyncio.sleep(0)


async def _endless_headers(_: Asked, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        await peer.send(b"X-Another: header\r\n" * 1000)
        await asyncio.sleep(0)


async def _endless_line(_: Asked, peer: Peer) -> None:
    await peer.send(b'HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nvllm:num_requests_running{x="')
    while True:
        await peer.send(b"y" * 65536)
        await asyncio.sleep(0)


def _always(answer: bytes) -> raw_server.Script:
    async def script(_: Asked, peer: Peer) -> None:
        await peer.send(answer)

    return script


@pytest.mark.parametrize(
    ("script", "reason", "detail"),
    [
        pytest.param(_slow_drip, Failure.TIMEOUT, "no answer within 2 s", id="slow drip"),
        pytest.param(_half_close, Failure.CUT, "broke off", id="half close"),
        pytest.param(_reset, Failure.REFUSED, "", id="reset"),
        pytest.param(_endless_header, Failure.MALFORMED, "", id="endless header"),
        pytest.param(_endless_headers, Failure.MALFORMED, "", id="endless headers"),
        pytest.param(_endless_line, Failure.TOO_LARGE, "10,000,000 bytes", id="endless line"),
        pytest.param(_always(text(b"a 1\n" * 3_000_000)), Failure.TOO_LARGE, "10,000,000 bytes", id="12 MB page"),
        pytest.param(
            _always(text(gzip.compress(bytes(50_000_000)), headers="Content-Encoding: gzip\r\n")),
            Failure.MALFORMED,
            "compressed unasked: gzip",
            id="gzip bomb",
        ),
        pytest.param(
            _always(raw_server.answer("307 Temporary Redirect", headers="Location: http://elsewhere/\r\n")),
            Failure.REDIRECT,
            "redirects are not followed",
            id="redirect",
        ),
        pytest.param(_always(raw_server.answer("404 Not Found")), Failure.REJECTED, "is engine.url right?", id="404"),
        pytest.param(_always(raw_server.answer("500 Oops")), Failure.SERVER_ERROR, "HTTP 500", id="500"),
        pytest.param(_always(raw_server.answer("503 Busy")), Failure.BUSY, "HTTP 503", id="503"),
        pytest.param(
            _always(text(b"<!DOCTYPE html>\n<html><body>hello world\nand more 1\n</body>", kind="text/html")),
            Failure.MALFORMED,
            "this is not a metrics page: is engine.url right?",
            id="HTML",
        ),
        pytest.param(
            _always(text(b'{"detail": "not here"}', kind="application/json")),
            Failure.MALFORMED,
            "this is not a metrics page: is engine.url right?",
            id="JSON",
        ),
        pytest.param(_always(text(b"")), Failure.MALFORMED, "the metrics page is empty", id="empty"),
        pytest.param(_always(text(b"\x00\xff" * 9000)), Failure.MALFORMED, "not a metrics page", id="bytes"),
        pytest.param(
            _always(text(b"# TYPE python_info gauge\npython_info 1\n")),
            Failure.MALFORMED,
            "--disable-log-stats",
            id="no vLLM",
        ),
        pytest.param(_always(text(GOOD + b"!\n" * 5000)), Failure.MALFORMED, "are garbage", id="mostly garbage"),
        pytest.param(_always(b"SSH-2.0-OpenSSH_9.2\r\n"), Failure.MALFORMED, "not an HTTP answer", id="not HTTP"),
    ],
)
def test_faults(script: raw_server.Script, reason: Failure, detail: str) -> None:
    """Each fault is a failure with its reason and a sentence, never an exception, and asks for patience."""
    watch = against(script, 4.5)

    assert watch.failures
    assert {failure.reason for failure in watch.failures} == {reason}
    assert detail in watch.failures[0].detail
    assert len(watch.failures) <= 5 or reason in {Failure.REFUSED, Failure.CUT}
    assert not watch.samples


def test_garbage_between_good_lines_is_counted_and_skipped() -> None:
    """Some lines of garbage, CRLF, time stamps and a wrong content type take nothing away."""
    body = b"!!\r\n" + GOOD.replace(b"\n", b"\r\n") + b"\xff\xfe{}\r\n" + b"vllm:kv_cache_usage_perc 0.5 1700\r\n"

    watch = against(_always(text(body, kind="application/octet-stream")), 1)

    assert watch.samples[0].garbage_lines == 2
    assert watch.samples[0].engines["0"].running == 1.0
    assert watch.samples[0].engines["0"].kv_usage == 0.5


def test_it_recovers_from_every_fault() -> None:
    """After a fault the next good page is read as if nothing had been."""
    faults = iter([_half_close, _reset, _always(text(b"<html>")), _always(raw_server.answer("500 Oops"))])

    async def script(asked: Asked, peer: Peer) -> None:
        await next(faults, _always(text(GOOD)))(asked, peer)

    watch = against(script, 10)

    assert [failure.reason for failure in watch.failures] == [Failure.CUT, Failure.MALFORMED, Failure.SERVER_ERROR]
    assert watch.samples[-1].at > 8


def test_a_refused_key_is_read_again(tmp_path: Path) -> None:
    """After a 401 the key file is read anew, so that a rotated key needs no restart."""
    key = tmp_path / "key"
    key.write_text("old")
    given: list[str] = []

    async def script(asked: Asked, peer: Peer) -> None:
        given.append(asked.headers.get("authorization", ""))
        if given[-1] != "Bearer new":
            await peer.send(raw_server.answer("401 Unauthorized"))
            key.write_text("new")
        else:
            await peer.send(text(GOOD))

    watch = against(script, 3, key=key)

    assert [failure.reason for failure in watch.failures] == [Failure.AUTH]
    assert watch.samples
    assert given[:2] == ["Bearer old", "Bearer new"]


def test_what_is_asked_for() -> None:
    """Requests ask for the plain text format, uncompressed, and the filter stands behind the trailing slash."""
    asked_for: list[Asked] = []

    async def script(asked: Asked, peer: Peer) -> None:
        asked_for.append(asked)
        await peer.send(text(GOOD))

    against(script, 0.6)

    assert [asked.path.partition("?")[0] for asked in asked_for] == ["/metrics", "/version", "/metrics/", "/metrics/"]
    for asked in asked_for:
        assert asked.headers["accept"] == "text/plain;version=0.0.4"
        assert asked.headers["accept-encoding"] == "identity"
    assert "name%5B%5D=vllm:num_requests_running" in asked_for[2].path


def test_as_many_engines_are_read_as_are_judged() -> None:
    """No engine is read for nothing, and none is dropped without a word."""
    assert MAX_ENGINES == MOST_ENGINES


def test_label_floods_stay_bounded() -> None:
    """Pages with ever new labels, engines and names neither fail nor fill memory; the engines met first stay known."""
    count = 0

    async def script(_: Asked, peer: Peer) -> None:
        nonlocal count
        count += 1
        lines = "".join(
            f'vllm:num_requests_running{{engine="0",request="{count}-{n}"}} 1\n'
            f'vllm:num_requests_waiting{{engine="{count}-{n}"}} 1\n'
            f"name_{count}_{n} 1\n"
            for n in range(1000)
        )
        await peer.send(text(GOOD + lines.encode()))

    async def scenario() -> tuple[Watch, int, int]:
        async with raw_server.serve(script) as server, source_of(server.url) as watch:
            await poll_for(watch, 4)
            watch.seen.clear()
            before, _ = tracemalloc.get_traced_memory()
            await poll_for(watch, 6)
            last = watch.samples[-1]
            watch.seen.clear()
            after, _ = tracemalloc.get_traced_memory()
            watch.seen.append(last)
            return watch, before, after

    tracemalloc.start()
    try:
        watch, before, after = run(scenario())
    finally:
        tracemalloc.stop()
    print(f"{before / 2**20:.1f} MiB after 4 pages, {after / 2**20:.1f} MiB after 10")

    assert watch.samples[-1].engines.keys() == {"0"}
    assert after < 12 * 2**20
    assert after - before < 6 * 2**20


def test_a_huge_page_does_not_hold_the_loop() -> None:
    """Nine megabytes of foreign metrics are read in slices, between which others run."""
    lines = b"".join(b'other_metric{number="%d"} 1\n' % n for n in range(200_000))

    async def scenario() -> tuple[int, Watch]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async with raw_server.serve(_always(text(GOOD + lines))) as server, source_of(server.url) as watch:
            answer = await watch.source._get(Lane.FULL, frozenset())
            counting = asyncio.create_task(count())
            await asyncio.sleep(0)
            turns = 0
            page: Page[Meaning] = Page()
            for _ in watch.source._parser.slices(answer.body, page):
                await asyncio.sleep(0)
            counting.cancel()
            return turns, watch

    turns, _ = run(scenario())

    assert turns > 20


@dataclass(frozen=True)
class Release:
    name: str
    page: bytes

    @property
    def number(self) -> tuple[int, ...]:
        return _number(self.name)


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.partition("-")[0].split(".") if part.isdigit())


def releases() -> list[Any]:
    """The whole pages among the goldens; a filtered one has only what was asked for."""
    pages = [path for path in sorted(GOLDEN.glob("*.prom")) if "filtered" not in path.stem]
    return [pytest.param(Release(path.stem, path.read_bytes()), id=path.stem) for path in pages]


def test_there_are_golden_pages() -> None:
    """Without pages of real servers the table would be tested against nothing."""
    assert (GOLDEN / "0.32.0.prom").exists()


def test_a_real_filtered_page_is_told_from_a_whole_one() -> None:
    """What the real server answers to a filter has the names asked for and no other."""
    page: Page[Meaning] = Exposition[Meaning](wanted, resolve).parse((GOLDEN / "0.32.0-filtered.prom").read_bytes())

    assert not page.unwanted
    assert page.samples
    assert page.garbage_lines == 0


def test_a_real_openmetrics_page_reads_alike() -> None:
    """Should a server answer in the other format and with its spelling of names, the same fields are found."""
    text_page, other = (interpret((GOLDEN / name).read_bytes()) for name in ("0.32.0.prom", "0.32.0.openmetrics"))

    assert other.missing == text_page.missing == frozenset()
    assert other.engines.keys() == text_page.engines.keys()
    assert other.caches == text_page.caches


@pytest.mark.parametrize("release", releases())
def test_every_field_is_found_where_the_release_has_it(release: Release) -> None:
    """On each golden page exactly those fields are found that the table says its release has."""
    reading = interpret(release.page, known=Known(prefix_in_blocks=False))

    for row in families.ROWS:
        if row.optional:
            continue
        due = [
            alias
            for alias in row.aliases
            if _number(alias.since) <= release.number
            and (alias.until is None or release.number <= _number(alias.until))
        ]
        assert (row.field in reading.missing) == (not due), row.field
