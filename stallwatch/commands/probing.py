"""One stream, asked for and timed; our own lateness and the monitor beside it. I/O."""

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from stallwatch.analysis.monitor import Monitor
from stallwatch.app import monitor_for
from stallwatch.commands.stream import Recording, follow
from stallwatch.commands.terminal import duration
from stallwatch.health import Health
from stallwatch.observations import Observation, ObserverSample, Outcome, PollFailure, Source
from stallwatch.scheduling import Poll, SourceError
from stallwatch.settings import CanarySettings, Settings
from stallwatch.sources.host import OwnCgroup
from stallwatch.sources.http import Target, target_of
from stallwatch.sources.lag import LagSource
from stallwatch.sources.served import Model, ServedModels
from stallwatch.sources.stream import StreamRequest
from stallwatch.sources.wording import SAMPLE_WORDS, words, words_for

_TICK_SECONDS = 0.1
_LAST_HEARTBEAT_SECONDS = 0.3  # one more look at our own lateness
_ENGINE = "0"  # whichever rank answers: the probe is not pinned
_TASK = "count upwards, one number after the other, and never stop: 1, 2, 3,"


@dataclass(slots=True)
class Probe:
    """What is known of a probe so far; complete when `outcome` says how it ended."""

    recording: Recording | None = None
    model: Model | None = None
    failure: SourceError | None = None  # also of what came before the stream
    interrupted: bool = False
    ended_at: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)  # as sent, the key too
    lags: list[ObserverSample] = field(default_factory=list)
    monitor: Monitor | None = None
    health: Health = field(default_factory=Health)

    @property
    def outcome(self) -> str:
        """How it ended, in the words of `canary_requests_total`."""
        if self.interrupted:
            return "interrupted"
        closed = self.recording.closed if self.recording is not None else None
        return str(closed.outcome) if closed is not None else "failed"

    @property
    def finished(self) -> bool:
        """Whether the stream came to its end."""
        return self.outcome == Outcome.COMPLETED

    @property
    def waiting(self) -> bool:
        """Whether it ended while a reader would still have waited; a request that was refused keeps nobody waiting."""
        return self.outcome in {"interrupted", Outcome.TIMEOUT, Outcome.CUT, Outcome.SERVER_ERROR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a person asked for."""

    tokens: int
    prompt_tokens: int | None = None


async def run_probe(
    settings: Settings,
    asked: Asked,
    *,
    clock: Callable[[], float],
    rng: random.Random,
    progress: Callable[[str], None] = lambda _line: None,
) -> Probe:
    """Times one stream. Being cancelled, once, ends it and gives what there is."""
    probe = Probe(monitor=monitor_for(settings))
    target = target_of(settings.canary_access)

    def observe(seen: Observation) -> None:
        if isinstance(seen, ObserverSample):
            probe.lags.append(seen)
        if probe.monitor is not None:
            probe.monitor.observe(seen)

    own = OwnCgroup(settings.host.proc_path, settings.host.sys_path)
    lag = LagSource(clock=clock, throttled_seconds=own.throttled_seconds)
    sleeper = asyncio.create_task(lag.run(observe), name="lag")
    telling = asyncio.create_task(_tell(probe, asked.tokens, clock, progress), name="progress")
    started = clock()
    try:
        async with target.session(keep_alive=False) as session:
            await _stream(probe, settings.canary, target, session, asked, clock=clock, rng=rng, also=observe)
    except SourceError as error:
        probe.failure = error
    except asyncio.CancelledError:
        probe.interrupted = True
    probe.ended_at = clock()
    failure, at = probe.failure, probe.ended_at
    if probe.recording is not None and probe.recording.sent_at is not None:
        started = probe.recording.sent_at
    probe.health.polled(
        Poll(
            Source.CANARY,
            started,
            at,
            PollFailure(at, Source.CANARY, failure.reason, failure.detail) if failure is not None else None,
        )
    )
    telling.cancel()
    # Waits are judged at the heartbeat after them.
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(_LAST_HEARTBEAT_SECONDS)
    sleeper.cancel()
    await asyncio.wait({sleeper, telling})
    for task in (sleeper, telling):
        if not task.cancelled():
            task.result()  # what it raised is a bug
    return probe


async def _stream(
    probe: Probe,
    settings: CanarySettings,
    target: Target,
    session: aiohttp.ClientSession,
    asked: Asked,
    *,
    clock: Callable[[], float],
    rng: random.Random,
    also: Callable[[Observation], None],
) -> None:
    served = ServedModels(target, session, configured=settings.model)
    probe.model = await served.choose()
    name = f"stallwatch-probe-{rng.getrandbits(48):012x}"

    def request(suffix: str, prompt: str, tokens: int) -> StreamRequest:
        return StreamRequest(
            stream=1,
            engine=_ENGINE,
            request_id=name + suffix,
            model=probe.model.name if probe.model is not None else "",
            prompt=f"{name}{suffix}: {prompt}",
            tokens=tokens,
            api=settings.api,
            served=served.described(),
        )

    prompt = _TASK
    if asked.prompt_tokens is not None:
        # How many tokens a word is depends on the model: one small request tells, before the one that is timed.
        sample = Recording(request("-words", words(SAMPLE_WORDS, rng), 1))
        await follow(sample, target, session, clock=clock, timeout_seconds=settings.timeout_seconds)
        if sample.failure is not None:
            raise sample.failure
        counted = sample.closed.prompt_tokens if sample.closed is not None else None
        prompt = words(words_for(asked.prompt_tokens, counted), rng)
    probe.recording = Recording(request("", prompt, asked.tokens))
    probe.headers = dict(session.headers) | target.key.headers() | probe.recording.request.headers()
    await follow(probe.recording, target, session, clock=clock, timeout_seconds=settings.timeout_seconds, also=also)
    probe.failure = probe.recording.failure


async def _tell(probe: Probe, wanted: int, clock: Callable[[], float], progress: Callable[[str], None]) -> None:
    while True:
        progress(progress_line(probe, wanted, clock()))
        await asyncio.sleep(_TICK_SECONDS)


def progress_line(probe: Probe, wanted: int, now: float) -> str:
    """What a person reads while the stream is open."""
    recording = probe.recording
    if recording is None or recording.sent_at is None:
        return "asking for the model"
    if not recording.arrivals:
        return f"waiting for the first token: {duration(now - recording.sent_at)}"
    return (
        f"{recording.tokens} of {wanted} tokens in {duration(now - recording.sent_at)}; "
        f"longest gap {duration(recording.longest_gap)}, open gap {duration(now - recording.arrivals[-1][0])}"
    )
