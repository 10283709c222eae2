"""Runs promtool on rule tests that leave out what every sidecar exports."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "stallwatch.rules.yml"
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'

KUBERNETES = {"namespace": "llm", "job": "vllm", "pod": "vllm-0", "instance": "10.0.0.7:9709"}
PLAIN = {"job": "stallwatch", "instance": "gpu-box:9709"}

HEALTHY: Mapping[str, tuple[float, float]] = {
    "up": (1, 0),
    'stallwatch_build_info{version="1"}': (1, 0),
    'stallwatch_target_phase{phase="serving"}': (1, 0),
    'stallwatch_target_phase{phase="starting"}': (0, 0),
    'stallwatch_target_phase{phase="gone"}': (0, 0),
    'stallwatch_source_up{source="engine"}': (1, 0),
    'stallwatch_last_poll_success_timestamp_seconds{source="engine"}': (0, 1),
    "stallwatch_slo_itl_objective_seconds": (0.1, 0),
    "stallwatch_slo_ttft_objective_seconds": (5, 0),
    "stallwatch_slo_target_ratio": (0.99, 0),
    'stallwatch_slo_seconds_total{engine="0"}': (0, 1),
    'stallwatch_slo_missed_seconds_total{engine="0"}': (0, 0),
    'stallwatch_stall_active_seconds_total{engine="0"}': (0, 0),
    'stallwatch_engine_requests{engine="0",state="running"}': (3, 0),
    "stallwatch_observer_lag_seconds": (0.002, 0),
    "stallwatch_observer_throttled_seconds_total": (0, 0),
    "stallwatch_canary_enabled": (1, 0),
    "stallwatch_canary_tokens_total": (0, 4),
    'stallwatch_canary_requests_total{outcome="completed"}': (0, 1 / 15),
    'stallwatch_canary_requests_total{outcome="refused"}': (0, 0),
    'stallwatch_scheduled_decode_tokens_total{engine="0"}': (0, 80),
    'stallwatch_scheduled_prefill_tokens_per_step{engine="0",evidence="balance",stat="max"}': (512, 0),
}
"""What a healthy sidecar exports of all that the rules use: value at the start, growth a second."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def program(name: str, package: str) -> str:
    """The path of a program; the test fails with the command to install it when there is none."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing: apt-get install --yes --no-install-recommends {package}")
    return found


def seconds(text: str) -> float:
    """A duration as promtool writes it, such as 1h30m."""
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", text))


def labelled(series: str, labels: Mapping[str, str]) -> str:
    """The series with these labels, unless it says itself which instance it belongs to."""
    if "instance=" in series:
        return series
    name, _, rest = series.partition("{")
    own = rest.removesuffix("}")
    added = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{own},{added}}}" if own else f"{name}{{{added}}}"


def complete(document: Mapping[str, Any], labels: Mapping[str, str], rules: Path = RULES) -> dict[str, Any]:
    """A promtool test document: each test gets the sidecar's labels, and the healthy series that it leaves out."""
    tests = []
    for test in document["tests"]:
        step = seconds(test["interval"])
        asked = [*test.get("promql_expr_test", ()), *test.get("alert_rule_test", ())]
        count = int(max(seconds(one["eval_time"]) for one in asked) / step) + 2
        given = {one["series"]: one["values"] for one in test.get("input_series", ())}
        base = {
            series: f"{start:g}+{growth * step:.9g}x{count}"
            for series, (start, growth) in HEALTHY.items()
            if test.get("healthy", True)
        }
        series = [{"series": labelled(one, labels), "values": values} for one, values in {**base, **given}.items()]
        named = ",".join(f'{key}="{value}"' for key, value in labels.items())
        expected = [
            {**one, "exp_samples": [{**a, "labels": a["labels"].replace("ID", named)} for a in one["exp_samples"]]}
            for one in test.get("promql_expr_test", ())
        ]
        kept = {key: value for key, value in test.items() if key not in {"healthy", "name"}}
        tests.append({**kept, "name": test.get("name", ""), "input_series": series, "promql_expr_test": expected})
    return {"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests}


def coarse(path: Path, interval: str | None, groups: Sequence[str] = ()) -> Path:
    """Writes the rules, or these groups of them, evaluated at one longer interval unless that is None.

    Hours of series at 15 s take minutes of computing.
    """
    rules = yaml.safe_load(RULES.read_text())
    kept = [group for group in rules["groups"] if not groups or group["name"] in groups]
    if interval is not None:
        kept = [group | {"interval": interval} for group in kept]
    path.write_text(yaml.safe_dump({"groups": kept}, width=10_000))
    return path


def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs promtool; standard output and errors come together."""
    return subprocess.run(
        [program("promtool", "prometheus"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=110,
    )


def run(document: Mapping[str, Any], path: Path) -> tuple[int, str]:
    """Writes a document and runs `promtool test rules` on it: exit status and everything it printed."""
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=10_000))
    done = call("test", "rules", str(path))
    return done.returncode, done.stdout


def values(
    expr: str,
    series: Sequence[Mapping[str, str]],
    at: Sequence[float],
    folder: Path,
    *,
    interval: str = "15s",
    groups: Sequence[str] = (),
) -> dict[float, float | None]:
    """What an expression without labels gives at some times; None where it gives nothing."""
    asked = [{"expr": expr, "eval_time": f"{time:g}s", "exp_samples": []} for time in at]
    test = {"interval": interval, "input_series": list(series), "promql_expr_test": asked}
    rules = coarse(folder / "rules.yml", None, groups)
    _, output = run(complete({"tests": [test]}, KUBERNETES, rules), folder / "values.yml")
    answer: dict[float, float | None] = dict.fromkeys(at)
    for text, got in re.findall(r"time: (\S+),\s+exp:\s*\S*\s+got:\s*\"?\{\} ([-+\d.eE]+)", output):
        answer[seconds(text)] = float(got)
    return answer
