"""The wiring: the one module that knows every room.

Sources are polled by `every` and emit observations, the monitor judges them, the listener shows what it found. All of
it runs in one task group: a bug in any task ends the process with a traceback, and the kubelet starts it again.
"""

import asyncio
import gc
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types
import structlog
from prometheus_client.core import Metric

from stallwatch import exporter
from stallwatch.analysis.causes import WHAT_TO_TRY, runbook
from stallwatch.analysis.episodes import Change, StallNews
from stallwatch.analysis.monitor import Monitor
from stallwatch.analysis.phase import Phase
from stallwatch.analysis.stalls import StallLimits
from stallwatch.analysis.streams import Objectives
from stallwatch.analysis.watch import Freshness
from stallwatch.health import Health
from stallwatch.observations import (
    EngineSample,
    Observation,
    ObserverSample,
    PollFailure,
    Source,
    StreamClosed,
    StreamOpened,
)
from stallwatch.recorder.recorder import Recorder
from stallwatch.recorder.scribe import Scribe
from stallwatch.scheduling import SourceError, every
from stallwatch.settings import Settings
from stallwatch.sources.blocking import RunBlocking
from stallwatch.sources.canary import Canary, Gate
from stallwatch.sources.engine import EngineSource
from stallwatch.sources.gpu import Gpu, GpuStatus
from stallwatch.sources.host import HostSource, OwnCgroup
from stallwatch.sources.http import target_of
from stallwatch.sources.lag import LagSource
from stallwatch.sources.nvml import Nvml
from stallwatch.web import server
from stallwatch.web.access import guard_for
from stallwatch.web.live import SLOTS_SECONDS, live
from stallwatch.web.reloading import problem_of
from stallwatch.web.stalls import stall, stalls
from stallwatch.web.status import status
from stallwatch.web.tls import certificates_for

log = structlog.get_logger()

_HEARTBEAT_LIMIT = 30.0  # seconds without a heartbeat after which the loop counts as stuck
_SCRAPE_HOLDS = 5.0  # seconds for which the verdict of a scrape holds, or three intervals if that is longer
HOST_TIMEOUT_SECONDS = 5.0  # files below /proc and /sys answer at once, or the machine is in trouble
_CANARY_HOLDS = 2.0  # intervals for which the verdict of a pulse holds

# A render thread that holds the interpreter for the default 5 ms would delay the time stamps on the loop by as much.
_SWITCH_INTERVAL = 0.0005

Clock = Callable[[], float]
Task = Coroutine[Any, Any, None]


