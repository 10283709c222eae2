"""The pages of experiments in a real browser, from files: they need no network and draw what was measured."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stallwatch.experiment import pages
from stallwatch.experiment.compare import comparison
from stallwatch.experiment.conduct import Experiment
from stallwatch.experiment.document import document
from stallwatch.experiment.sweep import Sweep, Tried, Varied, sweep_document
from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.scenario import Scenario, ServerConfig
from tests.browser.driver import Browser, browser
from tests.browser.stage import HOSTILE
from tests.experiments import SMALL, conduct

pytestmark = pytest.mark.timeout(300)


def made(budget: int, repeats: int = 1) -> Experiment:
    """An experiment against a server with a token budget and a hostile name."""
    shape = replace(SMALL, repeats=repeats)
    engine = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=64)
    return conduct(Scenario(name="x", sentence="x", engine=engine, server=ServerConfig(model=HOSTILE)), shape=shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report, a sweep of three budgets and a comparison of two, as files."""
    place = tmp_path_factory.mktemp("pages")
    found = {256: made(256), 512: made(512, 3), 2048: made(2048)}
    swept = Sweep(
        varied=Varied(template=f"serve {HOSTILE} {{budget}}", parameter="budget", values=("256", "512", "2048", "9")),
        asked=found[256].asked,
        tried=(
            *(Tried(value=str(b), command="x", start_seconds=1.0, experiment=one) for b, one in found.items()),
            Tried(value="9", command="x", problem=f"it said {HOSTILE}"),
        ),
        outcome=found[256].outcome,
        why="",
        objective_seconds=0.3,
        began=0.0,
        ended=9.0,
        unix_offset=0.0,
    )  # fmt: skip
    reports = {str(budget): document(one) for budget, one in found.items()}
    written = {
        "report": reports["512"],
        "sweep": sweep_document(swept),
        "comparison": comparison([(f"{HOSTILE} {name}", report) for name, report in reports.items()]),
    }
    for name, report in written.items():
        list(pages.write(report, place, name))
    return place


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser."""
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.size(1200, 900)
        yield opened


def drawn(window: Browser, path: Path, charts: int) -> str:
    """The text of a page once its charts are there; nothing was complained of, and nothing of a name ran."""
    window.open(path.as_uri())
    script = "return document.querySelectorAll('.panel canvas').length >= arguments[0]"
    window.until(script, charts, seconds=30, what=f"{charts} charts")
    text = window.text("main")
    assert window.run("return window.broken ?? null") is None
    assert window.complaints() == []
    return text


def test_the_report_draws_itself(window: Browser, folder: Path) -> None:
    """Verdict, the three kinds of runs over each other, the engine beside them, effects and every run are there."""
    text = drawn(window, folder / "report.html", 8)
    window.run("const choice = document.querySelector('.controls select:not([hidden])'); choice.value = '3'; "
               "choice.dispatchEvent(new Event('change'))")  # fmt: skip
    again = drawn(window, folder / "report.html", 8)

    assert "It is prefill" in text
    assert "Only the uncached prompt pauses the streams" in text
    assert "beside the cached prompt" in text
    assert "Our own lateness" in text
    assert HOSTILE in text
    assert window.run("return document.querySelectorAll('.runs tbody tr').length") == 9
    assert "Effects with 95" in again


def test_a_sweep_draws_its_curve(window: Browser, folder: Path) -> None:
    """The trade-off, each measure against the value, and what became of each value are there."""
    text = drawn(window, folder / "sweep.html", 6)

    assert "What budget costs whom" in text
    assert "The trade-off: readers against the long prompt" in text
    assert f"left out: it said {HOSTILE}" in text


def test_a_comparison_lays_gaps_over_each_other(window: Browser, folder: Path) -> None:
    """What differs, the gaps of all reports, and each measure with its difference to the first are there."""
    text = drawn(window, folder / "comparison.html", 3)

    assert "Gaps, by how rare they are" in text
    assert "B less A (95" in text
    assert "C less A (95" in text
    assert HOSTILE in text
