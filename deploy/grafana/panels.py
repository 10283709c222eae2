"""Panels as data: queries, graphs, single values, state timelines, heatmaps, tables, as Grafana's classic JSON.

In an expression `{S}` are the selectors of a sidecar and `{E}` those of an engine: a label that the scraper does not
attach is matched like one that is empty, so the same boards work with and without Kubernetes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
AXIS = 136
"""Width of the axis of every graph from side to side, in pixels: they share their time axis to the pixel."""
TILE = "1m"
"""Least width of a bar or a cell: `increase` over `$__interval` counts each thing once, and four scrapes fit in."""

_SIDECAR = 'namespace=~"$namespace",job=~"$job",pod=~"$pod",instance=~"$instance"'
_ENGINE = f'{_SIDECAR},engine=~"$engine"'
POD = "namespace, job, pod, instance"
ENGINE = f"{POD}, engine"

RED, ORANGE, GREEN, BLUE, GREY, PURPLE = "#e0503a", "#e8a33d", "#3fa66b", "#4f8fdc", "#8b949e", "#b877c9"
CAUSES = {
    "prefill": "#ff6d3c",
    "preemption": "#c94f28",
    "admission": "#57a4ec",
    "kv_transfer": "#3475b5",
    "gpu_clock": "#e3b92e",
    "gpu_idle": "#a8871c",
    "interconnect": "#30c596",
    "host_pressure": "#20815f",
    "engine_down": "#e094d1",
    "engine_hang": "#a35e96",
    "delivery": "#8fd3fc",
    "observer": "#5f666d",
    "unknown": "#949ba2",
}
"""The hues of the live page, the second of a pair darker where the page hatches it."""


def expression(text: str) -> str:
    """The expression on one line, its selectors filled in."""
    flat = " ".join(text.split())
    for mark, selectors in (("{S", _SIDECAR), ("{E", _ENGINE)):
        flat = flat.replace(mark, "{" + selectors)
    return flat


def link(title: str, url: str = "", *, tags: Sequence[str] = ()) -> dict[str, Any]:
    """A link to a page, in a tab of its own, or to all boards with these tags, with the chosen server and time."""
    return {
        "title": title,
        "type": "dashboards" if tags else "link",
        "icon": "doc",
        "tooltip": "",
        "tags": list(tags),
        "url": url,
        "asDropdown": False,
        "includeVars": bool(tags),
        "keepTime": bool(tags),
        "targetBlank": not tags,
    }


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel; an instant one gives a table's column or a single value."""

    expr: str
    legend: str = ""
    instant: bool = False
    shape: str = "time_series"

    def target(self, ref: str) -> dict[str, Any]:
        """The query as Grafana reads it."""
        return {
            "refId": ref,
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": expression(self.expr),
            "legendFormat": self.legend,
            "instant": self.instant,
            "range": not self.instant,
            "format": self.shape,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: what it shows, how to read it, where the runbook goes on."""

    kind: str
    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    width: int
    height: int
    options: Mapping[str, Any]
    custom: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[tuple[float | None, str], ...] = ()
    mappings: tuple[Mapping[str, Any], ...] = ()
    overrides: tuple[Mapping[str, Any], ...] = ()
    transformations: tuple[Mapping[str, Any], ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    empty: str = ""
    interval: str = ""
    section: str = ""

    def panel(self, number: int, x: int, y: int, runbook: str) -> dict[str, Any]:
        """The panel as Grafana reads it."""
        steps = self.steps or ((None, GREEN if self.kind == "stat" else BLUE),)
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "color": {"mode": "palette-classic" if self.kind == "timeseries" and not self.steps else "thresholds"},
            "thresholds": {
                "mode": "absolute",
                "steps": [{"value": value, "color": colour} for value, colour in steps],
            },
            "mappings": list(self.mappings),
            "custom": dict(self.custom),
            **self.limits,
        }
        if self.empty:
            defaults["noValue"] = self.empty
        made: dict[str, Any] = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [query.target(chr(ord("A") + place)) for place, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": defaults, "overrides": list(self.overrides)},
            "options": dict(self.options),
        }
        if self.interval:
            made["interval"] = self.interval
        if self.transformations:
            made["transformations"] = list(self.transformations)
        if self.section:
            made["links"] = [link(f"Runbook: {self.section}", f"{runbook}#{self.section}")]
        return made


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading; a closed one asks for nothing until somebody opens it."""

    title: str
    panels: tuple[Panel, ...]
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    span: str = "now-1h"
    variables: tuple[str, ...] = ("namespace", "job", "pod", "instance", "engine")


def paint(name: str, colour: str, **more: Any) -> dict[str, Any]:
    """A series by its name gets a colour, and what else is given."""
    properties = [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}]
    properties += [{"id": key, "value": value} for key, value in more.items()]
    return {"matcher": {"id": "byName", "options": name}, "properties": properties}


