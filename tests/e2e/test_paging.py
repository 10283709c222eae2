"""From a freeze to the page, in real time: simulated vLLM, stallwatch, Prometheus, Alertmanager, a webhook."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.artifacts.promtool import ROOT, program
from tests.e2e.processes import Process, free_port, get, process, stallwatch, until

DEPLOYED = ROOT / "deploy" / "prometheus"


@dataclass(slots=True)
class Pager:
    """What the webhook was told: time, receiver, names of the alerts that fire."""

    port: int = field(default_factory=free_port)
    calls: list[tuple[float, str, tuple[str, ...], str]] = field(default_factory=list)

    def pages(self) -> list[tuple[float, str, tuple[str, ...], str]]:
        """Calls that wake someone and tell of something that fires."""
        return [call for call in self.calls if call[1] == "pager" and call[2]]


@contextmanager
def pager() -> Iterator[Pager]:
    """A webhook that remembers."""
    told = Pager()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            firing = [alert for alert in body["alerts"] if alert["status"] == "firing"]
            names = tuple(alert["labels"]["alertname"] for alert in firing)
            text = firing[0]["annotations"]["description"] if firing else ""
            told.calls.append((time.monotonic(), body["receiver"], names, text))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", told.port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that runs."""

    simulator: Process
    sidecar: str
    prometheus: str
    began: float  # when the simulated server answered for the first time
    told: Pager


@contextmanager
def stage(scenario: str, folder: Path) -> Iterator[Stage]:
    """Starts Prometheus and Alertmanager as deployed, then a simulated server with stallwatch in default settings."""
    target, own, prometheus, alertmanager = (free_port() for _ in range(4))
    with ExitStack() as stack:
        told = stack.enter_context(pager())
        routes = yaml.safe_load((DEPLOYED / "alertmanager.yml").read_text())
        for receiver in routes["receivers"]:
            for hook in receiver.get("webhook_configs", ()):
                hook["url"] = f"http://127.0.0.1:{told.port}/{receiver['name']}"
        (folder / "alertmanager.yml").write_text(yaml.safe_dump(routes))
        scrape = {
            "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
            "rule_files": [str(DEPLOYED / "stallwatch.rules.yml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]},
            "scrape_configs": [{"job_name": "stallwatch", "static_configs": [{"targets": [f"127.0.0.1:{own}"]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(scrape))
        commands = {
            "alertmanager": [
                program("prometheus-alertmanager", "prometheus-alertmanager"),
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{alertmanager}",
                "--cluster.listen-address=",
            ],
            "prometheus": [
                program("prometheus", "prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{prometheus}",
            ],
            "run": stallwatch("run", "--engine.url", f"http://127.0.0.1:{target}", "--web.port", str(own)),
        }
        for name, command in commands.items():
            stack.enter_context(process(command, folder / f"{name}.log"))
        for port in (prometheus, alertmanager):
            until(
                lambda port=port: get(f"http://127.0.0.1:{port}/-/ready"), 30, "Prometheus and Alertmanager are ready"
            )
        until(lambda: get(f"http://127.0.0.1:{own}/livez"), 30, "stallwatch listens")
        simulate = stallwatch("simulate", "--scenario", scenario, "--port", str(target))
        simulator = stack.enter_context(process(simulate, folder / "simulate.log"))
        until(lambda: get(f"http://127.0.0.1:{target}/health") == "", 30, "the server answers")
        yield Stage(simulator, f"http://127.0.0.1:{own}", f"http://127.0.0.1:{prometheus}", time.monotonic(), told)


def first_stall(seen: Stage) -> float:
    """Waits until stallwatch counts a stall of more than three seconds; returns when that began."""

    def waited() -> float:
        page = get(f"{seen.sidecar}/metrics")
        found = [line for line in page.splitlines() if line.startswith("stallwatch_stall_active_seconds_total{")]
        return max((float(line.rpartition(" ")[2]) for line in found), default=0.0)

    until(lambda: waited() > 3, 90, "a stall is counted")
    return time.monotonic() - waited()


def page_after(seen: Stage, name: str, frozen: float, within: float) -> float:
    """Seconds from the freeze until the page of this name."""
    until(lambda: any(name in call[2] for call in seen.told.pages()), within, f"the page {name}")
    return next(call[0] for call in seen.told.pages() if name in call[2]) - frozen


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.parametrize("scenario", ["long-prefill", "engine-hang"])
def test_a_freeze_is_one_page_within_a_minute_and_a_half(scenario: str, tmp_path: Path) -> None:
    """Defaults everywhere, pulses only: the page comes while readers still wait, once, with a description filled in."""
    with stage(scenario, tmp_path) as seen:
        frozen = first_stall(seen)
        seconds = page_after(seen, "StallwatchReadersFrozen", frozen, 120)
        time.sleep(60)
        pages = seen.told.pages()
    print(f"{scenario}: frozen {frozen - seen.began:.0f} s after the start, paged {seconds:.0f} s later: {pages}")

    assert seconds < 90
    assert [call[2] for call in pages] == [("StallwatchReadersFrozen",)]
    assert "frozen for" in pages[0][3]
    assert "objective 100ms" in pages[0][3]


@pytest.mark.long
@pytest.mark.timeout(420)
def test_a_server_that_is_gone_is_one_page(tmp_path: Path) -> None:
    """When the server dies and does not come back, somebody is called once within three minutes."""
    with stage("quiet", tmp_path) as seen:
        until(lambda: 'phase="serving"} 1.0' in get(f"{seen.sidecar}/metrics"), 30, "serving")
        time.sleep(30)
        seen.simulator.stop(signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: bool(seen.told.pages()), 240, "a page")
        seconds = seen.told.pages()[0][0] - killed
        time.sleep(90)
        pages = seen.told.pages()
    print(f"gone: paged {seconds:.0f} s after the end: {pages}")

    assert seconds < 180
    assert len(pages) == 1


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("scenario", "seconds"),
    [
        ("quiet", 150),
        # A simulated server begins its scenario anew after 80 s, and two restarts in two minutes are worth a page.
        ("engine-restart", 105),
        ("power-cap-harmless", 150),
    ],
)
def test_nothing_wrong_for_readers_pages_nobody(scenario: str, seconds: float, tmp_path: Path) -> None:
    """A healthy server, a restart of fifteen seconds, and a GPU at its power cap wake nobody."""
    with stage(scenario, tmp_path) as seen:
        time.sleep(seconds)
        pages = seen.told.pages()
        rules = json.loads(get(f"{seen.prometheus}/api/v1/rules"))["data"]["groups"]

    assert pages == []
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
