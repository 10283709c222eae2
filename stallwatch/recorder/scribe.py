"""Writes to disk in a thread of its own, so that a slow disk costs nothing on the loop.

The thread is a daemon: a file system that hangs must not keep the process from ending. Jobs say what became of them in
their own words; an exception that leaves a job is a bug, and is raised again on the loop.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

Job = Callable[[], None]


class Scribe(Protocol):
    """Does jobs one after another."""

    def submit(self, job: Job, /) -> None:
        """Takes a job. Raises what a job before it raised."""

    def close(self, patience_seconds: float, /) -> bool:
        """Waits until all jobs are done, so long at most; says whether they are."""


class ScribeThread:
    """Does jobs in a thread that begins with the first."""

    def __init__(self, name: str = "recorder") -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None

    def submit(self, job: Job, /) -> None:
        """Takes a job."""
        if self._bug is not None:
            raise self._bug
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self, patience_seconds: float, /) -> bool:
        """Lets the thread finish what it has."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(patience_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - carried over to the loop, which raises it
                self._bug = error
                return


class InlineScribe:
    """Does each job at once: for virtual time, which knows no threads."""

    def submit(self, job: Job, /) -> None:
        """Does the job."""
        job()

    def close(self, patience_seconds: float, /) -> bool:
        """Nothing is ever left to do."""
        del patience_seconds
        return True
