"""A real vLLM server on loopback for the tests: started, stopped, frozen and killed at will, and never left behind.

The server runs in a process group of its own under `guard.py`, which kills that group when this process ends, however
it ends. Seconds throughout. `README.md` says which flags and variables it gets and what was measured to choose them.
"""

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGCONT, SIGTERM, Signals
from typing import Self
from urllib.parse import quote

from tests.vllm.environment import Environment
from tests.vllm.guard import members

GUARD = Path(__file__).with_name("guard.py")
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: 1,048,576 tokens for the tiny model
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
START_SECONDS = 300.0
STOP_SECONDS = 20.0

_EXPLAINS = re.compile(r"Error|Exception|error:|Traceback|CRITICAL|No space|Killed")


class ServerFailedError(Exception):
    """The server ended, or did not become healthy in time; the message holds the log lines that explain it."""


class VllmServer:
    """One server; a context manager that starts it and, at the end of the block, leaves no process of it behind.

    `flags` are appended to the recipe's own, so that they win. `folder` takes the log `vllm.log`, one for all starts.
    """

    def __init__(
        self,
        environment: Environment,
        folder: Path,
        *,
        model: str = "tiny",
        flags: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        port: int | None = None,
        max_model_len: int = 16_384,
        max_num_batched_tokens: int = 512,
        eager: bool = True,
        served_model_name: str = "tiny",
    ) -> None:
        self.port = port or free_port()
        self.log = folder / "vllm.log"
        self.served_model_name = served_model_name
        self._models = (
            environment.home / "models"
        )  # the server's working folder: its answers then name no machine's path
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._variables = {**_inherited_variables(), **VARIABLES, **(variables or {})}
        self.command = [
            *(str(environment.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", model, "--served-model-name", served_model_name),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-model-len", str(max_model_len), "--max-num-batched-tokens", str(max_num_batched_tokens)),
            *(["--enforce-eager"] if eager else []),
            *flags,
        ]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Base URL, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The API server's process, which is also the process group of all of it."""
        if self._guard is None:
            raise ServerFailedError("the server is not running")
        return self._pid

    @property
    def engine_core_pid(self) -> int:
        """The EngineCore process: stopped alone, the API server still answers while no step ends."""
        return self._descendant("VLLM::EngineCor")

    @property
    def worker_pid(self) -> int:
        """The process that computes the steps, a child of EngineCore."""
        return self._descendant("VLLM::Worker")

    def is_running(self) -> bool:
        """Whether the API server's process exists (stopped counts as running)."""
        return self._guard is not None and self._guard.poll() is None

    def start(self, *, timeout: float = START_SECONDS) -> float:
        """Starts the server and waits until it is healthy; returns how long that took."""
        if self.is_running():
            raise ServerFailedError("the server is running already")
        begun = time.monotonic()
        log_from = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), *self.command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self._variables, cwd=self._models,
            )  # fmt: skip
        assert self._guard.stdout is not None
        self._pid = int(self._guard.stdout.readline())
        while not self.healthy():
            waited = time.monotonic() - begun
            if not self.is_running() or waited > timeout:
                what = f"was not healthy after {waited:.0f} s" if self.is_running() else f"ended after {waited:.0f} s"
                self.kill()
                raise ServerFailedError(f"vLLM {what}; {self.log} says:\n{self._explanation(log_from)}")
            time.sleep(0.2)
        return time.monotonic() - begun

    def healthy(self) -> bool:
        """Whether `/health` answers 200 within two seconds."""
        try:
            return self.get("/health", timeout=2)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def get(self, path: str, *, timeout: float = 10.0) -> tuple[int, bytes]:
        """Status and body of a GET; OSError when the server cannot be reached."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def metrics(self, *names: str) -> str:
        """The `/metrics` page, filtered to `names` when there are any."""
        query = "&".join(f"name[]={quote(name)}" for name in names)
        return self.get(f"/metrics/?{query}" if names else "/metrics")[1].decode()

    def signal(self, number: Signals) -> None:
        """Sends a signal to every process of the server."""
        os.killpg(self.pid, number)

    def signal_engine(self, number: Signals) -> None:
        """Sends a signal to EngineCore alone."""
        os.kill(self.engine_core_pid, number)

    def stop(self, *, timeout: float = STOP_SECONDS) -> None:
        """Ends the server as a supervisor would: SIGTERM, and SIGKILL after `timeout`."""
        if self.is_running():
            self.signal(SIGCONT)
            os.kill(self.pid, SIGTERM)
            assert self._guard is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """Ends every process of the server at once, with no chance to say goodbye. Does nothing when there is none."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        self._guard.wait(STOP_SECONDS)
        self._guard.stdout.close()
        _wait_until_gone(self._pid)
        self._guard = None

    def restart(self) -> float:
        """Stops and starts on the same port; returns how long the start took."""
        self.stop()
        return self.start()

    def _descendant(self, name: str) -> int:
        for pid in members(self.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith(name):
                    return pid
        raise ServerFailedError(f"the server has no process called {name}")

    def _explanation(self, log_from: int) -> str:
        lines = self.log.read_bytes()[log_from:].decode(errors="replace").splitlines()
        telling = [line for line in lines if _EXPLAINS.search(line)]
        return "\n".join([*telling[-8:], "...", *lines[-5:]])


def free_port() -> int:
    """A TCP port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sample(page: str, name: str, **labels: str) -> float | None:
    """The sum over the samples of `name` that have all of `labels`; None when there are none.

    A reader of a few lines for the tests' own use: label values with escapes or braces are not for it.
    """
    found = []
    for line in page.splitlines():
        match = re.fullmatch(re.escape(name) + r"(?:\{(.*)\})? (\S+)", line)
        if match and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', match[1] or "")).items():
            found.append(float(match[2]))
    return sum(found) if found else None


def _inherited_variables() -> dict[str, str]:
    """This process's variables without those that belong to its own interpreter, or would change vLLM's doings."""
    private = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_", "STALLWATCH_", "OMP_", "PROMETHEUS_")
    return {name: value for name, value in os.environ.items() if not name.startswith(private)}


def _wait_until_gone(group: int) -> None:
    """Waits for the group's processes to be gone; ServerFailedError when some are left after a while."""
    deadline = time.monotonic() + STOP_SECONDS
    while left := members(group):
        if time.monotonic() > deadline:
            raise ServerFailedError(f"processes {left} of the killed server are still there")
        time.sleep(0.05)
