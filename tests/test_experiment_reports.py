import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stallwatch import cli
from stallwatch.experiment import pages
from stallwatch.experiment.compare import comparison
from stallwatch.experiment.comparison_markdown import letters
from stallwatch.experiment.document import UnreadableReportError, document, read, text
from stallwatch.experiment.gaps import thinned
from stallwatch.experiment.measure import MEASURES
from stallwatch.experiment.sweep import Sweep, Tried, Varied, sweep_document
from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.scenario import Scenario, ServerConfig
from tests.docs import ROOT
from tests.experiments import SMALL, conduct
from tests.test_report import carried

EVIL = "tiny</script><img src=x onerror=alert(1)>|*_`"
BUDGETS = (512, 2048)


pytestmark = pytest.mark.xdist_group("reports")  # what its tests share is made once


@pytest.fixture(scope="module")
def made() -> dict[int, Any]:
    """Experiments against two token budgets, the model's name hostile."""
    return {
        budget: conduct(
            Scenario(
                name="x",
                sentence="x",
                engine=EngineConfig(max_num_batched_tokens=budget),
                server=ServerConfig(model=EVIL, plugin=True),
            )
        )
        for budget in BUDGETS
    }


@pytest.fixture(scope="module")
def reports(made: dict[int, Any]) -> dict[int, dict[str, Any]]:
    """Their reports."""
    return {budget: document(found) for budget, found in made.items()}


def test_a_report_says_what_was_measured(reports: dict[int, dict[str, Any]]) -> None:
    """Identity, plan, verdict, runs with all their times: what a colleague needs to believe or to repeat it."""
    told = reports[512]
    run = next(run for run in told["runs"] if run["arm"] == "uncached")
    stream = run["timeline"]["streams"][0]

    assert told["schema"] == "stallwatch.experiment/1"
    assert told["identity"]["scheduler"]["max_num_batched_tokens"] == "512"
    assert told["identity"]["scheduler_source"] == "plugin"
    assert told["identity"]["server"]["system_fingerprint"].startswith("vllm-0.32")
    assert told["identity"]["gpus"][0]["name"] == "NVIDIA H100 80GB HBM3"
    assert told["identity"]["driver"] == "simulated"
    assert told["conclusions"][0]["verdict"] == "prefill"
    assert run["prefill_evidence"] == "plugin"
    assert run["measures"]["prefill_tokens_per_step"] == pytest.approx(run["measures"]["prompt_tokens"] / 8, rel=0.05)
    assert run["measures"]["mixed_step_seconds"] == pytest.approx(run["measures"]["lost_seconds"] / 8 + 0.031, rel=0.1)
    assert len(stream["at"]) == SMALL.output_tokens
    assert run["timeline"]["prompt"]["sent"] == pytest.approx(run["timeline"]["marked"], abs=0.01)
    assert sum(step["prefill_tokens"] or 0 for step in run["timeline"]["steps"]) >= run["measures"]["prompt_tokens"]
    assert max(run["timeline"]["engine"]["running"]) == SMALL.streams + 1
    assert run["timeline"]["gpus"]["0"]["sm_clock_hertz"]


def test_files_are_whole_and_safe(reports: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    """JSON is read back as it was, Markdown and HTML carry a hostile name as text."""
    paths = list(pages.write(reports[512], tmp_path, "one"))
    markdown, page = (tmp_path / "one.md").read_text(), (tmp_path / "one.html").read_text()

    assert [path.name for path in paths] == ["one.json", "one.md", "one.html"]
    assert read(paths[0]) == json.loads(text(reports[512]))
    assert carried(page)["report"] == json.loads(text(reports[512]))
    assert "<img" not in page
    assert re.search(r"(?<!\\)<img", markdown) is None
    assert "only the uncached prompt pauses the streams" in markdown.lower()
    assert "| inter-token latency p99 while the prompt was computed | - |" in markdown


def test_reports_are_compared(reports: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    """What differs in identity stands first, then each measure with its effect; the load that differs is a caution."""
    files = []
    for budget, report in reports.items():
        list(pages.write(report, tmp_path, f"budget-{budget}"))
        files.append(str(tmp_path / f"budget-{budget}.json"))
    out, err = io.StringIO(), io.StringIO()
    status = cli.main(
        ("compare", *files, "--output", str(tmp_path / "new"), "--name", "both"), environ={}, stdout=out, stderr=err
    )
    found = json.loads((tmp_path / "new" / "both.json").read_text())
    markdown = (tmp_path / "new" / "both.md").read_text()
    rows = {(row["arm"], row["measure"]): row for row in found["effects"]}
    longest = rows["uncached", "longest_gap_seconds"]

    assert (status, err.getvalue()) == (0, "")
    assert [line.rpartition(".")[2] for line in out.getvalue().splitlines()] == ["json", "md", "html"]
    assert [row["fact"] for row in found["differs"]] == ["scheduler: max_num_batched_tokens (from plugin)"]
    assert found["differs"][0]["values"] == ["512", "2048"]
    assert longest["means"][1]["mean"] > 2 * longest["means"][0]["mean"]
    assert longest["apart"] == [None, True]
    assert rows["alone", "longest_gap_seconds"]["apart"] == [None, False]
    assert "B less A" in markdown
    assert len(found["gaps"][0]["uncached"]["seconds"]) > 30


def test_one_changed_setting_is_one_factor(reports: dict[int, dict[str, Any]]) -> None:
    """A setting that differs also in the launch command and in the fingerprint is not taken for three factors."""
    changed = json.loads(text(reports[2048]))
    changed["identity"]["command"] = "vllm serve x --max-num-batched-tokens 2048"
    changed["identity"]["server"]["system_fingerprint"] = "vllm-0.32.0-other"

    assert len(comparison([("a", reports[512]), ("b", changed)])["cautions"]) == 1


def test_cautions_say_what_else_differs(reports: dict[int, dict[str, Any]]) -> None:
    """Another load, another machine or more than one changed setting: the difference has more than one reading."""
    other = json.loads(text(reports[2048]))
    other["plan"]["streams"] = 9
    other["identity"]["gpus"] = []
    other["identity"]["server"]["version"] = "0.33.0"
    said = " ".join(comparison([("a", reports[512]), ("b", other)])["cautions"])

    assert "The loads differ" in said
    assert "The hardware or the client's machine differs" in said
    assert "2 facts of the server differ" in said
    assert "what drifted between them" in said


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("{", "not JSON", id="torn"),
        pytest.param("[]", "not a report of `stallwatch experiment`", id="a list"),
        pytest.param('{"schema": "stallwatch.experiment/9"}', "schema stallwatch.experiment/9 is not one", id="newer"),
        pytest.param('{"schema": "stallwatch.experiment/1"}', "not a whole report", id="empty"),
    ],
)
def test_files_that_are_no_reports_are_refused(tmp_path: Path, content: str, expected: str) -> None:
    """Whatever a file holds, there is one line that says what is wrong with it."""
    (tmp_path / "bad.json").write_text(content)
    err = io.StringIO()
    bad = str(tmp_path / "bad.json")
    status = cli.main(("compare", bad, bad), environ={}, stdout=io.StringIO(), stderr=err)

    assert status == 1
    assert expected in err.getvalue()
    with pytest.raises(UnreadableReportError, match="no such file"):
        read(tmp_path / "absent.json")


