"""`stallwatch check`: judged from values, and run against simulated and broken servers in virtual time."""

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

import stallwatch
from stallwatch.analysis.prefill import Evidence
from stallwatch.commands.evidence import offered
from stallwatch.commands.finding import Area, Finding, Level, cleaned
from stallwatch.commands.gathering import CANARY_TOKENS, Tools, survey, usage_in_chunks
from stallwatch.commands.judging import exit_status, judge
from stallwatch.commands.judging_canary import canary_findings
from stallwatch.commands.judging_local import local_findings
from stallwatch.commands.judging_metrics import metrics_findings
from stallwatch.commands.remedies import CANARY, METRICS
from stallwatch.commands.survey import CanaryTry, Lateness, Local, Scrapes, Survey, Trouble
from stallwatch.commands.table import document, table
from stallwatch.commands.terminal import WIDTH, duration, redactor
from stallwatch.observations import (
    CacheFacts,
    EngineCounters,
    EngineSample,
    Failure,
    GpuSample,
    HostSample,
    Lane,
    Outcome,
    RdmaPort,
    ServerFacts,
)
from stallwatch.settings import Settings
from stallwatch.simulator.faults import Fault, FaultKind
from stallwatch.simulator.nvml import ScriptedGpu, ScriptedNvml
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.scenarios import SCENARIOS
from stallwatch.simulator.server import SERVER, create_app, serve
from stallwatch.sources.families import ROWS
from stallwatch.sources.gpu import GpuStatus
from stallwatch.sources.host import CpuLimit, OwnCgroup
from stallwatch.sources.served import Model
from tests import virtual
from tests.raw_server import Asked, Peer, answer
from tests.raw_server import serve as serve_raw

T = TypeVar("T")

KEY = "sk-a-very-secret-key"
QUIET = SCENARIOS["quiet"]
CACHE = CacheFacts(block_size=16, num_gpu_blocks=8192, prefix_caching=True, hybrid=False)
FACTS = ServerFacts(at=0, version="0.20.0", model_name="m", process_start_unix=0.0, caches={"0": CACHE})


async def inline(work: Callable[[], T]) -> T:
    return work()


# --- values --------------------------------------------------------------------------------------------------------


def counters(**more: Any) -> EngineCounters:
    """Every figure that a server of today has without flags."""
    plain = {row.field: 1.0 for row in ROWS if not row.optional and not row.buckets}
    return EngineCounters(**{**plain, **more})


def scrapes(**more: Any) -> Scrapes:
    page = EngineSample(
        sent_at=0.0, at=0.018, lane=Lane.FULL, engines={"0": counters(generation_tokens=5e6)}, bytes=56_000
    )
    known: dict[str, Any] = {
        "seconds": {Lane.DETECTION: (0.001, 0.0014, 0.3), Lane.ESTIMATOR: (0.0044,), Lane.FULL: (0.018,)},
        "page": page,
        "filter_works": True,
        "facts": FACTS,
    }
    return Scrapes(**{**known, **more})


GOOD_CANARY = CanaryTry(
    models=(Model("qwen", base=True, max_length=32768), Model("lora", base=False)),
    model=Model("qwen", base=True),
    asked=16,
    tokens=16,
    outcome=Outcome.COMPLETED,
    ttft=0.11,
    mean_gap=0.03,
    prompt_tokens=24,
    cached_tokens=0,
    usage_in_chunks=True,
    waited=0.56,
)
NO_GPU = GpuStatus(
    off="the driver is not here",
    problem=None,
    driver=None,
    scope=None,
    gpus=(),
    absent={},
    lost=(),
    hanging_calls=0,
)


def found(**more: Any) -> Survey:
    known: dict[str, Any] = {
        "scrapes": scrapes(),
        "canary": GOOD_CANARY,
        "local": Local(
            gpu_status=NO_GPU,
            host=HostSample(at=0, pressure_seconds={("cpu", "some"): 0.0, ("io", "full"): 0.0}),
            cpu_limit=CpuLimit(0.01, 0.1),
            lateness=Lateness(worst=0.0004, seconds=1.2, throttled=0.0),
        ),
        "wall_time": 86400.0 * 5,
    }
    return Survey(**{**known, **more})


