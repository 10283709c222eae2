"""The live page in a real browser, beside a simulated vLLM that freezes its readers: one run, looked at in turn."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.browser.driver import Browser, browser
from tests.browser.stage import HOSTILE
from tests.e2e.processes import Process, free_port, get, process, until

pytestmark = pytest.mark.timeout(300)

ESCAPE, LEFT = "\ue00c", "\ue012"
WIDE, PHONE = (1440, 1000), (390, 844)


@dataclass(slots=True)
class Stage:
    """The page in a browser and the sidecar behind it."""

    browser: Browser
    url: str
    running: Process
    arguments: list[str]
    folder: Path

    def stalls(self) -> list[dict[str, Any]]:
        """What the API says of stalls."""
        found: list[dict[str, Any]] = json.loads(get(f"{self.url}/api/v1/stalls"))["stalls"]
        return found


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The page open before the freeze begins."""
    folder = tmp_path_factory.mktemp("page")
    target, port = free_port(), free_port()
    arguments = [sys.executable, "-m", "tests.browser.stage", str(target), str(port)]
    with browser(folder) as window:
        window.size(*WIDE)
        with process(arguments, folder / "demo.log") as running:
            url = f"http://127.0.0.1:{port}"
            until(lambda: get(f"{url}/livez") == "ok\n", 60, "the sidecar listens")
            window.open(f"{url}/")
            yield Stage(window, url, running, arguments, folder)


def test_values_move(stage: Stage) -> None:
    """The page says who is watched and how it stands, and its figures change from second to second."""
    page = stage.browser
    page.until("return document.querySelector('#connection').dataset.state === 'live'", seconds=30, what="live")
    page.until("return document.querySelector('#verdict').dataset.state === 'well'", seconds=30, what="a verdict")
    page.until("return document.querySelectorAll('.panel canvas').length >= 8", seconds=30, what="charts")
    said = page.text("#verdict .sentence")
    before = page.text("#now")
    page.until("return document.querySelector('#now').textContent !== arguments[0]", before, seconds=10, what="motion")

    assert said.startswith("Readers are served. Longest wait of the last 30 s: ")
    assert "vLLM 0.32.0" in page.text("#target")
    page.until("return document.querySelector('#canary').textContent.includes('reading')", seconds=60, what="a canary")
    assert "up" in page.text("#sources")


def test_a_hostile_name_is_only_a_name(stage: Stage) -> None:
    """What the server calls its model is shown letter by letter, and nothing of it runs."""
    page = stage.browser
    page.until("return document.querySelector('#target').textContent.includes('onerror')", seconds=30, what="the name")

    assert page.text("#target").startswith(HOSTILE)
    assert page.run("return document.querySelectorAll('#target *').length") == 0
    assert page.run("return window.broken ?? null") is None
    assert page.complaints() == []


def test_events_find_their_slots(stage: Stage) -> None:
    """What an event tells late is written into its slot, a hole or another clock is refused, the oldest slots go."""
    found = stage.browser.run(
        "return import('/static/timeline.js').then(({Figures}) => {"
        "  const told = (start, ...gaps) => ({start_unix: start, slot_seconds: 0.25, slots: gaps.length, gpus: {},"
        "    host: {}, sidecar: {}, engines: {0: {gap_seconds: gaps}}});"
        "  const kept = new Figures(4), column = () => [...kept.columns.get('engines/0/gap_seconds')];"
        "  const said = [kept.merge(told(100, 1, null, 3)), kept.merge(told(100.251, 2, null, 4))];"
        "  const after = column();"
        "  said.push(kept.merge(told(102, 9)), kept.merge(told(100.4, 9)), kept.merge(told(99, 9)));"
        "  kept.merge(told(101, ...Array(240).fill(5)));"
        "  return {said, after, same: JSON.stringify(column()) === JSON.stringify(Array(4).fill(5)),"
        "    start: kept.start, end: kept.end};"
        "})"
    )

    assert found["said"] == [True, True, False, False, False]
    assert found["after"] == [1, 2, 3, 4]
    assert found["same"]
    assert (found["start"], found["end"]) == (160, 161)


