"""One thread for calls that may block for long, or for ever.

A driver that hangs must cost a source, not the process: the thread is a daemon, so it never delays the exit; a call
that does not come back is left behind and a fresh thread takes over; and only a few are left behind, because each may
hold a lock inside the driver. `asyncio.to_thread` offers none of this: its pool is joined at exit.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from stallwatch.observations import Failure
from stallwatch.scheduling import SourceError

T = TypeVar("T")


class RunBlocking(Protocol):
    """Runs `work` where it may block, and gives its result; tests in virtual time run it inline."""

    async def __call__(self, work: Callable[[], T], /) -> T:
        """The result of `work`, or whatever it raised."""
        ...


class _Job:
    """One call, and the future that waits for it on the loop."""

    def __init__(self, work: Callable[[], Any], since: float) -> None:
        self.work = work
        self.since = since
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        # Nobody may be waiting any more when it ends; an unread exception would be reported as a bug.
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())

    def run(self) -> None:
        try:
            result = self.work()
        except BaseException as error:  # noqa: BLE001 - carried over to the coroutine that asked, which raises it
            self._hand_over(self.future.set_exception, error)
        else:
            self._hand_over(self.future.set_result, result)

    def _hand_over(self, settle: Callable[[Any], None], value: Any) -> None:
        def once() -> None:
            if not self.future.done():
                settle(value)

        try:
            self.loop.call_soon_threadsafe(once)
        except RuntimeError:  # the loop was closed while the call was blocked
            return


class _Worker:
    """A daemon thread that runs jobs one after another until it is told to leave."""

    def __init__(self, name: str, on_leave: Callable[[], None] | None) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._on_leave = on_leave
        self._leaving = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: _Job) -> None:
        self._jobs.put(job)

    def leave(self) -> None:
        self._leaving = True
        self._jobs.put(None)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _serve(self) -> None:
        while not self._leaving and (job := self._jobs.get()) is not None:
            job.run()
        if self._on_leave is not None:
            self._on_leave()


class BlockingThread:
    """Runs one call at a time in a thread of its own, with a deadline.

    A call that misses the deadline keeps the thread: the next caller waits for it first, so a slow start of a driver
    needs no second thread. After `hang_seconds` it is given up and a new thread takes over; `on_leave` is called in the
    old one if its call ever returns, and in a thread that is closed.
    """

    def __init__(
        self,
        name: str,
        *,
        deadline_seconds: float,
        hang_seconds: float = 30.0,
        left_behind_max: int = 3,
        on_leave: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._deadline = deadline_seconds
        self._hang = hang_seconds
        self._left_behind_max = left_behind_max
        self._on_leave = on_leave
        self._clock = clock
        self._worker: _Worker | None = None
        self._pending: _Job | None = None
        self._left_behind: list[_Worker] = []

    @property
    def left_behind(self) -> int:
        """Threads given up whose call has still not come back."""
        self._left_behind = [worker for worker in self._left_behind if worker.alive]
        return len(self._left_behind)

    async def __call__(self, work: Callable[[], T], /) -> T:
        """The result of `work`, or what it raised. Raises `SourceError` when it does not come back in time."""
        give_up_at = self._clock() + self._deadline
        if self._pending is not None:
            await self._until_settled(self._pending, give_up_at)
        if self._worker is None:
            if self.left_behind >= self._left_behind_max:
                raise SourceError(
                    Failure.UNAVAILABLE, f"{self._left_behind_max} calls hang; none is tried before one of them returns"
                )
            self._worker = _Worker(self._name, self._on_leave)
        job = _Job(work, self._clock())
        self._pending = job
        self._worker.submit(job)
        await self._until_settled(job, give_up_at)
        result: T = job.future.result()
        return result

    def close(self) -> None:
        """Lets the thread go once its present call is over; never waits for it."""
        if self._worker is not None:
            self._worker.leave()
            self._worker = None

    async def _until_settled(self, job: _Job, give_up_at: float) -> None:
        # wait() and not wait_for(): neither a timeout nor our own cancellation may cancel the job's future,
        # which is how the next caller learns that the thread is free again.
        await asyncio.wait({job.future}, timeout=max(0.0, give_up_at - self._clock()))
        if job.future.done():
            self._pending = None
            return
        waited = self._clock() - job.since
        if waited >= self._hang and self._worker is not None:
            self._worker.leave()
            self._left_behind.append(self._worker)
            self._worker = None
            self._pending = None
        raise SourceError(Failure.TIMEOUT, f"a call has not come back for {waited:.1f} s")
