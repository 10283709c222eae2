"""The sidecar's own sources beside the real server, in this process, with every observation kept to be judged again."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from stallwatch.analysis.findings import Findings
from stallwatch.app import Sidecar, monitor_for
from stallwatch.observations import EngineCounters, EngineSample, Lane, Observation, PollFailure
from stallwatch.settings import Settings
from tests.vllm.load import Request, Stream, load

Seen = Observation | PollFailure


@dataclass(slots=True)
class Recording:
    """Observations of one run and what the load client saw meanwhile."""

    settings: Settings
    observations: list[Seen]
    streams: dict[str, Stream]
    marks: dict[str, float] = field(default_factory=dict)


class _Keeping(Sidecar):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.seen: list[Seen] = []

    def observe(self, seen: Seen) -> None:
        self.seen.append(seen)
        super().observe(seen)


def record(
    url: str, phases: Sequence[tuple[str, Sequence[Request]]], *, pause: float = 1.5, **rooms: object
) -> Recording:
    """Watches the server while the phases' loads run one after the other; marks when each began."""
    settings = Settings.model_validate(
        {"engine": {"url": url}, "host": {"enabled": False}, "gpu": {"enabled": "false"}, **rooms}
    )
    return asyncio.run(_record(url, settings, phases, pause))


async def _record(
    url: str, settings: Settings, phases: Sequence[tuple[str, Sequence[Request]]], pause: float
) -> Recording:
    sidecar = _Keeping(settings)
    kept = Recording(settings, sidecar.seen, {})
    async with sidecar.tasks() as plan:
        tasks = [asyncio.create_task(task, name=name) for name, task in plan.items()]
        await asyncio.sleep(pause)
        for name, requests in phases:
            kept.marks[name] = time.monotonic()
            if requests:
                with load(url, requests) as running:
                    await asyncio.to_thread(running.finish)
                    kept.streams.update({f"{name}/{key}": stream for key, stream in running.streams().items()})
            await asyncio.sleep(pause)
        kept.marks["end"] = time.monotonic()
        failed = [task for task in tasks if task.done() and task.exception() is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in failed:
        task.result()
    return kept


def without(*fields: str) -> Callable[[EngineCounters], EngineCounters]:
    """Takes fields out of counters, as if the server did not have them."""
    changes: dict[str, Any] = {name: MappingProxyType({}) if name == "plugin" else None for name in fields}
    return lambda counters: replace(counters, **changes)


def judged(
    recording: Recording,
    at: Iterable[float],
    *,
    change: Callable[[EngineCounters], EngineCounters] = lambda counters: counters,
    every: float = 0.0,
) -> list[Findings]:
    """Judges the recording again; findings at each of the times.

    `change` is applied to the counters of every scrape; `every` leaves out scrapes that come sooner after another.
    """
    monitor = monitor_for(recording.settings)
    wanted = sorted(at)
    found: list[Findings] = []
    last = float("-inf")
    for seen in recording.observations:
        while wanted and seen.at > wanted[0]:
            found.append(monitor.findings(wanted.pop(0)))
        if not isinstance(seen, EngineSample):
            monitor.observe(seen)
        elif seen.at - last >= every - 0.05 and not (every and seen.lane is Lane.DETECTION):
            last = seen.at
            changed = {name: change(counters) for name, counters in seen.engines.items()}
            monitor.observe(replace(seen, engines=changed))
    found.extend(monitor.findings(moment) for moment in wanted)
    return found
