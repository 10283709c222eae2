"""Starting and stopping a server of one's own: the whole process group, until its port is free again. I/O.

The server gets a process group, but stays in our session: some of its libraries tie helpers to the session. Should we
be killed outright, it lives on; whatever else ends us ends it.
"""

import asyncio
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from stallwatch.scheduling import SourceError
from stallwatch.sources.http import Target, network_failures, plain

_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=")
_TICK: Final = 0.1
_HEALTH_SECONDS: Final = 2.0
_TERM_SECONDS: Final = 20.0
_KILL_SECONDS: Final = 20.0
_PORT_SECONDS: Final = 60.0
_TELLING: Final = re.compile(r"Error|Exception|error:|CRITICAL|Killed|No space|refused|in use", re.IGNORECASE)
_POINTS_ELSEWHERE: Final = re.compile(r"\s*For further information visit")
"""What pydantic says after the words that tell, and `_TELLING` finds an error in its address."""
_LOG_BYTES: Final = 64 * 1024


class LaunchError(Exception):
    """The server did not come up, or does not go away; one sentence."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is started: words, and variables that go before them."""

    words: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def text(self) -> str:
        """As a person would write it."""
        return " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in self.variables.items()), shlex.join(self.words)]
        )


def command(template: str, values: Mapping[str, str]) -> Command:
    """The template with its {placeholders} filled in, split as a shell would; no shell runs it. Raises `ValueError`."""
    words = []
    for word in shlex.split(template):
        filled = word
        for name, value in values.items():
            filled = filled.replace("{" + name + "}", value)
        words.append(filled)
    variables: dict[str, str] = {}
    while words and _VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if not words:
        raise ValueError("no program to start")
    return Command(tuple(words), variables)


class Launched:
    """One server, from its start until nothing of it is left."""

    def __init__(
        self, launch: Command, target: Target, log: Path, *, clock: Callable[[], float], environ: Mapping[str, str]
    ) -> None:
        self._launch = launch
        self._target = target
        self._log = log
        self._clock = clock
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, *, timeout_seconds: float) -> float:
        """Starts it and waits until it is healthy; returns how long that took. Raises `LaunchError`.

        Whether it came up or not, `stop` must be called.
        """
        if _taken(self._target):
            raise LaunchError(f"something listens at {self._target.base} already")
        began = self._clock()
        try:
            with self._log.open("wb") as log:
                self._process = _spawn(self._launch, log, self._environ)
        except OSError as error:
            raise LaunchError(f"{self._launch.words[0]}: {(error.strerror or str(error)).lower()}") from error
        async with self._target.session(keep_alive=False) as session:
            while True:
                code = self._process.poll()
                if code is not None:
                    raise LaunchError(f"it ended with status {code} after {self._clock() - began:.0f} s{self._why()}")
                with suppress(SourceError, TimeoutError), network_failures():
                    async with asyncio.timeout(_HEALTH_SECONDS):
                        answer = await session.get(
                            self._target.url("/health"),
                            ssl=self._target.tls(),
                            server_hostname=self._target.server_name,
                            allow_redirects=False,
                        )
                        answer.close()
                        if answer.status == 200:
                            return self._clock() - began
                if self._clock() - began > timeout_seconds:
                    raise LaunchError(f"it was not healthy after {timeout_seconds:g} s{self._why()}")
                await asyncio.sleep(_TICK)

    async def stop(self) -> None:
        """Ends all of it and waits until its port is free. Raises `LaunchError` when that does not come about."""
        if self._process is None:
            return
        for number, patience in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            self._signal(number)
            if await self._gone(patience):
                break
        else:
            raise LaunchError(f"processes of group {self._process.pid} do not end")
        self._process = None
        deadline = self._clock() + _PORT_SECONDS
        while _taken(self._target):
            if self._clock() > deadline:
                raise LaunchError(f"{self._target.base} is still taken {_PORT_SECONDS:g} s after the server ended")
            await asyncio.sleep(_TICK)

    def kill(self) -> None:
        """Ends all of it at once, without waiting."""
        self._signal(signal.SIGKILL)

    async def _gone(self, patience: float) -> bool:
        deadline = self._clock() + patience
        while self._clock() < deadline:
            if self._process is None or (self._process.poll() is not None and not self._signal(0)):
                return True
            await asyncio.sleep(_TICK)
        return False

    def _signal(self, number: int) -> bool:
        """Sends a signal to the group; whether anybody is left in it."""
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _why(self) -> str:
        """What its log says, in a few words."""
        with suppress(OSError):
            lines = self._log.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace").splitlines()
            told = [line for line in lines if not _POINTS_ELSEWHERE.match(line)]
            telling = [line for line in told if _TELLING.search(line)] or told[-1:]
            if telling:
                return f": {plain(telling[-1], 300)}"
        return ""


def _spawn(launch: Command, log: IO[bytes], environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 (the person who gave the command runs it)
        launch.words,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**environ, **launch.variables},
        process_group=0,
    )


def _taken(target: Target) -> bool:
    """Whether somebody accepts connections there."""
    host, port = target.base.host or "127.0.0.1", target.base.port or 80
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def problem_of(template: str, names: Sequence[str]) -> str:
    """What is wrong with a template before anything is started; empty when nothing is."""
    for name in names:
        if "{" + name + "}" not in template:
            return f"does not hold {{{name}}}, the value to vary"
    try:
        command(template, dict.fromkeys([*names, "port", "host"], "0"))
    except ValueError as error:
        return str(error).lower()
    return ""
