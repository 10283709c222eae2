"""Holds the dashboards against Grafana's own types: wrong words and misspelt fields are errors of the compiler."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.artifacts.promtool import ROOT

RAW = "@grafana/schema/dist/esm/raw"
KINDS = {
    "heatmap": "heatmap/panelcfg/x/HeatmapPanelCfg_types.gen",
    "stat": "stat/panelcfg/x/StatPanelCfg_types.gen",
    "state-timeline": "statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen",
    "table": "table/panelcfg/x/TablePanelCfg_types.gen",
    "timeseries": "timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen",
}
WITHOUT_FIELDS = {"stat"}
"""Kinds whose types have no field configuration of their own."""

NOTE = ("expr", "step", "titleFormat", "textFormat", "tagKeys", "useValueForTime")
"""What an annotation says to the data source, of which the schema of boards knows nothing."""

SOMETHING = {"text": "", "value": ""}

# Enums are compared by the words that JSON holds.
PLAIN = """type U<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T :
  T extends (infer E)[] ? U<E>[] : T extends object ? { [K in keyof T]: U<T[K]> } : T;"""


def _without(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in names}


def program(name: str, board: dict[str, Any]) -> Iterator[str]:
    """The lines of a TypeScript file that compiles when the types hold for a board."""
    yield f"import type {{ Dashboard }} from '{RAW}/dashboard/x/Dashboard_types.gen';"
    for number, path in enumerate(KINDS.values()):
        yield f"import type * as K{number} from '{RAW}/composable/{path}';"
    yield PLAIN
    # Grafana itself writes these two, and an empty `current`, which its schema leaves out.
    variables = [{**_without(one, "definition"), "current": SOMETHING} for one in board["templating"]["list"]]
    notes = [_without(one, *NOTE) for one in board["annotations"]["list"]]
    known = {**board, "templating": {"list": variables}, "annotations": {"list": notes}}
    yield f"const board: U<Dashboard> = {json.dumps(known)};"
    for panel in (one for listed in board["panels"] for one in (listed, *listed.get("panels", ()))):
        if panel["type"] == "row":
            continue
        kind, number = f"K{list(KINDS).index(panel['type'])}", panel["id"]
        yield f"const o{number}: U<Partial<{kind}.Options>> = {json.dumps(panel['options'])};"
        if panel["type"] not in WITHOUT_FIELDS:
            custom = json.dumps(panel["fieldConfig"]["defaults"]["custom"])
            yield f"const f{number}: U<Partial<{kind}.FieldConfig>> = {custom};"
    yield f"export {{ board }};  // {name}"


def check(folder: Path) -> None:
    """Compiles all boards in a folder that has Grafana's types. Raises CalledProcessError when one does not hold."""
    sources = []
    for path in sorted((ROOT / "dashboards").glob("*.json")):
        source = folder / f"{path.stem}.ts"
        source.write_text("\n".join(program(path.stem, json.loads(path.read_text()))) + "\n")
        sources.append(source.name)
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler"]
    subprocess.run(["node_modules/.bin/tsc", *options, *sources], cwd=folder, check=True)