def only(findings: Iterable[Finding], subject: str) -> Finding:
    (one,) = [finding for finding in findings if finding.subject == subject]
    return one


# --- what findings say ---------------------------------------------------------------------------------------------

TABLE = """\
stallwatch VERSION checks http://127.0.0.1:8000

server
  ok       target            http://127.0.0.1:8000 answers
  ok       version, phase    vLLM 0.20.0, serving
  ok       model             qwen (context 32,768 tokens); 1 adapter
  ok       engines           one
  ok       KV cache          8,192 blocks of 16 tokens, room for 131,056 tokens, prefix caching on

metrics
  warning  name[] filter     not honoured: every scrape brings the whole page, so it is read once a
                             second at most
                             -> set engine.url to vLLM itself; with --api-server-count above 1 vLLM
                                answers no filtered request
  ok       scrape cost       full page 18.0 ms (median of 1); while the engine works that is 1.8 %
                             of the server's time, of 2 % allowed
  PROBLEM  figures           1 of 29 are missing: kv_usage; without kv_usage freezes are seen late
                             or not at all
                             -> a newer vLLM has them; what needs them stays absent, never 0
  warning  prefill evidence  completion: prompt tokens are known only when a prefill has ended, too
                             late to blame it; the token balance lacks kv_usage
                             -> mfu: prompt tokens between two polls, exact once calibrated; needs
                                --enable-mfu-metrics (vLLM 0.17 or later), costs 0.07 to 0.5 ms a
                                step in the engine core for 16 to 256 requests, as measured on a
                                slow CPU

canary
  PROBLEM  request           failed at http://127.0.0.1:8000: it wants a key, or another one (HTTP
                             401)
                             -> set canary.api_key_file (engine.api_key_file holds for the canary
                                only at the same host and port)
  ok       cost              64 tokens every 15 s: 368,640 tokens a day; 37 % of what this server
                             has generated a day since its start

this machine
  warning  GPU               none visible: the driver is not here
                             -> everything else works without; clocks and power are then no evidence
  warning  CPU limit         limit 100m: 10.0 ms in every 100 ms, so pauses of 90.0 ms are possible;
                             a gap shorter than 180 ms is not believable while we are paused, and is
                             left out
                             -> set no CPU limit on this container (a request is enough), or a
                                higher one
  ok       own lateness      0.40 ms at worst in 1.20 s
  ok       pressure (PSI)    readable for cpu, io
  ok       RDMA ports        none

degraded: name[] filter, figures, request (exit 3)
"""


def test_the_table_is_read_by_a_person() -> None:
    """Each finding is a row with what to do below it, and the last line is the verdict."""
    page = replace(
        scrapes().page,
        engines={"0": counters(kv_usage=None, generation_tokens=5e6)},
        missing=frozenset({"kv_usage"}),
    )
    degraded = found(
        scrapes=scrapes(
            page=page,
            filter_works=False,
            seconds={Lane.FULL: (0.018,)},
            facts=FACTS,
        ),
        canary=CanaryTry(models=GOOD_CANARY.models, trouble=Trouble(Failure.AUTH, "HTTP 401")),
    )
    findings = judge(degraded, Settings())
    shown = table("http://127.0.0.1:8000", findings, exit_status(degraded, findings))

    assert shown.replace(stallwatch.__version__, "VERSION") == TABLE


@pytest.mark.parametrize("reason", list(Failure))
def test_every_failure_has_its_remedy(reason: Failure) -> None:
    """Whatever keeps the page or the canary from us, the finding says what to do, and the status is 1 or 3."""
    trouble = Trouble(reason, "as the network said it")
    unreachable = found(trouble=trouble, scrapes=None)
    findings = judge(unreachable, Settings())
    target = only(findings, "target")

    assert (target.level, target.remedy) == (Level.PROBLEM, METRICS[reason][1])
    assert exit_status(unreachable, findings) == 1
    assert {finding.area for finding in findings} == {Area.SERVER, Area.HERE}

    no_canary = found(canary=CanaryTry(trouble=trouble))
    findings = judge(no_canary, Settings())

    assert only(findings, "request").remedy == CANARY[reason][1]
    assert exit_status(no_canary, findings) == 3