def other_unit(pattern: str, unit: str) -> dict[str, Any]:
    """Series by their names get another unit, on the right."""
    properties = [{"id": "unit", "value": unit}, {"id": "custom.axisPlacement", "value": "right"}]
    return {"matcher": {"id": "byRegexp", "options": pattern}, "properties": properties}


OBJECTIVE, ALLOWED, BUDGET = (
    paint(
        name,
        PURPLE,
        **{"custom.lineStyle": {"fill": "dash", "dash": [8, 6]}, "custom.lineWidth": 2, "custom.fillOpacity": 0},
    )
    for name in ("objective", "allowed", "advised budget")
)
CAUSE_COLOURS = tuple(paint(name, colour) for name, colour in CAUSES.items())


def graph(
    title: str,
    about: str,
    unit: str,
    *queries: Query,
    width: int = WIDTH,
    height: int = 6,
    log: bool = False,
    bars: bool = False,
    least: float = 0.0,
    **more: Any,
) -> Panel:
    """Lines over time, or stacked bars; `log` for values over several orders of magnitude.

    `least` is what the axis reaches where all values are smaller.
    """
    custom = {
        **({"axisWidth": AXIS} if width == WIDTH else {}),
        **({"axisSoftMax": least} if least else {}),
        **({"barAlignment": -1} if bars else {}),
        "drawStyle": "bars" if bars else "line",
        "lineInterpolation": "linear",
        "lineWidth": 0 if bars else 1,
        "fillOpacity": 80 if bars else 0 if log else 8,
        "showPoints": "never" if bars else "auto",
        "pointSize": 4,
        "spanNulls": False,
        "stacking": {"mode": "normal" if bars else "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": 10} if log else {"type": "linear"},
    }
    options = {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    limits = {"min": 0.001 if log else 0.0}
    return Panel(
        kind="timeseries",
        title=title,
        about=about,
        unit=unit,
        queries=queries,
        width=width,
        height=height,
        options=options,
        custom=custom,
        limits=more.pop("limits", limits),
        interval=TILE if bars else "",
        **more,
    )


def stat(
    title: str, about: str, unit: str, *asked: str | Query, width: int = 4, text: str = "auto", **more: Any
) -> Panel:
    """One value, large, as of the end of the time range: a value of before would hide that there is none any more.

    `text` is `name` where the legend is what is told, `value_and_name` for both.
    """
    queries = tuple(one if isinstance(one, Query) else Query(one, title) for one in asked)
    options = {
        "reduceOptions": {"values": False, "calcs": ["lastNotNull"], "fields": ""},
        "orientation": "auto",
        "textMode": text,
        "colorMode": "background" if more.get("mappings") or text == "name" else "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "wideLayout": True,
    }
    return Panel(
        kind="stat",
        title=title,
        about=about,
        unit=unit,
        queries=tuple(replace(query, instant=True) for query in queries),
        width=width,
        height=4,
        options=options,
        **more,
    )


def states(title: str, about: str, *queries: Query, height: int = 5, axis: int = AXIS, **more: Any) -> Panel:
    """A row for each series, coloured by its value."""
    options = {
        "mergeValues": True,
        "showValue": "never",
        "alignValue": "left",
        "rowHeight": 0.85,
        "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return Panel(
        kind="state-timeline",
        title=title,
        about=about,
        unit=more.pop("unit", "none"),
        queries=queries,
        width=WIDTH,
        height=height,
        options=options,
        custom={"fillOpacity": 85, "lineWidth": 0, "axisWidth": axis},
        **more,
    )


def heatmap(title: str, about: str, unit: str, expr: str, *, height: int = 8, **more: Any) -> Panel:
    """How the observations of a histogram spread, over time."""
    options = {
        "calculate": False,
        "yAxis": {"unit": unit, "axisPlacement": "left", "axisWidth": AXIS},
        "color": {
            "mode": "scheme",
            "scheme": "Oranges",
            "fill": "dark-orange",
            "reverse": False,
            "scale": "exponential",
            "exponent": 0.4,
            "steps": 64,
        },
        "cellGap": 1,
        "cellValues": {"unit": "short"},
        "filterValues": {"le": 1e-9},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": True},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
    }
    return Panel(
        kind="heatmap",
        title=title,
        about=about,
        unit="short",
        queries=(Query(expr, "{{le}}", shape="heatmap"),),
        width=WIDTH,
        height=height,
        options=options,
        interval=TILE,
        **more,
    )


def table(
    title: str,
    about: str,
    columns: Mapping[str, tuple[str, str]],
    *,
    worst: str,
    labels: Sequence[str] = ("namespace", "job", "pod", "instance", "engine"),
    links: Sequence[Mapping[str, Any]] = (),
    coloured: Mapping[str, tuple[tuple[float | None, str], ...]] | None = None,
    width: int = WIDTH,
    height: int = 10,
    **more: Any,
) -> Panel:
    """One line for each label set; `columns` are name -> query and unit, the largest `worst` comes first."""
    names = {f"Value #{chr(ord('A') + place)}": name for place, name in enumerate(columns)}
    order = {name: place for place, name in enumerate((*labels, *names))}
    tidy = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": names}
    overrides: list[dict[str, Any]] = [
        {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
        for name, (_, unit) in columns.items()
    ]
    for name, steps in (coloured or {}).items():
        thresholds = {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in steps]}
        overrides.append(
            {
                "matcher": {"id": "byName", "options": name},
                "properties": [
                    {"id": "custom.cellOptions", "value": {"type": "color-text"}},
                    {"id": "thresholds", "value": thresholds},
                ],
            }
        )
    if links:
        overrides.append(
            {"matcher": {"id": "byName", "options": "pod"}, "properties": [{"id": "links", "value": list(links)}]}
        )
        overrides.append(
            {"matcher": {"id": "byName", "options": "instance"}, "properties": [{"id": "links", "value": list(links)}]}
        )
    return Panel(
        kind="table",
        title=title,
        about=about,
        unit="short",
        queries=tuple(Query(expr, instant=True, shape="table") for expr, _ in columns.values()),
        width=width,
        height=height,
        options={"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": worst, "desc": True}]},
        custom={"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True, "minWidth": 80},
        overrides=tuple(overrides),
        transformations=(
            {"id": "merge", "options": {}},
            {"id": "organize", "options": tidy},
            {"id": "sortBy", "options": {"sort": [{"field": worst, "desc": True}]}},
        ),
        **more,
    )


