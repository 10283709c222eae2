"""A simulated vLLM server: what a client, a scraper or a probe of 0.32 would meet.

`create_app` gives the application alone, which drops connections while its process is "dead"; `serve` owns the
listening socket too and really refuses them. Time begins when the application starts.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from aiohttp import web

from stallwatch.simulator.faults import FaultKind
from stallwatch.simulator.frontend import SERVER, Clock, SimulatedServer, Sleeper
from stallwatch.simulator.routes import authentication, counting, path_faults, routes
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.world import EPOCH, ExtraFactory

__all__ = ["SERVER", "Serving", "SimulatedServer", "create_app", "run_simulator", "serve", "until_signalled"]


def create_app(
    scenario: Scenario,
    *,
    clock: Clock = time.monotonic,
    sleep: Sleeper = asyncio.sleep,
    speed: float = 1.0,
    epoch: float = EPOCH,
    extras: ExtraFactory | None = None,
) -> web.Application:
    """The application of one simulated server; `app[SERVER]` is its state. Time begins when the application starts."""
    server = SimulatedServer(scenario, clock=clock, sleep=sleep, speed=speed, epoch=epoch, extras=extras)
    app = web.Application(middlewares=[path_faults, authentication, counting], client_max_size=64 * 1024**2)
    app[SERVER] = server
    app.add_routes(routes(dev_mode=scenario.server.dev_mode))

    async def stepping(_: web.Application) -> AsyncIterator[None]:
        server.restart_clock()
        server.pump()
        task = asyncio.create_task(server.run(), name="simulated engine")
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app.cleanup_ctx.append(stepping)
    return app


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that listens."""

    url: str
    port: int
    server: SimulatedServer


@asynccontextmanager
async def serve(
    scenario: Scenario,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    clock: Clock = time.monotonic,
    sleep: Sleeper = asyncio.sleep,
    speed: float = 1.0,
    epoch: float = EPOCH,
    extras: ExtraFactory | None = None,
) -> AsyncIterator[Serving]:
    """Listens until the block ends. While the process is "dead" the port is closed and connections are refused."""
    app = create_app(scenario, clock=clock, sleep=sleep, speed=speed, epoch=epoch, extras=extras)
    server = app[SERVER]
    runner = web.AppRunner(app, handle_signals=False, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    bound = int(runner.addresses[0][1])
    door = asyncio.create_task(_door(server, runner, site, host=host, port=bound), name="simulated port")
    try:
        yield Serving(f"http://{host}:{bound}", bound, server)
    finally:
        door.cancel()
        with suppress(asyncio.CancelledError):
            await door
        server.tear_down()
        await runner.cleanup()


async def _door(server: SimulatedServer, runner: web.AppRunner, site: web.TCPSite, *, host: str, port: int) -> None:
    closed = [f for f in server.scenario.faults if f.kind in {FaultKind.RESTART, FaultKind.REFUSED}]
    for fault in sorted(closed, key=lambda f: f.start):
        await server.wait_until(fault.start)
        server.pump()
        await site.stop()
        server.tear_down()
        await server.wait_until(fault.end)
        server.pump()
        site = web.TCPSite(runner, host, port, reuse_address=True)
        await site.start()


async def run_simulator(
    scenario: Scenario,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    speed: float = 1.0,
    clock: Clock = time.monotonic,
    sleep: Sleeper = asyncio.sleep,
    until: float | None = None,
) -> None:
    """Serves a scenario until its end or, by default, until cancelled."""
    async with serve(
        scenario, host=host, port=port, speed=speed, clock=clock, sleep=sleep, epoch=time.time()
    ) as serving:
        await serving.server.wait_until(inf if until is None else until)


async def until_signalled(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` until it ends, or until SIGTERM or SIGINT, which as process 1 of a container nobody else heeds."""
    task = asyncio.create_task(work, name="served until signalled")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