@pytest.fixture(scope="module")
def sweep(made: dict[int, Any]) -> dict[str, Any]:
    """The report of a sweep over the budgets, and of a third that did not start."""
    swept = Sweep(
        varied=Varied(template="serve --b {budget}", parameter="budget", values=("512", "2048", "9")),
        asked=replace(made[512].asked),
        tried=(
            *(Tried(value=str(b), command="x", start_seconds=1.0, experiment=found) for b, found in made.items()),
            Tried(value="9", command="x", problem="it ended"),
        ),
        outcome=made[512].outcome,
        why="",
        objective_seconds=0.3,
        began=0.0,
        ended=9.0,
        unix_offset=0.0,
    )
    return sweep_document(swept)


def test_a_sweep_counts_as_many_reports(
    sweep: dict[str, Any], reports: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    """The values of a sweep are compared with each other, with their gaps; one that did not start is not among them."""
    list(pages.write(sweep, tmp_path, "sweep"))
    err = io.StringIO()
    arguments = ("compare", str(tmp_path / "sweep.json"), "--output", str(tmp_path))
    status = cli.main(arguments, environ={}, stdout=io.StringIO(), stderr=err)
    found = json.loads((tmp_path / "comparison.json").read_text())
    markdown = (tmp_path / "sweep.md").read_text()

    assert (status, err.getvalue()) == (0, "")
    assert [one["name"] for one in found["reports"]] == ["sweep: budget=512", "sweep: budget=2048"]
    assert found["gaps"] == comparison([("", report) for report in reports.values()])["gaps"]
    assert found["gaps"][1]["uncached"]["seconds"][0] > 2 * found["gaps"][0]["uncached"]["seconds"][0]
    assert "budget=512 meets the objective" in markdown
    assert "left out: it ended" in markdown
    assert sweep["curves"][0]["meets_objective"] == "512"


def keys(told: Any) -> set[str]:
    """The names of a report at every depth; those of measures and of facts stand for themselves, or are not ours."""
    if isinstance(told, list):
        return {name for one in told[:3] for name in keys(one)}
    if not isinstance(told, dict):
        return set()
    inside = {name: value for name, value in told.items() if name not in {"measures", "server", "host", "scheduler"}}
    return {name for name in told if not name.isdecimal()} | {name for one in inside.values() for name in keys(one)}


def test_the_schema_is_documented(sweep: dict[str, Any], reports: dict[int, dict[str, Any]]) -> None:
    """Every key of a report, a sweep and a comparison, and every measure of a run, stands in the documentation."""
    page = (ROOT / "docs" / "experiment.md").read_text()
    told = [reports[512], sweep, comparison([("", report) for report in reports.values()])]
    names = {*keys(told), *(measure.name for measure in MEASURES)}

    assert sorted(name for name in names if f"`{name}`" not in page) == []


def test_long_lists_keep_their_long_gaps() -> None:
    """What is drawn of many gaps is dense where they are long, and has the longest and the shortest."""
    gaps = [float(value) for value in range(10_000, 0, -1)]
    kept = thinned(gaps)

    assert kept["seconds"][:4] == [10_000.0, 9_999.0, 9_998.0, 9_997.0]
    assert kept["seconds"][-1] == 1.0
    assert len(kept["seconds"]) < 130
    assert list(letters(28))[-2:] == ["AA", "AB"]
    assert re.fullmatch(r"[A-Z]+", "".join(letters(3)))