def test_a_server_that_loads_is_one_line() -> None:
    """A refused connection may be a model that is loading: one sentence says so, and how to wait for it."""
    loading = found(trouble=Trouble(Failure.REFUSED, "Cannot connect to host"), scrapes=None, waited=12.0)
    (target,) = (finding for finding in judge(loading, Settings()) if finding.area is Area.SERVER)

    assert target.says == (
        "http://127.0.0.1:8000 after 12.0 s: nothing answers there: vLLM is still loading its model, or is not there"
    )
    assert "--wait" in target.remedy
    assert target.facts["may_be_loading"]


@pytest.mark.parametrize(
    ("limit", "level", "said", "degrades"),
    [
        (None, Level.OK, "none on our own", False),
        (CpuLimit(0.2, 0.1), Level.OK, "limit 2000m: our loop, which is one thread, is never paused", False),
        (CpuLimit(0.01, 0.1), Level.WARNING, "limit 100m: .* pauses of 90.0 ms .* shorter than 180 ms", False),
        (CpuLimit(0.02, 0.1), Level.WARNING, "limit 200m: .* pauses of 80.0 ms .* shorter than 160 ms", False),
        (CpuLimit(0.1, 1.0), Level.WARNING, "limit 100m: .* pauses of 900 ms .* shorter than 1.80 s", True),
    ],
)
def test_what_a_cpu_limit_does_to_timing(limit: CpuLimit | None, level: Level, said: str, degrades: bool) -> None:  # noqa: FBT001
    """A quota pauses us for the rest of its period, and gaps up to twice that are not to be believed."""
    finding = only(local_findings(Local(cpu_limit=limit), Settings()), "CPU limit")

    assert (finding.level, finding.degrades) == (level, degrades)
    assert re.search(said, finding.says)


@pytest.mark.parametrize(
    ("worst", "throttled", "level", "degrades"),
    [
        (0.001, None, Level.OK, False),
        (0.001, 0.2, Level.WARNING, False),
        (0.09, 0.5, Level.WARNING, False),
        (0.3, None, Level.WARNING, True),
    ],
)
def test_our_own_lateness(worst: float, throttled: float | None, level: Level, degrades: bool) -> None:  # noqa: FBT001
    """Lateness that hides gaps is a warning; lateness that hides stalls degrades."""
    late = Lateness(worst=worst, seconds=1.0, throttled=throttled)
    finding = only(local_findings(Local(lateness=late), Settings()), "own lateness")

    assert (finding.level, finding.degrades) == (level, degrades)


@pytest.mark.parametrize(
    ("gpu", "status", "enabled", "level", "said", "degrades"),
    [
        (None, NO_GPU, "auto", Level.WARNING, "none visible: the driver is not here", False),
        (None, NO_GPU, "true", Level.PROBLEM, "none visible: the driver is not here", True),
        (None, None, "false", Level.OK, "off: gpu.enabled is false", False),
        ("container", ("0",), "auto", Level.OK, r"1 visible \(H200\), driver 580", False),
        ("node", ("0",), "auto", Level.OK, "1 visible", False),
        ("node", ("0", "1"), "auto", Level.WARNING, "2 visible .* nothing says which are vLLM's", False),
    ],
)
def test_gpus(
    gpu: str | None,
    status: Any,
    enabled: str,
    level: Level,
    said: str,
    degrades: bool,  # noqa: FBT001
) -> None:
    """A machine without GPUs is not degraded, unless GPUs were demanded; a whole node's are to be told apart."""
    if isinstance(status, tuple):
        status = replace(NO_GPU, off=None, driver="580", scope=gpu, gpus=tuple((n, f"GPU-{n}", "H200") for n in status))
    sample = GpuSample(at=0, gpus=(), scope=gpu) if gpu is not None else None
    settings = Settings.model_validate({"gpu": {"enabled": enabled}})
    finding = only(local_findings(Local(gpu=sample, gpu_status=status), settings), "GPU")

    assert (finding.level, finding.degrades) == (level, degrades)
    assert re.search(said, finding.says)


