"""`python -m tests.grafana.render FOLDER [NAME[:ROW-ROW]...]`: pictures of dashboards filled by the simulated fleet.

Grafana's own types are held against them first; then Grafana's own components draw them in headless Chromium. Wants
npm, and 600 MB in FOLDER for what it installs. With pngquant there the pictures are made small.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.artifacts import history
from tests.artifacts.promtool import ROOT, program
from tests.grafana import typed

HERE = Path(__file__).parent
GRID = 34
"""Pixels of one unit of a board's grid."""
VARIABLES = {"namespace": "llm", "job": "vllm", "instance": ".*", "engine": ".*"}
WORST = "vllm-0"
"""The pod that boards of one server show."""
PAGE = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="bundle.css">
<style>body {{ background: #111217; margin: 0; font-family: Inter, Helvetica, Arial, sans-serif }}
#root {{ position: relative; width: 1600px; height: {height}px }}</style>
<div id="root"></div><script>window.CONFIG = {config}</script><script src="bundle.js"></script>"""


def opened(dashboard: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The dashboard with only these rows, counted from 1, all of them open and moved up."""
    rows: list[list[dict[str, Any]]] = []
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            rows.append([panel, *panel.pop("panels")])
        else:
            rows[-1].append(panel)
    y, panels = 0, []
    for row in rows[first - 1 : last]:
        down = y - row[0]["gridPos"]["y"]
        for panel in row:
            panel["gridPos"]["y"] += down
        y = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in row)
        panels += row
    return {**dashboard, "panels": panels}


def bundle(folder: Path) -> None:
    """Installs Grafana's components and bundles the page that draws."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "app.tsx"):
        shutil.copy(HERE / name, folder / name)
    if not (folder / "node_modules").exists():
        install = [program("npm", "npm"), "install", "--no-audit", "--no-fund", "--legacy-peer-deps"]
        subprocess.run(install, cwd=folder, check=True)
    loaders = [f"--loader:.{kind}=dataurl" for kind in ("svg", "png", "woff2", "ttf")]
    defines = ['--define:process.env.NODE_ENV="production"', "--define:global=window"]
    command = ["node_modules/.bin/esbuild", "app.tsx", "--bundle", "--outfile=bundle.js", "--log-level=error"]
    subprocess.run([*command, *loaders, *defines], cwd=folder, check=True)


def picture(folder: Path, url: str, asked: str) -> Path:
    """Draws one dashboard, or some rows of it. Returns the picture."""
    told = re.fullmatch(r"([\w-]+?)(?::(\d+)-(\d+))?", asked)
    if told is None:
        raise SystemExit(f"{asked}: wants NAME or NAME:FIRST-LAST")
    name, first, last = told.groups()
    dashboard = json.loads((ROOT / "dashboards" / f"{name}.json").read_text())
    dashboard = opened(dashboard, int(first or 1), int(last or 99))
    height = GRID * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    begin = history.START * 1000
    config = {
        "base": url,
        "from": begin,
        "to": begin + history.DURATION * 1000,
        "step": history.SCRAPE,
        "unit": GRID,
        "dashboard": dashboard,
        "variables": {**VARIABLES, "pod": ".*" if name == "stallwatch-fleet" else WORST},
    }
    target = folder / f"{asked.replace(':', '-')}.png"
    page = target.with_suffix(".html")
    page.write_text(PAGE.format(height=height, config=json.dumps(config)))
    command = [
        program("chromium", "chromium"),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size=1600,{height}",
        "--virtual-time-budget=30000",
        "--allow-file-access-from-files",
        "--disable-web-security",
        f"--user-data-dir={folder / 'chromium'}",
        f"--screenshot={target}",
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    if quantise := shutil.which("pngquant"):
        subprocess.run([quantise, "--force", "--skip-if-larger", "--ext=.png", "128", str(target)], check=False)
    return target


def main(arguments: list[str]) -> None:
    """Draws the dashboards that are named, or all."""
    folder = Path(arguments[0]).resolve()
    bundle(folder)
    typed.check(folder)
    if not (folder / "tsdb").exists():
        history.write_blocks(history.fleet(), folder)
    names = arguments[1:] or [path.stem for path in sorted((ROOT / "dashboards").glob("*.json"))]
    with history.prometheus(folder / "tsdb", folder / "prometheus.log") as url:
        for name in names:
            print(picture(folder, url, name))


if __name__ == "__main__":
    main(sys.argv[1:])
