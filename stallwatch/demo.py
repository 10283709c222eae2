"""`stallwatch demo`: a simulated vLLM and the sidecar beside it, in one process, to look at.

Everything is real but the server: the sidecar scrapes it, streams from it and reads its GPU through the same code as
in production. A lap shows one freeze after another with quiet between; the next lap begins with a new server process.
"""

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from stallwatch.analysis.findings import Findings
from stallwatch.app import Sidecar
from stallwatch.settings import Settings
from stallwatch.simulator.cost import Cause, Pause, Slowdown
from stallwatch.simulator.driver import driver_of
from stallwatch.simulator.load import Arrival, Load, Users
from stallwatch.simulator.scenario import Scenario, StallKind
from stallwatch.simulator.scenarios import SCENARIOS
from stallwatch.simulator.server import serve, until_signalled
from stallwatch.web import server

TOUR = Scenario(
    name="tour",
    sentence=(
        "A long uncached prompt freezes three readers at 0:20, the same prompt is cached at 0:50 and nobody notices, "
        "the GPU's clock falls at 1:15, and a kernel is compiled at 1:50."
    ),
    duration=130.0,
    cause=Cause.PREFILL,
    kind=StallKind.DECODE,
    load=Load(
        (
            Arrival(at=20.0, prompt_tokens=30_000, output_tokens=100, identity=1),
            Arrival(at=50.0, prompt_tokens=30_000, output_tokens=100, identity=1),
        ),
        (Users(count=3, prompt_tokens=64, output_tokens=1_200, stagger=1.0),),
    ),
    slowdowns=(Slowdown(start=75.0, end=95.0, factor=4.0, cause=Cause.GPU_CLOCK),),
    pauses=(Pause(at=110.0, seconds=2.5, cause=Cause.GPU_IDLE),),
)

_TTY_SECONDS, _PLAIN_SECONDS = 0.25, 5.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to show, and where."""

    scenarios: tuple[Scenario, ...] = (TOUR,)
    target_port: int = 8000
    web_port: int = 9709
    laps: int | None = None  # for ever


class PortTakenError(Exception):
    """A port that the demo needs is in use; the text says which and what to do."""


class _Driver:
    """The driver of whichever simulated server runs now: a new lap is a new server on the same host."""

    def __init__(self) -> None:
        self._current: Any = None

    def follow(self, driver: Any) -> None:
        if self._current is not None:
            driver.nvmlInit()  # the reader has the library open already
        self._current = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current, name)


def chosen(names: Sequence[str]) -> tuple[Scenario, ...]:
    """The scenarios of these names, or the tour. Raises `KeyError` with the unknown name."""
    return tuple(TOUR if name == TOUR.name else SCENARIOS[name] for name in names) or (TOUR,)


def described() -> dict[str, str]:
    """Every scenario's name with its sentence, the tour first."""
    return {scenario.name: scenario.sentence for scenario in (TOUR, *SCENARIOS.values())}


async def simulate(scenarios: Sequence[Scenario], *, host: str, port: int, speed: float, out: TextIO) -> None:
    """Serves only the simulated vLLM, scenario after scenario, until SIGTERM or SIGINT. Raises `PortTakenError`."""
    await until_signalled(_served(scenarios, host=host, port=port, speed=speed, out=out))


async def _served(scenarios: Sequence[Scenario], *, host: str, port: int, speed: float, out: TextIO) -> None:
    for scenario in itertools.cycle(scenarios):
        try:
            async with serve(scenario, host=host, port=port, speed=speed, epoch=time.time()) as simulated:
                out.write(f"{simulated.url}  {scenario.name}: {scenario.sentence}\n")
                out.flush()
                await simulated.server.wait_until(scenario.duration)
        except OSError as error:
            raise PortTakenError(_taken(port, "--port", error)) from error


