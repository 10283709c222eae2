"""The whole sidecar beside the simulated vLLM, over real loopback sockets, in virtual time."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from stallwatch.analysis.findings import EngineFindings, Findings
from stallwatch.app import Sidecar
from stallwatch.observations import Observation, PollFailure
from stallwatch.recorder.scribe import InlineScribe
from stallwatch.settings import Settings
from stallwatch.simulator.driver import driver_of
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.scenarios import SCENARIOS
from stallwatch.simulator.server import SERVER, SimulatedServer, create_app
from tests import virtual

T = TypeVar("T")


Beside = Callable[[SimulatedServer], Coroutine[Any, Any, None]]
Sampled = Callable[["Watched"], None]


@dataclass(slots=True)
class Watched:
    """What the sidecar saw and said beside one scenario; `wall` is the real seconds that it took."""

    sidecar: Sidecar
    simulated: SimulatedServer
    origin: float  # monotonic time at which the scenario began
    observations: list[Observation | PollFailure] = field(default_factory=list)
    findings: list[Findings] = field(default_factory=list)
    wall: float = 0.0

    @property
    def last(self) -> Findings:
        """The findings at the end."""
        return self.findings[-1]

    def engine(self, number: str = "0") -> EngineFindings:
        """What was said of one engine at the end."""
        return next(engine for engine in self.last.engines if engine.engine == number)


async def inline(work: Callable[[], T], /) -> T:
    """Runs at once what production runs in a thread: threads are invisible to virtual time."""
    return work()


class _Recording(Sidecar):
    def __init__(self, settings: Settings, **more: object) -> None:
        super().__init__(settings, **more)  # type: ignore[arg-type]
        self.seen: list[Observation | PollFailure] = []

    def observe(self, seen: Observation | PollFailure) -> None:
        self.seen.append(seen)
        super().observe(seen)


def watch(
    scenario: str | Scenario,
    *,
    seconds: float | None = None,
    sample_every: float = 1.0,
    lead: float = 0.0,
    beside: Beside | None = None,
    sampled: Sampled = lambda _watched: None,
    **rooms: object,
) -> Watched:
    """Runs the sidecar beside a scenario in virtual time; `rooms` are settings as nested mappings.

    `lead` lets the sidecar start that many seconds before the scenario. `beside` plays what else there is on the host.
    `sampled` is called after each sample of the findings.
    Where the scenario says that the observer is late, the loop stands still for as long.
    """
    chosen = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
    return virtual.run(_watch(chosen, seconds or chosen.duration, sample_every, lead, beside, sampled, rooms))


async def _watch(
    scenario: Scenario,
    seconds: float,
    sample_every: float,
    lead: float,
    beside: Beside | None,
    sampled: Sampled,
    rooms: dict[str, object],
) -> Watched:
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    origin = loop.time() + lead
    # Until the scenario begins its time stands still, so that nothing of it is played twice.
    app = create_app(scenario, clock=lambda: max(loop.time(), origin))
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    rooms = {**rooms, "engine": {"url": f"http://127.0.0.1:{port}", **rooms.get("engine", {})}}  # type: ignore[dict-item]
    settings = Settings.model_validate({"host": {"enabled": False}, **rooms})
    sidecar = _Recording(
        settings,
        clock=loop.time,
        rng=random.Random(7),
        nvml=driver_of(app[SERVER]),
        run_blocking=inline,
        scribe=InlineScribe(),
    )
    watched = Watched(sidecar, app[SERVER], origin, sidecar.seen)
    async with sidecar.tasks() as plan:
        tasks = [asyncio.create_task(task, name=name) for name, task in plan.items()]
        if lead:
            await asyncio.sleep(origin - loop.time())
        tasks.append(asyncio.create_task(_stand_still(scenario, watched.origin), name="lateness"))
        if beside is not None:
            tasks.append(asyncio.create_task(beside(app[SERVER]), name="beside"))
        end = loop.time() + seconds
        while loop.time() < end and not any(task.done() for task in tasks if task.get_name() != "lateness"):
            await asyncio.sleep(min(sample_every, end - loop.time()))
            watched.findings.append(sidecar.monitor.findings(loop.time()))
            sampled(watched)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
    await runner.cleanup()
    watched.wall = time.perf_counter() - began
    return watched


async def _stand_still(scenario: Scenario, origin: float) -> None:
    """Lets the loop be late as if something had blocked it, the server's side of it too."""
    loop = asyncio.get_running_loop()
    for lag in scenario.observer_lag:
        await asyncio.sleep(origin + lag.at - loop.time())
        if isinstance(loop, virtual.VirtualLoop):
            loop.stand_still(lag.seconds)


def column(found: Sequence[Findings], name: str, engine: str = "0") -> list[object]:
    """One attribute of one engine over all samples."""
    return [getattr(seen, name) for findings in found for seen in findings.engines if seen.engine == engine]
