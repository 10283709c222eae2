"""What readers really waited for: gaps mapped to the steps, pauses and faults that filled them.

Nothing here is declared by a scenario. The seconds by which a gap exceeds undisturbed stepping are added up by
cause; a cause is true of a gap when it covers at least half of the excess.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isinf
from statistics import median

from stallwatch.simulator.cost import Cause
from stallwatch.simulator.faults import FaultKind
from stallwatch.simulator.scenario import StallKind
from stallwatch.simulator.step import Blocked, Step
from stallwatch.simulator.world import World

# The thresholds by which the findings are defined; kept here again on purpose, as the truth must not import them.
_FLOOR, _FACTOR, _FIRST_TOKEN, _QUIET, _PROGRESS, _WINDOW = 0.5, 8.0, 10.0, 2.0, 1 / 3, 2.0

_FAULT_CAUSES = {
    FaultKind.RESTART: Cause.ENGINE_DOWN,
    FaultKind.REFUSED: Cause.ENGINE_DOWN,
    FaultKind.FRONTEND: Cause.DELIVERY,
    FaultKind.BUFFERING: Cause.DELIVERY,
}


@dataclass(frozen=True, slots=True)
class Truth:
    """The cause of an interval, and the excess seconds behind every candidate."""

    cause: Cause
    seconds: dict[Cause, float]


@dataclass(frozen=True, slots=True)
class TrueStall:
    """One episode as readers of the load felt it."""

    start: float
    end: float
    kind: StallKind
    cause: Cause
    rank: int | None


@dataclass(frozen=True, slots=True)
class _Gap:
    start: float
    end: float
    kind: StallKind
    rank: int
    seconds: dict[Cause, float]


def true_cause(
    world: World, start: float, end: float, *, rank: int = 0, request_id: str | None = None, waiting: bool = False
) -> Truth:
    """Why a reader on this rank saw nothing from `start` to `end`; `waiting` when it had not been admitted yet."""
    return _judge(_seconds(_Timeline(world, rank), start, end, request_id=request_id, waiting=waiting))


def baseline(steps: Iterable[Step]) -> float | None:
    """The usual duration of a step that only decodes."""
    clean = [s.seconds for s in steps if s.decode_requests and not s.prefill_tokens and not s.seconds_by_cause]
    return median(clean) if clean else None


def true_stalls(world: World) -> list[TrueStall]:
    """Every episode so far, from the answers that the readers of the load got."""
    gaps: list[_Gap] = []
    for rank in range(world.scenario.server.data_parallel_size):
        timeline = _Timeline(world, rank)
        gaps += _answer_gaps(world, timeline, rank)
        gaps += _degraded(timeline, rank)
    gaps += _fault_gaps(world)
    return _episodes(sorted(gaps, key=lambda g: (g.start, g.end)))


class _Timeline:
    """The steps of one rank, searchable by time."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.now = world.now
        self.steps: Sequence[Step] = sorted(
            [*world.steps(rank, under_way=True), *world.empty_steps(rank)], key=lambda s: (s.end, s.start)
        )
        self._ends = [s.end for s in self.steps]
        self.baseline = baseline(self.steps)

    def over(self, start: float, end: float) -> Iterable[tuple[Step, float]]:
        """Every step that overlaps, and the share of it that does."""
        for index in range(bisect_right(self._ends, start), len(self.steps)):
            step = self.steps[index]
            if step.start >= end:
                break
            length = min(step.end, self.now) - step.start if isinf(step.end) else step.seconds
            if length > 0:
                yield step, (min(end, step.end) - max(start, step.start)) / length


def _seconds(
    timeline: _Timeline, start: float, end: float, *, request_id: str | None = None, waiting: bool = False
) -> dict[Cause, float]:
    total: dict[Cause, float] = {}

    def add(cause: Cause, seconds: float) -> None:
        if seconds > 0:
            total[cause] = total.get(cause, 0.0) + seconds

    thrown_out = False
    for step, share in timeline.over(start, end):
        covered = (min(step.end, timeline.now) - step.start if isinf(step.end) else step.seconds) * share
        thrown_out |= request_id is not None and request_id in step.preempted
        if thrown_out:
            add(Cause.PREEMPTION, covered)
            continue
        explained = 0.0
        for cause, seconds in step.seconds_by_cause:
            known = min(covered, covered if isinf(seconds) else seconds * share)
            explained += known
            add(cause, known)
        if waiting:
            add(_waited_for(step), covered - explained)
    for fault in timeline.world.scenario.faults:
        if fault.kind in _FAULT_CAUSES:
            add(_FAULT_CAUSES[fault.kind], min(end, fault.end) - max(start, fault.start))
    return total


