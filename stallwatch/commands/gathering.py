"""Finding out: the server is asked a few times, sent one short stream, and our own side is looked at. I/O.

Nothing here can harm a server: a dozen scrapes and one stream of a few tokens, each bounded, none tried twice; a server
that is busy, asleep or paused for canaries is sent no stream.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types

from stallwatch.commands.stream import Recording, follow, outcome_of
from stallwatch.commands.survey import CanaryTry, Lateness, Local, Scrapes, Survey, Trouble
from stallwatch.commands.terminal import duration
from stallwatch.observations import EngineSample, Failure, Lane, ObserverSample, Outcome
from stallwatch.scheduling import SourceError
from stallwatch.settings import CanarySettings, EngineSettings, HostSettings, Settings
from stallwatch.sources.blocking import RunBlocking
from stallwatch.sources.engine import EngineSource
from stallwatch.sources.gpu import Gpu, GpuStatus
from stallwatch.sources.host import HostSource, OwnCgroup
from stallwatch.sources.http import Target, target_of
from stallwatch.sources.lag import LagSource
from stallwatch.sources.nvml import Nvml
from stallwatch.sources.served import Model, ServedModels, list_models
from stallwatch.sources.stream import StreamRequest

CANARY_TOKENS = 16
CANARY_SECONDS = 60.0
LATENESS_SECONDS = 1.0

# The first two say whether the filter works; where it does not, every answer is a full page.
_SCRAPES = (Lane.FULL, Lane.ESTIMATOR, Lane.DETECTION) * 4
_PAUSE_SECONDS = 0.1
_SCRAPING_SECONDS = 8.0
_WAIT_INTERVAL = 1.0
_PROMPT = "count upwards, one number after the other, and never stop: 1, 2, 3,"

# Waiting cures none of these.
_NOT_CURED = frozenset({Failure.AUTH, Failure.TLS, Failure.REDIRECT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What the gathering touches the world with; tests bring their own."""

    clock: Callable[[], float]
    wall_time: Callable[[], float]
    environ: Mapping[str, str]
    nvml: Nvml = pynvml
    run_blocking: RunBlocking | None = None
    rng: random.Random = field(default_factory=random.Random)
    progress: Callable[[str], None] = lambda _line: None


async def survey(settings: Settings, tools: Tools, *, wait_seconds: float = 0.0, canary: bool = True) -> Survey:
    """Finds out everything, in about two seconds for a server that answers."""
    target = target_of(settings.engine_access)
    started = tools.clock()
    async with target.session() as session:
        trouble = await _reach(settings.engine, target, session, tools, wait_seconds)
        found = Survey(waited=tools.clock() - started, trouble=trouble, wall_time=tools.wall_time())
        tools.progress("looking at this machine")
        local = await _look_around(settings, tools)
        samples: list[ObserverSample] = []
        own = OwnCgroup(settings.host.proc_path, settings.host.sys_path)
        lag = LagSource(clock=tools.clock, throttled_seconds=own.throttled_seconds)
        sleeper = asyncio.create_task(lag.run(samples.append), name="lag")
        began = tools.clock()
        try:
            if trouble is None:
                found = await _ask(settings, target, session, found, tools, canary=canary)
            await asyncio.sleep(max(0.0, began + LATENESS_SECONDS - tools.clock()))
        finally:
            sleeper.cancel()
            with suppress(asyncio.CancelledError):
                await sleeper
    return replace(found, local=replace(local, lateness=_lateness(samples, tools.clock() - began)))


# --- the metrics page ----------------------------------------------------------------------------------------------


async def _reach(
    settings: EngineSettings, target: Target, session: aiohttp.ClientSession, tools: Tools, wait_seconds: float
) -> Trouble | None:
    """Asks until the server serves, or for as long as it was told to wait."""
    started = tools.clock()
    until = started + wait_seconds
    while True:
        source = EngineSource(session, target, settings, clock=tools.clock)
        trouble, asleep = None, False
        try:
            asleep = bool((await source.poll()).asleep)
        except SourceError as error:
            trouble = Trouble(error.reason, error.detail)
        now = tools.clock()
        serves = trouble is None and not asleep
        if serves or now >= until or (trouble is not None and trouble.reason in _NOT_CURED):
            return trouble
        state = "asleep" if trouble is None else str(trouble.reason).replace("_", " ")
        tools.progress(
            f"waiting for {str(target.base).rstrip('/')}: {state}, {now - started:.0f} of {wait_seconds:.0f} s"
        )
        await asyncio.sleep(min(_WAIT_INTERVAL, until - now))


