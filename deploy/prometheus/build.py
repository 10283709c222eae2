#!/usr/bin/env python3
"""Writes the Prometheus rules: plain rule files, and the same groups as PrometheusRule objects.

One source for both, so that they cannot differ. Numbers come from thresholds.yml. The files next to this one are the
output with the defaults; for links of your own:

    python deploy/prometheus/build.py --runbook https://wiki.example/stallwatch --grafana https://grafana.example

Series are told apart by namespace, job, pod and instance, whichever of them the scraper attaches. Prometheus treats a
label that is absent like one that is empty, so the same rules work with and without Kubernetes.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import yaml

HERE = Path(__file__).parent
RUNBOOK = "https://stallwatch.example/docs/runbook.md"
GRAFANA = "https://grafana.example"

POD = "namespace, job, pod, instance"
"""What tells one sidecar from another."""
ENGINE = f"{POD}, engine"
SERVICE = "namespace, job"
"""What has one error budget. With a PodMonitor set `jobLabel`, or all of a namespace is one service."""

_BY_POD = '{namespace="%s",job="%s",pod="%s",instance="%s"'
_BY_SERVICE = '{namespace="%s",job="%s"'
_POD_LABELS = "$labels.namespace $labels.job $labels.pod $labels.instance"
_SERVICE_LABELS = "$labels.namespace $labels.job"

WINDOWS_DIRECT = ("5m", "30m", "1h", "2h")
WINDOWS_AVERAGED = ("6h", "1d", "3d")
"""Windows over recorded rates: a `rate` of raw series over days reads 35,000 samples a sidecar at every evaluation."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording rule."""

    record: str
    expr: str

    def rule(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {"record": self.record, "expr": self.expr}


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule: `hold` is its `for`, `keep` its `keep_firing_for`, `dashboard` the uid of a board."""

    alert: str
    severity: str
    expr: str
    summary: str
    description: str
    hold: str = ""
    keep: str = "5m"
    labels: Mapping[str, str] = field(default_factory=dict)
    dashboard: str = "stallwatch-why"
    by_pod: bool = True

    def rule(self, runbook: str, grafana: str) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        names = ("namespace", "job", "pod", "instance") if self.by_pod else ("namespace", "job")
        variables = "&".join(f"var-{name}={{{{ $labels.{name} | urlquery }}}}" for name in names)
        rule: dict[str, Any] = {"alert": self.alert, "expr": self.expr}
        if self.hold:
            rule["for"] = self.hold
        if self.keep:
            rule["keep_firing_for"] = self.keep
        rule["labels"] = {"severity": self.severity, **self.labels}
        rule["annotations"] = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{runbook}#{self.alert.lower()}",
            "dashboard_url": f"{grafana}/d/{self.dashboard}?{variables}",
        }
        return rule


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated one after another, at one interval."""

    name: str
    interval: str
    rules: tuple[Recording | Alert, ...]

    def group(self, runbook: str, grafana: str) -> dict[str, Any]:
        """The group as Prometheus reads it."""
        rules = [rule.rule() if isinstance(rule, Recording) else rule.rule(runbook, grafana) for rule in self.rules]
        return {"name": self.name, "interval": self.interval, "rules": rules}


def thresholds() -> dict[str, str]:
    """Name -> value of every threshold, as it is written into an expression."""
    read: Mapping[str, Mapping[str, object]] = yaml.safe_load((HERE / "thresholds.yml").read_text())
    return {name: str(entry["value"]) for name, entry in read.items()}


def _expr(text: str) -> str:
    return dedent(text).strip()


def _ask(query: str, labels: str, shown: str, otherwise: str = "not known") -> str:
    """A template that shows the first sample of a query, and says so when there is none.

    `query` holds the selectors' beginnings as `{pod` or `{service`, without the closing brace.
    """
    pattern = query.replace("{pod", _BY_POD).replace("{service", _BY_SERVICE).replace('"', '\\"')
    repeated = " ".join([labels] * (query.count("{pod") + query.count("{service")))
    return f'{{{{ with printf "{pattern}" {repeated} | query }}}}{shown}{{{{ else }}}}{otherwise}{{{{ end }}}}'


_VALUE = "{{ . | first | value | %s }}"
_DURATION = _VALUE % "humanizeDuration"
_NUMBER = _VALUE % "humanize"
_SHARE = _VALUE % "humanizePercentage"

WHERE = (
    "{{ if $labels.pod }}{{ $labels.namespace }}/{{ $labels.pod }}{{ else }}{{ $labels.instance }}{{ end }}"
    "{{ if $labels.engine }} engine {{ $labels.engine }}{{ end }}"
)
SERVICE_NAME = "{{ if $labels.namespace }}{{ $labels.namespace }}/{{ end }}{{ $labels.job }}"

OBJECTIVE = _ask("max(stallwatch_slo_itl_objective_seconds{pod})", _POD_LABELS, _DURATION)
WAITING = _ask('sum(stallwatch_engine_requests{pod,state=~"waiting.*"})', _POD_LABELS, _NUMBER)
TTFT_OBJECTIVE = _ask("max(stallwatch_slo_ttft_objective_seconds{pod})", _POD_LABELS, _DURATION)
ITL_P99 = _ask("max(engine:stallwatch_itl_seconds:p99_5m{pod})", _POD_LABELS, _DURATION, "not known (too few tokens)")
WAIT = _ask("max(stallwatch_reader_wait_max_seconds{pod})", _POD_LABELS, _DURATION)
PREFILL = _ask(
    'max(stallwatch_scheduled_prefill_tokens_per_step{pod,stat="max"})', _POD_LABELS, f"up to {_NUMBER} a step"
)
BUDGET = _ask(
    "min(stallwatch_prefill_budget_tokens{pod})",
    _POD_LABELS,
    f"{_NUMBER} tokens a step",
    "not known (too few steps seen)",
)
CAUSE_NOW = _ask(
    "topk(1, max by (cause) (stallwatch_stall_current_cause{pod}) == 1)",
    _POD_LABELS,
    '{{ . | first | label "cause" }}',
    "not known yet",
)
CAUSE_LATELY = _ask(
    "topk(1, sum by (cause) (increase(stallwatch_stall_seconds_total{pod}[1h])) > 0)",
    _POD_LABELS,
    '{{ . | first | label "cause" }} (' + _DURATION + " of stalls in the last hour)",
    "none (no stall ended in the last hour)",
)
SERVICE_CAUSE = _ask(
    "topk(1, sum by (cause) (increase(stallwatch_stall_seconds_total{service}[1h])) > 0)",
    _SERVICE_LABELS,
    '{{ . | first | label "cause" }} (' + _DURATION + " of stalls in the last hour)",
    "none (no stall ended in the last hour)",
)
SERVICE_BUDGET = _ask(
    "min(stallwatch_prefill_budget_tokens{service})",
    _SERVICE_LABELS,
    f"{_NUMBER} tokens a step",
    "not known (too few steps seen)",
)
SERVICE_WORST = _ask(
    "topk(1, engine:stallwatch_slo_missed:ratio_rate5m{service})",
    _SERVICE_LABELS,
    "{{ with . | first }}{{ if .Labels.pod }}{{ .Labels.pod }}{{ else }}{{ .Labels.instance }}{{ end }} with "
    "{{ .Value | humanizePercentage }} of the last 5 minutes{{ end }}",
)


def _last(series: str, bridge: str) -> str:
    return f"last_over_time({series}[{bridge}])"


def groups() -> tuple[Group, ...]:
    """All rules."""
    t = thresholds()
    bridge = t["bridge"]

    def newest(series: str, by: str = POD) -> str:
        return f"max by ({by}) ({_last(series, bridge)})"

    def phase(name: str) -> str:
        return f'({newest(f"""stallwatch_target_phase{{phase="{name}"}}""")} == 1)'

    return (
        _frozen(t),
        _windows(t),
        _long_windows(),
        _objectives(t, newest),
        _causes(t, newest),
        _watching(t, newest, phase),
    )


Newest = Callable[..., str]


def _frozen(t: Mapping[str, str]) -> Group:
    return Group(
        "stallwatch-frozen",
        "15s",
        (
            Alert(
                "StallwatchReadersFrozen",
                "critical",
                _expr(
                    f"max by ({ENGINE}) (rate(stallwatch_stall_active_seconds_total[{t['frozen_window']}]))"
                    f" > {t['frozen_share']}"
                ),
                "Readers of this server are being kept waiting right now.",
                f"{WHERE}: frozen for {{{{ $value | humanizePercentage }}}} of the last {t['frozen_window']}. "
                f"Longest wait of the last 30 s: {WAIT}, objective {OBJECTIVE}. Cause of the open stall: {CAUSE_NOW}. "
                f"Prefill tokens: {PREFILL}; advised budget: {BUDGET}.",
                dashboard="stallwatch-readers",
            ),
        ),
    )


def _windows(t: Mapping[str, str]) -> Group:
    rules: list[Recording] = [
        Recording("service:stallwatch_slo_target:max", f"max by ({SERVICE}) (stallwatch_slo_target_ratio)"),
        Recording(
            "engine:stallwatch_slo_missed:ratio_rate5m",
            _expr(
                f"""
                sum by ({ENGINE}) (rate(stallwatch_slo_missed_seconds_total[5m]))
                /
                (sum by ({ENGINE}) (rate(stallwatch_slo_seconds_total[5m])) > 0)
                """
            ),
        ),
    ]
    for window in WINDOWS_DIRECT:
        rules += [
            Recording(
                f"service:stallwatch_slo_missed_seconds:rate{window}",
                f"sum by ({SERVICE}) (rate(stallwatch_slo_missed_seconds_total[{window}]))",
            ),
            Recording(
                f"service:stallwatch_slo_seconds:rate{window}",
                f"sum by ({SERVICE}) (rate(stallwatch_slo_seconds_total[{window}]))",
            ),
            Recording(
                f"service:stallwatch_slo_missed:ratio_rate{window}",
                f"service:stallwatch_slo_missed_seconds:rate{window}\n/\n"
                f"(service:stallwatch_slo_seconds:rate{window} > 0)",
            ),
        ]
    canary = "stallwatch_canary_inter_token_latency_seconds"
    rules += [
        Recording(
            f"service:stallwatch_canary_itl_seconds:p{q[2:]:0<2}_rate5m",
            f"histogram_quantile({q}, sum by ({SERVICE}, le) (rate({canary}_bucket[5m])))",
        )
        for q in ("0.5", "0.95", "0.99")
    ]
    rules += [
        Recording(
            "service:stallwatch_canary_ttft_seconds:p90_rate15m",
            f"histogram_quantile(0.9, sum by ({SERVICE}, le) "
            "(rate(stallwatch_canary_time_to_first_token_seconds_bucket[15m])))",
        ),
        Recording(
            "service:stallwatch_stall_seconds:rate1h",
            f"sum by ({SERVICE}, cause) (rate(stallwatch_stall_seconds_total[1h]))",
        ),
        # Only engines that have a bucket edge at or below the objective: without one nothing counts as good.
        Recording(
            "service:stallwatch_engine_itl:rate1h",
            f"sum by ({SERVICE}) (\n  rate(stallwatch_engine_itl_total[1h])\n"
            f"  and on ({ENGINE}) rate(stallwatch_engine_itl_good_total[1h])\n)",
        ),
        Recording(
            "service:stallwatch_readers_late:ratio_rate1h",
            f"1 - sum by ({SERVICE}) (rate(stallwatch_engine_itl_good_total[1h]))\n/\n"
            "(service:stallwatch_engine_itl:rate1h > 0)",
        ),
        Recording(
            "service:stallwatch_slo_burn:ratio_rate1h",
            "service:stallwatch_slo_missed:ratio_rate1h\n/\n(1 - service:stallwatch_slo_target:max)",
        ),
    ]
    del t
    return Group("stallwatch-windows", "30s", tuple(rules))


def _long_windows() -> Group:
    rules: list[Recording] = []
    for window in WINDOWS_AVERAGED:
        rules += [
            Recording(
                f"service:stallwatch_slo_missed:ratio_rate{window}",
                f"avg_over_time(service:stallwatch_slo_missed_seconds:rate5m[{window}])\n/\n"
                f"(avg_over_time(service:stallwatch_slo_seconds:rate5m[{window}]) > 0)",
            ),
            Recording(
                f"service:stallwatch_slo_seconds:rate{window}",
                f"avg_over_time(service:stallwatch_slo_seconds:rate5m[{window}])",
            ),
        ]
    return Group("stallwatch-long-windows", "2m", tuple(rules))


def _burn(
    t: Mapping[str, str], factor: str, long: str, short: str, hold: str, *, name: str, severity: str, also: str = ""
) -> Alert:
    allowed = f"clamp_max({t[factor]} * (1 - service:stallwatch_slo_target:max), {t['burn_ceiling']})"
    windows = [window for window in (long, short, also) if window]
    over = [f"service:stallwatch_slo_missed:ratio_rate{window} > on ({SERVICE}) {allowed}" for window in windows]
    enough = f"service:stallwatch_slo_seconds:rate{long} > {t['judged_share']}"
    pace = "quickly" if severity == "critical" else "too quickly to last the month"
    return Alert(
        name,
        severity,
        f"\nand on ({SERVICE}) ".join([*over, enough]),
        f"Readers of this service wait so often that its error budget is being spent {pace}.",
        f"{SERVICE_NAME}: {{{{ $value | humanizePercentage }}}} of the judged seconds of the last {long} were missed, "
        f"{t[factor]} times what the target of "
        + _ask("max(stallwatch_slo_target_ratio{service})", _SERVICE_LABELS, _SHARE)
        + f" allows or more, and it goes on. Worst: {SERVICE_WORST}. Top cause: {SERVICE_CAUSE}. "
        f"Advised prefill budget: {SERVICE_BUDGET}.",
        hold=hold,
        keep="",
        labels={"long": long, "short": short},
        dashboard="stallwatch-fleet",
        by_pod=False,
    )


def _objectives(t: Mapping[str, str], newest: Newest) -> Group:
    bridge = t["bridge"]

    def quantile(source: str) -> str:
        enough = f'{_last(f"""stallwatch_itl_samples{{source="{source}",window="5m"}}""", bridge)}'
        value = _last(f'stallwatch_itl_seconds{{source="{source}",q="0.99",window="5m"}}', bridge)
        return f"{value}\n  and on ({ENGINE}) {enough} >= {t['itl_p99_samples']}"

    persistent = _last('stallwatch_itl_samples{source="canary",window="1m"}', bridge)
    p99 = (
        f"max by ({ENGINE}) (\n  {quantile('canary')}\n  and on ({ENGINE}) {persistent}\n)\n"
        f"or max by ({ENGINE}) (\n  {quantile('engine')}\n)\n"
        f"or max by ({ENGINE}) (\n  {quantile('canary')}\n)"
    )
    still = t["itl_p99_still"]
    # Over only where that is known: no more than one of a hundred of the readers' tokens late, and no second missed.
    over = (
        f"unless on ({ENGINE}) (\n  engine:stallwatch_itl_late:ratio_rate{still} <= 0.01\n"
        f"  and on ({ENGINE}) sum by ({ENGINE}) (rate(stallwatch_slo_missed_seconds_total[{still}])) == 0\n)"
    )
    ttft = "stallwatch_canary_time_to_first_token_seconds"
    fast, slow = "StallwatchBudgetBurnFast", "StallwatchBudgetBurnSlow"
    return Group(
        "stallwatch-objectives",
        "30s",
        (
            # A persistent canary sees every gap exactly; pulses miss most freezes, so there all readers come first.
            Recording("engine:stallwatch_itl_seconds:p99_5m", p99),
            Recording(
                f"engine:stallwatch_itl_late:ratio_rate{still}",
                f"1 - sum by ({ENGINE}) (rate(stallwatch_engine_itl_good_total[{still}]))\n/\n"
                f"(sum by ({ENGINE}) (rate(stallwatch_engine_itl_total[{still}])) > 0)",
            ),
            Alert(
                "StallwatchItlP99AboveObjective",
                t["itl_p99_severity"],
                f"engine:stallwatch_itl_seconds:p99_5m\n> on ({POD}) group_left ()\n"
                f"{newest('stallwatch_slo_itl_objective_seconds')}\n{over}",
                "The 99th percentile of inter-token latency is above the objective.",
                f"{WHERE}: ITL p99 of the last 5 minutes is {{{{ $value | humanizeDuration }}}}, objective "
                f"{OBJECTIVE}. Prefill tokens: {PREFILL}; advised budget: {BUDGET}. Top cause: {CAUSE_LATELY}.",
                hold="5m",
                # Whatever is inhibited by the freeze page must not outlive it, or one freeze would be two pages.
                keep="",
                dashboard="stallwatch-readers",
            ),
            _burn(t, "burn_fast", "1h", "5m", "2m", name=fast, severity="critical"),
            # The third window ends the page with the waiting: half an hour's window remembers a freeze that is over.
            _burn(t, "burn_medium", "6h", "30m", "15m", name=fast, severity="critical", also="5m"),
            _burn(t, "burn_slow", "1d", "2h", "1h", name=slow, severity="warning"),
            _burn(t, "burn_creeping", "3d", "6h", "3h", name=slow, severity="warning"),
            Alert(
                "StallwatchReadersLate",
                "warning",
                f"service:stallwatch_readers_late:ratio_rate1h\n> on ({SERVICE}) "
                "(1 - service:stallwatch_slo_target:max)\n"
                f"and on ({SERVICE}) service:stallwatch_engine_itl:rate1h * 3600 >= {t['late_samples']}",
                "More of the readers' own tokens come late than the target allows.",
                f"{SERVICE_NAME}: {{{{ $value | humanizePercentage }}}} of all tokens of the last hour came later than "
                "the largest of vLLM's bucket edges that is not above the objective. Worst: "
                f"{SERVICE_WORST}. Top cause: {SERVICE_CAUSE}.",
                hold="15m",
                dashboard="stallwatch-fleet",
                by_pod=False,
            ),
            Alert(
                "StallwatchTtftAboveObjective",
                "warning",
                f"histogram_quantile({t['ttft_quantile']}, sum by ({ENGINE}, le) (rate({ttft}_bucket[15m])))\n"
                f"> on ({POD}) group_left ()\n{newest('stallwatch_slo_ttft_objective_seconds')}\n"
                f"and on ({ENGINE}) sum by ({ENGINE}) (increase({ttft}_count[15m])) >= {t['ttft_samples']}",
                "New requests wait longer for their first token than promised.",
                f"{WHERE}: the slow tenth of the canary's requests of the last 15 minutes waited "
                f"{{{{ $value | humanizeDuration }}}} or more for a first token, objective {TTFT_OBJECTIVE}. Waiting "
                f"requests: {WAITING}, prompt tokens still to compute: "
                + _ask("sum(stallwatch_prefill_backlog_tokens{pod})", _POD_LABELS, _NUMBER)
                + f". Top cause: {CAUSE_LATELY}.",
                hold="5m",
                dashboard="stallwatch-readers",
            ),
            Alert(
                "StallwatchAdmissionStalled",
                "warning",
                newest('stallwatch_stall_active{kind="admission"}', ENGINE) + " == 1",
                "New requests get no first token.",
                f"{WHERE}: requests that came in have waited for their first token beyond stall.ttft_seconds for "
                f"over 3 minutes. Longest wait of the last 30 s: {WAIT}. Cause: {CAUSE_NOW}. KV cache in use: "
                + _ask("max(stallwatch_engine_kv_cache_usage_ratio{pod})", _POD_LABELS, _SHARE)
                + f", waiting requests: {WAITING}.",
                hold="3m",
            ),
        ),
    )


def _causes(t: Mapping[str, str], newest: Newest) -> Group:
    return Group(
        "stallwatch-causes",
        "1m",
        (
            Alert(
                "StallwatchInterferenceHigh",
                "warning",
                f'max by ({ENGINE}) (avg_over_time(stallwatch_interference_ratio{{stat="mean"}}[10m]))'
                f" > {t['interference_ratio']}",
                "Prefill beside decode has been slowing readers down for a while.",
                f"{WHERE}: over the last 10 minutes decode steps took {{{{ $value | humanizePercentage }}}} longer "
                f"than without prefill. Prefill tokens: {PREFILL}; advised budget: {BUDGET}. ITL p99: {ITL_P99}, "
                f"objective {OBJECTIVE}.",
                hold="10m",
            ),
            Alert(
                "StallwatchDecodeBaselineShifted",
                "warning",
                f"{newest('stallwatch_decode_baseline_seconds', ENGINE)}\n/ on ({ENGINE})\n"
                f"{newest('stallwatch_decode_baseline_reference_seconds', ENGINE)}\n> {t['baseline_factor']}",
                "Decode steps without any prefill have become slower than this server's own past.",
                f"{WHERE}: a step without prefill takes {{{{ $value | humanize }}}} times what it usually took here "
                "(now "
                + _ask("max(stallwatch_decode_baseline_seconds{pod})", _POD_LABELS, _DURATION)
                + "). Not a stall: a slower machine, or a server that latched into a slow state. Lowest GPU clock to "
                "its own usual one: " + _ask("min(stallwatch_gpu_sm_clock_ratio{pod})", _POD_LABELS, _SHARE) + ".",
                hold="30m",
            ),
            Alert(
                "StallwatchGpuClockLow",
                "warning",
                f"min by ({POD}, gpu, uuid) (avg_over_time(stallwatch_gpu_sm_clock_ratio[10m])) < {t['clock_ratio']}\n"
                f"and on ({POD}) max by ({POD}) (rate(stallwatch_stall_active_seconds_total[10m]))"
                f" > {t['clock_stall_share']}",
                "A GPU runs below its own usual clock while readers wait.",
                f"{WHERE} GPU {{{{ $labels.gpu }}}}: busy at {{{{ $value | humanizePercentage }}}} of its usual SM "
                "clock. Temperature "
                + _ask("max(stallwatch_gpu_temperature_celsius{pod})", _POD_LABELS, _NUMBER + " C")
                + ", power "
                + _ask("max(stallwatch_gpu_power_watts{pod})", _POD_LABELS, _NUMBER + " W")
                + f". Top cause of stalls: {CAUSE_LATELY}.",
                hold="5m",
            ),
        ),
    )


def _watching(t: Mapping[str, str], newest: Newest, phase: Callable[[str], str]) -> Group:
    serving = phase("serving")
    serving_long = f'max by ({POD}) (min_over_time(stallwatch_target_phase{{phase="serving"}}[15m])) == 1'
    failed = "auth|cut|malformed|refused|rejected|server_error"
    incurable = "auth|dns|malformed|redirect|rejected|server_error|tls|too_large"
    outcomes = "stallwatch_canary_requests_total"
    seen = "stallwatch_build_info"
    vllm = '{__name__=~"vllm[:_]num_requests_running",%s}'
    selector = f",{t['vllm_selector']}" if t["vllm_selector"] else ""
    host = '"host", "$1", "instance", "(.*):[0-9]+"'
    needed = (
        "stallwatch_last_poll_success_timestamp_seconds",
        "stallwatch_slo_itl_objective_seconds",
        "stallwatch_slo_seconds_total",
        "stallwatch_slo_target_ratio",
        "stallwatch_slo_ttft_objective_seconds",
        "stallwatch_stall_active_seconds_total",
    )
    missing = "\nor\n".join(
        f'label_replace({serving} unless on ({POD}) {newest(series)}, "series", "{series}", "", "")'
        for series in needed
    )
    return Group(
        "stallwatch-watching",
        "30s",
        (
            # Remembers which targets are sidecars for as long as they are scraped at all, whatever their job is called.
            Recording(
                "instance:stallwatch_build_info:known",
                f"group by ({POD}) ({seen})\nor\n"
                f"(group by ({POD}) (instance:stallwatch_build_info:known) and on ({POD}) group by ({POD}) (up))",
            ),
            Alert(
                "StallwatchServerGone",
                "critical",
                f'max by ({POD}) (min_over_time(stallwatch_target_phase{{phase="gone"}}[1m])) == 1',
                "vLLM no longer accepts connections.",
                f"{WHERE}: the server that stallwatch watches has refused connections for two minutes. It answered "
                "before, so this is not a start. Polls refused in the last 5 minutes: "
                + _ask(
                    'sum(increase(stallwatch_source_failures_total{pod,source="engine",reason="refused"}[5m]))',
                    _POD_LABELS,
                    _NUMBER,
                )
                + ".",
                hold="1m",
                keep="2m",
                dashboard="stallwatch-readers",
            ),
            Alert(
                "StallwatchBlind",
                "warning",
                f'time() - {newest("""stallwatch_last_poll_success_timestamp_seconds{source="engine"}""")}'
                f" > {t['blind_seconds']}\nand on ({POD}) {serving}",
                "vLLM serves, but stallwatch gets no metrics from it.",
                f"{WHERE}: the last successful poll of vLLM's metrics was {{{{ $value | humanizeDuration }}}} ago. "
                "Freezes are seen by the canary alone, and causes not at all.",
                hold="1m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchJudgingNothing",
                "warning",
                _expr(
                    f"""
                    (max by ({POD}) (min_over_time(stallwatch_target_phase{{phase="serving"}}[5m])) == 1)
                    unless on ({POD}) sum by ({POD}) (rate(stallwatch_slo_seconds_total[5m])) > {t["judged_share"]}
                    unless on ({POD}) (
                      sum by ({POD}) (max_over_time(stallwatch_engine_requests[5m])) == 0
                      and on ({POD}) (
                        {newest("stallwatch_canary_enabled")} == 0
                        or sum by ({POD}) (increase(stallwatch_canary_skipped_total{{reason=~"idle|paused"}}[5m])) > 0
                      )
                    )
                    """
                ),
                "vLLM serves, but no second is judged: pages about waiting readers cannot come.",
                f"{WHERE}: no reader's wait has been judged in the last 5 minutes although the server serves and is "
                "not known to be idle. Canary enabled: "
                + _ask("max(stallwatch_canary_enabled{pod})", _POD_LABELS, _NUMBER)
                + "; metrics source up: "
                + _ask('max(stallwatch_source_up{pod,source="engine"})', _POD_LABELS, _NUMBER)
                + "; figures that this vLLM lacks: "
                + _ask("count(stallwatch_engine_metric_missing{pod} == 1)", _POD_LABELS, _NUMBER, "none")
                + ".",
                hold="5m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchSeriesMissing",
                "warning",
                missing,
                "A series that the paging rules need is absent, so they are silent for this server.",
                f"{WHERE}: {{{{ $labels.series }}}} is not exported although the server serves. Usually the rules are "
                "newer than the sidecar, or a relabelling drops the series.",
                hold="15m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchMetricsUnreachable",
                "warning",
                f'{newest("""stallwatch_source_up{source="engine"}""")} == 0\n'
                f"and on ({POD}) sum by ({POD}) (increase(stallwatch_source_failures_total{{"
                f'source="engine",reason=~"{incurable}"}}[5m])) > 0',
                "vLLM's metrics endpoint answers, but not with metrics.",
                f"{WHERE}: polls fail for a reason that waiting does not cure: "
                + _ask(
                    "topk(1, sum by (reason) "
                    '(increase(stallwatch_source_failures_total{pod,source="engine"}[5m])) > 0)',
                    _POD_LABELS,
                    '{{ . | first | label "reason" }}',
                )
                + ".",
                hold="5m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchStartingTooLong",
                "warning",
                phase("starting"),
                "vLLM has not answered once since stallwatch started.",
                f"{WHERE}: still starting after 45 minutes. The model may be loading, the address in engine.url may be "
                "wrong, or the server is stuck.",
                hold="45m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchCanaryFailing",
                "warning",
                _expr(
                    f"""
                    sum by ({POD}) (increase({outcomes}{{outcome=~"{failed}"}}[15m]))
                    / on ({POD})
                    (sum by ({POD}) (increase({outcomes}{{outcome!="cancelled"}}[15m])) >= {t["canary_failed_samples"]})
                    > {t["canary_failed_share"]}
                    and on ({POD}) {serving}
                    """
                ),
                "Most canary streams fail, which is not the same as being slow.",
                f"{WHERE}: {{{{ $value | humanizePercentage }}}} of the canary's streams of the last 15 minutes "
                "failed, most of them as: "
                + _ask(
                    f'topk(1, sum by (outcome) (increase({outcomes}{{pod,outcome=~"{failed}"}}[15m])) > 0)',
                    _POD_LABELS,
                    '{{ . | first | label "outcome" }}',
                )
                + ". Waits of readers are judged from the engine's metrics alone meanwhile.",
                hold="5m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchCanarySilent",
                "warning",
                _expr(
                    f"""
                    {newest("stallwatch_canary_enabled")} == 1
                    and on ({POD}) ({serving_long})
                    unless on ({POD}) sum by ({POD}) (increase({outcomes}[15m])) > 0
                    unless on ({POD}) sum by ({POD}) (increase(stallwatch_canary_skipped_total[15m])) > 0
                    unless on ({POD}) sum by ({POD}) (increase(stallwatch_canary_tokens_total[15m])) > 0
                    """
                ),
                "The canary is switched on, but neither streams nor says why not.",
                f"{WHERE}: no canary stream ended, none was skipped and no token came in 15 minutes.",
                hold="5m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchEvidenceUnknown",
                "info",
                f"sum by ({ENGINE}) (rate(stallwatch_scheduled_decode_tokens_total[15m])) > 0\n"
                f"unless on ({ENGINE}) max by ({ENGINE}) (max_over_time("
                'stallwatch_scheduled_prefill_tokens_per_step{evidence!="unknown"}[15m])) >= 0',
                "Nothing tells how many prefill tokens a step holds, so prefill can never be named as a cause.",
                f"{WHERE}: the engine decodes, and there has been no evidence of scheduled prefill tokens for 15 "
                "minutes. Stalls are still seen and paged; their cause stays unknown.",
                hold="30m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchObserverStarved",
                "warning",
                f"max by ({POD}) (min_over_time(stallwatch_observer_lag_seconds[5m])) > {t['observer_lag_seconds']}\n"
                f"or\nmax by ({POD}) (rate(stallwatch_observer_throttled_seconds_total[5m]))"
                f" > {t['observer_throttled_share']}",
                "stallwatch itself gets too little CPU to judge short waits.",
                f"{WHERE}: our own loop runs late by "
                + _ask("max(stallwatch_observer_lag_seconds{pod})", _POD_LABELS, _DURATION)
                + " and the container was throttled for "
                + _ask("max(rate(stallwatch_observer_throttled_seconds_total{pod}[5m]))", _POD_LABELS, _SHARE)
                + " of the last 5 minutes. Gaps that our lateness may explain are excluded: "
                + _ask("sum(increase(stallwatch_observer_excluded_gaps_total{pod}[5m]))", _POD_LABELS, _NUMBER)
                + " in that time.",
                hold="5m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchNvmlDown",
                "warning",
                f'{newest("""stallwatch_source_up{source="gpu"}""")} == 0',
                "GPU counters cannot be read.",
                f"{WHERE}: NVML fails. Waits are judged as before; a low clock or an idle GPU cannot be named as a "
                "cause.",
                hold="10m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchSidecarUnreachable",
                "warning",
                f"max by ({POD}) (up) == 0\nand on ({POD}) instance:stallwatch_build_info:known",
                "Prometheus cannot scrape a stallwatch sidecar.",
                f"{WHERE}: nobody watches the readers of this server.",
                hold="5m",
                dashboard="stallwatch-self",
            ),
            Alert(
                "StallwatchSidecarGone",
                "warning",
                _expr(
                    f"""
                    group by (namespace, pod) ({vllm % ('pod!=""' + selector)})
                    unless on (namespace, pod) group by (namespace, pod) (last_over_time({seen}[5m]))
                    or
                    group by (host) (label_replace({vllm % ('pod=""' + selector)}, {host}))
                    unless on (host) group by (host) (label_replace(last_over_time({seen}[5m]), {host}))
                    """
                ),
                "A vLLM server runs without its stallwatch sidecar.",
                "{{ if $labels.pod }}{{ $labels.namespace }}/{{ $labels.pod }}{{ else }}{{ $labels.host }}{{ end }}: "
                "vLLM is scraped there and no stallwatch is. Nobody watches its readers.",
                hold="10m",
                dashboard="stallwatch-fleet",
            ),
            Alert(
                "StallwatchAbsent",
                "warning",
                f"absent({seen})",
                "Prometheus sees no stallwatch at all.",
                "No sidecar has been scraped for 15 minutes: the scrape configuration is gone, or every pod is. Every "
                "other alert of stallwatch is silent meanwhile.",
                hold="15m",
                dashboard="stallwatch-fleet",
            ),
        ),
    )


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _dump(document: object, about: str) -> str:
    head = f"# {about}\n# Generated by deploy/prometheus/build.py from thresholds.yml: edit those, not this.\n"
    return head + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


def files(runbook: str = RUNBOOK, grafana: str = GRAFANA) -> dict[str, str]:
    """File name -> content."""
    listed = [group.group(runbook, grafana) for group in groups()]
    custom = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "stallwatch", "labels": {"app.kubernetes.io/name": "stallwatch"}},
        "spec": {"groups": listed},
    }
    return {
        "stallwatch.rules.yml": _dump({"groups": listed}, "Rules for Prometheus: list this file under rule_files."),
        "stallwatch.prometheusrule.yml": _dump(custom, "The same rules for the Prometheus operator."),
    }


def alerts(listed: Iterable[Group]) -> list[Alert]:
    """The alerts among the rules, in order."""
    return [rule for group in listed for rule in group.rules if isinstance(rule, Alert)]


def main(arguments: Sequence[str]) -> int:
    """Writes the files, or with --check says which differ. Returns an exit code."""
    parser = argparse.ArgumentParser(description="Write the Prometheus rules.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (default: next to this program)")
    parser.add_argument("--runbook", default=RUNBOOK, help="address of the runbook page, without an anchor")
    parser.add_argument("--grafana", default=GRAFANA, help="address of Grafana, for links to the dashboards")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs")
    chosen = parser.parse_args(arguments)
    stale = []
    for name, content in files(chosen.runbook, chosen.grafana).items():
        path = chosen.out / name
        if path.exists() and path.read_text() == content:
            continue
        stale.append(name)
        if not chosen.check:
            path.write_text(content)
    if chosen.check and stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run deploy/prometheus/build.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
