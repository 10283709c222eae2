"""The experiment against the simulated vLLM, over real loopback sockets, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from stallwatch.app import monitor_for
from stallwatch.experiment.conduct import Asked, Experiment, Tools, experiment
from stallwatch.experiment.plan import Shape
from stallwatch.settings import Settings
from stallwatch.simulator.driver import driver_of
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.server import SimulatedServer, serve
from tests import virtual
from tests.harness import inline

Beside = Callable[[SimulatedServer, asyncio.Event], Coroutine[Any, Any, None]]

SMALL = Shape(streams=2, output_tokens=101, prompt_tokens=(4_000,), repeats=3, settle_tokens=8, pause_seconds=0.1)


def conduct(
    scenario: Scenario,
    *,
    shape: Shape = SMALL,
    beside: Beside | None = None,
    path: Callable[[int], Coroutine[Any, Any, int]] | None = None,
    after: Callable[[], Coroutine[Any, Any, None]] | None = None,
    lines: list[str] | None = None,
    rooms: dict[str, object] | None = None,
    **asked: Any,
) -> Experiment:
    """Makes the experiment against a scenario.

    `beside` runs along and may set the stop event; `path` starts what the streams go through
    and returns its port, `after` ends it;
    `lines` takes what is said; `rooms` are settings.
    """

    async def main() -> Experiment:
        loop = asyncio.get_running_loop()
        async with serve(scenario, clock=loop.time) as serving:
            given: dict[str, Any] = {"host": {"enabled": False}, **(rooms or {})}
            given["engine"] = {"url": serving.url, **given.get("engine", {})}
            if path is not None:
                given["canary"] = {"url": f"http://127.0.0.1:{await path(serving.port)}"}
            settings = Settings.model_validate(given)
            stop = asyncio.Event()
            tools = Tools(
                clock=loop.time,
                wall_time=loop.time,
                monitor=lambda: monitor_for(settings),
                environ={},
                stop=stop,
                nvml=driver_of(serving.server),
                run_blocking=inline,
                say=(lines if lines is not None else []).append,
            )
            task = asyncio.create_task(beside(serving.server, stop)) if beside is not None else None
            try:
                return await experiment(settings, Asked(**{"shape": shape, "timeout_seconds": 30.0, **asked}), tools)
            finally:
                if task is not None:
                    task.cancel()
                if after is not None:
                    await after()

    return virtual.run(main())
