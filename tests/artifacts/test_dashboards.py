"""The dashboards: what the generator writes, valid, by the rules, and each query answered by a real Prometheus."""

import json
import math
import re
import statistics
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.grafana import build
from deploy.grafana.panels import SOURCE, WIDTH
from deploy.prometheus import build as rules
from stallwatch.catalogue import CATALOGUE
from tests.artifacts import history
from tests.artifacts.history import CLOCK_LOW, COMPILED, DURATION, HANG, LONG_PROMPT, SCRAPE, START, Samples
from tests.artifacts.promtool import ROOT
from tests.artifacts.test_rules import RUNBOOK, anchors, used
from tests.e2e.processes import get

pytestmark = pytest.mark.xdist_group("dashboards")

FOLDER = ROOT / "dashboards"
VLLM_PAGE = ROOT / "tests" / "golden" / "vllm" / "0.32.0.prom"
BOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
UNITS = {"none", "short", "s", "percentunit", "watt", "hertz", "celsius", "bytes", "Bps", "bool_yes_no", "suffix:/s"}
PROMETHEUS_OWN = {
    "ALERTS",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "scrape_duration_seconds",
    "scrape_samples_scraped",
}
DEAR = 600
"""Samples that a query may read for each point of a graph: a histogram's thirty buckets over twenty scrapes."""

MADE_UP = {
    "stallwatch_decode_baseline_reference_seconds": "needs a day",
    "stallwatch_engine_metric_missing": "the simulated server has everything",
    "stallwatch_engine_spec_acceptance_ratio": "no speculative decoding",
    "stallwatch_engine_throttled_seconds_total": "needs host.engine_cgroup",
    "stallwatch_gpu_dram_active_ratio": "not in the simulated NVML",
    "stallwatch_gpu_ecc_errors_total": "not in the simulated NVML",
    "stallwatch_gpu_nvlink_bytes_total": "not in the simulated NVML",
    "stallwatch_gpu_pcie_bytes_per_second": "not in the simulated NVML",
    "stallwatch_gpu_sm_occupancy_ratio": "not in the simulated NVML",
    "stallwatch_rdma_bytes_total": "not among the simulated host's files",
}
"""Series that the recorded fleet has none of, and why; the fleet gets one that is constant, or grows steadily."""

NEVER_GREW = {"stallwatch_canary_skipped_total"}
"""Counters without which a query may stay empty: no pulse was skipped."""

VALUES = {
    "engine": "0",
    "field": "preemptions",
    "gpu": "0",
    "uuid": "GPU-0",
    "direction": "tx",
    "kind": "uncorrected",
    "device": "mlx5_0",
    "port": "1",
}
"""What made-up series say in their labels."""

LABELLED = 'namespace="llm",job="vllm",pod="vllm-1",instance="vllm-1:9709"'
"""Labels of the calm server."""

PLAIN = 'job="stallwatch",instance="gpu-box:9709"'
"""Labels of a sidecar that is scraped outside Kubernetes, and whose vLLM is not scraped."""

UNSEEN = {
    "stallwatch_gpu_energy_joules_total",  # the power panel shows the same
    "stallwatch_gpu_memory_clock_hertz",
    "stallwatch_rdma_link_bytes_per_second",
}
"""Series for queries by hand: on no dashboard and in no rule."""


@dataclass(frozen=True)
class Asked:
    """One query of a panel."""

    board: str
    panel: dict[str, Any]
    target: dict[str, Any]

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.board}: {self.panel['title']}, {self.target['refId']}"


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels of a board, also those in closed rows."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries() -> Iterator[Asked]:
    """All queries of all boards."""
    for name, board in BOARDS.items():
        for panel in panels(board):
            for target in panel.get("targets", ()):
                yield Asked(name, panel, target)


def series(expr: str) -> set[str]:
    """Names of series in an expression; of vLLM's without their colon."""
    inside = re.findall(r'__name__=~"([^"]+)"', expr)
    plain = re.sub(r"\{[^}]*\}|\"[^\"]*\"", "", expr)
    ours = set(re.findall(r"\b(?:stallwatch|process|scrape)_[a-z0-9_]+\b|\bALERTS\b", plain))
    return ours | {name.replace("[:_]", "_") for name in inside}


def test_the_files_are_what_the_generator_writes() -> None:
    """Whoever changes a board runs `make docs` before committing; nothing else lies in the folder."""
    assert {path.name: path.read_text() for path in FOLDER.glob("*.json")} == build.files()


