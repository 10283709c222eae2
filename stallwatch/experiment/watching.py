"""Everything that is watched beside the load, on the clock that stamps the tokens: engine, GPUs, host, ourselves. I/O.

The same sources as in `stallwatch run`, judged by the same monitor, which is told of the streams but not of the long
prompt: so it meets that one as it would meet anybody's, and its verdict on the stalls is a witness of its own.
"""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from stallwatch.analysis.episodes import Change, Stall
from stallwatch.analysis.monitor import Monitor
from stallwatch.analysis.paired import PairedInterval
from stallwatch.analysis.prefill import PrefillInterval
from stallwatch.experiment.record import Log
from stallwatch.observations import (
    EngineCounters,
    EngineSample,
    GpuSample,
    HostSample,
    Lane,
    Observation,
    ObserverSample,
    PollFailure,
    ServerFacts,
    Source,
)
from stallwatch.scheduling import SourceError, every
from stallwatch.settings import Settings
from stallwatch.sources.blocking import RunBlocking
from stallwatch.sources.engine import EngineSource
from stallwatch.sources.gpu import Gpu
from stallwatch.sources.host import HostSource, OwnCgroup
from stallwatch.sources.http import target_of
from stallwatch.sources.lag import LagSource

_HOST_TIMEOUT = 5.0
_TICK = 0.05


@dataclass(slots=True)
class Watching:
    """The state of what is watched."""

    monitor: Monitor
    gpu: Gpu
    clock: Callable[[], float]
    log: Log = field(default_factory=Log)
    facts: ServerFacts | None = None
    _restarts: int = 0

    @property
    def engine(self) -> str:
        """The engine (data-parallel rank) that all requests go to: the first."""
        return min(self.monitor.engines, default="0", key=lambda name: (len(name), name))

    @property
    def engines(self) -> int:
        """How many there are; 0 while no page was read."""
        return len(self.monitor.engines)

    @property
    def known(self) -> EngineCounters | None:
        """The last scrape of the engine, field by field."""
        watch = self.monitor.engines.get(self.engine)
        return watch.known if watch is not None else None

    def observe(self, seen: Observation | PollFailure) -> None:
        """Takes an observation of any source."""
        watch = self.monitor.engines.get(self.engine)
        before = (watch.work.last, watch.work.paired) if watch is not None else (None, None)
        self.monitor.observe(seen)
        match seen:
            case EngineSample():
                self.log.scrapes.append(seen)
                self._steps(*before)
                if self.monitor.life.restarts > self._restarts:
                    self._restarts = self.monitor.life.restarts
                    self.log.restarts.append(seen.at)
            case ServerFacts():
                self.facts = seen
            case GpuSample():
                self.log.gpus.append(seen)
            case HostSample():
                self.log.host.append(seen)
            case ObserverSample():
                self.log.lags.append(seen)
            case PollFailure():
                self.log.failures.append(seen)
        for news in self.monitor.news():
            if news.change is Change.CLOSED:
                self.log.stalls.append(news.stall)

    def _steps(self, prefill: PrefillInterval | None, paired: PairedInterval | None) -> None:
        watch = self.monitor.engines.get(self.engine)
        if watch is None:
            return
        if watch.work.last is not None and watch.work.last is not prefill:
            self.log.prefill.append(watch.work.last)
        if watch.work.paired is not None and watch.work.paired is not paired:
            self.log.paired.append(watch.work.paired)

    def stalls_open(self) -> list[Stall]:
        """Those that have no end yet."""
        found = self.monitor.findings(self.clock())
        return [engine.stalls.open for engine in found.engines if engine.stalls.open is not None]

    async def counters(self, since: float, *, idle: bool, patience: float) -> EngineCounters | None:
        """The engine's counters by a scrape sent after `since`, and `idle`: when it had nothing to do.

        None when there is none within `patience` seconds.
        """
        deadline = self.clock() + patience
        while self.clock() < deadline:
            first = bisect_left(self.log.scrapes, since, key=lambda seen: seen.sent_at)
            for seen in self.log.scrapes[first:]:
                counters = seen.engines.get(self.engine)
                if seen.lane is Lane.DETECTION or counters is None:
                    continue
                if not idle or not (counters.running or counters.waiting):
                    return counters
            await asyncio.sleep(_TICK)
        return None


@asynccontextmanager
async def watching(
    settings: Settings,
    monitor: Monitor,
    *,
    clock: Callable[[], float],
    gpu: Gpu,
    run_blocking: RunBlocking | None = None,
) -> AsyncIterator[Watching]:
    """Polls all sources while the block runs; a bug in one of them ends the block."""
    seen = Watching(monitor, gpu, clock)
    async with AsyncExitStack() as stack:
        target = target_of(settings.engine_access)
        session = await stack.enter_async_context(target.session())
        engine = EngineSource(session, target, settings.engine, clock=clock, emit_facts=seen.observe)
        lag = LagSource(clock=clock, throttled_seconds=OwnCgroup().throttled_seconds)
        plan = {
            "observer": lag.run(seen.observe),
            "engine": every(
                settings.engine.interval_seconds,
                engine.deadline_seconds,
                source=Source.ENGINE,
                observe=engine.poll,
                emit=seen.observe,
                clock=clock,
            ),
        }
        if settings.gpu.enabled != "false":
            stack.push_async_callback(gpu.close)
            plan["gpu"] = _gpus(settings, gpu, seen, clock)
        if settings.host.enabled:
            source = HostSource(settings.host, clock=clock, run_blocking=run_blocking)
            stack.callback(source.close)
            plan["host"] = every(
                settings.host.interval_seconds,
                _HOST_TIMEOUT,
                source=Source.HOST,
                observe=source.poll,
                emit=seen.observe,
                clock=clock,
            )
        group = await stack.enter_async_context(asyncio.TaskGroup())
        tasks = [group.create_task(coroutine, name=name) for name, coroutine in plan.items()]
        try:
            yield seen
        finally:
            for task in tasks:
                task.cancel()


async def _gpus(settings: Settings, gpu: Gpu, seen: Watching, clock: Callable[[], float]) -> None:
    with suppress(SourceError):
        await gpu.poll()
    if gpu.off is not None:
        return
    await every(
        settings.gpu.interval_seconds,
        settings.gpu.timeout_seconds + 1.0,
        source=Source.GPU,
        observe=gpu.poll,
        emit=seen.observe,
        clock=clock,
    )
