"""When the synthetic reader reads: pulses at an interval, or one stream that is always open.

A new request measures admission and the path; only a stream that is already decoding sees every step that all readers
share. So `pulse` is cheap and mostly sees the way in, and `persistent` holds one batch slot and sees everything. Both
stay inside hard bounds: tokens a minute, streams, deadlines. A busy server is spared, and what was not sent is counted.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import aiohttp

from stallwatch.observations import (
    CanaryObservation,
    CanarySkipped,
    Failure,
    Outcome,
    PollFailure,
    SkipReason,
    Source,
    StreamClosed,
)
from stallwatch.scheduling import Poll, SourceError
from stallwatch.settings import CanarySettings
from stallwatch.sources.http import Target
from stallwatch.sources.served import Model, ServedModels
from stallwatch.sources.stream import PATIENCE, CanaryStream, StreamRequest

_JITTER = 0.1  # of the interval; keeps the canaries of many servers, and of other clocks, out of step
_TICK_SECONDS = 0.25  # how often an open persistent stream is looked after
_ROTATE_FROM = 0.75  # of a stream's tokens: from here on it is handed over at the first quiet moment
_LONGEST_BACKOFF_SECONDS = 300.0
_PROMPT_TOKENS = 256  # room left for the prompt in a model of short context; a chat template may be long
_MINUTE = 60.0
# After these the server may have been replaced or serve something else; a timeout or a full queue says nothing of that.
_SAME_SERVER = frozenset({Failure.TIMEOUT, Failure.BUSY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What the canary must know of the server before it sends; None where that is not known."""

    serving: bool = True
    asleep: bool = False
    draining: bool = False
    slow: bool = False  # readers are waiting now: the pulse that looks at it must not wait
    waiting: int | None = None
    others_running: int | None = None  # requests other than ours
    engines: tuple[str, ...] = ()  # data-parallel ranks


class TokenBudget:
    """Tokens in any minute: booked as asked for when a request is sent, corrected when it has ended."""

    def __init__(self, tokens_per_minute: int | None) -> None:
        self._limit = tokens_per_minute
        self._booked: deque[list[float]] = deque()

    def allows(self, tokens: int, *, now: float) -> bool:
        """Whether a request of `tokens` may be sent now."""
        while self._booked and self._booked[0][0] <= now - _MINUTE:
            self._booked.popleft()
        return self._limit is None or tokens + sum(entry[1] for entry in self._booked) <= self._limit

    def book(self, tokens: int, *, now: float) -> Callable[[int], None]:
        """Books a request; the returned function corrects it to what it really took."""
        entry = [now, float(tokens)]
        self._booked.append(entry)

        def correct(taken: int) -> None:
            entry[1] = float(taken)

        return correct