def test_links_can_be_set() -> None:
    """The generator takes the address of another runbook, for panels and boards."""
    made = build.files("https://wiki/x")["stallwatch-readers.json"]

    assert '"url": "https://wiki/x#stallwatchreadersfrozen"' in made
    assert '"url": "https://wiki/x"' in made
    assert build.RUNBOOK not in made


OPTIONS = {
    "timeseries": {"legend", "tooltip"},
    "stat": {"reduceOptions", "orientation", "textMode", "colorMode", "graphMode", "justifyMode", "wideLayout"},
    "state-timeline": {"mergeValues", "showValue", "alignValue", "rowHeight", "legend", "tooltip"},
    "heatmap": {
        *("calculate", "yAxis", "color", "cellGap", "cellValues", "filterValues", "rowsFrame", "showValue"),
        *("legend", "tooltip", "exemplars"),
    },
    "table": {"showHeader", "cellHeight", "sortBy"},
}
"""Kinds of panels, and the options that Grafana's own schema gives to each."""

CUSTOM = {
    "timeseries": {
        *(
            "axisWidth",
            "axisSoftMax",
            "barAlignment",
            "drawStyle",
            "lineInterpolation",
            "lineWidth",
            "fillOpacity",
            "showPoints",
            "pointSize",
        ),
        *("spanNulls", "stacking", "scaleDistribution", "lineStyle", "axisPlacement"),
    },
    "stat": set[str](),
    "state-timeline": {"fillOpacity", "lineWidth", "axisWidth"},
    "heatmap": {"scaleDistribution", "hideFrom"},
    "table": {"align", "cellOptions", "filterable", "minWidth"},
}
STANDARD = {"unit", "color", "thresholds", "mappings", "min", "max", "decimals", "noValue", "links", "displayName"}
PANEL = {"id", "type", "title", "description", "datasource", "gridPos", "targets", "fieldConfig", "options"}
PANEL |= {"interval", "transformations", "links"}
TARGET = {"refId", "datasource", "editorMode", "expr", "legendFormat", "instant", "range", "format"}
CHOICES = {
    "drawStyle": {"line", "bars"},
    "lineInterpolation": {"linear"},
    "showPoints": {"auto", "never"},
    "mode": {
        "absolute",
        "fixed",
        "list",
        "multi",
        "none",
        "normal",
        "palette-classic",
        "scheme",
        "single",
        "thresholds",
    },
    "format": {"time_series", "table", "heatmap"},
    "colorMode": {"value", "background"},
    "graphMode": {"none"},
    "textMode": {"auto", "name", "value_and_name"},
}
"""Words that Grafana understands where it would take others in silence and draw something else."""


def words(found: Any) -> Iterator[tuple[str, str]]:
    """Every field with a text in it, at any depth."""
    if isinstance(found, dict):
        for key, value in found.items():
            if isinstance(value, str):
                yield key, value
            yield from words(value)
    elif isinstance(found, list):
        for value in found:
            yield from words(value)


@pytest.mark.parametrize("name", BOARDS)
def test_the_schema_knows_every_field(name: str) -> None:
    """Grafana ignores what it does not know: no field is misspelt or in a wrong place, no word is of our invention."""
    for panel in panels(BOARDS[name]):
        if panel["type"] == "row":
            assert set(panel) == {"id", "type", "title", "collapsed", "gridPos", "panels"}
            continue
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        overridden = {one["id"] for override in panel["fieldConfig"]["overrides"] for one in override["properties"]}
        assert set(panel) <= PANEL, title
        assert set(panel["options"]) <= OPTIONS[panel["type"]], title
        assert set(defaults) - {"custom"} <= STANDARD, title
        assert set(defaults["custom"]) <= CUSTOM[panel["type"]], title
        assert overridden <= STANDARD | {f"custom.{field}" for field in CUSTOM[panel["type"]]}, title
        assert all(set(target) == TARGET for target in panel["targets"]), title
    assert {
        (key, value) for key, value in words(BOARDS[name]["panels"]) if value not in CHOICES.get(key, {value})
    } == set()


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_imports_anywhere(name: str) -> None:
    """No data source, range of ids or place is fixed: variables, unique ids, no overlap, a shared crosshair, links."""
    board = BOARDS[name]
    numbers = [panel["id"] for panel in panels(board)]
    shown = {variable["name"]: variable for variable in board["templating"]["list"]}

    assert board["uid"] == name
    assert "id" not in board
    assert (board["graphTooltip"], board["schemaVersion"], board["editable"]) == (1, 39, False)
    assert len(numbers) == len(set(numbers))
    assert list(shown) == ["datasource", "namespace", "job", "pod", "instance", "engine"]
    assert shown["datasource"]["query"] == "prometheus"
    assert all(
        variable["refresh"] == 2 and variable["includeAll"] and variable["allValue"] == ".*"
        for variable in board["templating"]["list"][1:]
    )
    assert {json.dumps(found) for found in _sources(board)} == {json.dumps(SOURCE)}
    assert {note["name"] for note in board["annotations"]["list"]} == {"Alerts", "Stalls"}
    assert any(link.get("url") == build.RUNBOOK for link in board["links"])
    assert list(_overlaps(board["panels"])) == []
    assert len(json.dumps(board)) < 900_000  # a ConfigMap holds a megabyte


