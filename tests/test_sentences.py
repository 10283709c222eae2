import json
import math
from dataclasses import replace
from typing import Any

import pytest

from stallwatch.analysis.causes import Cause, StallKind
from stallwatch.analysis.episodes import Stall, StallsView
from stallwatch.analysis.findings import EngineFindings, Findings
from stallwatch.analysis.phase import Phase
from stallwatch.analysis.prefill import Evidence
from stallwatch.analysis.step_model import PrefillBudget, StepModelView
from stallwatch.analysis.work import WorkView
from stallwatch.app import monitor_for
from stallwatch.health import Health, SourceState
from stallwatch.observations import Failure, Source
from stallwatch.settings import Settings
from stallwatch.web.sentences import NAMES, State, advice, reservations, seconds, verdict
from tests.harness import Watched, watch

STALL = Stall(
    id="0-1", engine="0", kind=StallKind.DECODE, start=70.0, end=None, detected=70.5, seconds=28.0,
    reader_seconds=90.0, longest=1.3, cause=Cause.PREFILL, evidence=(), culprit_tokens=12_000.0,
)  # fmt: skip
MODEL = StepModelView(
    base=0.03, per_decoder=0.001, per_token={0.95: 1e-4}, per_token_start=None, per_token_context=None, r2=0.9,
    mixed_steps=80.0, context_min=0.0, context_max=12_000.0,
)  # fmt: skip
BUDGET = PrefillBudget(
    tokens=440, objective=0.1, decoders=4.0, context_min=0.0, context_max=12_000.0, extrapolated=False,
    batched_tokens=444, max_num_seqs=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def quiet() -> Watched:
    """A sidecar beside a server at which nothing happens."""
    return watch("quiet", seconds=40.0, canary={"mode": "persistent"})


def engine(seen: EngineFindings, **changes: Any) -> EngineFindings:
    return replace(seen, **changes)


def stalled(seen: EngineFindings, stall: Stall | None, *closed: Stall) -> EngineFindings:
    view: StallsView = replace(seen.stalls, open=stall, closed=closed)
    return engine(seen, stalls=view)


def said(findings: Findings, health: Health | None = None) -> tuple[State, str, str]:
    found = verdict(findings, health or Health())
    return found.state, found.sentence, found.more


def test_before_anything_was_seen() -> None:
    """Nothing is claimed of a server that was never reached, and the reason is said when there is one."""
    empty = monitor_for(Settings()).findings(1.0)
    refused = Health(
        {Source.ENGINE: SourceState(up=False, duration=0.0, since=0.0, last_success=None, reason=Failure.REFUSED)}
    )

    assert said(empty)[:2] == (
        State.UNKNOWN, "The server is starting or cannot be reached: nothing to judge yet."
    )  # fmt: skip
    assert "(refused)" in said(empty, refused)[1]
    assert said(replace(empty, phase=Phase.SERVING))[:2] == (State.UNKNOWN, "No data yet: nobody was seen to read.")
    assert said(replace(empty, phase=Phase.GONE))[0] is State.DOWN
    assert said(replace(empty, phase=Phase.ASLEEP))[0] is State.UNKNOWN


def test_a_quiet_server(quiet: Watched) -> None:
    """Readers are served, with the longest wait and its unit."""
    state, sentence, more = said(quiet.last)

    assert state is State.WELL
    assert sentence.startswith("Readers are served. Longest wait of the last 30 s: ")
    assert sentence.endswith(" ms.")
    assert more == ""


def test_late_without_a_stall(quiet: Watched) -> None:
    """Waits above the promise that are no stall are said as seconds missed, and a blind source is named."""
    late = replace(quiet.last, engines=(engine(quiet.engine(), just_missed=4.2, engine_wait_max=0.31),))
    down = Health(
        {Source.ENGINE: SourceState(up=False, duration=0.0, since=0.0, last_success=None, reason=Failure.TIMEOUT)}
    )

    assert said(late)[:2] == (
        State.LATE, "Readers waited longer than promised in 4.2 of the last 30 s, up to 310 ms."
    )  # fmt: skip
    assert said(late, down)[2] == "The server's metrics cannot be read (timeout): judged by the canary alone."


@pytest.mark.parametrize(
    ("kind", "cause", "sentence"),
    [
        (
            StallKind.DECODE,
            Cause.PREFILL,
            "Answers have been stalling for 30.0 s. Cause: prefill, a prompt of 12,000 tokens.",
        ),
        (StallKind.ADMISSION, Cause.ADMISSION, "New requests have been waiting for 30.0 s. Cause: admission."),
        (StallKind.ENGINE, Cause.ENGINE_HANG, "The engine has been stalling for 30.0 s. Cause: engine hang."),
        (StallKind.DEGRADED, Cause.GPU_CLOCK, "Answers have been trickling for 30.0 s. Cause: GPU clock."),
        (StallKind.DECODE, Cause.UNKNOWN, "Answers have been stalling for 30.0 s. Nothing seen so far explains it."),
    ],
)
def test_a_stall_that_goes_on(quiet: Watched, kind: StallKind, cause: Cause, sentence: str) -> None:
    """How long, what kind, and a cause only where there is one; advice only with a cause."""
    stall = replace(STALL, kind=kind, cause=cause)
    found = verdict(replace(quiet.last, at=100.0, engines=(stalled(quiet.engine(), stall),)), Health())

    assert (found.state, found.sentence, found.stall, found.cause) == (State.STALLED, sentence, "0-1", cause)
    assert found.more.startswith("Try: ") is (cause is not Cause.UNKNOWN)


def test_the_worst_of_several_engines_is_named(quiet: Watched) -> None:
    """With data-parallel ranks it is said where, or on how many."""
    seen = quiet.engine()
    well, bad = stalled(seen, None), engine(stalled(seen, replace(STALL, engine="1")), engine="1")
    worse = engine(stalled(seen, replace(STALL, engine="2", id="2-1", seconds=40.0)), engine="2")

    assert "30.0 s on engine 1." in said(replace(quiet.last, at=100.0, engines=(well, bad)))[1]
    both = verdict(replace(quiet.last, at=100.0, engines=(well, bad, worse)), Health())
    assert "30.0 s on 2 of 3 engines." in both.sentence
    assert both.stall == "2-1"


def test_a_stall_that_just_ended_is_still_mentioned(quiet: Watched) -> None:
    """For two minutes after it; then it is history."""
    ended = stalled(quiet.engine(), None, replace(STALL, end=85.0))
    soon, later = (replace(quiet.last, at=at, engines=(ended,)) for at in (100.0, 300.0))

    assert said(soon)[2] == "The last stall ended 15.0 s ago: 15.0 s, prefill, a prompt of 12,000 tokens."
    assert said(later)[2] == ""


def work(**changes: Any) -> WorkView:
    values: dict[str, Any] = dict.fromkeys(WorkView.__dataclass_fields__)
    values |= {"evidence": Evidence.BALANCE, "prefill_totals": {}, "step_seconds": {}} | changes
    return WorkView(**values)


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (None, "No data yet: the engine was not seen to work."),
        (work(), "No advice yet: no step with prefill beside readers was timed."),
        (
            work(model=replace(MODEL, mixed_steps=12.0)),
            "No advice yet: 12 steps with prefill were timed, 50 are needed.",
        ),
        (work(model=replace(MODEL, r2=0.3)), "No advice: what steps take is not explained by what they carry."),
        (work(model=MODEL, budget=BUDGET), "--max-num-batched-tokens 444 keeps 95 % of steps within 100 ms."),
        (
            work(model=MODEL, budget=BUDGET, token_budget=8192),
            "--max-num-batched-tokens 444 keeps 95 % of steps within 100 ms, now 8,192.",
        ),
        (work(model=MODEL, budget=replace(BUDGET, tokens=0)), "No chunk of prefill fits into 100 ms here."),
    ],
)
def test_advice_or_why_there_is_none(seen: WorkView | None, sentence: str) -> None:
    """A token budget with the promise that it keeps, or what is missing for one."""
    assert advice(seen, 0.1) == sentence


