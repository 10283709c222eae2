"""The matrix for several values of one setting of the server, which is started anew for each. I/O.

One factor at a time: everything else in the command stays. Values come in random order, so that what drifts with time
is not taken for their effect. A server that does not come up is told, and the sweep goes on.
"""

import asyncio
import random
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from stallwatch.experiment.conduct import Asked, Experiment, NotPossibleError, Outcome, Tools, experiment
from stallwatch.experiment.document import SWEEP_SCHEMA, document, estimate, moment
from stallwatch.experiment.identity import without_secrets
from stallwatch.experiment.launch import Command, Launched, LaunchError, command
from stallwatch.experiment.tradeoff import CURVE, curve, knee, meeting, order, statements
from stallwatch.scheduling import SourceError
from stallwatch.settings import Settings
from stallwatch.sources.http import target_of

START_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Varied:
    """What is varied, and how the server is started with it."""

    template: str
    parameter: str
    values: tuple[str, ...]
    start_seconds: float = START_SECONDS

    def filled(self, value: str, settings: Settings) -> Command:
        """The command for one value."""
        url = settings.engine.url
        return command(self.template, {self.parameter: value, "port": str(url.port or 80), "host": url.host or ""})

    def order(self, seed: int) -> list[str]:
        """The values as they will be tried."""
        values = list(self.values)
        random.Random(seed).shuffle(values)  # noqa: S311 (an order that can be repeated, no secret)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of one value."""

    value: str
    command: str
    problem: str | None = None
    start_seconds: float | None = None
    experiment: Experiment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All values that were tried."""

    varied: Varied
    asked: Asked
    tried: tuple[Tried, ...]
    outcome: Outcome
    why: str
    objective_seconds: float
    began: float
    ended: float
    unix_offset: float


async def sweep(settings: Settings, asked: Asked, varied: Varied, tools: Tools, *, folder: Path, name: str) -> Sweep:
    """Tries every value; server logs go to `folder`."""
    began = tools.clock()
    tried: list[Tried] = []
    outcome, why = Outcome.COMPLETE, ""
    for number, value in enumerate(varied.order(asked.shape.seed), 1):
        if tools.stop.is_set():
            outcome, why = Outcome.INTERRUPTED, "interrupted"
            break
        tools.say(f"{varied.parameter}={value}, {number} of {len(varied.values)}")
        try:
            tried.append(await _try(settings, asked, varied, tools, value, folder / f"{name}-{_file(value)}.log"))
        except _StillThereError as error:
            outcome, why = Outcome.STOPPED, str(error)
            tried.append(error.tried)
            break
        if tried[-1].problem is not None:
            tools.say(f"  left out: {tried[-1].problem}")
    if tools.stop.is_set():
        outcome, why = Outcome.INTERRUPTED, "interrupted"
    now = tools.clock()
    return Sweep(
        varied=varied,
        asked=asked,
        tried=tuple(sorted(tried, key=lambda one: order(one.value))),
        outcome=outcome,
        why=why,
        objective_seconds=settings.slo.itl_seconds,
        began=began,
        ended=now,
        unix_offset=tools.wall_time() - now,
    )


class _StillThereError(Exception):
    """A server does not go away, so no other can be started."""

    def __init__(self, problem: str, tried: Tried) -> None:
        super().__init__(problem)
        self.tried = tried


async def _try(settings: Settings, asked: Asked, varied: Varied, tools: Tools, value: str, log: Path) -> Tried:
    launch = varied.filled(value, settings)
    found = Tried(value=value, command=without_secrets(launch.text))
    server = Launched(launch, target_of(settings.engine_access), log, clock=tools.clock, environ=tools.environ)
    try:
        tools.progress(f"{varied.parameter}={value}: the server starts")
        try:
            took = await _unless_stopped(server.start(timeout_seconds=varied.start_seconds), tools.stop)
            made = await experiment(settings, replace(asked, command=launch.text), tools)
            found = replace(found, start_seconds=took, experiment=made)
        except (LaunchError, NotPossibleError) as error:
            found = replace(found, problem=str(error))
        except SourceError as error:
            found = replace(found, problem=f"the server cannot be asked: {error.detail or error.reason}")
        tools.progress(f"{varied.parameter}={value}: the server stops")
        await server.stop()
    except LaunchError as error:
        raise _StillThereError(str(error), found) from error
    finally:
        server.kill()  # nothing is left when it was stopped
    return found


async def _unless_stopped(starting: Coroutine[Any, Any, float], stop: asyncio.Event) -> float:
    """Waits for a start. Raises `LaunchError` when a person would rather end it."""
    tasks = [asyncio.create_task(starting), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise LaunchError("interrupted while it started")
        return float(tasks[0].result())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _file(value: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in value)[:60]


def sweep_document(found: Sweep) -> dict[str, Any]:
    """The object for JSON."""
    name, seed = found.varied.parameter, found.asked.shape.seed
    points = [
        {
            "value": one.value,
            "command": one.command,
            "problem": one.problem,
            "start_seconds": None if one.start_seconds is None else round(one.start_seconds, 1),
            "experiment": None if one.experiment is None else document(one.experiment, timelines=False),
        }
        for one in found.tried
    ]
    return {
        "schema": SWEEP_SCHEMA,
        "outcome": str(found.outcome),
        "why": found.why or None,
        "began": moment(found.began + found.unix_offset),
        "seconds": round(found.ended - found.began, 1),
        "parameter": name,
        "values": list(found.varied.values),
        "template": without_secrets(found.varied.template),
        "objective_seconds": found.objective_seconds,
        "curves": [_curve(points, tokens, found, seed) for tokens in found.asked.shape.prompt_tokens],
        "measures": {name: {"words": words, "unit": unit} for name, words, unit in CURVE},
        "points": points,
    }


def _curve(points: list[dict[str, Any]], tokens: int, found: Sweep, seed: int) -> Mapping[str, Any]:
    seen = curve(points, tokens, seed=seed)
    bend, best = knee(seen), meeting(seen, found.objective_seconds)
    return {
        "prompt_tokens": tokens,
        "statements": list(statements(found.varied.parameter, seen, found.objective_seconds)),
        "knee": bend.value if bend is not None else None,
        "meets_objective": best.value if best is not None else None,
        "points": [
            {"value": point.value, "measures": {name: estimate(one) for name, one in point.measures.items()}}
            for point in seen
        ],
    }


def planned(varied: Varied, settings: Settings) -> Iterator[str]:
    """What would be started, for a person to read."""
    yield f"for each of {len(varied.values)} values of {varied.parameter}, in random order:"
    for value in varied.values:
        yield f"  {without_secrets(varied.filled(value, settings).text)}"