def test_tokens_belong_to_the_step_that_computed_them(stage: Stage) -> None:
    """Over its whole time a step shows what it carried, also when that was told a moment after its end."""
    carried = stage.browser.run(
        "return import('/static/timeline.js').then(({Figures, drawn}) => {"
        "  const kept = new Figures(99), n = null;"
        "  kept.merge({start_unix: 0, slot_seconds: 0.25, slots: 12, gpus: {}, host: {}, sidecar: {}, engines: {0: {"
        "    steps:          [2, 4, n, n, n, 1, n, n, n, n, 1, n],"
        "    prefill_tokens: [0, 8, n, n, n, 511, n, n, n, n, 0, 511]}}});"
        "  return drawn(kept, '0').columns.prefill_per_step;"
        "})"
    )

    assert carried == [0, 2, *[511] * 9, None]


def test_a_stall_appears_with_its_cause(stage: Stage) -> None:
    """While readers are frozen the verdict says so, in the colour of the cause, and the stall lies on the timeline."""
    seen = stage.browser.until(
        "const verdict = document.querySelector('#verdict'), said = document.querySelector('#sentence').textContent;"
        "return verdict.dataset.state === 'stalled' && said.includes('prefill') && {said, title: document.title,"
        " vermilion: verdict.classList.contains('hue-vermilion'),"
        " spans: document.querySelectorAll('.lane button.hue-vermilion').length}",
        seconds=90,
        what="a stall with its cause",
    )

    assert "Cause: prefill, a prompt of 16,000 tokens." in seen["said"]
    assert seen["title"] == "● stalled"
    assert seen["vermilion"]
    assert seen["spans"] == 1


def test_its_length_is_that_of_the_api(stage: Stage) -> None:
    """When it is over, the list has its length and its cause, and a click shows its evidence."""
    page = stage.browser
    until(lambda: stage.stalls() and not stage.stalls()[0]["open"], 90, "the stall is over")
    (stall,) = stage.stalls()
    page.until("return document.querySelector('#verdict').dataset.state !== 'stalled'", seconds=20, what="the end")
    page.until("return !document.querySelector('#stalls button').classList.contains('open')", seconds=20, what="closed")
    page.click("#stalls button")
    detail = page.text("#stall")
    shown = page.run("return document.querySelector('#stalls button').lastElementChild.textContent")

    assert stall["cause"] == "prefill"
    assert page.text("#stalls .cause") == "prefill"
    assert float(shown.replace("\u202fs", "")) == pytest.approx(stall["duration_seconds"], abs=0.06)
    assert "prompt tokens were computed in the same steps" in detail
    assert "--max-num-batched-tokens" in detail
    assert page.run("return document.querySelectorAll('.lane button[aria-pressed=true]').length") == 1


def test_zoom_and_cursor(stage: Stage) -> None:
    """A drag zooms all charts, the cursor reads all of them at one time, keys move it, and a key goes back to live."""
    page = stage.browser
    page.run("document.querySelector('#timeline').scrollIntoView()")
    box = page.run(
        "const b = document.querySelector('.u-over').getBoundingClientRect(); return [b.x, b.y, b.width, b.height]"
    )
    x, y, width, height = (float(one) for one in box)
    before = page.text(".panel-head")
    page.move((x + width * 0.5, y + height / 2), (x + width * 0.6, y + height / 2))
    page.until("return document.querySelector('.instant').textContent !== ''", seconds=5, what="the time")
    lines = page.run("return [...document.querySelectorAll('.u-cursor-x')].map((l) => l.style.transform)")
    read = page.text(".panel-head")
    page.move((x + width * 0.4, y + height / 2), (x + width * 0.8, y + height / 2), held=True)
    zoomed = page.until(
        "return document.querySelector('#live').getAttribute('aria-pressed') === 'false'", seconds=5, what="zoom"
    )
    page.run("document.querySelector('#timeline').focus()")
    at = page.text(".instant")
    page.press(LEFT * 3)
    moved = page.text(".instant")
    page.press("l")

    assert zoomed
    assert len(set(lines)) == 1
    assert lines[0] != ""
    assert read != before
    assert moved != at
    assert page.run("return document.querySelector('#live').getAttribute('aria-pressed')") == "true"
    page.press(ESCAPE)