def test_host_figures() -> None:
    """Pressure and ports are listed; what is not there is no problem."""
    port = RdmaPort(device="mlx5_0", port="1", active=False, rate_gbps=200.0)
    host = HostSample(at=0, rdma=(port,))
    findings = list(local_findings(Local(host=host), Settings()))

    assert only(findings, "RDMA ports").says == "mlx5_0/1 200 Gb/s (down)"
    assert only(findings, "pressure (PSI)").says.startswith("not readable")
    assert not any(finding.degrades for finding in findings)


STEPS = 'stallwatch_plugin_step_moments_total{phase="decode",term="n"}'


@pytest.mark.parametrize(
    ("seen", "cache", "version", "evidence", "obstacle", "better"),
    [
        (counters(plugin={STEPS: 3.0}), CACHE, "0.32.0", Evidence.PLUGIN, "", []),
        (
            counters(plugin={STEPS: 0.0}),
            CACHE,
            "0.32.0",
            Evidence.BALANCE,
            "--enable-logging-iteration-details",
            ["plugin", "mfu"],
        ),
        (counters(write_bytes=4e9), CACHE, "0.32.0", Evidence.MFU, "", ["plugin"]),
        (counters(write_bytes=0.0), CACHE, "0.32.0", Evidence.BALANCE, "", ["plugin", "mfu"]),
        (counters(), CACHE, "0.20.1", Evidence.BALANCE, "", ["mfu"]),
        (counters(), CACHE, None, Evidence.BALANCE, "", ["plugin", "mfu"]),
        (counters(), CACHE, "0.0.0.dev1", Evidence.BALANCE, "", ["plugin", "mfu"]),
        (counters(), replace(CACHE, hybrid=True), "0.32.0", Evidence.COMPLETION, "hybrid", ["plugin", "mfu"]),
        (counters(), replace(CACHE, prefix_caching=False), "0.16", Evidence.COMPLETION, "prefix caching", []),
        (counters(), None, "0.32.0", Evidence.COMPLETION, "size of the KV cache", ["plugin", "mfu"]),
        (
            counters(prompt_local_compute=None),
            CACHE,
            "0.8.5",
            Evidence.COMPLETION,
            "lacks prompt_local_compute",
            [],
        ),
        (EngineCounters(), CACHE, "0.8.5", Evidence.UNKNOWN, "prompt tokens are not counted", []),
    ],
)
def test_which_evidence_is_there_and_what_would_be_better(
    seen: EngineCounters,
    cache: CacheFacts | None,
    version: str | None,
    evidence: Evidence,
    obstacle: str,
    better: list[str],
) -> None:
    """The best rung that the page offers, why it is no higher, and the flags that its release has."""
    offer = offered(seen, cache, version)

    assert offer.evidence is evidence
    assert obstacle in " ".join(offer.obstacles)
    assert [climb.evidence for climb in offer.better] == better


def test_a_scrape_that_is_too_dear_is_stretched() -> None:
    """The cost is the median of each lane; where it would exceed the limit the finding says what becomes of it."""
    dear = scrapes(seconds={Lane.DETECTION: (0.01,), Lane.ESTIMATOR: (0.02,), Lane.FULL: (0.1,)})
    fine = only(metrics_findings(scrapes(), Settings().engine), "scrape cost")
    over = only(metrics_findings(dear, Settings().engine), "scrape cost")

    assert fine.level is Level.OK
    assert fine.facts["seconds"]["detection"] == 0.0014
    assert fine.facts["duty"] < 0.02
    assert over.level is Level.WARNING
    assert re.search(r"asked every \S+ (ms|s) instead of 250 ms", over.says)
    assert over.facts["duty_as_configured"] > 0.04


