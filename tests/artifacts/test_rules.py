"""The rules for Prometheus: accepted, up to date, made of series that exist, and firing when they should."""

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.prometheus import build
from stallwatch.analysis.causes import Cause
from stallwatch.catalogue import CATALOGUE
from stallwatch.settings import FAST_BURN_FACTOR
from tests.artifacts import promtool
from tests.artifacts.promtool import FIRING, HEALTHY, KUBERNETES, PLAIN, ROOT, RULES

DEPLOYED = ROOT / "deploy" / "prometheus"
RUNBOOK = ROOT / "docs" / "runbook.md"
CASES = sorted((Path(__file__).parent / "rules").glob("*.yml"))
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
ALERTS: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
RECORDED = {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
NAMES = sorted({rule["alert"] for rule in ALERTS})

PENDING: frozenset[str] = frozenset()
"""Series that the rules use and that no sidecar exports yet: to be taken out as they come, and empty at a release."""


def texts(rule: Mapping[str, Any]) -> str:
    """Everything in a rule that may hold a query."""
    return " ".join([rule["expr"], *rule.get("annotations", {}).values()])


def used() -> set[str]:
    """Every series of ours that the rules name, recorded ones apart."""
    plain = " ".join(texts(rule) for group in GROUPS for rule in group["rules"])
    return set(re.findall(r"(?<![:\w])stallwatch_[a-z0-9_]+\b(?!:)", plain))


def anchors(page: str) -> set[str]:
    """Anchors of a Markdown page: its headings as GitHub makes them, and those written out."""
    headings = re.findall(r"^#+ +(.+)$", page, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', page))


def cases() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every test of the case files."""
    for path in CASES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            yield path, test


def by_interval(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The tests of a case file by the interval of their series."""
    found: dict[str, list[dict[str, Any]]] = {}
    for test in yaml.safe_load(path.read_text())["tests"]:
        found.setdefault(test["interval"], []).append(test)
    return found


def groups_of(path: Path) -> tuple[str, ...]:
    """The groups of rules that the tests of a case file need; none means all."""
    return tuple(yaml.safe_load(path.read_text()).get("groups", ()))


def verdict(
    tests: list[dict[str, Any]], interval: str, labels: Mapping[str, str], folder: Path, groups: tuple[str, ...] = ()
) -> tuple[int, str]:
    """What promtool says of tests whose series, and the rules with them, come at this interval."""
    own = None if interval == "15s" else interval
    rules = promtool.coarse(folder / f"rules-{interval}.yml", own, groups)
    document = promtool.complete({"tests": tests}, labels, rules) | {"evaluation_interval": interval}
    return promtool.run(document, folder / f"tests-{interval}.yml")


def test_promtool_accepts_the_rules() -> None:
    """The rule file has neither an error nor anything to complain of."""
    done = promtool.call("check", "rules", "--lint=all", "--lint-fatal", str(RULES))

    assert done.returncode == 0, done.stdout


def test_the_files_are_what_the_generator_writes() -> None:
    """Whoever edits a threshold or a rule runs `deploy/prometheus/build.py` before committing."""
    assert {name: (DEPLOYED / name).read_text() for name in build.files()} == build.files()


def test_the_operator_gets_the_same_rules() -> None:
    """The PrometheusRule object holds the groups of the plain file."""
    custom = yaml.safe_load((DEPLOYED / "stallwatch.prometheusrule.yml").read_text())

    assert (custom["apiVersion"], custom["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert custom["spec"] == {"groups": GROUPS}


def test_links_can_be_set(tmp_path: Path) -> None:
    """The generator takes the addresses of a runbook and of Grafana, and `--check` tells what is stale."""
    chosen = ["--out", str(tmp_path), "--runbook", "https://wiki/x", "--grafana", "https://graphs"]
    before = build.main([*chosen, "--check"])
    build.main(chosen)
    written = (tmp_path / "stallwatch.rules.yml").read_text()

    assert before == 1
    assert build.main([*chosen, "--check"]) == 0
    assert "runbook_url: https://wiki/x#stallwatchreadersfrozen" in written
    assert "dashboard_url: https://graphs/d/" in written


def test_every_threshold_has_a_reason_and_a_use() -> None:
    """A number without a sentence cannot be tuned, and one without a use misleads."""
    read = yaml.safe_load((DEPLOYED / "thresholds.yml").read_text())
    source = (DEPLOYED / "build.py").read_text()

    assert not [name for name, entry in read.items() if not re.fullmatch(r"[A-Z].{25,}\.", entry["why"])]
    assert not [name for name in read if f'"{name}"' not in source and f"'{name}'" not in source]


@pytest.mark.parametrize(
    "rule", ALERTS, ids=lambda rule: f"{rule['alert']}-{rule['labels'].get('long', '')}".strip("-")
)
def test_an_alert_says_what_to_do(rule: Mapping[str, Any]) -> None:
    """Severity, a summary without numbers, a description with them, a runbook section that exists, a dashboard."""
    told = rule["annotations"]

    assert re.fullmatch(r"Stallwatch[A-Z][A-Za-z0-9]+", rule["alert"])
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert re.fullmatch(r"[^{}]+\.", told["summary"])
    assert "{{" in told["description"] or rule["alert"] == "StallwatchAbsent"
    assert told["runbook_url"].rpartition("#")[2] in anchors(RUNBOOK.read_text())
    assert "/d/stallwatch-" in told["dashboard_url"]


def test_every_cause_has_a_section() -> None:
    """Findings point to the runbook by the name of the cause."""
    assert {cause.value for cause in Cause} <= anchors(RUNBOOK.read_text())


def test_the_runbook_names_what_exists() -> None:
    """Its queries use series that are exported or recorded, and its links lead to sections that are there."""
    page = RUNBOOK.read_text()
    known = {name for spec in CATALOGUE for name in spec.series} | {spec.name for spec in CATALOGUE}
    recorded = set(re.findall(r"\b(?:service|engine|instance):stallwatch_\w+:\w+", page))

    assert set(re.findall(r"(?<![:\w])stallwatch_[a-z0-9_]+\b(?!:)", page)) <= known
    assert recorded <= RECORDED
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= anchors(page)


def test_only_readers_who_wait_wake_anyone() -> None:
    """Pages are for harm to readers; whatever concerns the watching itself is a ticket."""
    assert {rule["alert"] for rule in ALERTS if rule["labels"]["severity"] == "critical"} == {
        "StallwatchReadersFrozen",
        "StallwatchItlP99AboveObjective",
        "StallwatchBudgetBurnFast",
        "StallwatchServerGone",
    }


def test_the_freeze_page_is_as_specified() -> None:
    """No `for`, held for five minutes, by engine, over two minutes."""
    rule = next(rule for rule in ALERTS if rule["alert"] == "StallwatchReadersFrozen")

    assert "for" not in rule
    assert rule["keep_firing_for"] == "5m"
    assert rule["expr"] == (
        "max by (namespace, job, pod, instance, engine) (rate(stallwatch_stall_active_seconds_total[2m])) > 0.25"
    )


def test_no_rule_uses_a_series_that_does_not_exist() -> None:
    """Every name is in the catalogue, is recorded here, or is known to be on its way."""
    known = {name for spec in CATALOGUE for name in spec.series}

    assert used() - known - PENDING == set()


def test_nothing_is_pending_that_has_come() -> None:
    """The list of series to come shrinks with the catalogue, and holds only what the rules use."""
    assert {name for spec in CATALOGUE for name in spec.series} & PENDING == set()
    assert used() >= PENDING


def test_what_is_recorded_is_named_by_level_and_used_with_its_name() -> None:
    """Recorded names are `level:metric:operation`, and a rule never names one that is not recorded."""
    named = {
        name
        for group in GROUPS
        for rule in group["rules"]
        for name in re.findall(r"\b(?:service|engine|instance):stallwatch_\w+:\w+", texts(rule))
    }

    assert all(re.fullmatch(r"(service|engine|instance):stallwatch_[a-z0-9_]+:[a-z0-9_]+", name) for name in RECORDED)
    assert named <= RECORDED


def test_what_is_asked_of_vllm_is_on_its_page() -> None:
    """The only series of vLLM's own is one that every version has."""
    page = next((ROOT / "tests" / "golden" / "vllm").glob("*-idle.prom")).read_text()

    assert "vllm[:_]num_requests_running" in RULES.read_text()
    assert re.search(r"^vllm:num_requests_running\{", page, re.MULTILINE)


def test_quantiles_are_never_averaged() -> None:
    """A quantile is computed from summed buckets, or the worst is taken; a mean of quantiles means nothing."""
    for group in GROUPS:
        for rule in group["rules"]:
            assert not re.search(r"\b(avg|sum)\b[^(]*\([^)]*stallwatch_itl(_time_weighted)?_seconds", rule["expr"])


def test_burn_factors_leave_room_below_every_second_missed() -> None:
    """A multiple of the budget that no share of seconds can reach would be an alert that never fires."""
    read = build.thresholds()
    lowest = 1 - 1 / FAST_BURN_FACTOR  # what the settings still accept

    assert float(read["burn_fast"]) == FAST_BURN_FACTOR
    assert float(read["burn_fast"]) * (1 - (lowest + 5e-5)) < 1
    assert float(read["burn_ceiling"]) < 1


def test_the_healthy_series_exist() -> None:
    """What the tests feed the rules with is what a sidecar exports."""
    known = {name for spec in CATALOGUE for name in spec.series} | PENDING | {"up"}

    assert {series.partition("{")[0] for series in HEALTHY} <= known


@pytest.mark.parametrize(
    ("path", "labels"),
    [
        *(pytest.param(path, KUBERNETES, id=f"{path.stem}-kubernetes") for path in CASES),
        *(pytest.param(path, PLAIN, id=f"{path.stem}-plain") for path in CASES if path.stem in {"readers", "causes"}),
    ],
)
def test_rules_fire_and_resolve(path: Path, labels: Mapping[str, str], tmp_path: Path) -> None:
    """Each case of the file holds, with and without the labels that Kubernetes adds."""
    faults = [
        output
        for interval, tests in by_interval(path).items()
        for status, output in [verdict(tests, interval, labels, tmp_path, groups_of(path))]
        if status != 0
    ]

    assert faults == []


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_was_seen_to_fire_to_stay_silent_and_to_resolve(name: str) -> None:
    """For each alert there is a case in which it is silent first, then fires, and later does not."""
    waits = resolves = False
    for _, test in cases():
        history = [
            any(f'alertname="{name}"' in sample["labels"] for sample in asked["exp_samples"])
            for asked in sorted(test["promql_expr_test"], key=lambda asked: promtool.seconds(asked["eval_time"]))
            if "ALERTS{" in asked["expr"]
        ]
        waits |= any(after and not before for before, after in itertools.pairwise(history))
        resolves |= any(before and not after for before, after in itertools.pairwise(history))

    assert waits
    assert resolves


def test_descriptions_are_filled_in(tmp_path: Path) -> None:
    """Whatever fires in any case, with few series there, says so in words: no template error, no missing value."""
    seen = set()
    for path, test in cases():
        firing = [
            (asked["eval_time"], found)
            for asked in test["promql_expr_test"]
            if "ALERTS{" in asked["expr"]
            for sample in asked["exp_samples"]
            for found in re.findall(r'alertname="(\w+)"', sample["labels"])
        ]
        wanted = [{"eval_time": at, "alertname": name, "exp_alerts": []} for at, name in firing if name not in seen]
        if not wanted:
            continue
        seen |= {one["alertname"] for one in wanted}
        asked = {**test, "promql_expr_test": [], "alert_rule_test": wanted}
        _, output = verdict([asked], test["interval"], KUBERNETES, tmp_path, groups_of(path))
        descriptions = re.findall(r'description="(.*?)", runbook_url', output)

        assert len(descriptions) >= len(wanted), output
        assert "error expanding" not in output
        assert "<no value>" not in output
        print("\n".join(descriptions))

    assert seen == set(NAMES)


def test_a_page_names_the_numbers_that_matter(tmp_path: Path) -> None:
    """With everything known, the page of a freeze says how long, against what, why, and which budget is advised."""
    engine = 'engine="0"'
    given = {
        f"stallwatch_stall_active_seconds_total{{{engine}}}": "0+0x20 15+15x30",
        f'stallwatch_reader_wait_max_seconds{{{engine},source="engine"}}': "2.4x60",
        f'stallwatch_stall_current_cause{{{engine},cause="prefill"}}': "1x60",
        f'stallwatch_stall_current_cause{{{engine},cause="unknown"}}': "0+0x60",
        f"stallwatch_prefill_budget_tokens{{{engine}}}": "384x60",
        f'stallwatch_prefill_budget_tokens{{{engine},instance="another",job="vllm"}}': "1x60",
    }
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in given.items()],
        "alert_rule_test": [{"eval_time": "6m", "alertname": "StallwatchReadersFrozen", "exp_alerts": []}],
    }
    _, output = verdict([test], "15s", KUBERNETES, tmp_path)

    assert (
        "llm/vllm-0 engine 0: frozen for 50% of the last 2m. Longest wait of the last 30 s: 2.4s, objective 100ms. "
        "Cause of the open stall: prefill. Prefill tokens: up to 512 a step; advised budget: 384 tokens a step."
    ) in output


def frozen(onset: float, lasts: float, offset: float, lost: int | None = None) -> list[dict[str, str]]:
    """Stall seconds as scraped every 15 s from `offset` on; `lost` counts the scrape that fails."""
    samples = ["_"] * 240
    for number, index in enumerate(range(int(offset / 5), 240, 3)):
        waited = min(lasts, max(0.0, index * 5 - onset))
        samples[index] = "stale" if number == lost else f"{waited:g}"
    return [{"series": 'stallwatch_stall_active_seconds_total{engine="0"}', "values": " ".join(samples)}]


def fires_after(series: list[dict[str, str]], onset: float, folder: Path) -> float | None:
    """Seconds from the beginning of the freeze until the alert fires; None when it does not within five minutes."""
    at = 'max(ALERTS_FOR_STATE{alertname="StallwatchReadersFrozen"})'
    times = [onset + 120, onset + 300]
    answers = promtool.values(at, series, times, folder, interval="5s", groups=("stallwatch-frozen",))
    found = [since for since in answers.values() if since]
    return min(found) - onset if found else None


def test_a_freeze_pages_within_a_minute_whenever_it_begins(tmp_path: Path) -> None:
    """Over all phases of scrape and evaluation the page comes 30 to 60 s into a freeze, and never sooner."""
    delays = [
        fires_after(frozen(300 + begins, 240, offset), 300 + begins, tmp_path)
        for offset in (0, 5, 10)
        for begins in (0, 5, 10)
    ]
    print("seconds from freeze to page, by phase:", delays)

    assert all(delay is not None and 30 <= delay <= 60 for delay in delays)


def test_a_lost_scrape_delays_the_page_by_one_scrape_at_most(tmp_path: Path) -> None:
    """Whichever of the scrapes after the beginning fails, the page comes at most 15 s later than without."""
    plain = fires_after(frozen(300, 240, 0), 300, tmp_path)
    delays = [fires_after(frozen(300, 240, 0, lost), 300, tmp_path) for lost in range(19, 25)]
    print("seconds from freeze to page, one scrape lost:", plain, delays)

    assert plain is not None
    assert all(delay is not None and delay <= plain + 15 for delay in delays)


@pytest.mark.parametrize("lasts", [2, 20])
def test_a_blip_pages_nobody_whenever_it_comes(lasts: float, tmp_path: Path) -> None:
    """Blips of 2 and of 20 s stay silent at every phase, and when the scrape at their end is lost."""
    assert [
        fires_after(frozen(300 + begins, lasts, 0, lost), 300 + begins, tmp_path)
        for begins in (0, 5, 10)
        for lost in (None, 20, 21, 22)
    ] == [None] * 12


def test_the_freeze_page_does_not_need_the_others(tmp_path: Path) -> None:
    """A sidecar that exports nothing but stall seconds still pages for a freeze."""
    test = {
        "interval": "15s",
        "healthy": False,
        "input_series": [{"series": 'stallwatch_stall_active_seconds_total{engine="0"}', "values": "0x20 15+15x20"}],
        "promql_expr_test": [
            {
                "expr": FIRING,
                "eval_time": "6m",
                "exp_samples": [{"labels": '{alertname="StallwatchReadersFrozen"}', "value": 1}],
            }
        ],
    }
    status, output = promtool.run(promtool.complete({"tests": [test]}, KUBERNETES), tmp_path / "alone.yml")

    assert status == 0, output