async def _ask(
    settings: Settings,
    target: Target,
    session: aiohttp.ClientSession,
    found: Survey,
    tools: Tools,
    *,
    canary: bool,
) -> Survey:
    tools.progress("asking for metrics")
    scrapes = await _scrape(settings.engine, target, session, tools)
    if isinstance(scrapes, Trouble):
        return replace(found, trouble=scrapes)
    tools.progress("sending one canary")
    tried = await _try_canary(settings, scrapes, tools, wanted=canary)
    if tried.outcome is Outcome.COMPLETED:
        # Some figures appear, or move, with the first request only.
        with suppress(SourceError):
            page = await EngineSource(session, target, settings.engine, clock=tools.clock).poll()
            scrapes = replace(scrapes, page=page)
    return replace(found, scrapes=scrapes, canary=tried)


async def _scrape(
    settings: EngineSettings, target: Target, session: aiohttp.ClientSession, tools: Tools
) -> Scrapes | Trouble:
    """A few rounds of all lanes, a tenth of a second apart."""
    source = EngineSource(session, target, settings, clock=tools.clock)
    samples: list[EngineSample] = []
    failed: list[Trouble] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(_SCRAPING_SECONDS):
            for lane in _SCRAPES:
                try:
                    if not source.facts:
                        samples.append(await source.poll())
                    elif lane is Lane.FULL or source.filter_works is not False:
                        await asyncio.sleep(_PAUSE_SECONDS)
                        samples.append(await source.ask(lane))
                except SourceError as error:
                    failed.append(Trouble(error.reason, error.detail))
    pages = [sample for sample in samples if sample.lane is Lane.FULL]
    if not pages:
        return failed[-1] if failed else Trouble(Failure.TIMEOUT, f"no page within {_SCRAPING_SECONDS:g} s")
    seconds = {lane: tuple(sample.at - sample.sent_at for sample in samples if sample.lane is lane) for lane in Lane}
    return Scrapes(
        seconds=seconds, page=pages[-1], filter_works=source.filter_works, facts=source.facts, failed=tuple(failed)
    )


# --- the canary ----------------------------------------------------------------------------------------------------


async def _try_canary(settings: Settings, scrapes: Scrapes, tools: Tools, *, wanted: bool) -> CanaryTry:
    canary = settings.canary
    target = target_of(settings.canary_access)
    async with target.session(keep_alive=False) as session:
        tried = CanaryTry(skipped=_held_back(canary, scrapes, wanted=wanted))
        try:
            tried = replace(tried, models=await list_models(target, session))
        except SourceError as error:
            if canary.model is None and not tried.skipped:
                return replace(tried, trouble=Trouble(error.reason, error.detail))
        if tried.skipped:
            return tried
        served = ServedModels(target, session, configured=canary.model)
        try:
            model = await served.choose()
        except SourceError as error:
            return replace(tried, trouble=Trouble(error.reason, error.detail))
        request = canary_request(canary, model, served.described(), sorted(scrapes.page.engines), tools.rng)
        recording = Recording(request)
        await follow(
            recording,
            target,
            session,
            clock=tools.clock,
            timeout_seconds=min(canary.timeout_seconds, CANARY_SECONDS),
            limit_seconds=CANARY_SECONDS,
        )
    return _told(replace(tried, model=model, asked=request.tokens), recording)


def _held_back(canary: CanarySettings, scrapes: Scrapes, *, wanted: bool) -> str:
    """Why no stream is sent, in words."""
    waiting = sum(counters.waiting or 0 for counters in scrapes.page.engines.values())
    if not wanted:
        return "not tried: --no-canary was given"
    if not canary.enabled:
        return "off: canary.enabled is false"
    if scrapes.page.asleep:
        return "not tried: the server sleeps"
    if canary.pause_file is not None and canary.pause_file.exists():
        return f"not tried: canary.pause_file {canary.pause_file} is there"
    if waiting >= canary.skip_when_waiting:
        return f"not tried: {waiting:.0f} requests are waiting, and busy is not down"
    return ""


