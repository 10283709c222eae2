"""Real processes for end-to-end tests: started on free ports, stopped whatever happens."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get(url: str, timeout: float = 5.0) -> str:
    """The body behind a URL. Raises `OSError` when it cannot be had."""
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        body: bytes = answer.read()
        return body.decode()


def until(condition: object, seconds: float, what: str) -> None:
    """Waits until the callable gives something true. Raises `AssertionError` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():  # type: ignore[operator]
                return
        except (OSError, urllib.error.URLError):
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


@dataclass(slots=True)
class Process:
    """One running command with its output in a file."""

    popen: "subprocess.Popen[bytes]"
    log: Path

    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM, seconds: float = 10.0) -> tuple[int, float]:
        """Sends a signal; returns the exit status and how long it took. Raises when it does not end."""
        began = time.monotonic()
        self.popen.send_signal(number)
        status = self.popen.wait(timeout=seconds)
        return status, time.monotonic() - began


@contextmanager
def process(arguments: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> Iterator[Process]:
    """Runs a command while the block runs; kills what is left of it at the end."""
    with log.open("wb") as sink:
        popen = subprocess.Popen(
            list(arguments),
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environ or {})},
            process_group=0,
        )
    try:
        yield Process(popen, log)
    finally:
        if popen.poll() is None:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait(timeout=10)


def stallwatch(*arguments: str) -> list[str]:
    """The command line of our own program with the interpreter of the tests."""
    return [sys.executable, "-m", "stallwatch", *arguments]
