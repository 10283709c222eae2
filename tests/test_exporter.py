import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from stallwatch import exporter
from stallwatch.analysis.causes import Cause, StallKind
from stallwatch.analysis.findings import Findings
from stallwatch.analysis.histogram import Histogram
from stallwatch.analysis.prefill import Evidence
from stallwatch.analysis.step_model import PrefillBudget, StepModelView
from stallwatch.analysis.work import PHASES, TOKEN_EDGES, WorkView
from stallwatch.app import monitor_for
from stallwatch.catalogue import CATALOGUE
from stallwatch.health import Health
from stallwatch.observations import (
    Buckets,
    EngineCounters,
    EngineSample,
    Failure,
    GpuReading,
    GpuSample,
    HostSample,
    Lane,
    ObserverSample,
    Outcome,
    PollFailure,
    RdmaPort,
    ServerFacts,
    Source,
    StreamClosed,
    StreamOpened,
    StreamTokens,
)
from stallwatch.scheduling import Poll
from stallwatch.settings import Settings

SETTINGS = Settings.model_validate({"canary": {"mode": "persistent"}})
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def busy() -> tuple[Findings, Health]:
    """Findings in which every part has something to say: two engines, streams, failures."""
    monitor = monitor_for(SETTINGS)
    health = Health()
    monitor.observe(ServerFacts(at=0.0, version="0.32.0", model_name='ti"ny\n'))
    monitor.observe(StreamOpened(0.0, 1, "0", "stallwatch-canary-1"))
    at = 0.0
    for step in range(1, 300):
        at = step * 0.02
        monitor.observe(StreamTokens(at, 1, 1))
        if step % 10 == 0:
            monitor.observe(ObserverSample(at, 0.001, 0.0))
            monitor.observe(sample(at, step))
    monitor.observe(StreamClosed(at, 1, Outcome.COMPLETED, prompt_tokens=20, cached_tokens=0))
    monitor.observe(StreamOpened(at, 2, "0", "stallwatch-canary-2"))
    monitor.observe(StreamOpened(at, 3, "0", "stallwatch-canary-3"))
    monitor.observe(StreamTokens(at, 3, 1))
    monitor.observe(ObserverSample(at + 0.25, 0.001, 0.1))
    monitor.observe(ObserverSample(at + 2.5, 0.001, 0.1))  # the gap of stream 3 is a stall that is going on
    port = RdmaPort(
        device="mlx5_0",
        port="1",
        received_bytes=1e9,
        transmitted_bytes=2e9,
        active=True,
        rate_gbps=200.0,
        congestion={"np_cnp_sent": 3.0},
    )
    monitor.observe(
        HostSample(at=at, engine_throttled_seconds=0.0, pressure_seconds={("memory", "full"): 0.5}, rdma=(port,))
    )
    for second in range(40):
        monitor.observe(GpuSample(at=at - 40 + second, gpus=(gpu(second),), scope="container", driver="580.1"))
        monitor.observe(GpuSample(at=at - 39.5 + second, gpus=(gpu(second),), scope="container", driver="580.1"))
    for source in Source:
        health.polled(Poll(source, at - 0.01, at, None))
    health.polled(Poll(Source.GPU, at, at, PollFailure(at, Source.GPU, Failure.UNAVAILABLE, "no driver")))
    found = monitor.findings(at + 2.6)
    first, *others = found.engines
    return replace(found, engines=(replace(first, work=work()), *others)), health


def sample(at: float, step: int) -> EngineSample:
    counters = EngineCounters(
        running=3.0,
        waiting=1.0,
        waiting_capacity=1.0,
        waiting_deferred=0.0,
        kv_usage=0.25,
        iterations=float(step),
        generation_tokens=3.0 * step,
        itl_count=3.0 * step,
        itl_sum=0.06 * step,
        itl_buckets=Buckets((0.01, 0.05, 0.1, float("inf")), (0.0, 3.0 * step, 3.0 * step, 3.0 * step)),
        preemptions=0.0,
        first_tokens=3.0,
        finished=1.0,
        prompt_local_compute=100.0,
        prompt_local_cache_hit=0.0,
    )
    return EngineSample(
        sent_at=at - 0.002,
        at=at,
        lane=Lane.ESTIMATOR,
        engines={"0": counters, "1": counters},
        missing=frozenset({"spec_draft_tokens"}),
        asleep=False,
    )


def work() -> WorkView:
    """What is said of an engine whose every figure is known."""
    model = StepModelView(
        base=0.03,
        per_decoder=0.0005,
        per_token={0.5: 0.0004, 0.9: 0.0005, 0.95: 0.0006},
        per_token_start=0.0004,
        per_token_context=4e-9,
        r2=0.99,
        mixed_steps=60,
        context_min=32.0,
        context_max=60_000.0,
    )
    budget = PrefillBudget(
        tokens=109,
        objective=0.1,
        decoders=3.0,
        context_min=32.0,
        context_max=60_000.0,
        extrapolated=False,
        batched_tokens=112,
        max_num_seqs=16,
    )
    return WorkView(
        evidence=Evidence.BALANCE,
        prefill_totals={Evidence.BALANCE: 60_000.0},
        per_step_mean=400.0,
        per_step_max=2_045.0,
        step_prefill=Histogram(TOKEN_EDGES).state(),
        step_seconds={phase: Histogram().state() for phase in PHASES},
        baseline=0.031,
        baseline_reference=0.03,
        interference_mean=0.5,
        interference_p95=9.0,
        interference_seconds=30.0,
        interference_share=0.2,
        backlog=12_000.0,
        backlog_eta=20.0,
        model=model,
        budget=budget,
        token_budget=2_048,
        acceptance=0.7,
    )


