"""A recording and the rules: which alerts would have fired, and when."""

import json
import urllib.parse
from pathlib import Path

import pytest

from deploy.prometheus import backtest
from stallwatch import cli
from stallwatch.commands.replay_series import Samples, openmetrics
from tests.artifacts.history import prometheus
from tests.e2e.processes import get
from tests.harness import watch

pytestmark = pytest.mark.xdist_group("backtest")  # its recordings are made once

LABELS = {"namespace": "llm", "job": "vllm", "pod": "vllm-0", "instance": "10.0.0.7:9709"}
PROMPT_AT = 25.0
"""Seconds into the scenario at which the long prompt comes."""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Recordings by scenario."""
    folder = tmp_path_factory.mktemp("recordings")
    made = {}
    for scenario in ("long-prefill", "quiet", "metrics-down"):
        made[scenario] = folder / f"{scenario}.jsonl.gz"
        watch(scenario, sample_every=10.0, recorder={"file": made[scenario]})
    return made


def column(samples: Samples, name: str) -> list[float]:
    """The values of one series, in the order of time."""
    (found,) = [points for series, points in samples.items() if series.startswith(name)]
    return [value for _, value in found]


def test_a_recorded_freeze_fires_when_it_would_have(recordings: dict[str, Path]) -> None:
    """A long prompt fires the page of the frozen readers 30 to 60 s after it came, and nothing else."""
    samples = backtest.scraped(recordings["long-prefill"], (), LABELS)
    verdict = backtest.backtest(samples)
    began = verdict.began - backtest.SCRAPE
    print(*backtest.table(verdict, LABELS), sep="\n")

    assert [one.labels["alertname"] for one in verdict.fired] == ["StallwatchReadersFrozen"]
    assert {**LABELS, "engine": "0", "severity": "critical"}.items() <= verdict.fired[0].labels.items()
    assert 30 <= verdict.fired[0].firing - began - PROMPT_AT <= 60
    assert verdict.fired[0].resolved is None


def test_a_quiet_recording_fires_nothing(recordings: dict[str, Path]) -> None:
    """Readers who were fine would have called nobody, and nothing was about to."""
    verdict = backtest.backtest(backtest.scraped(recordings["quiet"], (), LABELS))

    assert verdict.fired == ()
    assert [name for name in verdict.pending if "Frozen" in name or "P99" in name or "Burn" in name] == []


def test_other_thresholds_can_be_tried(recordings: dict[str, Path], tmp_path: Path) -> None:
    """Rules that were changed, and objectives that were not recorded, are judged by."""
    rules = tmp_path / "changed.rules.yml"
    rules.write_text(backtest.RULES.read_text().replace("[2m])) > 0.25", "[2m])) > 0.5"))
    tolerant = backtest.scraped(recordings["long-prefill"], ("--slo.itl_seconds=3",), LABELS)
    strict = backtest.scraped(recordings["long-prefill"], (), LABELS)

    assert backtest.backtest(strict, rules).fired == ()
    assert column(tolerant, "stallwatch_slo_itl_objective_seconds") == [3.0] * 5
    assert (
        column(tolerant, "stallwatch_slo_missed_seconds_total")[-1]
        < column(strict, "stallwatch_slo_missed_seconds_total")[-1]
    )


def test_an_alert_that_ends_says_when(tmp_path: Path) -> None:
    """A span of firing ends with the first evaluation without it; one that comes again is another span."""
    rules = tmp_path / "any.yml"
    rules.write_text(
        'groups: [{name: any, rules: [{alert: High, expr: \'x{a="q}\\""} > 1\', for: 15s, labels: {severity: info}}]}]'
    )
    values = [0, 2, 2, 2, 0, 2, 2]
    samples = {r'x{a="q}\""}': [(1000.0 + 15 * index, value) for index, value in enumerate(values)]}
    verdict = backtest.backtest(samples, rules)

    assert [(one.firing, one.resolved) for one in verdict.fired] == [(1030.0, 1060.0), (1090.0, None)]
    assert verdict.fired[0].labels["a"] == r"q}\""
    assert verdict.pending == ()


def test_what_vanishes_from_the_page_is_stale_and_times_are_shifted() -> None:
    """A series is gone with the first scrape without it, and times of the past are times of promtool's clock."""
    points = [(1000.0, 1.0), (1015.0, 2.0), (1060.0, 3.0)]

    assert backtest._values("x{}", points, 1000.0, 6) == "1.0 2.0 stale _ 3.0 stale"
    assert backtest._values("x_timestamp_seconds{}", [(1000.0, 990.0)], 1000.0, 2) == "-10.0 stale"