def test_nothing_jumps(stage: Stage) -> None:
    """Over three seconds of live figures no box of the page changes its place or its size."""
    page = stage.browser
    boxes = (
        "return JSON.stringify([...document.querySelectorAll('.card, .panel')].map((e) => {"
        "const b = e.getBoundingClientRect(); return [b.x, b.y + scrollY, b.width, b.height].map(Math.round)}))"
    )
    before, sentence = page.run(boxes), page.text("#now")
    page.until(
        "return document.querySelector('#now').textContent !== arguments[0]", sentence, seconds=10, what="motion"
    )
    time.sleep(2.0)

    assert page.run(boxes) == before


def test_light_and_dark(stage: Stage) -> None:
    """The page and its charts follow what the person prefers, without being loaded again."""
    page = stage.browser
    colours = {}
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        time.sleep(0.3)
        colours[scheme] = page.run(
            "const c = document.querySelector('.panel canvas'), copy = new OffscreenCanvas(c.width, c.height);"
            "const p = copy.getContext('2d', {willReadFrequently: true}); p.drawImage(c, 0, 0);"
            "const d = p.getImageData(0, 0, c.width, c.height).data;"
            "const inks = {}; for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) {"
            "const k = [d[i], d[i + 1], d[i + 2]].join(); inks[k] = (inks[k] ?? 0) + 1; }"
            "return [getComputedStyle(document.body).backgroundColor,"
            " Object.entries(inks).sort((a, b) => b[1] - a[1]).slice(0, 3).map((e) => e[0])]"
        )
    page.scheme("light")

    assert colours["light"][0] != colours["dark"][0]
    assert set(colours["light"][1]).isdisjoint(colours["dark"][1])


def test_a_phone_has_room_for_it(stage: Stage) -> None:
    """At the width of a phone nothing is cut off at the side, and the timeline comes before the small print."""
    page = stage.browser
    page.size(*PHONE, phone=True)
    time.sleep(0.5)
    wide = page.run("return document.documentElement.scrollWidth")
    top = page.run(
        "return ['#verdict', '.timeline', '#sources'].map((s) => document.querySelector(s).getBoundingClientRect().top)"
    )
    plot = page.run("return document.querySelector('.u-over').getBoundingClientRect().width")
    page.size(*WIDE)

    assert wide <= PHONE[0]
    assert top == sorted(top)
    assert plot > 250


def test_it_comes_back_by_itself(stage: Stage) -> None:
    """When the sidecar is gone the page says so, and it is live again soon after the next one starts."""
    page = stage.browser
    quiet = page.complaints()
    page.run("performance.mark('same page')")
    code, seconds = stage.running.stop()
    page.until("return document.querySelector('#connection').dataset.state === 'lost'", seconds=30, what="lost")
    stale = page.run("return document.querySelector('#verdict').classList.contains('stale')")
    with process(stage.arguments, stage.folder / "second.log"):
        page.until(
            "return document.querySelector('#connection').dataset.state === 'live'", seconds=90, what="live again"
        )
        before = page.text("#sources")
        page.until(
            "return document.querySelector('#sources').textContent !== arguments[0]", before, seconds=60, what="news"
        )
        stalls = page.run("return document.querySelectorAll('#stalls button').length")

    print(f"ended {seconds:.2f} s after SIGTERM with a page open")

    assert quiet == []
    assert code == 0
    assert seconds < 2 * 5
    assert stale
    assert page.run("return performance.getEntriesByName('same page').length") == 1
    assert stalls == 0, "the stalls of the process before are not shown as those of this one"