def _sources(found: Any) -> Iterator[Any]:
    if isinstance(found, dict):
        if "datasource" in found:
            yield found["datasource"]
        for value in found.values():
            yield from _sources(value)
    elif isinstance(found, list):
        for value in found:
            yield from _sources(value)


def _overlaps(placed: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    spots: dict[tuple[int, int], str] = {}
    for panel in placed:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= WIDTH
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                if (x, y) in spots:
                    yield spots[x, y], panel["title"]
                spots[x, y] = panel["title"]


def test_every_panel_says_how_to_read_it() -> None:
    """Title, description as a sentence, a unit that Grafana has, and a link to a section of the runbook that exists."""
    known = anchors(RUNBOOK.read_text())
    for name, board in BOARDS.items():
        for panel in panels(board):
            if panel["type"] == "row":
                continue
            assert re.fullmatch(r"[A-Za-z][^{}]+", panel["title"]), (name, panel["title"])
            assert re.fullmatch(r"(?s)\w.{20,}\.", panel["description"]), (name, panel["title"])
            defaults = panel["fieldConfig"]["defaults"]
            units = {defaults["unit"]} | {
                one["value"]
                for override in panel["fieldConfig"]["overrides"]
                for one in override["properties"]
                if one["id"] == "unit"
            }
            assert units <= UNITS, (name, panel["title"])
            assert {link["url"].rpartition("#")[2] for link in panel.get("links", ())} <= known, (name, panel["title"])


def test_alerts_lead_to_boards_that_exist() -> None:
    """The dashboard of each alert is one of these."""
    assert {alert.dashboard for alert in rules.alerts(rules.groups())} <= set(BOARDS)


def test_every_query_selects_and_names() -> None:
    """Each query uses the variables, counters stand in a rate or difference, fixed windows are four scrapes or more."""
    for asked in queries():
        expr = asked.target["expr"]
        assert "$namespace" in expr, asked.name
        assert "$pod" in expr, asked.name
        assert asked.target["legendFormat"] or asked.panel["type"] == "table", asked.name
        for counter in re.findall(r"\b\w+_total\b(?=\{)", expr):
            plain = re.search(rf"\({counter}(\{{[^}}]*\}}) - {counter}\1 offset \$__interval\)", expr)
            assert plain or re.search(rf"\b(rate|increase)\({counter}\{{", expr), (asked.name, counter)
        for number, unit in re.findall(r"\[(\d+)([smhd])\]", expr):
            assert int(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit] >= 4 * SCRAPE, asked.name
        assert not re.search(r"avg[^(]*\((?:[^()]|\([^()]*\))*stallwatch_itl", expr), asked.name


def test_every_series_exists() -> None:
    """Each name is in our catalogue, on vLLM's page as it really was, or Prometheus's own."""
    ours = {name for spec in CATALOGUE for name in spec.series}
    vllm = {f"vllm_{name}" for name in re.findall(r"^vllm:(\w+)", VLLM_PAGE.read_text(), re.MULTILINE)}

    assert {name for asked in queries() for name in series(asked.target["expr"])} <= ours | vllm | PROMETHEUS_OWN


def test_every_label_exists() -> None:
    """What a query selects or groups by is a label of a series in it, or one that the scraper attaches."""
    attached = {"namespace", "job", "pod", "instance", "le", "__name__"}
    labels = {name: set(spec.labels) for spec in CATALOGUE for name in spec.series}
    for name, told in re.findall(r"^vllm:(\w+)\{([^}]*)\}", VLLM_PAGE.read_text(), re.MULTILINE):
        labels.setdefault(f"vllm_{name}", set()).update(re.findall(r"(\w+)=", told))
    for asked in queries():
        expr = asked.target["expr"]
        here = {label for name in series(expr) for label in labels.get(name, ())}
        used_here = set(re.findall(r"[{,](\w+)=", expr))
        for group in re.findall(r"(?:by|on) \(([^)]*)\)", expr):
            used_here |= {label.strip() for label in group.split(",")}
        assert used_here <= here | attached, asked.name


def test_everything_exported_is_shown_somewhere() -> None:
    """Each family is on a dashboard or in a rule, or stands in the list of those for queries by hand."""
    shown = {name for asked in queries() for name in series(asked.target["expr"])} | used()
    forgotten = {spec.name for spec in CATALOGUE if not spec.series & shown} - UNSEEN

    assert forgotten == set()
    assert not {spec.name for spec in CATALOGUE if spec.series & shown} & UNSEEN


def made_up() -> Samples:
    """A series of each name that the simulated fleet lacks, and a firing alert."""
    times = [START + SCRAPE * count for count in range(1, int(DURATION / SCRAPE) + 1)]
    labels = {spec.name: spec.labels for spec in CATALOGUE}
    made: Samples = {}
    for name in MADE_UP:
        told = "".join(f'{label}="{VALUES[label]}",' for label in labels[name])
        rate = 1.0 if name.endswith("_total") else 0.0
        made[f"{name}{{{told}{LABELLED}}}"] = [(at, 1.0 + rate * (at - START)) for at in times]
    alert = 'alertname="StallwatchReadersFrozen",alertstate="firing",severity="critical"'
    return made | {f"ALERTS{{{alert},{LABELLED}}}": [(at, 1.0) for at in times[8:16]]}


@pytest.fixture(scope="module")
def recorded() -> Samples:
    """Eight minutes of a simulated fleet, the calm server once more as it is scraped outside Kubernetes."""
    fleet = history.fleet()
    calm = {series: points for series, points in fleet.items() if LABELLED in series and not series.startswith("vllm")}
    return fleet | {series.replace(LABELLED, PLAIN): points for series, points in calm.items()}


@pytest.fixture(scope="module")
def server(recorded: Samples, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prometheus that holds the fleet and what it lacks."""
    folder = tmp_path_factory.mktemp("history")
    blocks = history.write_blocks(recorded | made_up(), folder)
    with history.prometheus(blocks, folder / "prometheus.log") as url:
        yield url


Points = list[tuple[dict[str, str], list[tuple[float, float]]]]
"""Labels, and seconds since the history began with their values."""


def asked_for(server: str, panel: dict[str, Any], target: dict[str, Any], **variables: str) -> dict[str, Any]:
    """What Prometheus says to a query of a panel over the whole history, and how many samples it read for that."""
    step = 60.0 if panel.get("interval") == "1m" else SCRAPE
    everywhere = dict.fromkeys(("namespace", "job", "pod", "instance", "engine"), ".*")
    filled = target["expr"]
    windows = {"__rate_interval": "75s", "__interval": f"{step:.0f}s", "__range": f"{DURATION:.0f}s"}
    for name, value in {**everywhere, **windows, **variables}.items():
        filled = filled.replace(f"${name}", value)
    asked = {"query": filled, "stats": "all"}
    if target["instant"]:
        path, asked = "query", asked | {"time": str(START + DURATION)}
    else:
        path = "query_range"
        asked |= {"start": str(START), "end": str(START + DURATION), "step": f"{step:.0f}s"}
    document = json.loads(get(f"{server}/api/v1/{path}?{urllib.parse.urlencode(asked)}", timeout=30))
    found: dict[str, Any] = document["data"]
    return found


def answer(server: str, panel: dict[str, Any], target: dict[str, Any], **variables: str) -> Points:
    """The series of an answer. Raises for a query that fails."""
    return [
        (
            found["metric"],
            [
                (float(at) - START, float(value))
                for at, value in found.get("values", [found.get("value")])
                if math.isfinite(float(value))
            ],
        )
        for found in asked_for(server, panel, target, **variables)["result"]
    ]


def shown(server: str, board: str, title: str, legend: str, **variables: str) -> dict[float, float]:
    """One line of a panel, or how its single value went: seconds since the history began -> value."""
    asked = next(
        asked
        for asked in queries()
        if (asked.board, asked.panel["title"], asked.target["legendFormat"]) == (f"stallwatch-{board}", title, legend)
    )
    found = answer(server, asked.panel, {**asked.target, "instant": False}, **variables)
    assert len(found) <= 1, (title, legend, [labels for labels, _ in found])
    return dict(found[0][1]) if found else {}


def answered(server: str, title: str, **variables: str) -> Points:
    """All lines of the first query of a panel."""
    asked = next(asked for asked in queries() if asked.panel["title"] == title)
    return answer(server, asked.panel, asked.target, **variables)


def named(legend: str, labels: dict[str, str]) -> str:
    """The legend of one series."""
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: labels.get(mark[1], ""), legend)


def within(line: dict[float, float], begin: float, end: float) -> list[float]:
    """The values of a stretch of time."""
    return [value for at, value in line.items() if begin <= at <= end]


def test_every_query_is_answered(server: str) -> None:
    """None fails, none is empty all the time, none gives two lines of one name."""
    empty, double = [], []
    for asked in queries():
        found = answer(server, asked.panel, asked.target)
        ever = answer(server, asked.panel, {**asked.target, "instant": False}) if asked.target["instant"] else found
        if not any(points for _, points in ever) and not series(asked.target["expr"]) & NEVER_GREW:
            empty.append(asked.name)
        names = [named(asked.target["legendFormat"], labels) for labels, _ in found]
        if asked.panel["type"] != "table" and len(names) != len(set(names)):
            double.append(asked.name)

    assert empty == []
    assert double == []


def test_no_query_is_dear(server: str) -> None:
    """What a board asks of Prometheus at each refresh stays small for one server; the dearest queries are named."""
    costs: list[tuple[int, float, str]] = []
    for asked in queries():
        began = time.perf_counter()
        stats = asked_for(server, asked.panel, asked.target, pod="vllm-0")["stats"]
        costs.append((stats["samples"]["totalQueryableSamples"], time.perf_counter() - began, asked.name))
    costs.sort(reverse=True)
    points = DURATION / SCRAPE
    for samples, took, name in costs[:5]:
        print(f"{samples / points:6.0f} samples a point, {took * 1000:.0f} ms: {name}")

    assert [name for samples, _, name in costs if samples / points > DEAR] == []


def test_nothing_is_made_up_that_is_there(recorded: Samples) -> None:
    """The list of series that the fleet lacks holds none that it has."""
    assert {name for series in recorded if (name := series.partition("{")[0]) in MADE_UP} == set()


def test_it_works_with_only_stallwatch_scraped(server: str) -> None:
    """Without vLLM's page only the panels of the row that says so stay empty, and without Kubernetes none."""
    needing = {
        asked.panel["title"]
        for asked in queries()
        if any(name.startswith("vllm_") for name in series(asked.target["expr"]))
    }
    row = next(panel for panel in BOARDS["stallwatch-why"]["panels"] if panel["title"].startswith("vLLM's own page"))
    empty = []
    for asked in queries():
        target = {**asked.target, "instant": False}
        inside = answer(server, asked.panel, target, pod="vllm-1")
        outside = answer(server, asked.panel, target, namespace="", pod="")
        if inside and not outside and not series(asked.target["expr"]) & {*MADE_UP, "ALERTS"}:
            empty.append(asked.panel["title"])

    assert row["collapsed"]
    assert needing == {panel["title"] for panel in row["panels"]}
    assert set(empty) == needing


def test_the_freeze_shows_where_readers_look(server: str) -> None:
    """p99 by time, the open gap, the longest wait and the step age rise in the freeze; p99 by tokens falls in it."""
    one = {"pod": "vllm-0"}
    latency = "Inter-token latency, 5 min"
    by_time = shown(server, "readers", latency, "by time p99", **one)
    by_tokens = shown(server, "readers", latency, "canary p99", **one)

    assert max(within(by_time, 30, LONG_PROMPT - 15)) < 0.5
    assert max(within(by_time, HANG[0] + 15, DURATION)) > 30
    assert max(within(by_tokens, HANG[0] + 30, DURATION)) < 0.5
    for asked in queries():
        if asked.panel["title"] not in {"Waits", "Longest wait, last 30 s"} or "objective" in asked.target["expr"]:
            continue
        for _, points in answer(server, asked.panel, {**asked.target, "instant": False}, **one):
            assert max(within(dict(points), 30, LONG_PROMPT - 15)) < 0.5, asked.name
            assert max(within(dict(points), *HANG)) > 30, asked.name


def test_the_verdict_says_what_readers_feel(server: str) -> None:
    """Served while all is well, then what is worst: readers wait, nobody sees the server, it is gone."""
    panel = next(asked.panel for asked in queries() if asked.panel["title"] == "Verdict")
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    said = {
        pod: {
            at: mapping["options"][f"{value:g}"]["text"]
            for at, value in shown(server, "readers", "Verdict", "Verdict", pod=pod).items()
        }
        for pod in ("vllm-0", "vllm-1", "vllm-2")
    }

    assert said["vllm-0"][60.0] == "Served"
    assert said["vllm-0"][105.0] == said["vllm-0"][420.0] == "Readers wait"
    assert set(said["vllm-1"].values()) <= {"Served", "Starting"}
    assert said["vllm-1"][DURATION] == "Served"
    assert {"Server gone", "Blind", "Served"} <= set(said["vllm-2"].values())


def test_single_values_judge(server: str) -> None:
    """p99 is above the objective or within it, never both; the budget is spent or whole; much was lost, or little."""
    budget, lost = "Budget left", "Reader-seconds lost"
    for pod, spent in (("vllm-0", True), ("vllm-1", False)):
        above = shown(server, "readers", "ITL p99, 5 min", "above the objective", pod=pod)
        inside = shown(server, "readers", "ITL p99, 5 min", "within the objective", pod=pod)

        assert bool(above) is spent
        assert inside
        assert not set(above) & set(inside)
        assert all(value > 0.1 for value in above.values())
        assert all(value <= 0.1 for value in inside.values())
        assert (shown(server, "readers", budget, budget, pod=pod)[DURATION] == -1) is spent
        assert (shown(server, "readers", lost, lost, pod=pod)[DURATION] > 100) is spent


def test_the_p99_of_all_readers_rises_with_prefill(server: str) -> None:
    """Three readers beside prompts of 1,800 tokens: p99 of vLLM's own buckets goes above the objective."""
    line = shown(server, "readers", "Inter-token latency, 5 min", "all readers p99", pod="vllm-0")
    medium = history.MEDIUM_PROMPTS

    assert statistics.median(within(line, 45, LONG_PROMPT)) < 0.1
    assert max(within(line, *medium)) > 0.3


def test_a_calm_server_looks_calm(server: str) -> None:
    """Of the server in which nothing happens no panel shows a stall, and nothing is missed."""
    missed = shown(server, "readers", "Seconds missed", "missed, 5m", pod="vllm-1")

    assert max(missed.values()) < 0.01
    assert answered(server, "Stalls by cause", pod="vllm-1") == []


def test_the_causes_appear_when_they_were_there(server: str) -> None:
    """Prefill while the long prompt is computed, the clock while it is low, a hang while nothing steps."""
    found = {labels["cause"]: dict(points) for labels, points in answered(server, "Stalls by cause", pod="vllm-0")}

    assert within(found["prefill"], LONG_PROMPT, LONG_PROMPT + 45)
    assert within(found["gpu_clock"], *CLOCK_LOW)
    assert within(found["gpu_idle"], COMPILED, COMPILED + 2 * SCRAPE)
    assert within(found["engine_hang"], HANG[0] + 30, HANG[1])
    assert not [cause for cause in found if within(found[cause], LONG_PROMPT + 60, CLOCK_LOW[0])]


def test_interference_is_the_uncached_prompts(server: str) -> None:
    """The same long prompt costs readers while it is computed, and nothing while it comes from the cache."""
    lost = shown(server, "why", "Interference", "seconds lost a second", pod="vllm-0", __rate_interval="30s")
    tokens = {
        labels["source"]: dict(points)
        for labels, points in answered(server, "Prompt tokens: computed and cached", pod="vllm-0")
    }
    uncached = max(within(lost, LONG_PROMPT + 15, LONG_PROMPT + 45))
    cached = max(within(lost, LONG_PROMPT + 60, CLOCK_LOW[0]))

    print(f"interference: {uncached:.2f} s a second beside the uncached prompt, {cached:.2f} beside the cached one")
    assert uncached > 0.5
    assert cached < uncached / 5
    assert max(within(tokens["computed"], 90, 150)) > 500
    assert max(within(tokens["cached"], 150, 180)) > 500


def test_the_gaps_heatmap_has_the_freeze_in_it(server: str) -> None:
    """Gaps of a second and more are there in the stalls, and none before them."""
    buckets = {labels["le"]: dict(points) for labels, points in answered(server, "Gaps of the canary", pod="vllm-0")}
    long = {at: count - buckets["1.0"].get(at, 0.0) for at, count in buckets["+Inf"].items()}

    assert long[60.0] == 0
    assert long[120.0] > 5
    assert max(buckets["+Inf"].values()) > 500


def test_the_why_board_shows_what_the_engine_did(server: str) -> None:
    """Prefill in the steps, the lower clock, and no step at all in the hang, each in its time."""
    one = {"pod": "vllm-0"}
    steps = shown(server, "why", "Steps", "steps", **one)
    clock = shown(server, "why", "SM clock, to its own usual one", "GPU {{gpu}}", **one)
    backlog = shown(server, "why", "Prefill backlog", "tokens to go", **one)
    carried = {labels["stat"]: dict(points) for labels, points in answered(server, "Prefill tokens in a step", **one)}
    budget = shown(server, "why", "Prefill budget", "advised budget", **one)

    assert max(within(backlog, LONG_PROMPT, LONG_PROMPT + 30)) > 10_000
    assert max(within(carried["max"], LONG_PROMPT, LONG_PROMPT + 30)) > 1_000
    assert max(within(carried["max"], 15, LONG_PROMPT - 15)) < 1_000
    assert 0 < statistics.median(budget.values()) < max(carried["max"].values())
    assert min(within(clock, *CLOCK_LOW)) < 0.5
    assert min(within(clock, 60, CLOCK_LOW[0] - 5)) > 0.9
    assert min(within(steps, *HANG)) < statistics.median(steps.values()) / 2


def test_the_fleet_lists_the_worst_first(server: str) -> None:
    """By burn the server with the freezes is the first of three, and what a table joins by is the same everywhere."""
    asked = [asked for asked in queries() if asked.panel["title"] == "Servers, worst first"]
    answers = [answer(server, one.panel, one.target) for one in asked]
    burns = {labels.get("pod"): points[-1][1] for labels, points in answers[0]}

    assert max(burns, key=lambda pod: burns[pod]) == "vllm-0"
    assert burns["vllm-0"] > 14.4
    assert burns["vllm-1"] < 1
    assert {frozenset(labels) for found in answers for labels, _ in found} == {
        frozenset({"namespace", "job", "pod", "instance", "engine"}),
        frozenset({"job", "instance", "engine"}),
    }


def test_a_server_of_the_fleet_leads_to_why() -> None:
    """Its pod, and its instance where there are no pods, are links to boards that exist, with it chosen there."""
    worst = next(panel for panel in panels(BOARDS["stallwatch-fleet"]) if panel["title"] == "Servers, worst first")
    links = {
        override["matcher"]["options"]: one["value"]
        for override in worst["fieldConfig"]["overrides"]
        for one in override["properties"]
        if one["id"] == "links"
    }

    assert set(links) == {"pod", "instance"}
    for link in (link for listed in links.values() for link in listed):
        board, _, chosen = link["url"].removeprefix("/d/").partition("?")
        known = {variable["name"] for variable in BOARDS[board]["templating"]["list"]}
        names = set(re.findall(r"var-(\w+)=", chosen))
        assert {"datasource", "job", "pod", "instance"} <= names <= known
        assert chosen.endswith("${__url_time_range}")
    assert links["pod"][0]["url"].startswith("/d/stallwatch-why?")
    assert worst["transformations"][-1] == {
        "id": "sortBy",
        "options": {"sort": [{"field": "burn, 1h", "desc": True}]},
    }


def test_annotations_and_variables_are_answered(server: str) -> None:
    """Alerts and stalls are found, and each variable has values."""
    for board in BOARDS.values():
        for note in board["annotations"]["list"]:
            assert answer(server, {}, {"expr": note["expr"], "instant": False}), note["name"]
        for variable in board["templating"]["list"][1:]:
            inside = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert inside
            found = answer(server, {}, {"expr": f"count by ({inside[2]}) ({inside[1]})", "instant": True})
            assert any(labels.get(inside[2]) for labels, _ in found), variable["name"]
