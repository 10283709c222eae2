"""The report of an incident in a real browser, from a file: it needs no network and draws what the bundle holds."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.browser.driver import Browser, browser
from tests.browser.stage import HOSTILE, STAGE
from tests.e2e.processes import stallwatch
from tests.harness import watch

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a freeze beside a server with a hostile name."""
    folder = tmp_path_factory.mktemp("report")
    watch(STAGE, seconds=45.0, canary={"mode": "persistent"}, recorder={"directory": folder / "incidents"})
    (bundle,) = (folder / "incidents").iterdir()
    command = stallwatch("report", str(bundle), "--output", str(folder))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(done.stdout.splitlines()[0])


def test_the_report_draws_itself(report: Path, tmp_path: Path) -> None:
    """Verdict, charts, evidence and figures are there; a click zooms to the stall; nothing of a name runs."""
    with browser(tmp_path) as page:
        page.size(1200, 900)
        page.open(report.as_uri())
        page.until("return document.querySelectorAll('.panel canvas').length >= 6", seconds=30, what="charts")
        said = page.text(".verdicts button")
        head = page.text("header")
        pressed = _zoomed(page)
        page.click(".verdicts button")
        page.until("return document.querySelector('.chosen') !== null", seconds=5, what="the stall is chosen")
        time.sleep(0.3)
        zoomed = _zoomed(page)
        rows = page.run("return [...document.querySelectorAll('td:first-child')].map((cell) => cell.textContent)")
        evidence = page.text(".evidence")
        broken = page.run("return window.broken ?? null")
        complaints = page.complaints()

    assert said.startswith("prefillReaders stood still for ")
    assert "a prompt of 16,000 tokens" in said
    assert HOSTILE in head
    assert (pressed, zoomed) == ("true", "false")
    assert {"engine step", "prefill tokens in a step", "first token (TTFT)", "SM clock"} <= set(rows)
    assert "prompt tokens were computed in the same steps" in evidence
    assert broken is None
    assert complaints == []


def _zoomed(page: Browser) -> str:
    """Whether the whole time is shown, as its button says."""
    return str(page.run("return document.querySelector('.controls button').getAttribute('aria-pressed')"))