@pytest.mark.parametrize(
    ("canary", "tried", "tokens", "prompts", "place"),
    [
        ({}, GOOD_CANARY, 368_640.0, 5760 * 24, 5760 * (0.11 + 63 * 0.03) / 86400),
        ({}, CanaryTry(), 368_640.0, None, None),
        ({"interval_seconds": 1, "tokens_per_minute": 600}, CanaryTry(), 600 * 1440, None, None),
        ({"mode": "persistent"}, GOOD_CANARY, 86400 / 0.03, None, 1.0),
        ({"mode": "persistent"}, CanaryTry(), None, None, 1.0),
    ],
)
def test_what_a_canary_costs_a_day(
    canary: dict[str, Any], tried: CanaryTry, tokens: float | None, prompts: float | None, place: float | None
) -> None:
    """Tokens as configured and bounded by the budget, prompts, and the share of the time in which a stream is open."""
    settings = Settings.model_validate({"canary": canary})
    facts = only(canary_findings(found(canary=tried), settings), "cost").facts

    assert facts["tokens_per_day"] == (None if tokens is None else pytest.approx(tokens))
    assert facts["prompt_tokens_per_day"] == (None if prompts is None else pytest.approx(prompts))
    assert facts["batch_place_share"] == (None if place is None else pytest.approx(place))


@pytest.mark.parametrize(
    ("tried", "level", "said"),
    [
        (GOOD_CANARY, Level.OK, "16 tokens of qwen: the first after 110 ms, then one every 30.0 ms"),
        (replace(GOOD_CANARY, tokens=7), Level.WARNING, "does not honour ignore_eos"),
        (replace(GOOD_CANARY, ttft=8.0), Level.WARNING, "more than slo.ttft_seconds, 5.00 s"),
        (CanaryTry(skipped="not tried: the server sleeps"), Level.WARNING, "sleeps"),
        (CanaryTry(skipped="not tried: --no-canary was given"), Level.OK, "--no-canary"),
    ],
)
def test_what_became_of_the_canary(tried: CanaryTry, level: Level, said: str) -> None:
    """A canary that came through in full and in time is fine; one that was held back did not fail."""
    finding = only(canary_findings(found(canary=tried), Settings()), "request")

    assert (finding.level, finding.degrades) == (level, False)
    assert said in finding.says


def chunk(count: int | None, *, finish: str | None = None) -> str:
    usage = None if count is None else {"completion_tokens": count}
    return json.dumps({"choices": [{"text": "a", "finish_reason": finish}], "usage": usage})


@pytest.mark.parametrize(
    ("events", "works"),
    [
        ([chunk(1), chunk(2), chunk(3, finish="length"), "[DONE]"], True),
        ([chunk(None), chunk(None), chunk(3, finish="length")], False),
        ([chunk(0), chunk(0), chunk(3, finish="length")], False),
        ([chunk(3, finish="length"), '{"choices": [], "usage": {"completion_tokens": 3}}'], None),
        (["[]", "nonsense", '{"choices": 3}', '{"choices": [7], "usage": "x"}'], False),
        ([], None),
    ],
)
def test_whether_chunks_carry_usage(events: list[str], works: bool | None) -> None:  # noqa: FBT001
    """Only a count that grows before the last chunk tells how many tokens a chunk carries."""
    assert usage_in_chunks(events) is works


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.000_04, "0.04 ms"), (0.0123, "12.3 ms"), (0.4, "400 ms"), (9.5, "9.50 s"), (1234.5, "1,234 s")],
)
def test_durations_for_people(seconds: float | None, text: str) -> None:
    """Three figures and a unit."""
    assert duration(seconds) == text


def test_what_a_server_says_is_neither_obeyed_nor_a_leak() -> None:
    """Control characters are escaped, keys are taken out, and nothing makes the table wider than 100 columns."""
    access = Settings.model_validate({"engine": {"api_key": KEY}})
    nasty = f"\x1b[2J {KEY} " + "x" * 300
    model = Model(nasty, base=True)
    findings = cleaned(
        judge(found(canary=replace(GOOD_CANARY, models=(model,), model=model)), access),
        redactor(access.engine_access, access.canary_access),
    )
    for shown in (table("http://x", findings, 0), document("http://x", findings, 0)):
        assert KEY not in shown
        assert "\x1b" not in shown
    assert max(len(line) for line in table("http://x", findings, 0).splitlines()) <= WIDTH