class Sidecar:
    """One monitor with its sources; what `run` starts and what the listener shows."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
        nvml: Nvml = pynvml,
        run_blocking: RunBlocking | None = None,
        scribe: Scribe | None = None,
    ) -> None:
        """`nvml` is the library's module or its stand-in.

        `run_blocking` and `scribe` (in tests) replace the threads of the sources and of the recorder.
        """
        self.settings = settings
        self.gpu = Gpu(settings.gpu, environ=os.environ, nvml=nvml, clock=clock, run_blocking=run_blocking)
        self._run_blocking = run_blocking
        self.monitor = monitor_for(settings)
        self.health = Health()
        self.recorder = Recorder(
            settings, findings=self.monitor.findings, clock=clock, writing=self.health.writing, scribe=scribe
        )
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311  (jitter and names, no secrets)
        self._wake = asyncio.Event()
        self._lag: LagSource | None = None
        self._heartbeat = clock()
        self._starting_told = False
        self._started = clock()

    def observe(self, seen: Observation | PollFailure) -> None:
        """Takes one observation of any source."""
        was_slow, phase = self.monitor.slow, self.monitor.life.phase
        self.monitor.observe(seen)
        if isinstance(seen, StreamOpened | StreamClosed) and self._lag is not None:
            self._lag.watch_closely(any(watch.streams.open for watch in self.monitor.engines.values()))
        if isinstance(seen, ObserverSample):
            self._heartbeat = seen.at
            self._warn_when_starting_takes_long(seen.at)
        if self.monitor.slow and not was_slow:
            self._wake.set()
        if self.monitor.life.phase is not phase:
            log.info("target phase", phase=self.monitor.life.phase, before=phase)
        for news in self.monitor.news():
            _tell(news)
            self._record(news)
        if isinstance(seen, EngineSample):
            for engine, watch in self.monitor.engines.items():
                if watch.work.last is not None:
                    self.recorder.prefilled(engine, watch.work.last)
        self.recorder.observe(seen)

    def families(self) -> tuple[Metric, ...]:
        """What `/metrics` says now."""
        now = self._clock()
        return exporter.families(self.monitor.findings(now), self.health, self.settings, wall_offset=time.time() - now)

    def status(self) -> Mapping[str, Any]:
        """What `/api/v1/status` says now."""
        now = self._clock()
        return status(
            self.monitor.findings(now), self.health, self.settings, now=now, hardware=_hardware(self.gpu.status())
        )

    def stalls(self) -> Mapping[str, Any]:
        """What `/api/v1/stalls` says now."""
        now = self._clock()
        return stalls(self.monitor.findings(now), wall_offset=time.time() - now)

    def stall(self, wanted: str) -> Mapping[str, Any] | None:
        """What `/api/v1/stalls/{id}` says now."""
        now = self._clock()
        return stall(self.monitor.findings(now), wanted, wall_offset=time.time() - now)

    def timeline(self, seconds: float) -> Callable[[], Mapping[str, Any]]:
        """What `/api/v1/timeline` says now, by a call that may be made in a thread."""
        return self.recorder.document(seconds)

    def live(self) -> Callable[[], Mapping[str, Any]]:
        """What an open page hears now, by a call that may be made in a thread."""
        now = self._clock()
        return live(
            self.monitor.findings(now),
            self.health,
            self.settings,
            now=now,
            wall_offset=time.time() - now,
            hardware=_hardware(self.gpu.status()),
            timeline=self.recorder.document(SLOTS_SECONDS),
        )

    def alive(self) -> bool:
        """Whether the heartbeat is fresh."""
        return self._clock() - self._heartbeat < _HEARTBEAT_LIMIT

    def gate(self) -> Gate:
        """What the canary must know before it sends."""
        life = self.monitor.life
        engines = self.monitor.engines
        known = [watch.known for watch in engines.values() if watch.known is not None]
        waiting = [counters.waiting for counters in known if counters.waiting is not None]
        running = [counters.running for counters in known if counters.running is not None]
        ours = sum(len(watch.streams.open) for watch in engines.values())
        return Gate(
            serving=life.phase is Phase.SERVING or (life.phase is Phase.STARTING and life.listening),
            asleep=life.phase is Phase.ASLEEP,
            draining=life.phase is Phase.GONE,
            slow=self.monitor.slow,
            waiting=int(sum(waiting)) if waiting else None,
            others_running=max(0, int(sum(running)) - ours) if running else None,
            engines=tuple(sorted(engines)),
        )

    @asynccontextmanager
    async def tasks(self) -> AsyncIterator[dict[str, Task]]:
        """The coroutines to run, by name, with the connections that they need open."""
        settings = self.settings
        async with AsyncExitStack() as stack:
            stack.callback(self.recorder.close)
            plan: dict[str, Task] = {}
            self._lag = LagSource(clock=self._clock, throttled_seconds=OwnCgroup().throttled_seconds, closely=False)
            plan["observer"] = self._lag.run(self.observe)
            plan["engine"] = await self._engine(stack)
            if settings.canary.enabled:
                plan["canary"] = await self._canary(stack)
            if settings.gpu.enabled != "false":
                stack.push_async_callback(self.gpu.close)
                plan["gpu"] = self._gpus()
            if settings.host.enabled:
                plan["host"] = self._host(stack)
            for coroutine in plan.values():
                stack.callback(coroutine.close)  # for those that nobody starts
            yield plan

    async def _engine(self, stack: AsyncExitStack) -> Task:
        target = target_of(self.settings.engine_access)
        session = await stack.enter_async_context(target.session())
        source = EngineSource(session, target, self.settings.engine, clock=self._clock, emit_facts=self.observe)
        return self._every(Source.ENGINE, self.settings.engine.interval_seconds, source.deadline_seconds, source.poll)

    async def _canary(self, stack: AsyncExitStack) -> Task:
        settings = self.settings.canary
        target = target_of(self.settings.canary_access)
        session = await stack.enter_async_context(target.session(keep_alive=False))
        canary = Canary(
            settings,
            target,
            session=session,
            gate=self.gate,
            emit=self.observe,
            clock=self._clock,
            rng=self._rng,
            polled=self.health.polled,
        )
        if settings.mode == "persistent":
            return canary.persistent()
        return self._every(
            Source.CANARY, settings.interval_seconds, canary.pulse_timeout_seconds, canary.pulse, wake=self._wake
        )

    async def _gpus(self) -> None:
        settings = self.settings.gpu
        with suppress(SourceError):
            await self.gpu.poll()
        if self.gpu.off is not None:
            log.info("gpu source off", reason=self.gpu.off)
            return
        await self._every(Source.GPU, settings.interval_seconds, settings.timeout_seconds + 1.0, self.gpu.poll)

    def _host(self, stack: AsyncExitStack) -> Task:
        settings = self.settings.host
        source = HostSource(settings, clock=self._clock, run_blocking=self._run_blocking)
        stack.callback(source.close)
        return self._every(Source.HOST, settings.interval_seconds, HOST_TIMEOUT_SECONDS, source.poll)

    def _every(
        self,
        source: Source,
        interval_seconds: float,
        timeout_seconds: float,
        observe: Callable[[], Awaitable[Observation]],
        wake: asyncio.Event | None = None,
    ) -> Task:
        return every(
            interval_seconds,
            timeout_seconds,
            source=source,
            observe=observe,
            emit=self.observe,
            clock=self._clock,
            wake=wake,
            polled=self.health.polled,
        )

    def _record(self, news: StallNews) -> None:
        if news.change is Change.CLOSED:
            self.recorder.stall_closed(news.stall, news.at)
        else:
            self.recorder.stall_open(news.stall, news.at)

    def _warn_when_starting_takes_long(self, now: float) -> None:
        limit = self.settings.engine.start_timeout_seconds
        if self.monitor.life.phase is not Phase.STARTING:
            self._starting_told = False
            self._started = now
        elif not self._starting_told and now - self._started > limit:
            self._starting_told = True
            log.warning(
                "target still starting",
                seconds=round(now - self._started),
                url=str(self.settings.engine.url),
                hint="is engine.url right, and does the server's log show progress?",
            )


def monitor_for(settings: Settings) -> Monitor:
    """A monitor that judges by these settings."""
    return Monitor(
        objectives=Objectives(
            itl=settings.slo.itl_seconds, ttft=settings.slo.ttft_seconds, stall_floor=settings.stall.floor_seconds
        ),
        freshness=Freshness(
            scrape=max(_SCRAPE_HOLDS, 3 * settings.engine.interval_seconds),
            canary=_CANARY_HOLDS * settings.canary.interval_seconds,
        ),
        persistent=settings.canary.enabled and settings.canary.mode == "persistent",
        limits=StallLimits(
            floor=settings.stall.floor_seconds,
            factor=settings.stall.factor,
            ttft=settings.stall.ttft_seconds,
            hang=settings.stall.hang_seconds,
        ),
    )


async def run(
    settings: Settings,
    *,
    stop: asyncio.Event | None = None,
    ready: Callable[[int], None] = lambda _port: None,
    clock: Clock = time.monotonic,
) -> int:
    """Watches until SIGTERM, SIGINT or `stop`; returns an exit code. `ready` hears the port once we listen.

    Raises whatever a bug raises, as an `ExceptionGroup`.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        listener = server.listen(settings.web.host, settings.web.port)
    except OSError as error:
        log.error(  # noqa: TRY400  (a state of the machine; a traceback would hide the hint)
            "cannot listen",
            host=settings.web.host,
            port=settings.web.port,
            error=os.strerror(error.errno or 0),
            hint="set web.port or web.host to an address that is free",
        )
        return 1
    try:
        guard, certificates = guard_for(settings.web), certificates_for(settings.web)
    except (OSError, ValueError) as error:  # they were right when the settings were read
        log.error("cannot use a file of the listener", error=problem_of(error))  # noqa: TRY400
        listener.close()
        return 1
    port = listener.getsockname()[1]
    sidecar = Sidecar(settings, clock=clock)
    log.info("watching", target=str(settings.engine.url), port=port, canary=_described(settings))
    async with (
        server.serving(server.create_app(sidecar, guard=guard), listener, certificates=certificates),
        sidecar.tasks() as plan,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(coroutine, name=name) for name, coroutine in plan.items()]
        # What lives as long as the process need not be looked at by every collection.
        gc.collect()
        gc.freeze()
        ready(port)
        await stop.wait()
        log.info("stopping")
        for task in tasks:
            task.cancel()
    return 0


