"""One simulated server without its sockets: engines, traffic, counters, faults, all in simulated time.

It is driven by whoever knows the time: a loop that sleeps (the HTTP server) or one that does not (`simulate`,
`record_polls`). Both see the same numbers, because everything happens at the time it was due, not when it was
noticed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from stallwatch.simulator.engine import Engine
from stallwatch.simulator.exposition import Page
from stallwatch.simulator.faults import FaultKind, blocked_until
from stallwatch.simulator.load import Cancel, LoadPlayer
from stallwatch.simulator.metrics import EngineMetrics, Extra
from stallwatch.simulator.plugin import StepFamilies
from stallwatch.simulator.process import HttpMetrics, cache_config_family, process_families
from stallwatch.simulator.request import FinishReason, Request
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.step import Outcome, Step

# An arbitrary but fixed date, so that pages of two runs are equal.
EPOCH = 1_790_000_000.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """New tokens of a request leave the API process; no tokens and a reason when it ended without."""

    at: float
    request: Request
    first: int
    count: int
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Answered:
    """What a reader of one request saw: when it asked, and when tokens reached it."""

    request: Request
    arrival: float
    times: list[float] = field(default_factory=list)
    ended: float | None = None


ExtraFactory = Callable[[Scenario], Sequence[Extra]]
_Happening = tuple[float, int, Callable[[float], list[Delivery]]]


class World:
    """The state of one server. Times are seconds since the scenario began."""

    def __init__(self, scenario: Scenario, *, epoch: float = EPOCH, extras: ExtraFactory | None = None) -> None:
        self.scenario = scenario
        self.epoch = epoch
        self.now = 0.0
        self.down = False
        self.asleep: int | None = None
        self.answers: list[Answered] = []
        self.incarnation = 0
        self._extras = extras
        self._player = LoadPlayer(scenario.load)
        self._past: list[Engine] = []
        self._order = count()
        self._booking: list[tuple[float, int, Outcome]] = []
        self._by_id: dict[str, Answered] = {}
        self._happenings = self._plan()
        self._boot(0.0)

    @property
    def engines(self) -> list[Engine]:
        """One for each rank, of the process that runs now."""
        return self._engines

    @property
    def page(self) -> Page:
        """The metrics page."""
        return self._page

    @property
    def metrics(self) -> EngineMetrics:
        """The families of the engines."""
        return self._metrics

    @property
    def http(self) -> HttpMetrics:
        """The families of the HTTP layer."""
        return self._http

    def steps(self, rank: int | None = None, *, under_way: bool = False) -> list[Step]:
        """The ground truth so far, over restarts, in order of their ends."""
        chosen = [e for e in (*self._past, *self._engines) if rank in {None, e.rank}]
        found = [step for engine in chosen for step in engine.steps]
        if under_way:
            found += [e.executing for e in chosen if e.executing is not None]
        return sorted(found, key=lambda s: (s.end, s.rank))

    def empty_steps(self, rank: int | None = None) -> list[Step]:
        """The turns of the scheduler that computed nothing while requests waited."""
        chosen = [e for e in (*self._past, *self._engines) if rank in {None, e.rank}]
        return sorted((step for engine in chosen for step in engine.empty_steps), key=lambda s: s.end)

    def next_event(self) -> float:
        """When something happens next without anybody's doing."""
        soonest = self._happenings[0][0] if self._happenings else inf
        if self._booking:
            soonest = min(soonest, self._booking[0][0])
        if not self.down:
            for engine in self._engines:
                if engine.executing is not None:
                    soonest = min(soonest, engine.executing.end)
        return min(soonest, self._player.next_at())

    def advance(self, until: float) -> list[Delivery]:
        """Lets everything happen that is due up to `until`."""
        deliveries: list[Delivery] = []
        while (at := self.next_event()) <= until:
            self.now = max(self.now, at)
            for engine in self._engines:
                if not self.down and engine.executing is not None and engine.executing.end <= at:
                    outcome = engine.finish()
                    heappush(self._booking, (blocked_until(self.scenario.faults, at), next(self._order), outcome))
            while self._booking and self._booking[0][0] <= at:
                deliveries += self._deliver(heappop(self._booking)[2], at)
            while self._happenings and self._happenings[0][0] <= at:
                deliveries += heappop(self._happenings)[2](at)
            self._play(at)
            self._begin(at)
        self.now = max(self.now, until)
        return deliveries

    def forget(self, before: float) -> None:
        """Drops what is known of the time before, so that a server may run for days."""
        for engine in self._engines:
            engine.forget(before)
        self._past = [e for e in self._past if e.steps and e.steps[-1].end >= before]
        self.answers = [a for a in self.answers if a.ended is None or a.ended >= before]

    def full(self) -> bool:
        """Whether one more request would be refused; asking counts as trying."""
        limit = self.scenario.server.max_num_queued_reqs
        if limit is None or len(self._by_id) < limit:
            return False
        self._metrics.refuse()
        return True

    def submit(self, request: Request, now: float, *, rank: int | None = None) -> None:
        """A request reaches the API server."""
        chosen = rank if rank is not None else self._least_loaded()
        answered = Answered(request, now)
        self.answers.append(answered)
        self._by_id[request.id] = answered
        self._engines[chosen].add(request, now)
        self._begin(now)

    def abort(self, request: Request, now: float) -> None:
        """The client of a request has gone."""
        answered = self._by_id.pop(request.id, None)
        if answered is not None:
            answered.ended = now
            self._engines[request.rank].abort(request)

    def sleep(self, level: int, now: float) -> list[Delivery]:
        """Puts the engines to sleep: what runs is aborted, memory is given back."""
        self.asleep = level
        deliveries = []
        for engine in self._engines:
            for request in engine.abort_all():
                deliveries.append(Delivery(now, request, len(request.output), 0, FinishReason.ABORT))
                self._settle(request, now)
            engine.paused = True
        self._metrics.sleep(level)
        return deliveries

    def wake_up(self, now: float) -> None:
        """Ends the sleep."""
        self.asleep = None
        for engine in self._engines:
            engine.paused = False
        self._metrics.sleep(None)
        self._begin(now)

    def _plan(self) -> list[_Happening]:
        happenings: list[_Happening] = []
        for fault in self.scenario.faults:
            if fault.kind is FaultKind.RESTART:
                happenings.append((fault.start, next(self._order), partial(self._die, back_at=fault.end)))
                happenings.append((fault.end, next(self._order), self._rise))
        for nap in self.scenario.sleeps:
            happenings.append((nap.start, next(self._order), partial(self.sleep, nap.level)))
            happenings.append((nap.end, next(self._order), self._awake))
        heapify(happenings)
        return happenings

    def _awake(self, now: float) -> list[Delivery]:
        self.wake_up(now)
        return []

    def _boot(self, now: float) -> None:
        scenario, server = self.scenario, self.scenario.server
        self._engines = [
            Engine(scenario.engine, scenario.disturbances, rank=rank) for rank in range(server.data_parallel_size)
        ]
        started = self.epoch + now
        self._page = Page(process_families(started=started - 60.0))
        extras: list[Extra] = list(self._extras(scenario)) if self._extras else []
        if server.plugin:
            extras.append(StepFamilies(scenario.engine, ranks=server.data_parallel_size))
        self._metrics = EngineMetrics(
            self._page,
            scenario.engine,
            model=server.model,
            ranks=server.data_parallel_size,
            created=started if server.created_series else None,
            accounting=server.accounting if server.mfu_metrics else None,
            kv_connector=server.kv_connector,
            extras=extras,
        )
        self._page.add(cache_config_family(scenario.engine, ranks=server.data_parallel_size))
        self._http = HttpMetrics(self._page, created=started if server.created_series else None)

    def _die(self, now: float, *, back_at: float) -> list[Delivery]:
        self.down = True
        deliveries = []
        for answered in list(self._by_id.values()):
            request = answered.request
            deliveries.append(Delivery(now, request, len(request.output), 0, FinishReason.ERROR))
            self._by_id.pop(request.id)
            answered.ended = now
            if request.background:
                self._player.lost(request, back_at)
        self._past += self._engines
        self._booking.clear()
        return deliveries

    def _rise(self, now: float) -> list[Delivery]:
        self.down = False
        self.incarnation += 1
        self._boot(now)
        return []

    def _begin(self, now: float) -> None:
        if not self.down:
            for engine in self._engines:
                engine.begin(now)

    def _least_loaded(self) -> int:
        return min(range(len(self._engines)), key=lambda r: (_pressure(self._engines[r]), r))

    def _play(self, now: float) -> None:
        for event in self._player.due(now):
            if isinstance(event, Cancel):
                if event.request.id in self._by_id:
                    self.abort(event.request, now)
            elif not self.down and not self.full():
                self.submit(event.request, now, rank=event.rank)
            else:
                self._player.lost(event.request, now + 1.0)

    def _deliver(self, outcome: Outcome, now: float) -> Iterator[Delivery]:
        self._metrics.book(outcome)
        for output in outcome.outputs:
            request = output.request
            answered = self._by_id.get(request.id)
            if answered is None:
                continue
            answered.times.append(now)
            yield Delivery(now, request, output.first, output.count, output.finish_reason)
            if output.finish_reason is not None:
                self._settle(request, now)

    def _settle(self, request: Request, now: float) -> None:
        answered = self._by_id.pop(request.id, None)
        if answered is None:
            return
        answered.ended = now
        if request.background:
            self._player.finished(request, now)
            self._http.count(
                "/v1/completions",
                method="POST",
                status=200,
                seconds=now - answered.arrival,
                size_in=2 * request.prompt_tokens,
                size_out=0,
            )


def _pressure(engine: Engine) -> int:
    """What vLLM's internal balancer compares."""
    return engine.scheduler.waiting * 4 + engine.scheduler.running