def test_the_json_form_says_the_same() -> None:
    """One versioned object with every finding and its figures."""
    findings = judge(found(), Settings())
    answer_ = json.loads(document("http://x", findings, 0))

    assert (answer_["schema"], answer_["status"], answer_["exit_status"]) == ("stallwatch.check/1", "ok", 0)
    assert [one["subject"] for one in answer_["findings"]] == [finding.subject for finding in findings]
    assert only(findings, "scrape cost").facts["duty"] == pytest.approx(
        next(one["facts"]["duty"] for one in answer_["findings"] if one["subject"] == "scrape cost")
    )


@pytest.mark.parametrize(
    ("cgroup", "files", "cpus"),
    [
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 0.1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/pod/c\n", {"pod/c/cpu.max": "max 100000", "pod/cpu.max": "50000 100000"}, 0.5),
        ("0::/pod/c\n", {"pod/c/cpu.max": "20000 100000", "pod/cpu.max": "50000 100000"}, 0.2),
        ("0::/../../other\n", {"cpu.max": "30000 100000"}, 0.3),
        ("3:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "25000\n", "cpu/d/cpu.cfs_period_us": "50000\n"}, 0.5),
        ("3:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/\n", {"cpu.max": "0 0 0"}, None),
        ("", {}, None),
    ],
)
def test_the_cpu_limit_of_our_cgroup(tmp_path: Path, cgroup: str, files: dict[str, str], cpus: float | None) -> None:
    """The tightest quota on our own cgroup or above it, in either version of cgroups."""
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    limit = OwnCgroup(tmp_path / "proc", tmp_path / "sys").cpu_limit()

    assert (None if limit is None else limit.cpus) == (None if cpus is None else pytest.approx(cpus))


# --- against servers -----------------------------------------------------------------------------------------------

Middle = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]


def tools(clock: Callable[[], float], lines: list[str] | None = None, nvml: Any = pynvml, **more: Any) -> Tools:
    return Tools(
        clock=clock,
        wall_time=lambda: 1.79e9 + clock(),
        environ={},
        nvml=nvml,
        run_blocking=inline,
        rng=random.Random(1),
        progress=(lines if lines is not None else []).append,
        **more,
    )


def checked(
    scenario: Scenario,
    *,
    middleware: Middle | None = None,
    at: float = 0.0,
    wait: float = 0.0,
    send: bool = True,
    nvml: Any = pynvml,
    lines: list[str] | None = None,
    **rooms: Any,
) -> tuple[Survey, tuple[Finding, ...], int]:
    """Surveys a simulated server `at` seconds after it began; returns what was found, the findings, and the status."""

    async def main() -> tuple[Survey, tuple[Finding, ...], int]:
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            if middleware is None:
                url = (await stack.enter_async_context(serve(scenario, clock=loop.time))).url
            else:
                app = create_app(scenario, clock=loop.time)
                app.middlewares.insert(0, web.middleware(middleware))  # type: ignore[arg-type]  # its protocol wants a coroutine type
                runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await asyncio.sleep(at)
            engine = {"url": url, **rooms.pop("engine", {})}
            settings = Settings.model_validate({"engine": engine, "gpu": {"enabled": "false"}, **rooms})
            hands = tools(loop.time, lines, nvml)
            seen = await survey(settings, hands, wait_seconds=wait, canary=send)
        findings = cleaned(judge(seen, settings), redactor(settings.engine_access, settings.canary_access))
        return seen, findings, exit_status(seen, findings)

    return virtual.run(main())