def _hardware(seen: GpuStatus) -> Mapping[str, Any]:
    return {
        "off": seen.off,
        "problem": seen.problem,
        "driver": seen.driver,
        "scope": seen.scope,
        "gpus": [{"gpu": gpu, "uuid": uuid, "name": name} for gpu, uuid, name in seen.gpus],
        "absent": {gpu: dict(figures) for gpu, figures in seen.absent.items()},
        "lost": list(seen.lost),
        "hanging_calls": seen.hanging_calls,
    }


def _tell(news: StallNews) -> None:
    """One line for each turn that a stall takes."""
    seen = news.stall
    told = log.bind(
        stall=seen.id,
        engine=seen.engine,
        kind=seen.kind,
        cause=seen.cause,
        seconds=round(seen.duration(news.at), 2),
        evidence=[f"{evidence.cause} {evidence.seconds:.1f} s: {evidence.sentence}" for evidence in seen.evidence],
    )
    if news.change is Change.OPENED:
        told.warning("stall opened")
        return
    advice = {"what_to_try": WHAT_TO_TRY[seen.cause], "runbook": runbook(seen.cause)}
    if seen.culprit_tokens is not None:
        advice["largest_prompt"] = f"{seen.culprit_tokens:.0f} tokens"
    if news.change is Change.CAUSE:
        told.warning("stall cause changed", **advice)
    else:
        told.warning(
            "stall closed",
            stall_seconds=round(seen.seconds, 2),
            reader_seconds_lost=round(seen.reader_seconds, 1),
            notes=list(seen.notes),
            **advice,
        )


def _described(settings: Settings) -> str:
    canary = settings.canary
    if not canary.enabled:
        return "off"
    if canary.mode == "persistent":
        return f"persistent, {canary.stream_tokens} tokens a request"
    return f"pulse of {canary.stream_tokens} tokens every {canary.interval_seconds:g} s"