def gpu(second: int) -> GpuReading:
    """A busy GPU that gives every figure."""
    numbers = {
        name: float(second + 1)
        for name in (
            *("utilization", "memory_utilization", "memory_clock", "power", "power_limit", "energy", "temperature"),
            *("memory_used", "memory_total", "pcie_rx", "pcie_tx", "nvlink_rx", "nvlink_tx"),
            *("ecc_corrected", "ecc_uncorrected", "xid_errors", "dram_active", "sm_occupancy"),
        )
    }
    return GpuReading(
        gpu="0", uuid="GPU-1", name="H100", sm_clock=1.98e9, clock_event_reasons=frozenset({"sw_power_cap"}), **numbers
    )


def page(accept: str = "text/plain;version=0.0.4") -> str:
    findings, health = busy()
    body, _ = exporter.render(exporter.families(findings, health, SETTINGS, wall_offset=1.7e9), accept)
    return body.decode()


def test_page_reads_back_with_every_label_escaped() -> None:
    """prometheus_client reads the page, and a hostile model name is only a label value."""
    families = {family.name: family for family in read_text(page())}

    info = families["stallwatch_engine_info"].samples
    assert {sample.labels["engine"] for sample in info} == {"0", "1"}
    assert {sample.labels["model_name"] for sample in info} == {'ti"ny\n'}


def test_only_the_catalogue_and_process_metrics_are_on_the_page() -> None:
    """Whatever is exported was declared, with just the declared labels."""
    declared = {name: set(spec.labels) for spec in CATALOGUE for name in spec.series}
    for family in read_text(page()):
        for sample in family.samples:
            if not sample.name.startswith("process_"):
                assert set(sample.labels) - {"le"} == declared[sample.name], sample.name


def test_every_metric_of_the_catalogue_can_appear() -> None:
    """A busy server makes every declared metric show, so that none is declared in vain."""
    shown = {sample.name for family in read_text(page()) for sample in family.samples}

    assert [spec.name for spec in CATALOGUE if not spec.series & shown] == []


def test_stalls_by_kind_and_cause_begin_at_zero() -> None:
    """Every combination is there before the first stall; a cause of the present one only while there is one."""
    samples = [sample for family in read_text(page()) for sample in family.samples]
    counted = {
        (s.labels["kind"], s.labels["cause"]): s.value
        for s in samples
        if s.name == "stallwatch_stalls_total" and s.labels["engine"] == "1"
    }
    present = {s.labels["engine"] for s in samples if s.name == "stallwatch_stall_current_cause"}

    assert counted == {(kind, cause): 0 for kind in StallKind for cause in Cause}
    assert present == {"0"}


def test_promtool_accepts_the_page() -> None:
    """Prometheus' own linter has nothing to say."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.fail("promtool is missing. On Debian, as root: apt-get install prometheus")

    checked = subprocess.run(
        [promtool, "check", "metrics"], input=page(), text=True, capture_output=True, timeout=60, check=False
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_openmetrics_carries_the_request_as_exemplar() -> None:
    """Who asks for OpenMetrics gets it, with the canary's request id on its buckets."""
    text = page(OPENMETRICS)

    assert text.endswith("# EOF\n")
    assert '# {request_id="stallwatch-canary-1"}' in text
    read = read_openmetrics(text)  # type: ignore[no-untyped-call]
    assert {family.name for family in read} >= {"stallwatch_canary_inter_token_latency_seconds"}


def test_no_created_series() -> None:
    """`_created` series would nearly double the page and nobody reads them."""
    assert "_created" not in page()
    assert "_created" not in page(OPENMETRICS)


def test_what_is_not_known_is_absent() -> None:
    """Before anything was seen there is no latency, no age and no engine: not a zero."""
    findings = monitor_for(SETTINGS).findings(10.0)
    body, _ = exporter.render(exporter.families(findings, Health(), SETTINGS, wall_offset=0.0), "")
    text = body.decode()

    assert 'stallwatch_target_phase{phase="starting"} 1.0' in text
    assert 'stallwatch_canary_requests_total{outcome="completed"} 0.0' in text
    for absent in ("itl", "open_gap", "step_age", "engine", "slo_seconds", "reader_wait"):
        assert not re.search(rf"^stallwatch_{absent}", text, re.MULTILINE), absent


def test_one_engine_stays_small() -> None:
    """A sidecar of one engine costs Prometheus a bounded number of series."""
    findings, health = busy()
    lines = [line for line in page().splitlines() if line and not line.startswith("#")]
    per_engine = [line for line in lines if 'engine="1"' in line]
    print(f"{len(lines)} series in all with two engines, {len(per_engine)} of an engine without canary streams")

    assert len(findings.engines) == 2
    assert len(health.sources) == 4
    assert len(lines) < 900
