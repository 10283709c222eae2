import asyncio
import gzip
import re
import subprocess
import sys
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from stallwatch.drawing import files
from stallwatch.drawing.html import self_contained
from stallwatch.web import assets, server
from tests import virtual
from tests.test_web import Shown, at_once

MODULES = sorted(
    path for folder in (files.STATIC, assets.PAGE) for path in folder.glob("*.js") if ".min." not in path.name
)
STYLES = sorted(
    path for folder in (files.STATIC, assets.PAGE) for path in folder.glob("*.css") if ".min." not in path.name
)

Client = TestClient[web.Request, web.Application]


def ask(talk: Callable[[Client], Awaitable[None]]) -> None:
    """Runs `talk` against the listener in virtual time."""

    async def main() -> None:
        app = server.create_app(Shown(), run_blocking=at_once)
        plain = {"Accept-Encoding": "identity"}
        async with TestClient(TestServer(app), auto_decompress=False, headers=plain) as client:
            await talk(client)

    virtual.run(main())


def test_the_page_and_all_it_names_are_served() -> None:
    """Every file that the page or a module of it names is there, with its type, packed for who takes that."""

    async def talk(client: Client) -> None:
        page = await (await client.get("/")).text()
        wanted = set(re.findall(r'(?:src|href)="static/([\w.-]+)"', page))
        for module in MODULES:
            wanted |= set(re.findall(r'from "\./([\w.-]+)"', module.read_text()))
        assert {"page.js", "page.css", "uplot.iife.min.js", "chart.js", "icon.svg"} <= wanted
        for name in wanted:
            answer = await client.get(f"/static/{name}")
            packed = await client.get(f"/static/{name}", headers={"Accept-Encoding": "gzip"})
            assert answer.status == 200, name
            assert answer.content_type in {"text/javascript", "text/css", "image/svg+xml"}, name
            assert gzip.decompress(await packed.read()) == await answer.read()

    ask(talk)


def test_nothing_else_is_served() -> None:
    """A name that is not one of the files is not looked for on the disk."""

    async def talk(client: Client) -> None:
        for name in ("nothing.js", "..%2f__init__.py", "%2e%2e/server.py", "../server.py", "index.html/", "a" * 300):
            assert (await client.get(f"/static/{name}")).status == 404, name

    ask(talk)


def test_the_page_may_run_only_our_files() -> None:
    """No inline script or style, no other origin, no frame around it, and no text that becomes markup."""

    async def talk(client: Client) -> None:
        answer = await client.get("/")
        parts = (part.strip().partition(" ") for part in answer.headers["Content-Security-Policy"].split(";"))
        policy = {name: allowed for name, _, allowed in parts}
        page = await answer.text()

        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", page)

    ask(talk)


def test_a_file_that_is_still_the_same_is_not_sent_again() -> None:
    """The browser asks each time and gets 304, so that a new version shows at once."""

    async def talk(client: Client) -> None:
        first = await client.get("/static/page.js")
        again = await client.get("/static/page.js", headers={"If-None-Match": first.headers["ETag"]})

        assert first.headers["Cache-Control"] == "no-cache"
        assert (again.status, await again.read()) == (304, b"")

    ask(talk)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_scripts_make_text_of_text(path: Path) -> None:
    """What turns text into markup or code is not used."""
    source = path.read_text()

    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(.on", source
    )


@pytest.mark.parametrize("path", [*MODULES, *STYLES], ids=lambda path: path.name)
def test_files_name_no_other_place(path: Path) -> None:
    """Nothing is fetched from anywhere else."""
    assert not re.search(r"https?://|url\(|@import", path.read_text())


def test_names_at_the_top_of_modules_are_unique() -> None:
    """Modules can be put one after another into a single script."""
    names: dict[str, str] = {}
    for module in MODULES:
        found = re.findall(
            r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", module.read_text(), re.MULTILINE
        )
        for name in found:
            if name == "$":
                continue
            assert names.setdefault(name, module.name) == module.name, name


def test_a_bundle_has_each_module_once_and_its_imports_before_it() -> None:
    """What a module imports comes along, before it, without a word of import or export."""
    bundle = files.bundled(assets.PAGE / "page.js")

    assert not re.search(r"^(?:import|export) ", bundle, re.MULTILINE)
    for once in ("class Stack ", "function element(", "function figure("):
        assert bundle.count(once) == 1
    assert bundle.index("function element(") < bundle.index("class Stack ") < bundle.index("const restart = feed(")


