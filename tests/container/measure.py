"""Prints how well the sidecar measures under CPU limits: `python -m tests.container.measure [SCENARIO ...]`.

For each limit the image runs beside the simulator, scraped every 15 s as by Prometheus, while an independent client
times a reader of its own. Both see the same engine steps in the same minute; what they differ by is the price of the
limit, and what else the machine is doing: it should be quiet.
"""

import sys
import tempfile
import time
from pathlib import Path

from tests.container.environment import Containers, ensure
from tests.container.running import build, container, sidecar_command, simulator, value
from tests.e2e.processes import free_port, get, until
from tests.vllm import truth
from tests.vllm.load import decode_stream, load

LIMITS = (0.05, 0.1, 0.2, 0.5, None)
SCENARIOS = ("quiet", "long-prefill")
SECONDS = 60.0
SCRAPE_SECONDS = 15.0
COLUMNS = (
    "scenario", "limit", "ITL p50 told / true", "ITL p99 told / true", "missed told / true", "gaps left out",
    "throttled", "CPU used", "memory",
)  # fmt: skip


def measured(containers: Containers, scenario: str, cpus: float | None) -> str:
    """One row of the table."""
    target, port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    incidents = ("--tmpfs=/var/lib/stallwatch:rw,size=64m,mode=0777",)
    with (
        simulator(containers, scenario, target),
        container(containers, "measured", *sidecar_command(target, port), cpus=cpus, options=incidents),
    ):
        until(lambda: value(get(url, timeout=30.0), "stream_seconds_total", absent=0.0) > 0, 120, "the canary streams")
        with load(f"http://127.0.0.1:{target}", [decode_stream(tokens=4000)]) as client:
            first = get(url, timeout=30.0)
            began = time.monotonic()
            for _ in range(int(SECONDS / SCRAPE_SECONDS)):
                time.sleep(SCRAPE_SECONDS)
                page = get(url, timeout=30.0)
            ended = time.monotonic()
            reader = client.streams()["victim"]
    gaps = truth.gaps(reader, window=(began, ended))
    cells = [scenario, "none" if cpus is None else f"{cpus * 1000:.0f}m"]
    for q in (0.5, 0.99):
        wanted = truth.itl_quantile(gaps, q) or 0.0
        told = value(page, "itl_seconds", absent=float("nan"), source="canary", q=f"{q:g}", window="1m")
        cells.append(f"{told * 1e3:.1f} / {wanted * 1e3:.1f} ({(told - wanted) * 1e3:+.1f}) ms")
    missed = truth.missed_seconds([reader], objective=0.1, window=(began, ended))
    grew = {
        name: value(page, name, absent=0.0) - value(first, name, absent=0.0)
        for name in ("slo_missed_seconds_total", "observer_excluded_gaps_total", "observer_throttled_seconds_total")
    }
    cells.append(f"{grew['slo_missed_seconds_total']:.1f} / {missed:.1f} s")
    cells.append(f"{grew['observer_excluded_gaps_total']:.0f}")
    cells.append(f"{grew['observer_throttled_seconds_total'] / (ended - began):.1%}")
    own = [_process(each, "process_cpu_seconds_total") for each in (first, page)]
    cells.append(f"{(own[1] - own[0]) / (ended - began) * 1e3:.0f}m")
    cells.append(f"{_process(page, 'process_resident_memory_bytes') / 2**20:.0f} MiB")
    return f"| {' | '.join(cells)} |"


def _process(page: str, name: str) -> float:
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} "))


def main() -> int:
    """Measures and prints the table."""
    containers = ensure()
    with tempfile.TemporaryDirectory() as folder:
        build(containers, Path(folder))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for scenario in sys.argv[1:] or SCENARIOS:
        for cpus in LIMITS:
            print(measured(containers, scenario, cpus), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
