import math
import random
from collections.abc import Callable
from statistics import fmean

import pytest

from stallwatch.experiment import statistics
from stallwatch.experiment.statistics import Estimate

DISTRIBUTIONS: dict[str, tuple[Callable[[random.Random], float], float]] = {
    "normal": (lambda rng: rng.gauss(3.0, 1.0), 3.0),
    "uniform": (lambda rng: rng.uniform(0.0, 2.0), 1.0),
    "exponential": (lambda rng: rng.expovariate(1.0), 1.0),
}
EXPERIMENTS = 150


@pytest.mark.parametrize(
    ("name", "repeats", "least"),
    [
        pytest.param("normal", 3, 0.68, id="normal, 3"),
        pytest.param("normal", 5, 0.88, id="normal, 5"),
        pytest.param("normal", 10, 0.90, id="normal, 10"),
        pytest.param("uniform", 5, 0.86, id="uniform, 5"),
        pytest.param("exponential", 5, 0.77, id="exponential, 5"),
    ],
)
def test_intervals_hold_the_true_mean(name: str, repeats: int, least: float) -> None:
    """The interval of a mean holds the true one about as often as it says, less with three repeats or a long tail."""
    draw, true = DISTRIBUTIONS[name]
    rng = random.Random(17)
    held = 0
    for number in range(EXPERIMENTS):
        seen = statistics.mean([draw(rng) for _ in range(repeats)], seed=number)
        assert seen is not None
        held += seen.low <= true <= seen.high

    print(f"{name}, {repeats} repeats: the interval held the mean in {held / EXPERIMENTS:.0%} of the experiments")
    assert held / EXPERIMENTS >= least


def test_a_difference_that_is_there_is_seen_and_one_that_is_not_is_not() -> None:
    """Two independent samples: the interval of the difference holds the true one, and zero only when it should."""
    rng = random.Random(23)
    held = zero = 0
    for number in range(60):
        ones = [rng.gauss(5.0, 1.0) for _ in range(6)]
        others = [rng.gauss(1.0, 1.0) for _ in range(6)]
        seen = statistics.difference(ones, others, seed=number)
        assert seen is not None
        held += seen.low <= 4.0 <= seen.high
        zero += seen.low <= 0.0

    assert held / 60 >= 0.88
    assert zero == 0


def test_pairs_take_out_what_both_share() -> None:
    """Drift that meets both runs of a block is not in the interval of their difference."""
    drift = [0.0, 10.0, 20.0, 30.0, 40.0]
    seen = statistics.paired([value + 2.0 for value in drift], drift)

    assert seen == Estimate(2.0, 2.0, 2.0, 5)


def test_a_ratio_is_of_what_is_above_zero() -> None:
    """The ratio is a geometric mean, and absent where something is not above zero."""
    seen = statistics.ratio([2.0, 8.0], [1.0, 1.0])

    assert seen is not None
    assert seen.mean == pytest.approx(4.0)
    assert statistics.ratio([1.0, 0.0], [1.0, 1.0]) is None


def test_one_value_has_no_interval() -> None:
    """Nothing is claimed of what was seen once, and nothing at all of what was never seen."""
    assert statistics.mean([2.0]) == Estimate(2.0, -math.inf, math.inf, 1)
    assert statistics.mean([]) is None
    assert statistics.difference([1.0], []) is None


def test_a_seed_gives_one_interval() -> None:
    """The same values and seed give the same interval, to the last bit."""
    values = [2.0**power for power in range(12)]

    assert statistics.mean(values, seed=4) == statistics.mean(values, seed=4)
    assert statistics.mean(values, seed=4) != statistics.mean(values, seed=5)


def test_few_repeats_give_the_range() -> None:
    """With three repeats the interval is all that was seen: resampling cannot reach further."""
    seen = statistics.mean([1.0, 2.0, 6.0])

    assert seen is not None
    assert (seen.low, seen.high) == (1.0, 6.0)
    assert seen.mean == fmean([1.0, 2.0, 6.0])
