"""Days on which nobody may be called: a day and a night of everything that looks like trouble and is none."""

import math
import re
from collections.abc import Callable
from pathlib import Path

from tests.artifacts import promtool
from tests.artifacts.promtool import KUBERNETES

MINUTES = 24 * 60
RESTARTED = 4 * 60  # the minute of the night in which the server is replaced
PAUSES = frozenset(range(37, MINUTES, 61))  # minutes with a freeze of two seconds in them


def busy(minute: int) -> float:
    """Load from 0 at night to 1 at noon."""
    return max(0.0, math.sin((minute / 60 - 7) / 14 * math.pi)) if 7 * 60 <= minute < 21 * 60 else 0.0


def gauge(value: Callable[[int], float]) -> str:
    """A value for each minute."""
    return " ".join(f"{value(minute):.6g}" for minute in range(MINUTES + 1))


def counter(growth: Callable[[int], float]) -> str:
    """The sum of what each minute adds, from zero again after the restart."""
    total, samples = 0.0, []
    for minute in range(MINUTES + 1):
        total = 0.0 if minute == RESTARTED else total + growth(minute)
        samples.append(f"{total:.6g}")
    return " ".join(samples)


def day() -> dict[str, str]:
    """Every series of a sidecar over the day: idle at night, large batches at noon, a restart, blips, a power cap."""
    engine = 'engine="0"'
    down = {RESTARTED, RESTARTED + 1}
    histogram = "stallwatch_canary_time_to_first_token_seconds"
    return {
        'stallwatch_target_phase{phase="serving"}': gauge(lambda m: m not in down),
        'stallwatch_target_phase{phase="gone"}': gauge(lambda m: m == RESTARTED),
        'stallwatch_target_phase{phase="starting"}': gauge(lambda m: m == RESTARTED + 1),
        'stallwatch_source_up{source="engine"}': gauge(lambda m: m not in down),
        'stallwatch_source_up{source="gpu"}': gauge(lambda _: 1),
        'stallwatch_source_failures_total{source="engine",reason="refused"}': counter(lambda m: 240 * (m in down)),
        f"stallwatch_slo_seconds_total{{{engine}}}": counter(lambda m: 60 * (m not in down)),
        f"stallwatch_slo_missed_seconds_total{{{engine}}}": counter(lambda m: 2 * (m in PAUSES)),
        f"stallwatch_stall_active_seconds_total{{{engine}}}": counter(lambda m: 2 * (m in PAUSES)),
        f'stallwatch_stall_active{{{engine},kind="admission"}}': gauge(lambda _: 0),
        f'stallwatch_engine_requests{{{engine},state="running"}}': gauge(lambda m: round(64 * busy(m))),
        f'stallwatch_itl_seconds{{{engine},source="canary",q="0.99",window="5m"}}': gauge(
            lambda m: 0.03 + 0.05 * busy(m)
        ),
        f'stallwatch_itl_samples{{{engine},source="canary",window="5m"}}': gauge(lambda _: 1280),
        # At night a handful of tokens, one of them late: a p99 that must not be believed.
        f'stallwatch_itl_seconds{{{engine},source="engine",q="0.99",window="5m"}}': gauge(
            lambda m: 0.04 + 0.05 * busy(m) if busy(m) else 2.0
        ),
        f'stallwatch_itl_samples{{{engine},source="engine",window="5m"}}': gauge(lambda m: 20 + 9000 * busy(m)),
        f"stallwatch_engine_itl_total{{{engine}}}": counter(lambda m: 4 + 2000 * busy(m)),
        f"stallwatch_engine_itl_good_total{{{engine}}}": counter(lambda m: 4 - (m % 60 == 0) + 1995 * busy(m)),
        f"stallwatch_scheduled_decode_tokens_total{{{engine}}}": counter(lambda m: 2000 * busy(m)),
        f'stallwatch_interference_ratio{{{engine},stat="mean"}}': gauge(lambda m: 3 * (m in PAUSES) + 0.5 * busy(m)),
        f"stallwatch_decode_baseline_seconds{{{engine}}}": gauge(lambda m: 0.03 * (1 + 0.2 * busy(m))),
        f"stallwatch_decode_baseline_reference_seconds{{{engine}}}": gauge(lambda _: 0.03),
        'stallwatch_gpu_sm_clock_ratio{gpu="0",uuid="GPU-a"}': gauge(lambda m: 1 - 0.05 * busy(m)),
        'stallwatch_gpu_clock_event{gpu="0",uuid="GPU-a",reason="sw_power_cap"}': gauge(lambda m: busy(m) > 0),
        "stallwatch_observer_lag_seconds": gauge(lambda m: 0.3 if m in PAUSES else 0.003),
        'stallwatch_canary_requests_total{outcome="completed"}': counter(lambda m: 4 * (m not in down)),
        'stallwatch_canary_requests_total{outcome="refused"}': counter(lambda m: 4 * (m in down)),
        'stallwatch_canary_requests_total{outcome="busy"}': counter(lambda m: m in PAUSES),
        "stallwatch_canary_tokens_total": counter(lambda m: 240 * (m not in down)),
        f"{histogram}_count{{{engine}}}": counter(lambda _: 4),
        f'{histogram}_bucket{{{engine},le="1.0"}}': counter(lambda m: 3 if busy(m) > 0.5 else 4),
        f'{histogram}_bucket{{{engine},le="5.0"}}': counter(lambda _: 4),
        f'{histogram}_bucket{{{engine},le="+Inf"}}': counter(lambda _: 4),
        # vLLM's own page, scraped beside: its pod has its sidecar.
        'vllm:num_requests_running{instance="10.0.0.7:8000",namespace="llm",pod="vllm-0",job="vllm"}': gauge(
            lambda m: round(64 * busy(m))
        ),
    }


def check(series: dict[str, str], at: str, folder: Path) -> tuple[int, str]:
    """Whether any alert fired, at any minute until `at`."""
    asked = f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{at}]))'
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": asked, "eval_time": at, "exp_samples": []}],
    }
    rules = promtool.coarse(folder / "rules.yml", "1m")
    document = promtool.complete({"tests": [test]}, KUBERNETES, rules) | {"evaluation_interval": "1m"}
    return promtool.run(document, folder / "day.yml")


def test_a_quiet_day_and_night_call_nobody(tmp_path: Path) -> None:
    """Idle night, large batches, a power cap, a restart, blips every hour, few tokens: no alert of any severity."""
    status, output = check(day(), "1d", tmp_path)

    assert status == 0, output


def test_the_same_day_with_one_real_freeze_calls_someone(tmp_path: Path) -> None:
    """The quiet day is not quiet because the rules are deaf: three minutes of freeze in it page."""
    frozen = range(90, 93)
    waited = counter(lambda m: 60 if m in frozen else 2 * (m in PAUSES))
    status, output = check(day() | {'stallwatch_stall_active_seconds_total{engine="0"}': waited}, "2h", tmp_path)

    assert status == 1
    assert re.findall(r'alertname="(\w+)"', output) == ["StallwatchReadersFrozen"]