def test_sources_are_as_well_as_they_were(recordings: dict[str, Path]) -> None:
    """While the metrics page was away its source is down, and the time of the last success stands still."""
    samples = backtest.scraped(recordings["metrics-down"], (), LABELS)
    succeeded = column(samples, 'stallwatch_last_poll_success_timestamp_seconds{source="engine"')

    assert column(samples, 'stallwatch_source_up{source="engine"') == [1.0, 0.0, 1.0]
    assert succeeded[1] - succeeded[0] < 6
    assert succeeded[2] - succeeded[1] > 24
    assert sum(points[-1][1] for name, points in samples.items() if "failures_total" in name and "engine" in name) > 10
    assert not [series for series in samples if "incidents" in series or "recording_failures" in series]


def test_replay_writes_what_becomes_blocks_of_a_prometheus(recordings: dict[str, Path], tmp_path: Path) -> None:
    """A Prometheus on the blocks of a recording answers with its values at its times."""
    samples = backtest.scraped(recordings["long-prefill"], (), LABELS)
    backtest.write_blocks(samples, tmp_path / "tsdb")
    ((at, waited),) = [
        points[-1] for name, points in samples.items() if name.startswith("stallwatch_stall_active_seconds_total")
    ]
    query = urllib.parse.urlencode({"query": "stallwatch_stall_active_seconds_total", "time": at})
    with prometheus(tmp_path / "tsdb", tmp_path / "log") as url:
        answer = json.loads(get(f"{url}/api/v1/query?{query}"))["data"]["result"]

    assert [one["metric"]["pod"] for one in answer] == ["vllm-0"]
    assert float(answer[0]["value"][1]) == pytest.approx(waited)


def test_the_program_prints_a_table(recordings: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each alert with its times in UTC, and status 0."""
    status = backtest.main([str(recordings["long-prefill"]), "--label", "namespace=llm"])
    first, *lines = capsys.readouterr().out.splitlines()

    assert status == 0
    assert first.endswith("UTC, a scrape every 15 s")
    assert lines[0].split()[1:] == [
        "fires",
        "at",
        "the",
        "end",
        "StallwatchReadersFrozen",
        "engine=0",
        "severity=critical",
    ]
    assert lines[1].startswith("not yet for long enough at the end: ")


def test_what_cannot_be_done_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file, a flag that is no setting, a rule file that is none: a sentence and a status."""
    (tmp_path / "empty.yml").write_text("groups: 3")

    assert backtest.main([str(tmp_path / "none.jsonl.gz")]) == 1
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        backtest.main([str(tmp_path / "none.jsonl.gz"), "--label", "x"])
    with pytest.raises(backtest.PromtoolError):
        backtest.backtest({"x": [(0.0, 1.0)]}, tmp_path / "empty.yml")
    with pytest.raises(backtest.PromtoolError, match="48 hours"):
        backtest.backtest({"x": [(0.0, 1.0), (3e5, 1.0)]})


def test_replay_writes_the_page_of_each_moment(recordings: dict[str, Path], tmp_path: Path) -> None:
    """`stallwatch replay --openmetrics` writes the same series, without promtool and without the rules."""
    into = tmp_path / "case.om"
    with (tmp_path / "out").open("w") as out:
        arguments = ("replay", str(recordings["quiet"]), "--every", "15", "--openmetrics", str(into))
        status = cli.main(arguments, environ={}, stdout=out, stderr=out)
        refused = cli.main((*arguments[:-1], str(tmp_path)), environ={}, stdout=out, stderr=out)
    lines = into.read_text().splitlines()
    samples = backtest.scraped(recordings["quiet"], (), {"job": "stallwatch", "instance": "quiet.jsonl.gz"})

    assert (status, refused) == (0, 1)
    assert lines == [line.rstrip("\n") for line in openmetrics(samples)]
    assert "argument --openmetrics: " in (tmp_path / "out").read_text()
