"""The sidecar as a process beside the real server, and what it exports."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.processes import Process, get, process, stallwatch, until
from tests.vllm.server import VllmServer, free_port, sample


@dataclass(slots=True)
class Sidecar:
    """A running `stallwatch run`."""

    url: str
    process: Process
    samples: list[tuple[float, str]] = field(default_factory=list)  # (monotonic time, page)

    def page(self) -> str:
        """`/metrics` as it is now; it is kept with its time."""
        text = get(f"{self.url}/metrics")
        self.samples.append((time.monotonic(), text))
        return text

    def value(self, name: str, **labels: str) -> float | None:
        """One exported value as it is now; None when it is absent."""
        return sample(self.page(), f"stallwatch_{name}", **labels)

    def series(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """One value over the pages kept so far."""
        found = ((at, sample(page, f"stallwatch_{name}", **labels)) for at, page in self.samples)
        return [(at, value) for at, value in found if value is not None]

    def watch_while(self, busy: Callable[[], bool], *, every: float = 0.1, seconds: float = 480.0) -> None:
        """Keeps a page every so often until `busy` is false. Raises `AssertionError` when it never is."""
        deadline = time.monotonic() + seconds
        while busy():
            if time.monotonic() > deadline:
                raise AssertionError(f"still busy after {seconds:g} s")
            self.page()
            time.sleep(every)

    def log(self) -> list[dict[str, Any]]:
        """The log so far, an event a line."""
        return [json.loads(line) for line in self.process.output().splitlines() if line.startswith("{")]

    def events(self, event: str, **keys: str) -> list[dict[str, Any]]:
        """The log lines of one event with these keys."""
        return [line for line in self.log() if line["event"] == event and keys.items() <= line.items()]


@contextmanager
def beside(server: VllmServer, folder: Path, *settings: str, serving: bool = True) -> Iterator[Sidecar]:
    """Runs the sidecar beside a server while the block runs; waits until it sees the server serve."""
    port = free_port()
    arguments = stallwatch("run", "--engine.url", server.url, "--web.port", str(port), *settings)
    with process(arguments, folder / "stallwatch.log", {"STALLWATCH_LOG__FORMAT": "json"}) as running:
        sidecar = Sidecar(f"http://127.0.0.1:{port}", running)
        if serving:
            until(
                lambda: sidecar.value("target_phase", phase="serving") == 1.0, 120, "the sidecar sees the server serve"
            )
        yield sidecar
        assert running.popen.poll() is None, running.output()
        code, seconds = running.stop()
        assert code == 0, running.output()
        assert "Traceback" not in running.output()
        print(f"the sidecar ended {seconds:.2f} s after SIGTERM")