class _Backoff:
    """How long to wait before the next attempt: longer after each failure, nothing after a token."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._failures = 0

    @property
    def seconds(self) -> float:
        if self._failures == 0:
            return 0.0
        grown = self._interval * 2.0 ** min(self._failures - 1, 16)
        return min(grown, max(_LONGEST_BACKOFF_SECONDS, self._interval))

    def failed(self) -> None:
        self._failures += 1

    def succeeded(self) -> None:
        self._failures = 0


@dataclass(slots=True)
class _Open:
    """One stream of the persistent mode under way."""

    task: "asyncio.Task[bool] | None" = None
    stream: CanaryStream | None = None  # None while the model's name is still being read

    def ripe(self) -> bool:
        return self.stream is not None and self.stream.tokens >= _ROTATE_FROM * self.stream.wanted

    def end(self, outcome: Outcome) -> None:
        """Closes the connection at once; the observation says `outcome`."""
        if self.stream is not None:
            self.stream.cancelled_as = outcome
        if self.task is not None:
            self.task.cancel()


class Canary:
    """Sends canary requests inside their bounds; run either `pulse` at an interval or `persistent` for ever.

    `session` must not keep connections alive. `rng` seeds the jitter and the names that make prompts unique. `polled`
    hears of attempts in persistent mode; in pulse mode `every` tells it.
    """

    def __init__(
        self,
        settings: CanarySettings,
        target: Target,
        *,
        session: aiohttp.ClientSession,
        gate: Callable[[], Gate],
        emit: Callable[[CanaryObservation | PollFailure], None],
        clock: Callable[[], float],
        rng: random.Random,
        polled: Callable[[Poll], None] = lambda _poll: None,
    ) -> None:
        self._settings = settings
        self._target = target
        self._session = session
        self._gate = gate
        self._emit = emit
        self._clock = clock
        self._rng = rng
        self._polled = polled
        self._models = ServedModels(target, session, configured=settings.model)
        self._budget = TokenBudget(settings.token_budget)
        self._run = f"{rng.getrandbits(32):08x}"  # tells our requests from those of a sidecar before or beside us
        self._sent = 0

    @property
    def pulse_timeout_seconds(self) -> float:
        """The longest that one pulse may take: a bound for the loop, beyond all bounds of the request."""
        return (PATIENCE + 1) * self._settings.timeout_seconds + _JITTER * self._settings.interval_seconds + 60.0

    async def pulse(self) -> StreamClosed | CanarySkipped:
        """One request, or the reason why none was sent; the last observation is returned, not emitted.

        Raises `SourceError` for a request that failed, after its `StreamClosed` was emitted.
        """
        if not self._gate().slow:
            await asyncio.sleep(self._rng.uniform(0.0, _JITTER * self._settings.interval_seconds))
        reason = self._held()
        if reason is not None:
            return CanarySkipped(self._clock(), reason)
        return await self._attempt()

    async def persistent(self) -> NoReturn:
        """Keeps one stream open whenever that is allowed."""
        backoff = _Backoff(self._settings.interval_seconds)
        while True:
            await self._wait_until_allowed()
            await self._stay_open(backoff)
            await asyncio.sleep(backoff.seconds)

    async def _wait_until_allowed(self) -> None:
        told: float | None = None
        while (reason := self._held()) is not None:
            now = self._clock()
            if told is None or now - told >= self._settings.interval_seconds:
                told = now
                self._emit(CanarySkipped(now, reason))
            await asyncio.sleep(_TICK_SECONDS)

    async def _stay_open(self, backoff: _Backoff) -> None:
        """Opens a stream, hands it over to the next in time, and returns when none is open."""
        streams = [self._open(backoff)]
        retry_at = self._clock()
        try:
            while streams:
                tasks = [stream.task for stream in streams if stream.task is not None]
                await asyncio.wait(tasks, timeout=_TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for stream in [stream for stream in streams if stream.task is not None and stream.task.done()]:
                    streams.remove(stream)
                    if not _went_well(stream.task):
                        retry_at = self._clock() + backoff.seconds
                if self._must_end():
                    for stream in streams:
                        stream.end(Outcome.CANCELLED)
                elif len(streams) == 1 and streams[0].ripe() and self._clock() >= retry_at and self._quiet():
                    streams.append(self._open(backoff, replaces=streams[0]))
        finally:
            for stream in streams:
                stream.end(Outcome.CANCELLED)
            await asyncio.gather(*(stream.task for stream in streams if stream.task), return_exceptions=True)

    def _open(self, backoff: _Backoff, *, replaces: _Open | None = None) -> _Open:
        opened = _Open()
        started = self._clock()
        first = True

        def started_as(stream: CanaryStream) -> None:
            opened.stream = stream

        def on_tokens() -> None:
            nonlocal first
            if not first:
                return
            first = False
            self._polled(Poll(Source.CANARY, started, self._clock(), None))
            if replaces is not None:
                replaces.end(Outcome.ROTATED)

        async def follow() -> bool:
            try:
                self._emit(await self._attempt(started_as, on_tokens))
            except SourceError as error:
                failure = PollFailure(self._clock(), Source.CANARY, error.reason, error.detail)
                self._polled(Poll(Source.CANARY, started, failure.at, failure))
                self._emit(failure)
                backoff.failed()
                return False
            # A stream that ends long before its time would be opened again and again.
            if opened.stream is not None and not opened.ripe():
                backoff.failed()
                return False
            backoff.succeeded()
            return True

        opened.task = asyncio.create_task(follow(), name="canary stream")
        return opened

    async def _attempt(
        self,
        started: Callable[[CanaryStream], None] = lambda _stream: None,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> StreamClosed:
        model = await self._models.choose()
        tokens = _fitting(self._settings.stream_tokens, model)
        stream = CanaryStream(
            self._request(model, tokens),
            self._target,
            emit=self._emit,
            clock=self._clock,
            timeout_seconds=self._settings.timeout_seconds,
            on_tokens=on_tokens,
        )
        started(stream)
        correct = self._budget.book(tokens, now=self._clock())
        try:
            ended = await stream.run(self._session)
        finally:
            correct(stream.tokens)
        if ended.failure is None:
            return ended.closed
        if ended.failure.reason not in _SAME_SERVER:
            self._models.forget()
        self._emit(ended.closed)
        raise ended.failure

    def _request(self, model: Model, tokens: int) -> StreamRequest:
        engines = self._gate().engines or ("0",)
        engine = engines[self._sent % len(engines)]
        self._sent += 1
        name = f"stallwatch-canary-{self._run}-{self._sent}"
        return StreamRequest(
            stream=self._sent,
            engine=engine,
            request_id=name,
            model=model.name,
            prompt=f"{self._run}-{self._sent}: count upwards, one number after the other, and never stop: 1, 2, 3,",
            tokens=tokens,
            api=self._settings.api,
            rank=engine if len(engines) > 1 and engine.isascii() and engine.isdecimal() else None,
            served=self._models.described(),
        )

    def _held(self) -> SkipReason | None:
        """Why nothing may be sent now."""
        gate = self._gate()
        settings = self._settings
        if not gate.serving:
            self._models.forget()
        if self._paused():
            return SkipReason.PAUSED
        if gate.asleep:
            return SkipReason.ASLEEP
        if gate.draining or not gate.serving:
            return SkipReason.NOT_SERVING
        if settings.only_when_busy and not gate.others_running and not gate.waiting:
            return SkipReason.IDLE
        if gate.waiting is not None and gate.waiting >= settings.skip_when_waiting:
            return SkipReason.BUSY
        return None if self._budget.allows(settings.stream_tokens, now=self._clock()) else SkipReason.BUDGET

    def _must_end(self) -> bool:
        """Whether an open stream must go; one that still brings tokens outlives a metrics page that is gone."""
        gate = self._gate()
        return gate.asleep or gate.draining or self._paused()

    def _quiet(self) -> bool:
        """Whether a second stream for a moment costs nobody a place; not known counts as no."""
        return self._gate().waiting == 0 and self._held() is None

    def _paused(self) -> bool:
        return self._settings.pause_file is not None and self._settings.pause_file.exists()


def _went_well(task: "asyncio.Task[bool] | None") -> bool:
    """What a finished stream came to. Raises what is a bug."""
    return task is not None and not task.cancelled() and task.result()


def _fitting(tokens: int, model: Model) -> int:
    """As many of `tokens` as the model's context has room for beside the prompt."""
    if model.max_length is None or tokens + _PROMPT_TOKENS <= model.max_length:
        return tokens
    return max(1, min(tokens, model.max_length // 2))
