"""Runs cases through the whole sidecar, once each, and compares what it says with what the simulator knows."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from stallwatch.analysis.causes import Cause as Verdict
from stallwatch.analysis.episodes import Stall
from stallwatch.simulator.cost import Cause
from stallwatch.simulator.truth import true_cause, true_stalls
from stallwatch.simulator.world import World
from tests.harness import watch
from tests.scenarios import host
from tests.scenarios.cases import CASES, Case, later

LIMIT, FIRST_TOKEN = 0.5, 10.0
SLACK = 2.0  # seconds around a stall in which its truth may lie


@dataclass(frozen=True)
class Seen:
    """One stall as reported; times are seconds since the run began."""

    stall: Stall
    start: float
    end: float
    detected: float


@dataclass(frozen=True)
class TrueWait:
    """A wait that somebody really had: a reader of the load, or our own stream."""

    start: float
    end: float
    cause: Cause
    rank: int | None


@dataclass(frozen=True)
class Result:
    """What one run said, and what was true."""

    case: Case
    seen: tuple[Seen, ...]
    load: tuple[TrueWait, ...]
    ours: tuple[TrueWait, ...]
    gaps: tuple[tuple[float, float], ...]
    """Times between two tokens of anybody that were above the limit, in order of their begin."""

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The causes that were named, each once; `none` without a stall."""
        return tuple(sorted({str(seen.stall.cause) for seen in self.seen})) or ("none",)

    @property
    def wrong(self) -> list[str]:
        """Causes that are not true, and unknown where the truth can be seen."""
        case = self.case
        allowed = {str(cause) for cause in (case.cause, *case.also, *case.scenario.probe_causes) if cause is not None}
        if case.unseen:
            allowed.add(Verdict.UNKNOWN)
        return [f"{seen.stall.cause} at {seen.start:.2f} s" for seen in self.seen if seen.stall.cause not in allowed]

    @property
    def false(self) -> list[str]:
        """Stalls in which nobody waited."""
        waits = [*self.load, *self.ours]
        return [
            f"{seen.stall.kind} {seen.stall.cause} at {seen.start:.2f} s"
            for seen in self.seen
            if seen.stall.cause is not Verdict.OBSERVER
            and not any(w.start < seen.end + SLACK and w.end > seen.start - SLACK for w in waits)
        ]


@cache
def run(number: int, shift: float = 0.0, seconds: float | None = None) -> Result:
    """Runs a case by its place in the table, or the first `seconds` of it.

    With `shift` everything in it happens that much later, so that polls and pulses fall elsewhere.
    """
    case = CASES[number]
    rooms: dict[str, Any] = dict(case.rooms)
    canary = {"enabled": False} if case.mode == "off" else {"mode": case.mode}
    rooms["canary"] = {**canary, **rooms.get("canary", {})}
    with tempfile.TemporaryDirectory() as folder:
        beside = None
        if case.host:
            beside, rooms["host"] = host.host(Path(folder)), host.rooms(Path(folder))
        watched = watch(
            later(case.scenario, shift),
            seconds=None if seconds is None else seconds + shift,
            beside=beside,
            **rooms,
        )
    found = []
    for engine in watched.last.engines:
        for stall in (*reversed(engine.stalls.closed), engine.stalls.open):
            if stall is not None:
                end = watched.last.at if stall.end is None else stall.end
                times = (time - watched.origin for time in (stall.start, end, stall.detected))
                found.append(Seen(stall, *times))
    world = watched.simulated.world
    load = tuple(TrueWait(s.start, s.end, s.cause, s.rank) for s in true_stalls(world))
    gaps = [
        (before, after)
        for answer in world.answers
        for before, after in pairwise(answer.times if answer.ended is not None else [*answer.times, world.now])
        if after - before > LIMIT
    ]
    return Result(case, tuple(found), load, tuple(_ours(world)), tuple(sorted(gaps)))


def _ours(world: World) -> Iterator[TrueWait]:
    """What our own streams waited for."""
    for answer in world.answers:
        if answer.request.background:
            continue
        rank, name = answer.request.rank, answer.request.id
        first = answer.times[0] if answer.times else world.now
        if first - answer.arrival > FIRST_TOKEN:
            truth = true_cause(world, answer.arrival, first, rank=rank, request_id=name, waiting=True)
            yield TrueWait(answer.arrival, first, truth.cause, rank)
        for before, after in pairwise(answer.times):
            if after - before > LIMIT:
                yield TrueWait(before, after, true_cause(world, before, after, rank=rank, request_id=name).cause, rank)