def canary_request(
    canary: CanarySettings, model: Model, served: str, engines: Sequence[str], rng: random.Random
) -> StreamRequest:
    """A short request like those of `run`, pinned to the first rank where there are several."""
    name = f"stallwatch-check-{rng.getrandbits(48):012x}"
    engine = engines[0] if engines else "0"
    return StreamRequest(
        stream=1,
        engine=engine,
        request_id=name,
        model=model.name,
        prompt=f"{name}: {_PROMPT}",
        tokens=min(CANARY_TOKENS, canary.stream_tokens),
        api=canary.api,
        rank=engine if len(engines) > 1 and engine.isascii() and engine.isdecimal() else None,
        served=served,
    )


def _told(tried: CanaryTry, recording: Recording) -> CanaryTry:
    arrivals, sent, closed = recording.arrivals, recording.sent_at, recording.closed
    failure = recording.failure
    trouble = Trouble(failure.reason, failure.detail) if failure is not None else None
    if trouble is None and outcome_of(recording) is not Outcome.COMPLETED:
        trouble = Trouble(Failure.TIMEOUT, f"not finished within {duration(CANARY_SECONDS)}")
    later = sum(tokens for _, tokens in arrivals[1:])
    return replace(
        tried,
        tokens=recording.tokens,
        outcome=outcome_of(recording),
        trouble=trouble,
        ttft=arrivals[0][0] - sent if arrivals and sent is not None else None,
        mean_gap=(arrivals[-1][0] - arrivals[0][0]) / later if later else None,
        prompt_tokens=closed.prompt_tokens if closed is not None else None,
        cached_tokens=closed.cached_tokens if closed is not None else None,
        usage_in_chunks=usage_in_chunks([data for _, data in recording.events]),
        waited=closed.at - sent if closed is not None and sent is not None else 0.0,
    )


def usage_in_chunks(events: Sequence[str]) -> bool | None:
    """Whether chunks carry a count of tokens that grows before the end; None when no such chunk came."""
    counts = []
    for data in events:
        try:
            chunk: Any = json.loads(data)
        except (ValueError, RecursionError):
            continue
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        if not isinstance(choices, list) or not choices:
            continue
        if any(isinstance(choice, dict) and choice.get("finish_reason") for choice in choices):
            continue
        usage = chunk.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        counts.append(count if isinstance(count, int) else 0)
    return max(counts) > 0 if counts else None


# --- our own side --------------------------------------------------------------------------------------------------


async def _look_around(settings: Settings, tools: Tools) -> Local:
    local = Local(cpu_limit=OwnCgroup(settings.host.proc_path, settings.host.sys_path).cpu_limit())
    if settings.host.enabled:
        local = await _host(settings.host, local, tools)
    if settings.gpu.enabled != "false":
        local = await _gpus(settings, local, tools)
    return local


async def _host(settings: HostSettings, local: Local, tools: Tools) -> Local:
    source = HostSource(settings, clock=tools.clock, run_blocking=tools.run_blocking)
    try:
        return replace(local, host=await source.poll())
    except SourceError as error:
        return replace(local, host_trouble=Trouble(error.reason, error.detail))
    finally:
        source.close()


async def _gpus(settings: Settings, local: Local, tools: Tools) -> Local:
    source = Gpu(
        settings.gpu, environ=tools.environ, nvml=tools.nvml, clock=tools.clock, run_blocking=tools.run_blocking
    )
    problem: str | None = None
    try:
        local = replace(local, gpu=await source.poll())
    except SourceError as error:
        problem = error.detail
    status: GpuStatus = source.status()
    await source.close()
    return replace(local, gpu_status=replace(status, problem=status.problem or problem))


def _lateness(samples: Sequence[ObserverSample], seconds: float) -> Lateness | None:
    if not samples:
        return None
    throttled = [sample.throttled for sample in samples if sample.throttled is not None]
    return Lateness(
        worst=max(sample.lag for sample in samples),
        seconds=seconds,
        throttled=sum(throttled) if throttled else None,
    )
