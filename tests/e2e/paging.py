"""All between a freeze and a pager, in real time: simulated vLLM, stallwatch, Prometheus, Alertmanager, a webhook.

Prometheus and Alertmanager run with the files of `deploy/prometheus/`, stallwatch with its default settings. Each
simulated server is a namespace of its own, so that many can be watched by one Prometheus.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from tests.artifacts.promtool import ROOT, program
from tests.e2e.processes import Process, free_port, get, process, stallwatch, until

DEPLOYED = ROOT / "deploy" / "prometheus"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the webhook about one server: when, for whom, which alerts fire, what is said of each."""

    at: float
    receiver: str
    namespace: str
    firing: tuple[str, ...]
    text: str


@dataclass(slots=True)
class Pager:
    """A webhook that remembers."""

    port: int = field(default_factory=free_port)
    calls: list[Call] = field(default_factory=list)

    def told(self, namespace: str, receiver: str = "pager") -> list[Call]:
        """Calls about one server that tell of something that fires."""
        return [
            call for call in self.calls if call.receiver == receiver and call.namespace == namespace and call.firing
        ]


@contextmanager
def pager() -> Iterator[Pager]:
    """A webhook that listens while the block runs."""
    told = Pager()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            firing = [alert for alert in body["alerts"] if alert["status"] == "firing"]
            names = tuple(sorted({alert["labels"]["alertname"] for alert in firing}))
            text = "\n".join(alert["annotations"]["description"] for alert in firing)
            namespace = body["groupLabels"].get("namespace", "")
            told.calls.append(Call(time.monotonic(), body["receiver"], namespace, names, text))
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
class Played:
    """A scenario whose trouble comes `sooner` seconds before its time."""

    scenario: str
    sooner: float = 0.0


@dataclass(frozen=True, slots=True)
class Server:
    """One simulated server with the sidecar beside it; `began` is when it answered for the first time."""

    simulator: Process
    sidecar: str
    began: float


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that runs; `servers` by namespace."""

    servers: Mapping[str, Server]
    prometheus: str
    told: Pager


@contextmanager
def stage(folder: Path, played: Mapping[str, Played]) -> Iterator[Stage]:
    """Starts all of it: a server with a sidecar for each namespace."""
    ports = {name: (free_port(), free_port()) for name in played}
    prometheus, alertmanager = free_port(), free_port()
    with ExitStack() as stack:
        told = stack.enter_context(pager())
        _configure(folder, {name: own for name, (_, own) in ports.items()}, alertmanager, told)
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
        }
        for name, (target, own) in ports.items():
            commands[f"{name}-run"] = stallwatch(
                "run", "--engine.url", f"http://127.0.0.1:{target}", "--web.port", str(own)
            )
        for name, command in commands.items():
            stack.enter_context(process(command, folder / f"{name}.log"))
        ready = [f"http://127.0.0.1:{port}/-/ready" for port in (prometheus, alertmanager)]
        for url in (*ready, *(f"http://127.0.0.1:{own}/livez" for _, own in ports.values())):
            until(partial(_answers, url), 120, f"{url} answers")
        servers = {}
        for name, (target, own) in ports.items():
            what = (played[name].scenario, str(played[name].sooner))
            command = [sys.executable, "-m", "tests.e2e.simulating", str(target), *what]
            simulator = stack.enter_context(process(command, folder / f"{name}.log"))
            until(partial(_answers, f"http://127.0.0.1:{target}/health"), 60, f"{name} answers")
            servers[name] = Server(simulator, f"http://127.0.0.1:{own}", time.monotonic())
        yield Stage(servers, f"http://127.0.0.1:{prometheus}", told)


def _answers(url: str) -> bool:
    get(url)
    return True


def _configure(folder: Path, sidecars: Mapping[str, int], alertmanager: int, told: Pager) -> None:
    routes = yaml.safe_load((DEPLOYED / "alertmanager.yml").read_text())
    for receiver in routes["receivers"]:
        for hook in receiver.get("webhook_configs", ()):
            hook["url"] = f"http://127.0.0.1:{told.port}/{receiver['name']}"
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(routes))
    targets = [{"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": name}} for name, port in sidecars.items()]
    scrape = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [str(DEPLOYED / "stallwatch.rules.yml")],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]},
        "scrape_configs": [{"job_name": "stallwatch", "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(scrape))