def test_a_page_in_one_file_cannot_be_broken_out_of() -> None:
    """Data that look like markup stay data, and the policy allows the scripts inside by their hash alone."""
    hostile = '</script><script>alert(1)</script><!--\u2028"&'
    page = self_contained(hostile, {"model": hostile}, files.STATIC / "dom.js")

    assert page.count("<script") == 3
    assert "alert(1)</script>" not in page
    assert "&lt;/script&gt;" in page.split("</title>")[0]
    assert page.count("sha256-") == 3
    assert not re.search(r"(?:src|href)=", page.split("<body>")[1])


def test_the_wheel_has_the_files_of_the_page(tmp_path: Path) -> None:
    """Whoever installs the package gets the page, the plotting library and its licence."""
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    subprocess.run(build, cwd=files.STATIC.parents[2], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    assert {f"stallwatch/drawing/static/{path.name}" for path in files.STATIC.iterdir()} <= names
    assert {f"stallwatch/web/static/{path.name}" for path in assets.PAGE.iterdir()} <= names
    assert "stallwatch/drawing/static/uplot.LICENSE.txt" in names


HUES = ("vermilion", "blue", "gold", "green", "purple", "sky", "grey")


def _linear(channel: int) -> float:
    share = channel / 255
    return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4


def _lab(rgb: tuple[float, float, float]) -> tuple[float, float, float]:
    red, green, blue = rgb
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (
        (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116) for one in (max(0, x), max(0, y), max(0, z))
    )
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


# Machado, Oliveira and Fernandes (2009), severity 1.0.
_SIGHT = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


@pytest.mark.parametrize("sight", ["all colours", *_SIGHT])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colour_blind_people_can_tell_the_hues_of_causes_apart(theme: str, sight: str) -> None:
    """Any two hues differ by more than 12 in CIE Lab, five times what can just be told, for every kind of sight."""
    light, dark = (files.STATIC / "look.css").read_text().split("@media (prefers-color-scheme: dark)", 1)
    colours = {}
    for hue in HUES:
        code = re.findall(rf"--hue-{hue}: #(\w{{6}});", light if theme == "light" else dark.split("\n}\n")[0])[0]
        linear = tuple(_linear(int(code[place : place + 2], 16)) for place in (0, 2, 4))
        if sight in _SIGHT:
            linear = tuple(sum(a * b for a, b in zip(row, linear, strict=True)) for row in _SIGHT[sight])
        colours[hue] = _lab((linear[0], linear[1], linear[2]))
    apart = {
        (one, other): sum((a - b) ** 2 for a, b in zip(colours[one], colours[other], strict=True)) ** 0.5
        for one in HUES
        for other in HUES
        if one < other
    }
    closest = min(apart, key=lambda pair: apart[pair])
    print(f"{theme}, {sight}: closest are {' and '.join(closest)}, {apart[closest]:.1f} apart")

    assert apart[closest] > 12


def _luminance(code: str) -> float:
    return sum(
        weight * _linear(int(code[place : place + 2], 16)) for weight, place in ((0.2126, 0), (0.7152, 2), (0.0722, 4))
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(theme: str) -> None:
    """Text has at least 4.5 : 1 against its card, faint words and lines of charts 3 : 1."""
    light, dark = (files.STATIC / "look.css").read_text().split("@media (prefers-color-scheme: dark)", 1)
    colours = dict(re.findall(r"--([\w-]+): #(\w{6});", light if theme == "light" else dark.split("\n}\n")[0]))
    card = _luminance(colours["card"])

    def contrast(name: str) -> float:
        other = _luminance(colours[name])
        return (max(card, other) + 0.05) / (min(card, other) + 0.05)

    for name in ("ink", "soft", "good", "focus"):
        assert contrast(name) >= 4.5, name
    for name in ("faint", *(f"series-{n}" for n in range(1, 5)), *(f"hue-{hue}" for hue in HUES)):
        assert contrast(name) >= 3, name


def test_nothing_is_made_for_nobody() -> None:
    """The listener makes no events while nobody listens."""

    async def main() -> int:
        app = server.create_app(Shown(), run_blocking=at_once)
        task = asyncio.create_task(app[server.EVENTS].run())
        await asyncio.sleep(60.0)
        task.cancel()
        return app[server.EVENTS].made

    assert virtual.run(main()) == 0