def test_reservations_say_what_the_advice_was_learned_from() -> None:
    """The context seen, the readers beside, what is extrapolated, and vLLM's own lower bound where it is not known."""
    bold = work(budget=replace(BUDGET, extrapolated=True, max_num_seqs=256))

    assert reservations(None) == reservations(work()) == ""
    assert reservations(work(budget=BUDGET)) == (
        "A chunk of 440 prompt tokens beside 4 readers, learned with 0 to 12,000 tokens of context, not below "
        "--max-num-seqs."
    )
    assert reservations(bold).endswith("of context, extrapolated beyond what was seen.")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "12.3 ms"),
        (0.4567, "457 ms"),
        (0.9996, "1.0 s"),
        (12.34, "12.3 s"),
        (99.6, "1 min 40 s"),
        (7500.0, "2 h 05 min"),
        (math.nan, "an unknown time"),
        (math.inf, "an unknown time"),
    ],
)
def test_seconds_for_people(value: float, text: str) -> None:
    """Three figures and the unit that fits."""
    assert seconds(value) == text


def test_every_cause_has_a_name() -> None:
    """A new cause cannot be forgotten."""
    assert set(NAMES) == set(Cause)


def test_what_a_page_hears_is_json(quiet: Watched) -> None:
    """The event of a real sidecar: verdict, figures, the newest slots and the stalls, without NaN."""
    content = quiet.sidecar.live()()
    text = json.dumps(content, allow_nan=False)

    assert content["verdict"]["state"] == "well"
    assert content["status"]["target"]["model"] == "tiny"
    assert content["timeline"]["slots"] == 20
    assert content["advice"]["0"]["sentence"].startswith("No advice yet")
    assert content["stalls"] == []
    assert len(text) < 20_000
