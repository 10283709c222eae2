"""The load of one run: streams that decode, and at a moment of theirs one long prompt. I/O.

Every request is sent once and never again: a retry would hide the very wait that is to be measured. All prompts carry
a text and a salt of their own, so that only the prompt that is meant to be in the prefix cache is found there.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from stallwatch.experiment.record import Followed, Played
from stallwatch.sources.http import Target
from stallwatch.sources.stream import CanaryStream, StreamObservation, StreamRequest

Heard = Callable[[StreamObservation], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """What requests are sent with."""

    target: Target
    session: aiohttp.ClientSession
    clock: Callable[[], float]
    timeout_seconds: float
    hear: Heard = lambda _seen: None
    """Hears what the streams bring, but not the long prompt: that is somebody else's, as far as a monitor knows."""
    tap: Callable[[str], None] = lambda _data: None

    async def follow(self, followed: Followed, *moved: Callable[[], None], aloud: bool = False) -> None:
        """Sends one request and follows it to its end; `moved` are called after tokens and at the end."""

        def emit(seen: StreamObservation) -> None:
            followed.hear(seen)
            if aloud:
                self.hear(seen)

        def on_tokens() -> None:
            for call in moved:
                call()

        stream = CanaryStream(
            followed.request,
            self.target,
            emit=emit,
            clock=self.clock,
            timeout_seconds=self.timeout_seconds,
            on_tokens=on_tokens,
            tap=lambda _at, data: self.tap(data),
        )
        try:
            ended = await stream.run(self.session)
        finally:
            on_tokens()
        followed.failure = ended.failure
        emit(ended.closed)
        on_tokens()


async def play(
    client: Client, readers: Sequence[StreamRequest], prompt: StreamRequest | None, *, settle_tokens: int
) -> Played:
    """One run. When cancelled, all requests are given up at once."""
    began = client.clock()
    streams = tuple(Followed(request) for request in readers)
    beside = Followed(prompt) if prompt is not None else None
    moved = asyncio.Event()
    tasks = [
        asyncio.create_task(client.follow(stream, moved.set, aloud=True), name=stream.request.request_id)
        for stream in streams
    ]
    marked: float | None = None
    try:
        while not all(stream.tokens >= settle_tokens for stream in streams):
            if any(stream.closed is not None for stream in streams):
                break
            moved.clear()
            await moved.wait()
        else:
            marked = client.clock()
            if beside is not None:
                tasks.append(asyncio.create_task(client.follow(beside), name=beside.request.request_id))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
    return Played(began=began, marked=marked, ended=client.clock(), readers=streams, prompt=beside)
