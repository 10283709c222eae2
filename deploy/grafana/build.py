"""The dashboards as Grafana imports them: classic ones, by file, by ConfigMap or by hand. No recording rule is needed.

`python -m deploy.build` writes them to dashboards/.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from deploy.grafana import fleet, itself, readers, why
from deploy.grafana.panels import ORANGE, RED, SOURCE, STALLS_BY_CAUSE, WIDTH, Board, Row, expression, link

RUNBOOK = "https://stallwatch.example/docs/runbook.md"


def boards() -> tuple[Board, ...]:
    """All dashboards."""
    return readers.board(), why.board(), fleet.board(), itself.board()


def _variable(name: str, before: Sequence[str]) -> dict[str, Any]:
    series = "stallwatch_stall_active_seconds_total" if name == "engine" else "stallwatch_build_info"
    narrowed = ",".join(f'{other}=~"${other}"' for other in before)
    return {
        "name": name,
        "label": {"job": "Job", "engine": "Engine (DP rank)"}.get(name, name.capitalize()),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({series}{{{narrowed}}}, {name})", "refId": name},
        "definition": f"label_values({series}{{{narrowed}}}, {name})",
        "refresh": 2,
        "sort": 7,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
        "hide": 0,
    }


def _annotations() -> dict[str, Any]:
    def annotation(name: str, expr: str, title: str, text: str, colour: str) -> dict[str, Any]:
        return {
            "name": name,
            "datasource": SOURCE,
            "enable": True,
            "hide": False,
            "iconColor": colour,
            "expr": expression(expr),
            "step": "15s",
            "titleFormat": title,
            "textFormat": text,
            "tagKeys": "",
            "useValueForTime": False,
        }

    return {
        "list": [
            annotation(
                "Alerts",
                'ALERTS{alertname=~"Stallwatch.+",alertstate="firing",severity=~"critical|warning",'
                'namespace=~"$namespace",job=~"$job|"}',
                "{{alertname}}",
                "{{severity}} {{pod}} {{instance}}",
                RED,
            ),
            annotation("Stalls", STALLS_BY_CAUSE, "stall: {{cause}}", "{{cause}}", ORANGE),
        ]
    }


def _laid_out(rows: Iterable[Row], runbook: str) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    number, y = 1, 0
    for row in rows:
        heading: dict[str, Any] = {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": row.closed,
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            "panels": [],
        }
        number, y, x, tallest = number + 1, y + 1, 0, 0
        inside: list[dict[str, Any]] = []
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            inside.append(panel.panel(number, x, y, runbook))
            number, x, tallest = number + 1, x + panel.width, max(tallest, panel.height)
        if row.closed:
            made.append({**heading, "panels": inside})
            y = heading["gridPos"]["y"] + 1
        else:
            made += [heading, *inside]
            y += tallest
    return made


def dashboard(board: Board, runbook: str) -> dict[str, Any]:
    """The board as Grafana imports it."""
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "options": [],
        "current": {},
    }
    names = board.variables
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.about,
        "tags": ["stallwatch", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "15s",
        "time": {"from": board.span, "to": "now"},
        "templating": {
            "list": [source, *(_variable(name, names[:place]) for place, name in enumerate(names))],
        },
        "annotations": _annotations(),
        "links": [link("stallwatch", tags=("stallwatch",)), link("Runbook", runbook)],
        "panels": _laid_out(board.rows, runbook),
    }


def files(runbook: str = RUNBOOK) -> dict[str, str]:
    """File name -> content."""
    return {
        f"{board.uid}.json": json.dumps(dashboard(board, runbook), indent=1, ensure_ascii=False) + "\n"
        for board in boards()
    }
