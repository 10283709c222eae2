"""The API process of a simulated server: the world at the pace of a clock, and who is connected to it.

Clock and sleep are given, so that the same process runs in virtual time, in real time, or faster. All tokens of a step
leave at its end; what a client has not read yet is merged, as vLLM's output collector does.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from math import inf, isinf

from aiohttp import web

from stallwatch.simulator.asking import Ask
from stallwatch.simulator.faults import FaultKind, active
from stallwatch.simulator.request import FinishReason, Request
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.world import EPOCH, Delivery, ExtraFactory, World

Clock = Callable[[], float]
Sleeper = Callable[[float], Awaitable[object]]

# How many seconds of ground truth a running server keeps.
_MEMORY = 3600.0
# A sleep below the grain of the loop's clock may end before any time has passed, and again and again.
_GRAIN = 1e-6
# An answer that nobody limited ends by itself after about this many tokens.
_TYPICAL_ANSWER = 200


class Stream:
    """What the engine has said to one client and the client has not been sent yet."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.upto = 0
        self.reason: FinishReason | None = None
        self.failed = False
        self._news = asyncio.Event()

    def push(self, delivery: Delivery) -> None:
        """Takes new tokens, or the end."""
        self.upto = max(self.upto, delivery.first + delivery.count)
        if delivery.finish_reason is not None:
            self.reason = delivery.finish_reason
        self._news.set()

    def fail(self) -> None:
        """Ends the stream without an answer."""
        self.failed = True
        self._news.set()

    async def news(self) -> None:
        """Waits until there is more; what came meanwhile is merged, as vLLM's output collector does."""
        await self._news.wait()
        self._news.clear()

    async def news_within(self, wait: Awaitable[None]) -> bool:
        """Waits until there is more, or until `wait` is over; whether there is more."""
        news, limit = asyncio.ensure_future(self._news.wait()), asyncio.ensure_future(wait)
        try:
            await asyncio.wait({news, limit}, return_when=asyncio.FIRST_COMPLETED)
            return self._news.is_set()
        finally:
            news.cancel()
            limit.cancel()


class SimulatedServer:
    """A world, a clock, and the connections of its clients."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleeper = asyncio.sleep,
        speed: float = 1.0,
        epoch: float = EPOCH,
        extras: ExtraFactory | None = None,
    ) -> None:
        self.world = World(scenario, epoch=epoch, extras=extras)
        self.scenario = scenario
        self._clock = clock
        self._sleep = sleep
        self._speed = speed
        self._origin = clock()
        self._streams: dict[str, Stream] = {}
        self._numbers = count(1)
        self._sleeper: asyncio.Task[None] | None = None
        self._sleeps_until = inf
        self._tidied = 0.0
        self._transports: set[asyncio.Transport] = set()
        self.in_flight = 0

    @property
    def now(self) -> float:
        """Seconds since the scenario began."""
        return (self._clock() - self._origin) * self._speed

    def restart_clock(self) -> None:
        """Makes the scenario begin now."""
        self._origin = self._clock()

    def pump(self) -> None:
        """Lets the world catch up with the clock and wakes the streams that have news."""
        now = self.now
        if now - self._tidied > _MEMORY / 2:
            self._tidied = now
            self.world.forget(now - _MEMORY)
        for delivery in self.world.advance(now):
            stream = self._streams.get(delivery.request.id)
            if stream is not None:
                if delivery.finish_reason is FinishReason.ERROR:
                    stream.fail()
                else:
                    stream.push(delivery)

    async def run(self) -> None:
        """Steps the engines until cancelled."""
        while True:
            self.pump()
            self._sleeps_until = self.world.next_event()
            sleeper = asyncio.create_task(self._until(self._sleeps_until))
            self._sleeper = sleeper
            try:
                await asyncio.wait([sleeper])
            finally:
                sleeper.cancel()

    async def _until(self, at: float) -> None:
        if isinf(at):
            await asyncio.get_running_loop().create_future()
        delay = (at - self.now) / self._speed
        if delay > 0:
            await self._sleep(max(delay, _GRAIN))

    def nudge(self) -> None:
        """Cuts the sleep of the stepping loop short when something is due earlier than it thinks."""
        if self._sleeper is not None and self.world.next_event() < self._sleeps_until:
            self._sleeper.cancel()

    async def wait_until(self, at: float) -> None:
        """Sleeps until a simulated time."""
        await self._until(at)

    def connection(self, transport: asyncio.Transport | None) -> None:
        """Remembers a connection, so that it can be torn down when the process dies."""
        if transport is not None and transport not in self._transports:
            self._transports = {t for t in self._transports if not t.is_closing()}
            self._transports.add(transport)

    def tear_down(self) -> None:
        """Cuts every connection without a word."""
        for transport in self._transports:
            transport.abort()
        self._transports.clear()

    def refuses(self) -> bool:
        """Whether a connection would be refused now."""
        faults, now = self.scenario.faults, self.now
        return any(active(faults, kind, now) for kind in (FaultKind.RESTART, FaultKind.REFUSED))

    @asynccontextmanager
    async def open(self, ask: Ask, *, rank: int | None, request_id: str) -> AsyncIterator[Stream]:
        """Submits a request, and aborts it if its reader leaves before it is complete."""
        stop_at = None
        request = Request(request_id, ask.prompt, ask.max_tokens, priority=ask.priority, salt=ask.salt)
        if not ask.ignore_eos:
            stop_at = _TYPICAL_ANSWER // 2 + request.seed % _TYPICAL_ANSWER
        request.stop_at = stop_at
        stream = Stream(request)
        self._streams[request.id] = stream
        self.pump()
        self.world.submit(request, self.now, rank=rank)
        self.nudge()
        try:
            yield stream
        finally:
            del self._streams[request.id]
            if stream.reason is None and not stream.failed:
                self.world.abort(request, self.now)

    def next_number(self) -> int:
        """Numbers the requests that came over HTTP."""
        return next(self._numbers)

    def stream(self, request_id: str) -> Stream | None:
        """The open stream of a request, if there is one."""
        return self._streams.get(request_id)


SERVER: web.AppKey[SimulatedServer] = web.AppKey("server", SimulatedServer)