async def run(options: DemoOptions, *, out: TextIO) -> int:
    """Shows until interrupted, or for the number of laps asked for. Raises `PortTakenError`."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    settings = Settings.model_validate(
        {
            "engine": {"url": f"http://127.0.0.1:{options.target_port}"},
            "canary": {"mode": "persistent"},
            "gpu": {"enabled": "true"},
            "web": {"host": "127.0.0.1", "port": options.web_port},
        }
    )
    try:
        listener = server.listen(settings.web.host, settings.web.port)
    except OSError as error:
        raise PortTakenError(_taken(options.web_port, "--port", error)) from error
    driver = _Driver()
    sidecar = Sidecar(settings, nvml=driver)
    port = listener.getsockname()[1]
    async with server.serving(server.create_app(sidecar), listener):
        work = asyncio.create_task(_laps(options, sidecar, driver, port, out=out), name="laps")
        stopped = asyncio.create_task(stop.wait(), name="interrupt")
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in (work, stopped):
            task.cancel()
        await asyncio.wait([work, stopped])
    if not work.cancelled():
        work.result()
    out.write("\n")
    return 0


async def _laps(options: DemoOptions, sidecar: Sidecar, driver: _Driver, web_port: int, *, out: TextIO) -> None:
    told = False
    lap: Iterator[Scenario] = itertools.cycle(options.scenarios)
    if options.laps is not None:
        lap = itertools.islice(lap, options.laps * len(options.scenarios))
    tasks: list[asyncio.Task[None]] = []
    async with sidecar.tasks() as plan:
        try:
            for scenario in lap:
                try:
                    serving = serve(scenario, port=options.target_port, epoch=time.time())
                    async with serving as simulated:
                        driver.follow(driver_of(simulated.server))
                        if not told:
                            out.write(_greeting(simulated.url, web_port))
                            told = True
                            tasks += [asyncio.create_task(task, name=name) for name, task in plan.items()]
                        out.write(f"\n{scenario.name}: {scenario.sentence}\n")
                        await _show(sidecar, scenario, tasks, lambda: simulated.server.now, out=out)
                except OSError as error:
                    raise PortTakenError(_taken(options.target_port, "--target-port", error)) from error
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


async def _show(
    sidecar: Sidecar,
    scenario: Scenario,
    tasks: Sequence["asyncio.Task[None]"],
    now: Callable[[], float],
    *,
    out: TextIO,
) -> None:
    live = out.isatty()
    while now() < scenario.duration:
        ended = next((task for task in tasks if task.done() and task.exception() is not None), None)
        if ended is not None:
            ended.result()
        line = verdict(sidecar.monitor.findings(time.monotonic()), now())
        out.write(f"\r\x1b[2K{line}" if live else f"{line}\n")
        out.flush()
        await asyncio.sleep(_TTY_SECONDS if live else _PLAIN_SECONDS)


def verdict(findings: Findings, at: float) -> str:
    """One line for a person: how long readers wait now, and what the engine is doing. `at` is seconds into the lap."""
    head = f"{int(at) // 60}:{int(at) % 60:02d}  {findings.phase}"
    engine = next(iter(findings.engines), None)
    if engine is None or engine.canary is None:
        return f"{head} | nothing seen yet"
    window = engine.canary.windows[-1]
    parts = [
        f"open gap {_seconds(engine.canary.open_gap)}",
        f"p99 {_seconds(window.itl.get(0.99))}",
        f"time-weighted p95 {_seconds(window.time_weighted.get(0.95))}",
    ]
    work = engine.work
    if work is not None:
        prefill = "-" if work.per_step_mean is None else f"{work.per_step_mean:.0f}"
        parts.append(f"prefill {prefill} tokens/step")
        parts.append("interference " + ("-" if work.interference_mean is None else f"{work.interference_mean:.2f}"))
    stall = engine.stalls.open
    if stall is not None:
        parts.append(f"STALL {stall.duration(findings.at):.0f} s: {stall.cause}")
    elif engine.stalls.closed:
        last = engine.stalls.closed[0]
        parts.append(f"last stall {last.duration(findings.at):.0f} s: {last.cause}")
    return " | ".join([head, *parts])


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _greeting(target: str, web_port: int) -> str:
    here = f"http://127.0.0.1:{web_port}"
    return (
        f"A simulated vLLM listens on {target}, stallwatch watches it.\n"
        f"  live page    {here}/\n"
        f"  metrics      {here}/metrics\n"
        f"  status       {here}/api/v1/status\n"
        f"  try          curl -s {here}/metrics | grep -E 'open_gap|reader_wait|missed'\n"
        f"Ctrl-C ends it.\n"
    )


def _taken(port: int, flag: str, error: OSError) -> str:
    return f"port {port} cannot be used ({error.strerror or error}): choose another with {flag}"
