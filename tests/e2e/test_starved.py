"""The sidecar under a CPU limit that is too small for it: it must know, and must not blame the server."""

import time
from pathlib import Path

from tests.cgroups import limited
from tests.e2e.processes import free_port, get, process, stallwatch, until


def total(page: str, name: str) -> float:
    """The sum over the samples of a metric."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.partition("{")[0].split()[0] == name)


def _pages(url: str) -> tuple[str, str]:
    """The metrics when latencies first show, and after 12 s of ten scrapes a second."""
    until(lambda: total(get(url), "stallwatch_itl_samples") > 20, 90, "latencies")
    before = get(url, timeout=30.0)
    end = time.monotonic() + 12.0
    while time.monotonic() < end:
        get(url, timeout=30.0)
        time.sleep(0.05)
    return before, get(url, timeout=30.0)


def test_a_starved_sidecar_excludes_its_own_lateness(tmp_path: Path) -> None:
    """At 100 millicores and ten scrapes a second the sidecar is throttled: it says so and misses nothing for it."""
    target, port = free_port(), free_port()
    run = stallwatch(
        "run", "--engine.url", f"http://127.0.0.1:{target}", "--web.port", str(port), "--canary.mode", "persistent"
    )
    simulate = stallwatch("simulate", "--scenario", "quiet", "--port", str(target))
    url = f"http://127.0.0.1:{port}/metrics"
    with limited(100) as members:
        # As in a container, the limit holds from the first instruction on.
        starved = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(members), *run]
        with process(simulate, tmp_path / "simulate.log"), process(starved, tmp_path / "run.log") as sidecar:
            before, page = _pages(url)
            sidecar.popen.kill()
            sidecar.popen.wait()
    grew = {
        name: total(page, f"stallwatch_{name}") - total(before, f"stallwatch_{name}")
        for name in (
            "observer_throttled_seconds_total",
            "observer_excluded_gaps_total",
            "slo_missed_seconds_total",
            "slo_seconds_total",
        )
    }
    lag = total(page, "stallwatch_observer_lag_seconds")
    print(f"own lag {lag:.3f} s, {grew}")

    assert grew["observer_throttled_seconds_total"] > 1.0
    assert grew["observer_excluded_gaps_total"] > 10
    assert lag > 0.05
    assert grew["slo_missed_seconds_total"] < 0.05 * grew["slo_seconds_total"]
