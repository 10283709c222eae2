"""The judge judged: simulated scenarios and public reports through the whole sidecar, against the ground truth."""

import re
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
        # All that is asked of a case is asked in one process, which then runs it once.
        pytest.param(number, id=case.id, marks=[pytest.mark.xdist_group(case.id), *[pytest.mark.long] * case.long])
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


@every_case
def test_the_judgement_is_as_written_down(number: int, update_golden: bool) -> None:  # noqa: FBT001  (a fixture)
    """What was judged how is written down, case by case; a change in the rules shows as a change of judgement."""
    assert update_golden or CASES[number].long or _line(run(number)) in GOLDEN.read_text().splitlines()


def test_the_confusion_table(update_golden: bool) -> None:  # noqa: FBT001  (a fixture)
    """The table of judgements sums up its own lines and has every case once."""
    if update_golden:
        GOLDEN.write_text(_table([_line(run(number)) for number in QUICK]))

    text = GOLDEN.read_text()
    lines = [line for line in text.splitlines() if " -> " in line]
    assert [line.split()[0] for line in lines] == [CASES[number].id for number in QUICK]
    assert text == _table(lines)


def _line(result: Result) -> str:
    case = result.case
    return f"{case.id:<40} {case.cause or 'none'!s:<15} -> {', '.join(result.verdicts):<24} {case.source}"


def _table(lines: list[str]) -> str:
    """Rows are truths, columns verdicts, numbers are cases; then every case by name."""
    pairs = Counter[tuple[str, str]]()
    for line in lines:
        case, verdicts = line.split(" -> ")
        # Names of causes hold no spaces; two of them end the list.
        named = re.match(r"[a-z_]+(, [a-z_]+)*", verdicts)
        assert named is not None
        pairs.update((case.split()[1], verdict) for verdict in named[0].split(", "))
    truths = [name for name in dict.fromkeys(("none", *map(str, Cause))) if any(truth == name for truth, _ in pairs)]
    verdicts_seen = [name for name in ("none", *map(str, Verdict)) if any(verdict == name for _, verdict in pairs)]
    text = [
        "# What stallwatch said of every case of tests/scenarios (columns) and what was true (rows): numbers of cases.",
        "# A case counts once for each verdict that it got. Captured in virtual time: pytest --update-golden.",
        "",
        " " * 16 + "".join(f"{verdict:>15}" for verdict in verdicts_seen),
    ]
    for truth in truths:
        cells = "".join(f"{pairs[truth, verdict] or '.':>15}" for verdict in verdicts_seen)
        text.append(f"{truth:<16}{cells}")
    return "\n".join([*text, "", *lines]) + "\n"


PHASES = [round(0.01 + 0.05 * index, 2) for index in range(6)]
DELAYS = {
    # By what it is seen, the threshold in seconds, and how much of the scenario it takes.
    "long-prefill-off": ("step age", 0.5, 30.0),
    "jit-pause-off": ("step age", 0.5, 26.0),
    "engine-hang-pulse": ("step age", 0.5, 34.0),
    "frontend-bound-persistent": ("open stream", 0.5, 26.0),
    "allreduce-hang": ("open stream", 0.5, 34.0),
}


@pytest.mark.parametrize("name", DELAYS)
def test_detection_delay(name: str) -> None:
    """Over phases of the poll, every stall is known half a second after its threshold was crossed at the latest."""
    witness, threshold, seconds = DELAYS[name]

    delays = sorted(_delay(run(NUMBERS[name], phase, seconds)) for phase in PHASES)

    least, middle, most = delays[0], delays[len(delays) // 2], delays[-1]
    print(f"\n{name}, seen by {witness}, threshold {threshold:.2f} s; seconds from the begin of the gap:")
    print(f"least {least:.2f}, median {middle:.2f}, most {most:.2f}")
    assert most <= threshold + 0.5


def _delay(result: Result) -> float:
    """From the begin of the first true gap above the threshold to the moment at which the first stall was opened."""
    return result.seen[0].detected - result.gaps[0][0]


# A case, and how much of it there has to be.
JITTERED = {"long-prefill-off": 70.0, "jit-pause-off": 48.0, "queue-full-pulse": 40.0}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "queue-full-pulse")) for name in JITTERED]
)
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
