"""What open pages cost the watching: the sidecar with fifty of them and without, in real time."""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stallwatch.app import Sidecar
from stallwatch.observations import Observation, ObserverSample, PollFailure, StreamOpened, StreamTokens
from stallwatch.settings import Settings
from stallwatch.web import server
from tests.e2e.processes import free_port, get, process, stallwatch, until

PAGES = 50
PHASE_SECONDS = 9.0

CLIENTS = """
import asyncio, sys, aiohttp
async def page(session, url):
    async with session.get(url + "/api/v1/events") as events:
        await (await session.get(url + "/api/v1/timeline?seconds=900")).read()
        await (await session.get(url + "/api/v1/stalls")).read()
        async for _ in events.content.iter_any():
            pass
async def main(url, pages):
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*(page(session, url) for _ in range(pages)))
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


class Listening(Sidecar):
    """Keeps our own lateness and the canary's gaps."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.lags: list[float] = []
        self.gaps: list[float] = []
        self._since: float | None = None

    def observe(self, seen: Observation | PollFailure) -> None:
        if isinstance(seen, ObserverSample):
            self.lags.append(seen.lag)
        elif isinstance(seen, StreamOpened):
            self._since = None
        elif isinstance(seen, StreamTokens):
            if self._since is not None:
                self.gaps.append(seen.at - self._since)
            self._since = seen.at
        super().observe(seen)


async def _become(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.1)


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_fifty_open_pages_cost_the_canary_nothing(tmp_path: Path) -> None:
    """The canary's gaps and our own lateness are the same with fifty pages as without any, turn and turn about."""
    target, port = free_port(), free_port()
    (tmp_path / "clients.py").write_text(CLIENTS)
    settings = Settings.model_validate(
        {
            "engine": {"url": f"http://127.0.0.1:{target}"},
            "canary": {"mode": "persistent"},
            "gpu": {"enabled": "false"},
            "web": {"host": "127.0.0.1", "port": port},
        }
    )

    async def main() -> dict[int, tuple[list[float], list[float], list[float]]]:
        sidecar = Listening(settings)
        app = server.create_app(sidecar)
        seen: dict[int, tuple[list[float], list[float], list[float]]] = {0: ([], [], []), PAGES: ([], [], [])}
        clients = [sys.executable, str(tmp_path / "clients.py"), f"http://127.0.0.1:{port}", str(PAGES)]
        async with server.serving(app, server.listen("127.0.0.1", port)), sidecar.tasks() as plan:
            tasks = [asyncio.create_task(task, name=name) for name, task in plan.items()]
            await _become(lambda: len(sidecar.gaps) >= 50)
            for pages in (0, PAGES) * 2:
                running = await asyncio.create_subprocess_exec(*clients) if pages else None
                await _become(lambda pages=pages: len(app[server.EVENTS]) == pages)  # type: ignore[misc]
                await asyncio.sleep(2.0)  # what opening costs is another matter
                sidecar.lags.clear()
                sidecar.gaps.clear()
                cpu, made = time.process_time(), app[server.EVENTS].made
                await asyncio.sleep(PHASE_SECONDS)
                seen[pages][0].extend(sidecar.gaps)
                seen[pages][1].extend(sidecar.lags)
                seen[pages][2].append((time.process_time() - cpu) / PHASE_SECONDS)
                assert app[server.EVENTS].made - made >= (PHASE_SECONDS / 2 if pages else 0)
                assert len(app[server.EVENTS]) == pages, "nobody who reads is dropped"
                if running is not None:
                    running.terminate()
                    await running.wait()
                    await _become(lambda: len(app[server.EVENTS]) == 0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    simulate = stallwatch("simulate", "--scenario", "quiet", "--port", str(target))
    with process(simulate, tmp_path / "simulate.log"):
        until(lambda: "vllm" in get(f"http://127.0.0.1:{target}/metrics"), 30, "the server answers")
        import uvloop  # noqa: PLC0415  (the loop of `run`)

        switch = sys.getswitchinterval()
        sys.setswitchinterval(0.0005)  # as `run` does
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                seen = runner.run(main())
        finally:
            sys.setswitchinterval(switch)
    for pages, (gaps, lags, cpu) in seen.items():
        figures = ", ".join(f"p{q * 100:g} {_quantile(gaps, q) * 1000:.2f} ms" for q in (0.5, 0.95, 0.99))
        late = ", ".join(f"p{q * 100:g} {_quantile(lags, q) * 1000:.2f} ms" for q in (0.5, 0.95, 0.99))
        print(f"{pages:2} pages: {len(gaps)} gaps {figures}; late {late}; {statistics.mean(cpu):.1%} of a CPU")

    for q, allowed in ((0.5, 0.001), (0.95, 0.005)):
        assert _quantile(seen[PAGES][0], q) < _quantile(seen[0][0], q) + allowed