def test_a_healthy_server_is_all_right() -> None:
    """Nothing degrades, everything is known, and it was asked a bounded number of times."""
    asked: list[str] = []

    async def counting(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked.append(request.path)
        return await handler(request)

    seen, findings, status = checked(QUIET, middleware=counting, at=5.0)

    assert status == 0
    assert not [finding for finding in findings if finding.level is Level.PROBLEM]
    assert only(findings, "version, phase").says == "vLLM 0.32.0, serving"
    assert only(findings, "model").says == "tiny (context 131,072 tokens)"
    assert only(findings, "name[] filter").facts == {"works": True}
    assert {lane: len(times) for lane, times in seen.scrapes.seconds.items()} == dict.fromkeys(Lane, 4)  # type: ignore[union-attr]  # it is there
    assert only(findings, "prefill evidence").facts["evidence"] == {"0": "balance"}
    assert seen.canary.tokens == CANARY_TOKENS
    assert only(findings, "usage per chunk").level is Level.OK
    assert seen.local.lateness is not None
    assert seen.local.lateness.seconds >= 1.0
    assert asked.count("/v1/completions") == 1
    assert len(asked) <= 25


@pytest.mark.parametrize(
    ("server", "evidence"),
    [({}, "balance"), ({"mfu_metrics": True}, "mfu"), ({"plugin": True, "mfu_metrics": True}, "plugin")],
)
def test_flags_show_in_the_evidence(server: dict[str, Any], evidence: str) -> None:
    """The evidence is read from the page as it is after the canary, which moves the counters of an idle server."""
    idle = replace(SCENARIOS["idle"], server=replace(SCENARIOS["idle"].server, **server))
    _, findings, status = checked(idle)

    assert status == 0
    assert only(findings, "prefill evidence").facts["evidence"] == {"0": evidence}


async def unfiltered(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path == "/metrics/":
        return web.Response(text=request.app[SERVER].world.page.render())
    return await handler(request)


async def no_usage(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path != "/v1/completions":
        return await handler(request)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(CANARY_TOKENS):
        await response.write(b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n')
        await asyncio.sleep(0.02)
    await response.write(b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n')
    return response


async def no_kv(request: web.Request, handler: Handler) -> web.StreamResponse:
    if not request.path.startswith("/metrics"):
        return await handler(request)
    names = frozenset(request.query.getall("name[]", []))
    page = request.app[SERVER].world.page.render(names or None)
    return web.Response(text="".join(line for line in page.splitlines(keepends=True) if "kv_cache_usage" not in line))


def fails_with(status: int) -> Middle:
    async def failing(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/v1/completions":
            return web.json_response({"error": {"message": f"told {request.headers}"}}, status=status)
        return await handler(request)

    return failing


async def silent(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path == "/v1/completions":
        await asyncio.sleep(1e6)
    return await handler(request)


@pytest.mark.parametrize(
    ("middleware", "subject", "said", "expected"),
    [
        pytest.param(unfiltered, "name[] filter", "not honoured", 3, id="filter ignored"),
        pytest.param(no_usage, "usage per chunk", "not sent", 0, id="no usage"),
        pytest.param(no_kv, "figures", "1 of 29 are missing: kv_usage", 3, id="figure missing"),
        pytest.param(fails_with(500), "request", "the server failed at it", 3, id="canary 500"),
        pytest.param(fails_with(403), "request", "it wants a key", 3, id="canary 403"),
        pytest.param(fails_with(404), "request", "does not suit this server", 3, id="canary 404"),
        pytest.param(silent, "request", "no answer in time", 3, id="canary silent"),
    ],
)
def test_what_degrades(middleware: Middle, subject: str, said: str, expected: int) -> None:
    """Each fault is found, named, and counted or not; a key never comes back in what a server repeats."""
    seen, findings, status = checked(QUIET, middleware=middleware, engine={"api_key": KEY})

    assert said in only(findings, subject).says
    assert status == expected
    assert KEY not in table("x", findings, status) + document("x", findings, status)
    assert seen.canary.waited <= 60.1


def test_the_key_opens_the_api() -> None:
    """Without the key only the canary fails, with it all is well."""
    closed = replace(QUIET, server=replace(QUIET.server, api_key=KEY))

    assert checked(closed)[2] == 3
    assert checked(closed, engine={"api_key": KEY})[2] == 0


def test_waiting_until_it_serves() -> None:
    """`--wait` asks once a second while nothing listens, tells of it in one line, and ends when the server answers."""
    late = replace(QUIET, faults=(Fault(FaultKind.REFUSED, 0.0, 5.5),))
    lines: list[str] = []
    seen, findings, status = checked(late, at=0.1, wait=60.0, lines=lines)

    assert status == 0
    assert 5.0 < seen.waited < 7.0
    assert re.fullmatch(r"waiting for http://127.0.0.1:\d+: refused, 0 of 60 s", lines[0])
    assert only(findings, "target").says.endswith(f"answers after {duration(seen.waited)}")

    seen, _, status = checked(late, at=0.1, wait=3.0)

    assert status == 1
    assert seen.waited == pytest.approx(3.0)
    assert seen.local.host is not None


@pytest.mark.parametrize(
    ("faults", "at", "reason"),
    [
        ((Fault(FaultKind.REFUSED, 0.0),), 0.1, Failure.REFUSED),
        ((Fault(FaultKind.METRICS_DOWN, 0.0),), 0.0, Failure.BUSY),
        ((Fault(FaultKind.FROZEN, 0.0),), 0.0, Failure.TIMEOUT),
    ],
)
def test_a_server_that_cannot_be_watched(faults: tuple[Fault, ...], at: float, reason: Failure) -> None:
    """The reason is named, nothing more is asked, and the status is 1."""
    seen, findings, status = checked(replace(QUIET, faults=faults), at=at)

    assert status == 1
    assert only(findings, "target").facts["reason"] == reason
    assert seen.canary.outcome is None


def test_a_sleeping_server_is_left_asleep() -> None:
    """No stream is sent to it, and the phase degrades."""
    seen, findings, status = checked(SCENARIOS["asleep"], at=20.0)

    assert status == 3
    assert only(findings, "version, phase").facts["phase"] == "asleep"
    assert seen.canary.skipped == "not tried: the server sleeps"


def test_a_busy_server_is_spared(tmp_path: Path) -> None:
    """With as many waiting as `run` would respect, or with the pause file there, no stream is sent."""
    busy, findings, status = checked(SCENARIOS["queue-full"], at=30.0, canary={"skip_when_waiting": 1})
    pause = tmp_path / "pause"
    pause.touch()
    paused, _, _ = checked(QUIET, canary={"pause_file": str(pause)})

    assert re.search(r"\d+ requests are waiting", busy.canary.skipped)
    assert (only(findings, "request").degrades, status) == (False, 0)
    assert "pause_file" in paused.canary.skipped


def test_ranks_and_gpus_are_named() -> None:
    """Data-parallel ranks are listed, the canary goes to the first, and GPUs come with name and driver."""
    gpu = ScriptedGpu(uuid="GPU-1", name="NVIDIA H200", utilization=5, sm_clock=1980)
    nvml = ScriptedNvml(lambda _now: [gpu], lambda: 0.0)
    _, findings, status = checked(SCENARIOS["dp-rank-frozen"], at=3.0, nvml=nvml, gpu={"enabled": "auto"})

    assert status == 0
    assert only(findings, "engines").facts == {"engines": ["0", "1"]}
    assert "1 visible (NVIDIA H200)" in only(findings, "GPU").says


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answer("200 OK", b"<html>hello</html>", kind="text/html"), Failure.MALFORMED),
        (answer("302 Found", headers="Location: http://127.0.0.1:1/\r\n"), Failure.REDIRECT),
        (answer("401 Unauthorized"), Failure.AUTH),
        (answer("404 Not Found"), Failure.REJECTED),
        (answer("500 Oops", b"\x1b[2J"), Failure.SERVER_ERROR),
        (b"SSH-2.0-OpenSSH_9\r\n", Failure.MALFORMED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf", Failure.CUT),
    ],
)
def test_what_is_not_vllm(reply: bytes, reason: Failure) -> None:
    """Whatever listens there, the check ends soon, with the reason and status 1."""

    async def script(_: Asked, peer: Peer) -> None:
        await peer.send(reply)

    async def main() -> Survey:
        loop = asyncio.get_running_loop()
        async with serve_raw(script) as server:
            settings = Settings.model_validate({"engine": {"url": server.url}, "gpu": {"enabled": "false"}})
            seen = await survey(settings, tools(loop.time))
            assert len(server.asked) == 1
            assert loop.time() < 5
            return seen

    seen = virtual.run(main())

    assert seen.trouble is not None
    assert seen.trouble.reason is reason
    assert exit_status(seen, ()) == 1