def _waited_for(step: Step) -> Cause:
    if step.blocked in {Blocked.SEQUENCES, Blocked.KV, Blocked.PREEMPTION}:
        return Cause.ADMISSION
    if step.deferred:
        return Cause.KV_TRANSFER
    return Cause.PREFILL if step.prefill_tokens else Cause.UNKNOWN


def _judge(seconds: dict[Cause, float]) -> Truth:
    total = sum(seconds.values())
    if total <= 0:
        return Truth(Cause.NONE, seconds)
    cause, most = max(seconds.items(), key=lambda item: item[1])
    return Truth(cause if most >= total / 2 else Cause.UNKNOWN, seconds)


def _answer_gaps(world: World, timeline: _Timeline, rank: int) -> Iterable[_Gap]:
    limit = max(_FLOOR, _FACTOR * (timeline.baseline or 0.0))
    for answer in world.answers:
        if answer.request.rank != rank or not answer.request.background:
            continue
        closed = answer.ended if answer.ended is not None else world.now
        first = answer.times[0] if answer.times else closed
        if first - answer.arrival > _FIRST_TOKEN:
            seconds = _seconds(timeline, answer.arrival, first, waiting=True)
            yield _Gap(answer.arrival, first, StallKind.ADMISSION, rank, seconds)
        times = answer.times if answer.ended is not None else [*answer.times, world.now]
        for before, after in pairwise(times):
            if after - before > limit:
                seconds = _seconds(timeline, before, after, request_id=answer.request.id)
                yield _Gap(before, after, StallKind.DECODE, rank, seconds)


def _degraded(timeline: _Timeline, rank: int) -> Iterable[_Gap]:
    if timeline.baseline is None:
        return
    decoding = [s for s in timeline.steps if s.decode_requests and s.end <= timeline.now]
    first = 0
    for last, step in enumerate(decoding):
        while step.end - decoding[first].end > _WINDOW:
            first += 1
        # A window that is not filled with decoding tells nothing about its pace.
        busy = sum(s.seconds for s in decoding[first : last + 1])
        if busy > _WINDOW * 0.8 and (last - first + 1) * timeline.baseline < _PROGRESS * busy:
            begin = step.end - _WINDOW
            yield _Gap(begin, step.end, StallKind.DEGRADED, rank, _seconds(timeline, begin, step.end))


def _fault_gaps(world: World) -> Iterable[_Gap]:
    kinds = {FaultKind.RESTART: StallKind.ENGINE, FaultKind.REFUSED: StallKind.ENGINE}
    kinds[FaultKind.BUFFERING] = StallKind.DECODE
    for fault in world.scenario.faults:
        if fault.kind in kinds and fault.start < world.now:
            end = min(fault.end, world.now)
            yield _Gap(fault.start, end, kinds[fault.kind], 0, {_FAULT_CAUSES[fault.kind]: end - fault.start})


def _episodes(gaps: Sequence[_Gap]) -> list[TrueStall]:
    groups: list[list[_Gap]] = []
    ends: list[float] = []
    for gap in gaps:
        if groups and gap.start <= ends[-1] + _QUIET:
            groups[-1].append(gap)
            ends[-1] = max(ends[-1], gap.end)
        else:
            groups.append([gap])
            ends.append(gap.end)
    return [_episode(group, end) for group, end in zip(groups, ends, strict=True)]


def _episode(gaps: Sequence[_Gap], end: float) -> TrueStall:
    totals: dict[Cause, float] = {}
    for gap in gaps:
        for cause, seconds in gap.seconds.items():
            totals[cause] = totals.get(cause, 0.0) + seconds
    kinds = [g.kind for g in gaps]
    order = (StallKind.ENGINE, StallKind.DECODE, StallKind.ADMISSION, StallKind.DEGRADED)
    ranks = {g.rank for g in gaps}
    return TrueStall(
        min(g.start for g in gaps),
        end,
        next(kind for kind in order if kind in kinds),
        _judge(totals).cause,
        ranks.pop() if len(ranks) == 1 else None,
    )
