"""How long the rest of an open prompt will take."""

import random
from collections.abc import Iterator
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.analysis.pace import PrefillPace, Stretch

CHUNK = 512.0


def steps(
    length: float, *, start: float = 2e-4, slope: float = 1e-7, noise: float = 0.0, seed: int = 0
) -> Iterator[Stretch]:
    """The steps of one prompt: a token at position x takes start + slope*x seconds, each step wrong by `noise`."""
    rng = random.Random(seed)
    for number in range(int(length / CHUNK)):
        middle = (number + 0.5) * CHUNK
        yield Stretch(middle, CHUNK, CHUNK * (start + slope * middle) * (1 + rng.uniform(-noise, noise)))


def errors(pace: PrefillPace, prompt: list[Stretch]) -> list[float | None]:
    """How wrong the time to go was after each step but the last; the first is seen with steps before the prompt."""
    found: list[float | None] = []
    for number, step in enumerate(prompt[:-1]):
        pace.add(step, pure=number > 0)
        left = sum(later.seconds for later in prompt[number + 1 :])
        eta = pace.eta((number + 1) * CHUNK, CHUNK * (len(prompt) - number - 1))
        found.append(None if eta is None else eta / left - 1)
    pace.add(prompt[-1], pure=False)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_first_long_prompt_is_foretold_once_its_pace_is_known(seed: int) -> None:
    """Absent before there is a slope, and right within a quarter whenever it is there."""
    told = errors(PrefillPace(), list(steps(12_000, noise=0.05, seed=seed)))
    known = [error for error in told if error is not None]

    assert told[:2] == [None, None]
    assert len(known) > 15
    assert max(abs(error) for error in known) < 0.25


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.0])
def test_the_next_prompt_is_foretold_from_its_first_steps(slower: float) -> None:
    """What one long prompt taught holds for the next, whose own steps say by how much it is slower."""
    pace = PrefillPace()
    errors(pace, list(steps(12_000, noise=0.05)))
    told = errors(pace, list(steps(24_000, start=2e-4 * slower, slope=1e-7 * slower, noise=0.05, seed=9)))
    known = [abs(error) for error in told[2:] if error is not None]

    assert len(known) > 40
    assert max(known) < 0.25
    assert median(known) < 0.1


def test_short_prompts_do_not_push_out_what_a_long_one_taught() -> None:
    """After a thousand short prompts the next long one is still foretold."""
    pace = PrefillPace()
    errors(pace, list(steps(12_000)))
    for _ in range(1_000):
        errors(pace, list(steps(3 * CHUNK)))
    told = errors(pace, list(steps(12_000)))

    assert all(error is not None and abs(error) < 0.02 for error in told)


def test_short_prompts_promise_nothing_of_a_long_one() -> None:
    """A pace seen at the beginning of prompts only is not stretched to one thirty times as long."""
    pace = PrefillPace()
    for seed in range(20):
        errors(pace, list(steps(4 * CHUNK, noise=0.3, seed=seed)))

    assert pace.eta(CHUNK, 60_000) is None
    assert pace.eta(CHUNK, CHUNK) is not None


def test_nothing_is_known_before_the_first_step() -> None:
    """No pace, no time to go; and nothing to do takes no time."""
    assert PrefillPace().eta(0, 1_000) is None
    assert PrefillPace().eta(0, 0) == 0


@given(
    st.lists(
        st.tuples(st.floats(0, 1e12), st.floats(0, 1e9), st.floats(0, 1e6), st.booleans()),
        max_size=60,
    ),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
)
def test_a_time_to_go_is_never_negative(
    seen: list[tuple[float, float, float, bool]], position: float, backlog: float
) -> None:
    """Whatever was seen, the answer is absent or a time."""
    pace = PrefillPace()
    for at, tokens, seconds, pure in seen:
        pace.add(Stretch(at, tokens, seconds), pure=pure)
    eta = pace.eta(position, backlog)

    assert eta is None or eta >= 0
