"""The experiment itself: a server that may be measured, a warm-up, the runs in their order, their judgement. I/O.

Whatever stops it early (a person, a server that dies) leaves what there is: runs that came to their end are judged.
"""

import asyncio
import gc
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean
from typing import Final

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types

from stallwatch.analysis.monitor import Monitor
from stallwatch.experiment.conclude import Conclusion, conclude
from stallwatch.experiment.confirm import CACHED_SHARE, counted
from stallwatch.experiment.figures import duration, told
from stallwatch.experiment.identity import Fingerprint, Identity, identity, listening_command
from stallwatch.experiment.load import Client, play
from stallwatch.experiment.measure import Run, Taken, Threshold, measured, usual_gap
from stallwatch.experiment.plan import Arm, Planned, Shape, matrix
from stallwatch.experiment.record import Followed
from stallwatch.experiment.watching import Watching, watching
from stallwatch.observations import EngineCounters
from stallwatch.scheduling import SourceError
from stallwatch.settings import Settings
from stallwatch.sources.blocking import RunBlocking
from stallwatch.sources.gpu import Gpu
from stallwatch.sources.http import target_of
from stallwatch.sources.nvml import Nvml
from stallwatch.sources.served import Model, ServedModels
from stallwatch.sources.stream import StreamRequest
from stallwatch.sources.wording import SAMPLE_WORDS, words, words_for

BUSY_LOOK_SECONDS: Final = 2.0
"""For which a server is watched before it counts as idle."""

_FIRST_PAGE_SECONDS = 10.0
_IDLE_SECONDS = 60.0  # for what a client gave up to leave the engine
_BOOKED_SECONDS = 5.0  # for the counters to say what the client has seen
_LATENESS_TOLD = 0.3  # seconds: a sample of our lateness spans 0.25 s; what we compute after a run is not in the run
_BOOKED_AFTER = 0.1  # seconds: the server books a token about when it sends it
_SETTLED_SECONDS = 4.0  # a stall is closed two seconds after its last sign, and judged when the evidence is in
_TELL_SECONDS = 0.5
_UNCONFIRMED_MOST = 2  # cached runs that were not, after which no more are tried
_FAILED_MOST = 2  # runs in a row whose requests failed
_TOLERANCE = 0.02  # of a prompt's length
_TASK = "count upwards, one number after the other, and never stop: 1, 2, 3,"


