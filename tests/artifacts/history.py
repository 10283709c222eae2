"""Minutes of a small fleet as a Prometheus would have scraped them, recorded in virtual time and written as blocks."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import Metric, ProcessCollector

from stallwatch import exporter
from stallwatch.commands.replay_series import openmetrics, series_name
from stallwatch.simulator.cost import Cause, Pause, Slowdown
from stallwatch.simulator.faults import Fault, FaultKind
from stallwatch.simulator.load import Arrival, Load, Users, every
from stallwatch.simulator.scenario import Scenario, ServerConfig
from tests.artifacts.promtool import call, program
from tests.e2e.processes import free_port, get, process, until
from tests.harness import Beside, Watched, watch
from tests.scenarios import host

START = 1_790_000_000.0 - 1_790_000_000.0 % 7200
"""Unix time at which all of it begins: where a block of Prometheus begins."""
SCRAPE = 15.0
DURATION = 480.0
LATECOMER = 180.0
"""Seconds for which the pods that were added last are there: all end together."""
LONG_PROMPT = 90.0
CLOCK_LOW = (185.0, 230.0)
COMPILED = 270.0
MEDIUM_PROMPTS = (300.0, 340.0)
HANG = (379.0, 435.0)

_READERS = Users(count=3, prompt_tokens=64, output_tokens=600, stagger=2.0)
_SHORT = every(20.0, Arrival(at=10.0, prompt_tokens=700, output_tokens=80), times=30)

STORY = Scenario(
    name="story",
    sentence="Eight minutes with a long prompt, the same one cached, a lower clock, a compiled kernel and a hang.",
    duration=DURATION,
    server=ServerConfig(mfu_metrics=True),
    load=Load(
        (
            *_SHORT,
            Arrival(at=LONG_PROMPT, prompt_tokens=60_000, output_tokens=100, identity=1),
            Arrival(at=LONG_PROMPT + 60, prompt_tokens=60_000, output_tokens=100, identity=1),
            *every(1.0, Arrival(at=MEDIUM_PROMPTS[0], prompt_tokens=1_800, output_tokens=12), times=40),
        ),
        (_READERS,),
    ),
    slowdowns=(Slowdown(start=CLOCK_LOW[0], end=CLOCK_LOW[1], factor=4.0, cause=Cause.GPU_CLOCK),),
    pauses=(
        Pause(at=COMPILED, seconds=2.5, cause=Cause.GPU_IDLE),
        Pause(at=HANG[0], seconds=HANG[1] - HANG[0], cause=Cause.ENGINE_HANG, gpu_busy=True),
    ),
)
RESTARTED = Scenario(
    name="restarted",
    sentence="Readers are fine, and the server is replaced once.",
    duration=LATECOMER,
    load=Load(_SHORT, (_READERS,)),
    faults=(Fault(FaultKind.RESTART, 45.0, 65.0), Fault(FaultKind.METRICS_DOWN, 90.0, 165.0)),
)
CALM = replace(RESTARTED, name="calm", sentence="Readers are fine.", faults=())

Samples = dict[str, list[tuple[float, float]]]
"""Series as the text format writes them -> unix time and value of each sample."""


@dataclass(slots=True)
class Scraped:
    """What was on two pages, the sidecar's and vLLM's, whenever they were asked for."""

    samples: Samples = field(default_factory=dict)

    def take(self, families: tuple[Metric, ...], page: str | None, at: float, labels: Mapping[str, str]) -> None:
        """Adds one scrape of both; None for the page of a server that is not there."""
        found = {
            series_name(sample.name, {**sample.labels, **labels}): sample.value
            for family in families
            for sample in family.samples
        }
        found |= {
            series_name(sample.name, {**sample.labels, **labels}): sample.value
            for family in ProcessCollector(registry=None).collect()
            for sample in family.samples
        }
        attached = {"up": 1.0, "scrape_samples_scraped": float(len(found)), "scrape_duration_seconds": 0.005}
        found |= {series_name(name, labels): value for name, value in attached.items()}
        for line in (page or "").splitlines():
            if not line.startswith("#") and "_created" not in line:
                head, _, told = line.rpartition(" ")
                name, _, own = head.partition("{")
                more = ",".join(f'{key}="{text}"' for key, text in {**labels, "instance": "vllm:8000"}.items())
                found[f"{name}{{{more}{',' if own else ''}{own or '}'}"] = float(told)
        for series, value in found.items():
            self.samples.setdefault(series, []).append((at, value))


def scraped(scenario: Scenario, labels: Mapping[str, str], beside: Beside | None = None, **rooms: Any) -> Samples:
    """The samples of a scenario that ends with all others, a scrape every 15 s."""
    into = Scraped()
    began = START + DURATION - scenario.duration

    def scrape(watched: Watched) -> None:
        now = watched.last.at
        sidecar, world = watched.sidecar, watched.simulated.world
        shown = exporter.families(watched.last, sidecar.health, sidecar.settings, wall_offset=began - watched.origin)
        into.take(shown, None if world.down else world.page.render(), began + now - watched.origin, labels)

    watch(scenario, sample_every=SCRAPE, sampled=scrape, beside=beside, **rooms)
    return into.samples


def write_blocks(samples: Samples, folder: Path) -> Path:
    """Writes the samples as blocks below `folder`. Returns the folder for Prometheus."""
    text = folder / "history.om"
    with text.open("w") as out:
        out.writelines(openmetrics(samples))
    made = call("tsdb", "create-blocks-from", "openmetrics", str(text), str(folder / "tsdb"))
    assert made.returncode == 0, made.stdout
    return folder / "tsdb"


@contextmanager
def prometheus(tsdb: Path, log: Path) -> Iterator[str]:
    """The address of a real Prometheus with these blocks and nothing to scrape."""
    configuration = log.with_suffix(".yml")
    configuration.write_text("global: {scrape_interval: 15s}\n")
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        program("prometheus", "prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={tsdb}",
        "--storage.tsdb.retention.time=100y",
        # Blocks that were made from text know no staleness: what vanished from a page would stay for five minutes.
        f"--query.lookback-delta={SCRAPE + 1:g}s",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]
    with process(command, log):
        until(lambda: get(f"{url}/-/ready"), 60, "Prometheus is ready")
        yield url


FLEET: tuple[tuple[str, Scenario, Mapping[str, Any]], ...] = (
    ("vllm-0", STORY, {"canary": {"mode": "persistent"}, "gpu": {"enabled": "true"}}),
    ("vllm-1", CALM, {}),
    ("vllm-2", RESTARTED, {"canary": {"tokens": 32}}),
)


def fleet() -> Samples:
    """Three pods of one service for eight minutes: takes half a minute of computing."""
    together: Samples = {}
    for pod, scenario, rooms in FLEET:
        labels = {"namespace": "llm", "job": "vllm", "pod": pod, "instance": f"{pod}:9709"}
        with tempfile.TemporaryDirectory() as folder:
            beside = host.host(Path(folder))
            more = {"host": host.rooms(Path(folder))} if scenario is STORY else {}
            together.update(scraped(scenario, labels, beside if more else None, **rooms, **more))
    return together
