"""What one sidecar costs a Prometheus: series, and bytes of a scrape."""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import ProcessCollector

from stallwatch import exporter
from stallwatch.observations import GpuReading, GpuSample
from stallwatch.simulator.scenario import ServerConfig
from stallwatch.simulator.scenarios import SCENARIOS
from tests.harness import Watched, watch
from tests.scenarios import host

FLEET = 1000
INTERVAL = 15.0
BYTES_A_SERIES = 3_000
"""Memory of a Prometheus for a series in its head block, samples included: Robust Perception's rule of thumb."""


FIGURES = (
    *("utilization", "memory_utilization", "memory_clock", "power", "power_limit", "energy", "temperature"),
    *("memory_used", "memory_total", "pcie_rx", "pcie_tx", "nvlink_rx", "nvlink_tx"),
    *("ecc_corrected", "ecc_uncorrected", "xid_errors", "dram_active", "sm_occupancy"),
)


def gpus(count: int, at: float) -> GpuSample:
    """So many GPUs that give every figure, busy."""
    numbers = dict.fromkeys(FIGURES, 1.0)
    readings = [
        GpuReading(
            gpu=str(number),
            uuid=f"GPU-00000000-0000-0000-0000-{number:012d}",
            name="NVIDIA H100 80GB HBM3",
            sm_clock=1.98e9,
            clock_event_reasons=frozenset({"sw_power_cap"}),
            **numbers,
        )
        for number in range(count)
    ]
    return GpuSample(at=at, gpus=tuple(readings), scope="container", driver="580.1")


@dataclass(slots=True)
class Cost:
    """Series that were on any page, samples and bytes of the largest page, and bytes of that one compressed."""

    gpus: int = 0
    series: set[tuple[str, ...]] = field(default_factory=set)
    samples: int = 0
    plain: int = 0
    packed: int = 0
    _calls: int = 0

    def sampled(self, watched: Watched) -> None:
        """Lets the GPUs be read once more, and takes the page of every third time as a Prometheus gets it."""
        sidecar, now = watched.sidecar, watched.last.at
        if self.gpus:
            sidecar.monitor.observe(gpus(self.gpus, now))
        self._calls += 1
        if self._calls % 3:
            return
        shown = exporter.families(watched.last, sidecar.health, sidecar.settings, wall_offset=1.7e9)
        process = ProcessCollector(registry=None).collect()
        samples = [sample for family in (*shown, *process) for sample in family.samples]
        self.series |= {(sample.name, *sample.labels.values()) for sample in samples}
        if len(samples) > self.samples:
            body, _ = exporter.render(shown, "application/openmetrics-text;version=1.0.0")
            # As the server packs it.
            self.samples, self.plain, self.packed = len(samples), len(body), len(gzip.compress(body, compresslevel=1))


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a sidecar is given to watch, and the series that it may make of it: a tenth more than measured."""

    most: int
    server: ServerConfig = field(default_factory=ServerConfig)
    gpus: int = 0
    rdma: bool = False
    rooms: Mapping[str, Any] = field(default_factory=dict)


PERSISTENT = {"canary": {"mode": "persistent"}}
EXACT = ServerConfig(plugin=True, mfu_metrics=True)
TABLE = {
    "defaults, no GPU": Fitted(530),
    "and one GPU": Fitted(570, gpus=1),
    "and a persistent canary": Fitted(575, gpus=1, rooms=PERSISTENT),
    "and the plugin, MFU metrics and an RDMA port": Fitted(670, EXACT, gpus=1, rdma=True, rooms=PERSISTENT),
    "and eight GPUs": Fitted(900, EXACT, gpus=8, rdma=True, rooms=PERSISTENT),
    "and a second data-parallel rank": Fitted(
        1440, replace(EXACT, data_parallel_size=2), gpus=8, rdma=True, rooms=PERSISTENT
    ),
}


def cost(fitted: Fitted, folder: Path) -> Cost:
    """The cost of a sidecar through a long prompt with a freeze."""
    scenario = replace(SCENARIOS["long-prefill"], server=fitted.server)
    beside = host.host(folder) if fitted.rdma else None
    pressure = folder / "proc" / "pressure"
    pressure.mkdir(parents=True, exist_ok=True)
    for resource in ("cpu", "memory", "io"):
        (pressure / resource).write_text(
            "".join(f"{kind} avg10=0.00 avg60=0.00 avg300=0.00 total=7\n" for kind in ("some", "full"))
        )
    found = Cost(fitted.gpus)
    rooms = {**fitted.rooms, "gpu": {"enabled": "false"}, "host": host.rooms(folder)}
    watch(scenario, sample_every=1.0, sampled=found.sampled, beside=beside, **rooms)
    return found


@pytest.mark.parametrize("name", TABLE, ids=lambda name: name.replace(",", "").replace(" ", "-"))
def test_a_sidecar_costs_a_bounded_number_of_series(name: str, tmp_path: Path) -> None:
    """Whatever it watches, a sidecar stays within its number of series: one engine with eight GPUs below 900."""
    found = cost(TABLE[name], tmp_path)
    series, rate = len(found.series), found.samples * FLEET / INTERVAL
    print(f"| {name} | {series} | {found.plain / 1e3:.0f} kB | {found.packed / 1e3:.1f} kB | {rate:,.0f} ", end="")
    print(f"| {series * FLEET * BYTES_A_SERIES / 1e9:.1f} GB | {found.packed * FLEET / INTERVAL / 1e6:.2f} MB/s |")

    assert 300 < series <= TABLE[name].most
