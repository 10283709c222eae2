"""The judge judged: simulated scenarios and public reports through the whole sidecar, against the ground truth."""

from collections import Counter
from pathlib import Path

import pytest

from stallwatch.analysis.causes import Cause as Verdict
from stallwatch.simulator.cost import Cause
from tests.scenarios.cases import CASES, PUBLIC
from tests.scenarios.runs import Result, run

GOLDEN = Path(__file__).parents[1] / "golden" / "attribution.txt"

QUICK = [number for number, case in enumerate(CASES) if not case.long]
every_case = pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=case.id, marks=[pytest.mark.long] if case.long else [])
        for number, case in enumerate(CASES)
    ],
)
NUMBERS = {case.id: number for number, case in enumerate(CASES)}


def test_the_set_is_as_large_as_promised() -> None:
    """At least 25 cases are built from public reports, each with its source and an id of its own."""
    assert len(PUBLIC) >= 25
    assert len({case.id for case in PUBLIC}) == len(PUBLIC)
    assert all(case.source for case in CASES)


@every_case
def test_no_wrong_cause(number: int) -> None:
    """No cause is named that is not true, and unknown is only said where the truth cannot be seen."""
    assert run(number).wrong == []


@every_case
def test_no_false_stall(number: int) -> None:
    """Nobody is said to stall who does not: neither a reader of the load nor a stream of ours waited."""
    assert run(number).false == []


@every_case
def test_what_is_true_is_said(number: int) -> None:
    """A case with a cause has a stall with that cause; what the simulator computed confirms the table."""
    result = run(number)
    case = result.case
    truths = {wait.cause for wait in result.load}

    if case.cause in {None, Cause.OBSERVER} or case.idle:
        assert truths <= {*case.also, *case.scenario.probe_causes} or case.idle
        allowed = {str(cause) for cause in (*case.also, *case.scenario.probe_causes, case.cause) if cause is not None}
        assert {str(seen.stall.cause) for seen in result.seen} <= allowed
        return
    assert case.cause in truths
    assert truths <= {case.cause, *case.also, Cause.UNKNOWN}
    named = {str(seen.stall.cause) for seen in result.seen}
    assert case.cause in named or (case.unseen and Verdict.UNKNOWN in named)


def test_the_confusion_table(update_golden: bool) -> None:  # noqa: FBT001  (a fixture)
    """What was judged how, over all cases, is written down; a change in the rules shows as a change of judgement."""
    text = _table([run(number) for number in QUICK])
    if update_golden:
        GOLDEN.write_text(text)

    assert GOLDEN.read_text() == text


def _table(results: list[Result]) -> str:
    """Rows are truths, columns verdicts, numbers are cases; then every case by name."""
    pairs = Counter((str(result.case.cause or "none"), verdict) for result in results for verdict in result.verdicts)
    truths = [name for name in ("none", *map(str, Cause)) if any(truth == name for truth, _ in pairs)]
    truths = list(dict.fromkeys(truths))
    verdicts = [name for name in ("none", *map(str, Verdict)) if any(verdict == name for _, verdict in pairs)]
    lines = [
        "# What stallwatch said of every case of tests/scenarios (columns) and what was true (rows): numbers of cases.",
        "# A case counts once for each verdict that it got. Captured in virtual time: pytest --update-golden.",
        "",
        " " * 16 + "".join(f"{verdict:>15}" for verdict in verdicts),
    ]
    for truth in truths:
        cells = "".join(f"{pairs[truth, verdict] or '.':>15}" for verdict in verdicts)
        lines.append(f"{truth:<16}{cells}")
    lines.append("")
    for result in results:
        case = result.case
        lines.append(f"{case.id:<40} {case.cause or 'none'!s:<15} -> {', '.join(result.verdicts):<24} {case.source}")
    lines += [
        "",
        f"false stalls: {sum(len(r.false) for r in results)}",
        f"wrong causes: {sum(len(r.wrong) for r in results)}",
    ]
    return "\n".join(lines) + "\n"


PHASES = [round(0.01 + 0.05 * index, 2) for index in range(6)]
DELAYS = {
    # By what it is seen, the threshold in seconds, and how much of the scenario it takes.
    "long-prefill-off": ("step age", 0.5, 30.0),
    "jit-pause-off": ("step age", 0.5, 26.0),
    "engine-hang-pulse": ("step age", 0.5, 34.0),
    "frontend-bound-persistent": ("open stream", 0.5, 26.0),
    "allreduce-hang": ("open stream", 0.5, 34.0),
}


def test_detection_delay() -> None:
    """Over phases of the poll, every stall is known half a second after its threshold was crossed at the latest."""
    print("\ncase                       seen by      threshold  from the begin of the gap: least, median, most (s)")
    for name, (witness, threshold, seconds) in DELAYS.items():
        delays = sorted(_delay(run(NUMBERS[name], phase, seconds)) for phase in PHASES)
        least, middle, most = delays[0], delays[len(delays) // 2], delays[-1]
        print(f"{name:<26} {witness:<12} {threshold:>8.2f}   {least:.2f} {middle:.2f} {most:.2f}")
        assert most <= threshold + 0.5


def _delay(result: Result) -> float:
    """From the begin of the first true gap above the threshold to the moment at which the first stall was opened."""
    return result.seen[0].detected - result.gaps[0][0]


# A case, and how much of it there has to be.
JITTERED = {"long-prefill-off": 70.0, "jit-pause-off": 48.0, "queue-full-pulse": 40.0}


@pytest.mark.parametrize("name", JITTERED)
def test_ten_runs_with_other_phases_agree(name: str) -> None:
    """Polls and pulses shifted against the scenario change no verdict."""
    runs = [run(NUMBERS[name], 0.037 + 0.277 * index, JITTERED[name]) for index in range(10)]

    assert {result.verdicts for result in runs} == {(str(runs[0].case.cause),)}
    assert [result.false for result in runs if result.false] == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [pytest.param(number, id=case.id) for number, case in enumerate(CASES)])
def test_no_phase_makes_a_wrong_cause(number: int) -> None:
    """Ten shifts of polls and pulses against the scenario, for every case."""
    runs = [run(number, 0.037 + 1.551 * index) for index in range(10)]

    assert [result.wrong for result in runs if result.wrong] == []
    assert [result.false for result in runs if result.false] == []
