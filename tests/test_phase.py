from collections.abc import Callable

import pytest

from stallwatch.analysis.phase import Phase, PhaseWatch
from stallwatch.observations import EngineSample, Failure, Lane, PollFailure, Source


def answer(at: float, *, asleep: bool | None = None, started: float | None = None) -> Callable[[PhaseWatch], object]:
    sample = EngineSample(
        sent_at=at - 0.01, at=at, lane=Lane.FULL, engines={}, asleep=asleep, process_start_unix=started
    )
    return lambda watch: watch.answered(sample)


def failure(at: float, reason: Failure) -> Callable[[PhaseWatch], object]:
    return lambda watch: watch.failed(PollFailure(at, Source.ENGINE, reason))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([], Phase.STARTING, id="nothing seen yet"),
        pytest.param(
            [failure(1, Failure.REFUSED), failure(900, Failure.REFUSED)], Phase.STARTING, id="loads its model"
        ),
        pytest.param([failure(1, Failure.REFUSED), answer(60)], Phase.SERVING, id="loaded"),
        pytest.param([answer(1), failure(2, Failure.REFUSED)], Phase.SERVING, id="one refusal is a full backlog"),
        pytest.param(
            [answer(1), failure(2, Failure.REFUSED), failure(3, Failure.REFUSED)], Phase.GONE, id="refused for a second"
        ),
        pytest.param(
            [answer(1), failure(2, Failure.TIMEOUT), failure(60, Failure.TIMEOUT)], Phase.SERVING, id="frozen"
        ),
        pytest.param([answer(1), answer(2, asleep=True)], Phase.ASLEEP, id="asleep"),
        pytest.param([answer(1, asleep=True), answer(2)], Phase.ASLEEP, id="a small scrape does not tell it woke"),
        pytest.param([answer(1, asleep=True), answer(2, asleep=False)], Phase.SERVING, id="woken"),
        pytest.param([answer(1, started=100.0), answer(2, started=200.0)], Phase.STARTING, id="another process"),
        pytest.param(
            [answer(1, started=100.0), answer(2, started=200.0), answer(3, started=200.0)],
            Phase.SERVING,
            id="another process serves",
        ),
    ],
)
def test_phase_follows_from_what_the_endpoint_answered(
    events: list[Callable[[PhaseWatch], object]], expected: Phase
) -> None:
    """The phase is what the sequence of answers and failures means."""
    watch = PhaseWatch()
    for event in events:
        event(watch)

    assert watch.phase is expected


def test_a_restart_is_told_once() -> None:
    """Only the first scrape of another process reports the restart."""
    watch = PhaseWatch()
    told = [answer(1, started=1.0)(watch), answer(2, started=2.0)(watch), answer(3, started=2.0)(watch)]

    assert told == [False, True, False]
    assert watch.restarts == 1