class Outcome(StrEnum):
    """How the experiment ended."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"  # by a person
    STOPPED = "stopped"  # by the server


class NotPossibleError(Exception):
    """The experiment cannot be made; one sentence why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a person asked for."""

    shape: Shape
    allow_busy: bool = False
    timeout_seconds: float = 300.0
    command: str | None = None
    scheduler: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What it touches the world with; tests bring their own. `monitor` makes one that has seen nothing."""

    clock: Callable[[], float]
    wall_time: Callable[[], float]
    monitor: Callable[[], Monitor]
    environ: dict[str, str]
    stop: asyncio.Event
    nvml: Nvml = pynvml
    run_blocking: RunBlocking | None = None
    progress: Callable[[str], None] = lambda _line: None
    say: Callable[[str], None] = lambda _line: None
    """Hears a line that stays: what became of each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """All of it, judged."""

    asked: Asked
    outcome: Outcome
    why: str  # it stopped; empty when complete
    identity: Identity
    runs: tuple[Run, ...]
    left_out: tuple[Planned, ...]
    threshold: Threshold | None
    conclusions: tuple[Conclusion, ...]
    notes: tuple[str, ...]
    began: float
    ended: float
    unix_offset: float


async def experiment(settings: Settings, asked: Asked, tools: Tools) -> Experiment:
    """Makes the experiment. Raises `NotPossibleError`, and `SourceError` when the server cannot be asked at all."""
    access = settings.canary_access
    target = target_of(access)
    gpu = Gpu(settings.gpu, environ=tools.environ, nvml=tools.nvml, clock=tools.clock, run_blocking=tools.run_blocking)
    # A stream holds a connection as long as it lives.
    connections = asked.shape.streams + 4
    try:
        async with (
            watching(settings, tools.monitor(), clock=tools.clock, gpu=gpu, run_blocking=tools.run_blocking) as seen,
            target.session(connections=connections, keep_alive=False) as session,
        ):
            fingerprint = Fingerprint()
            client = Client(
                target=target,
                session=session,
                clock=tools.clock,
                timeout_seconds=asked.timeout_seconds,
                hear=seen.observe,
                tap=fingerprint.tap,
            )
            models = ServedModels(target, session, configured=settings.canary.model)
            conductor = _Conductor(settings, asked, tools, seen, client, models, fingerprint)
            return await conductor.conduct()
    except* NotPossibleError as refused:
        raise _only(refused) from None
    except* SourceError as failed:
        raise _only(failed) from None


def _only(group: BaseExceptionGroup[Exception]) -> Exception:
    """The first of what a task group wrapped up."""
    first = group.exceptions[0]
    return _only(first) if isinstance(first, BaseExceptionGroup) else first


@dataclass(slots=True)
class _Conductor:
    settings: Settings
    asked: Asked
    tools: Tools
    seen: Watching
    client: Client
    models: ServedModels
    fingerprint: Fingerprint
    model: Model | None = None
    taken: list[Taken] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[Planned] = field(default_factory=list)
    _name: str = ""
    _sent: int = 0
    _idle_since: float = 0.0  # when our last request ended
    _texts: dict[int, str] = field(default_factory=dict)  # by prompt length
    _took: dict[tuple[Arm, int | None], list[float]] = field(default_factory=dict)
    _unconfirmed: dict[int, int] = field(default_factory=dict)
    _why: str = ""

    async def conduct(self) -> Experiment:
        shape, clock = self.asked.shape, self.tools.clock
        began = clock()
        self._name = f"stallwatch-experiment-{random.SystemRandom().getrandbits(40):010x}"
        outcome = Outcome.COMPLETE
        stopping = asyncio.create_task(self.tools.stop.wait(), name="stop")
        work = asyncio.create_task(self._work(matrix(shape)), name="runs")
        try:
            await asyncio.wait({stopping, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # what it raised is a bug, or says why nothing could be measured
                await asyncio.sleep(_SETTLED_SECONDS)
                outcome = Outcome.STOPPED if self._why else Outcome.COMPLETE
            else:
                outcome, self._why = Outcome.INTERRUPTED, "interrupted"
        finally:
            for task in (stopping, work):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        return self._judged(outcome, began)

    def _judged(self, outcome: Outcome, began: float) -> Experiment:
        shape = self.asked.shape
        usual = usual_gap(self.taken)
        stall = self.settings.stall
        threshold = (
            Threshold(usual=usual, stall_floor=stall.floor_seconds, stall_factor=stall.factor)
            if usual is not None
            else None
        )
        runs: list[Run] = []
        if threshold is not None:
            for taken in self.taken:
                # Stalls are settled some time after they end.
                whole = replace(taken, log=self.seen.log.within(taken.played.began, taken.played.ended))
                runs.append(measured(whole, threshold, allow_busy=self.asked.allow_busy))
        now = self.tools.clock()
        url = self.settings.engine.url
        found = identity(
            self.seen,
            model=self.model,
            fingerprint=self.fingerprint.text,
            command=self.asked.command or listening_command(url.host or "", url.port or 80),
            given=self.asked.scheduler,
            seed=shape.seed,
        )
        return Experiment(
            asked=self.asked,
            outcome=outcome,
            why=self._why,
            identity=found,
            runs=tuple(runs),
            left_out=tuple(self.left_out),
            threshold=threshold,
            conclusions=tuple(
                conclude(runs, tokens, usual_gap=usual, seed=shape.seed) for tokens in shape.prompt_tokens
            ),
            notes=tuple(self.notes),
            began=began,
            ended=now,
            unix_offset=self.tools.wall_time() - now,
        )

    # before the runs

    async def _require_possible(self) -> None:
        """Raises when the server cannot be measured, or should not be."""
        self.tools.progress("looking at the server")
        self.model = await self.models.choose()
        longest = max(self.asked.shape.prompt_tokens)
        if self.model.max_length is not None and longest * (1 + _TOLERANCE) + 1 > self.model.max_length:
            raise NotPossibleError(
                f"a prompt of {longest:,} tokens does not fit into the model's {self.model.max_length:,}: "
                "give a shorter --prompt-tokens"
            )
        began = self.tools.clock()
        first = await self.seen.counters(began, idle=False, patience=_FIRST_PAGE_SECONDS)
        if first is None:
            failures = self.seen.log.failures
            why = f" ({failures[-1].detail or failures[-1].reason})" if failures else ""
            if not self.asked.allow_busy:
                raise NotPossibleError(
                    f"the metrics page cannot be read{why}, so nobody knows whether the server is busy: give "
                    "engine.url, or --allow-busy"
                )
            self.notes.append(f"The metrics page could not be read{why}: the engine's side of it is not known.")
            return
        await self._look_for_others(first)
        self._look_at_the_cache()

    async def _look_for_others(self, first: EngineCounters) -> None:
        deadline = self.tools.clock() + BUSY_LOOK_SECONDS
        most = 0.0
        while True:
            most = max([most, *(_requests(scrape.engines.values()) for scrape in self.seen.log.scrapes)])
            if self.tools.clock() >= deadline:
                break
            await asyncio.sleep(_TELL_SECONDS)
        known = self.seen.known or first
        moved = (known.generation_tokens or 0.0) - (first.generation_tokens or 0.0)
        if most == 0 and moved <= 0:
            return
        busy = f"{most:.0f} requests run or wait" if most else f"{moved:,.0f} tokens came in {BUSY_LOOK_SECONDS:g} s"
        if not self.asked.allow_busy:
            raise NotPossibleError(
                f"the server is busy ({busy}): the experiment would slow down its readers, and they would disturb it; "
                "take a server without traffic, or give --allow-busy"
            )
        self.notes.append(f"The server was busy ({busy}): other requests are part of every figure.")

    def _look_at_the_cache(self) -> None:
        facts = self.seen.facts
        cache = facts.caches.get(self.seen.engine) if facts is not None else None
        if cache is None:
            return
        if cache.prefix_caching is False:
            self.notes.append("The server says that prefix caching is off: no run can be confirmed as cached.")
        for tokens in self.asked.shape.prompt_tokens:
            block = cache.block_size
            if block is not None and (tokens - 1) // block * block < CACHED_SHARE * tokens:
                self.notes.append(
                    f"Of a prompt of {tokens:,} tokens only whole blocks of {block} can be cached, which is less than "
                    f"{CACHED_SHARE:.0%}: give a longer one."
                )

    # the runs

    async def _work(self, planned: Sequence[Planned]) -> None:
        await self._require_possible()
        await self._warm_up()
        failed = 0
        for number, run in enumerate(planned):
            if run.arm is Arm.CACHED and self._unconfirmed.get(run.prompt_tokens or 0, 0) >= _UNCONFIRMED_MOST:
                self.left_out.append(run)
                continue
            taken = await self._take(run, planned[number:])
            if taken is None:
                return
            self.taken.append(taken)
            ran = self._tell(taken, len(planned))
            failed = failed + 1 if any("failed" in why or "long prompt" in why for why in ran.void) else 0
            if failed >= _FAILED_MOST:
                self._why = f"the requests of {_FAILED_MOST} runs in a row failed: {ran.void[0]}"
                return

    async def _warm_up(self) -> None:
        """Tells how many tokens a word is, and lets the server compile and allocate what it needs."""
        shape = self.asked.shape
        rng = random.Random(shape.seed)  # noqa: S311 (a text that can be repeated, no secret)
        self.tools.progress("warm-up: how long is a token")
        sample = await self._ask(words(SAMPLE_WORDS, rng))
        for tokens in shape.prompt_tokens:
            self.tools.progress(f"warm-up: a prompt of {tokens:,} tokens")
            count = words_for(tokens, sample)
            text = words(count, rng)
            length = await self._ask(text)
            if length is not None and abs(length - tokens) > _TOLERANCE * tokens:
                count = max(1, round(count * tokens / length))
                text = words(count, rng)
            self._texts[tokens] = text
        self.tools.progress("warm-up: streams")
        began = self.tools.clock()
        warm = await play(self.client, self._readers("warm"), None, settle_tokens=shape.settle_tokens)
        self._idle_since = self.tools.clock()
        self._took[Arm.ALONE, None] = [self._idle_since - began + shape.pause_seconds]
        broken = [reader.problem for reader in warm.readers if reader.problem]
        if broken:
            raise NotPossibleError(f"{len(broken)} of {len(warm.readers)} streams of the warm-up failed: {broken[0]}")
        if warm.marked is None:
            raise NotPossibleError("the streams end before they have settled: ask for more --output-tokens")

    async def _ask(self, text: str) -> int | None:
        """Sends a prompt for one token; how many tokens it was. Raises `NotPossibleError`."""
        asked = Followed(self._request("warm", text, 1))
        await self.client.follow(asked)
        if asked.problem:
            raise NotPossibleError(f"a request of the warm-up {asked.problem}")
        return asked.closed.prompt_tokens if asked.closed is not None else None

    async def _take(self, run: Planned, ahead: Sequence[Planned]) -> Taken | None:
        """One run with all that was seen of it; None when the server does not come to rest before it."""
        shape, clock = self.asked.shape, self.tools.clock
        started = clock()
        problems: list[str] = []
        self.tools.progress(self._line(run, ahead, "waiting until the server is idle"))
        gc.collect()  # now, and not in a run
        await asyncio.sleep(shape.pause_seconds)
        before = await self._at_rest()
        prompt = None
        if run.prompt_tokens is not None:
            prompt = self._long(run)
        if run.arm is Arm.CACHED and prompt is not None and not self._why:
            self.tools.progress(self._line(run, ahead, "putting the prompt into the prefix cache"))
            prime = Followed(replace(prompt, request_id=f"{prompt.request_id}-prime"))
            await self.client.follow(prime)
            self._idle_since = clock()
            if prime.problem:
                problems.append(f"the long prompt, sent to be cached, {prime.problem}")
            await asyncio.sleep(shape.pause_seconds)
            before = await self._at_rest()
        if self._why:
            return None
        began = clock()
        readers = self._readers(f"run-{run.number}")
        playing = asyncio.create_task(play(self.client, readers, prompt, settle_tokens=shape.settle_tokens))
        try:
            while not playing.done():
                self.tools.progress(self._line(run, ahead, f"{clock() - began:.0f} s"))
                await asyncio.wait({playing}, timeout=_TELL_SECONDS)
            played = playing.result()
        finally:
            playing.cancel()
            with suppress(asyncio.CancelledError):
                await playing
        self._idle_since = played.ended
        after = None
        if self.seen.engines:
            since = played.ended + _BOOKED_AFTER
            after = await self.seen.counters(since, idle=False, patience=_BOOKED_SECONDS)
        await asyncio.sleep(max(0.0, played.ended + _LATENESS_TOLD - clock()))
        self._took.setdefault((run.arm, run.prompt_tokens), []).append(clock() - started)
        return Taken(
            planned=run,
            played=played,
            log=self.seen.log.within(played.began, played.ended),
            counted=counted(before, after),
            ended=clock(),
            problems=tuple(problems),
            engine=self.seen.engine,
        )

    async def _at_rest(self) -> EngineCounters | None:
        """The counters once the server has nothing to do; sets why it is over when it never has.

        None where they cannot be read. Beside other people's requests there is no rest to wait for.
        """
        if not self.seen.engines:
            return None
        since, idle = self._idle_since + _BOOKED_AFTER, not self.asked.allow_busy
        found = await self.seen.counters(since, idle=idle, patience=_IDLE_SECONDS)
        if found is None and idle:
            known = self.seen.known
            running = 0.0 if known is None else (known.running or 0.0) + (known.waiting or 0.0)
            self._why = (
                f"after {_IDLE_SECONDS:g} s {running:.0f} requests still run or wait: others came, or the server hangs"
                if running
                else f"the metrics page gave no answer for {_IDLE_SECONDS:g} s"
            )
        return found

    def _tell(self, taken: Taken, of: int) -> Run:
        """Says what became of a run; provisional, since what is usual is known at the end only."""
        threshold = Threshold(
            usual=usual_gap(self.taken) or 0.0,
            stall_floor=self.settings.stall.floor_seconds,
            stall_factor=self.settings.stall.factor,
        )
        run = measured(taken, threshold, allow_busy=self.asked.allow_busy)
        if run.planned.arm is Arm.CACHED and any("meant to be cached" in why for why in run.void):
            tokens = run.planned.prompt_tokens or 0
            self._unconfirmed[tokens] = self._unconfirmed.get(tokens, 0) + 1
            if self._unconfirmed[tokens] == _UNCONFIRMED_MOST:
                self.notes.append(
                    f"The prefix cache did not hold the prompt of {tokens:,} tokens {_UNCONFIRMED_MOST} times: the "
                    "other cached runs were left out."
                )
        self.tools.say(f"{run.planned.number:>3} of {of}  {run.planned.name:<34}  {_summary(run)}")
        return run

    def _line(self, run: Planned, ahead: Sequence[Planned], doing: str) -> str:
        return (
            f"run {run.number}, block {run.block} of {self.asked.shape.repeats}: {run.name}, {doing}{self._left(ahead)}"
        )

    def _left(self, ahead: Sequence[Planned]) -> str:
        """How long it will still take, once each kind of run was made."""
        total = 0.0
        for run in ahead:
            took = self._took.get((run.arm, run.prompt_tokens))
            if took is None:
                return ""
            total += fmean(took)
        return f"; about {duration(total)} left"

    # the requests

    def _readers(self, key: str) -> list[StreamRequest]:
        return [
            self._request(f"{key}-stream-{number}", _TASK, self.asked.shape.output_tokens)
            for number in range(1, self.asked.shape.streams + 1)
        ]

    def _long(self, run: Planned) -> StreamRequest:
        """The long prompt: the same text for every run; what goes before it and the salt decide what a cache knows."""
        key = f"{run.number:04d}" if run.arm is Arm.UNCACHED else "0000"
        tokens = run.prompt_tokens or 0
        salt = f"{self._name}-{key}-{tokens}"
        asked = self._request(f"run-{run.number}-prompt", "", 1)
        return replace(asked, prompt=f"{salt}: {self._texts[tokens]}", salt=salt)

    def _request(self, key: str, text: str, tokens: int) -> StreamRequest:
        self._sent += 1
        name = f"{self._name}-{key}"
        engine = self.seen.engine
        return StreamRequest(
            stream=self._sent,
            engine=engine,
            request_id=f"{name}-{self._sent}",
            model=self.model.name if self.model is not None else "",
            prompt=f"{name}-{self._sent}: {text}",
            tokens=tokens,
            api=self.settings.canary.api,
            rank=engine if self.seen.engines > 1 and engine.isascii() and engine.isdecimal() else None,
            served=self.models.described(),
        )


def _requests(engines: Iterable[EngineCounters]) -> float:
    return sum((counters.running or 0.0) + (counters.waiting or 0.0) for counters in engines)


def _summary(run: Run) -> str:
    if run.void:
        return f"void: {run.void[0]}"
    seen = run.measures
    parts = [f"longest gap {told(seen['longest_gap_seconds'])}", f"{told(seen['lost_seconds'])} lost by a stream"]
    if "prompt_ttft_seconds" in seen:
        parts.append(f"prompt's first token {told(seen['prompt_ttft_seconds'])}")
    if "cached_tokens" in seen:
        parts.append(f"{seen['cached_tokens']:,.0f} of {seen['prompt_tokens']:,.0f} tokens cached")
    return ", ".join(parts)