def values(**named: tuple[float, str]) -> tuple[Mapping[str, Any], ...]:
    """Names (an underscore is a space) and colours for values."""
    shown = {
        f"{value:g}": {"text": text.replace("_", " "), "color": colour, "index": place}
        for place, (text, (value, colour)) in enumerate(named.items())
    }
    return ({"type": "value", "options": shown},)


GOOD_TO_BAD: tuple[tuple[float | None, str], ...] = ((None, GREEN), (0.5, ORANGE), (5.0, RED))
BUDGET_LEFT: tuple[tuple[float | None, str], ...] = ((None, RED), (0.0, ORANGE), (0.5, GREEN))
BURN: tuple[tuple[float | None, str], ...] = ((None, GREEN), (1.0, ORANGE), (6.0, RED))

OBJECTIVE_LINE = Query("max(stallwatch_slo_itl_objective_seconds{S})", "objective")
# What a counter grew by since the last point marks that point alone; a rate's window would colour minutes after it.
STALLS_BY_CAUSE = (
    "max by (cause) (stallwatch_stall_current_cause{E}) == 1 "
    "or max by (cause) (sgn(stallwatch_stalls_total{E} - stallwatch_stalls_total{E} offset $__interval)) == 1"
)


def cause_rows() -> Panel:
    """When readers were stalled, a row for each cause."""
    return states(
        "Stalls by cause",
        "When readers were stalled, and by what: an open stall in the colour of the cause that was thought then, the "
        "moment at which one was closed in that of the cause that it came down to. `unknown` at the beginning is "
        "normal: evidence comes with the end of the first frozen step.",
        Query(STALLS_BY_CAUSE, "{{cause}}"),
        height=6,
        mappings=({"type": "value", "options": {"1": {"text": "stalled", "index": 0}}},),
        overrides=CAUSE_COLOURS,
        empty="no stall",
        section="stallwatchreadersfrozen",
    )
