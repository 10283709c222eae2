"""Effects with their uncertainty: bootstrap confidence intervals over repeats. Pure and seeded.

Up to seven repeats all resamples are looked at, which needs no chance; beyond that a seeded sample of them.

Repeats are few, and a percentile interval over few repeats is too narrow: with five it covers the truth in 84 of 100
experiments and not in 95. The percentiles taken here lie further out, by the factor between Student's t and the normal
distribution and by sqrt(n / (n - 1)) (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 5.3).
With few repeats the interval then becomes the range of what was seen, which is as far as any resampling can go.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from statistics import NormalDist, fmean
from typing import Final

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 2_000

_ALL: Final = 7

_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t at 97.5 %, by degrees of freedom from 1."""
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the interval that holds the true one with 95 % confidence, as far as `n` values can tell."""

    mean: float
    low: float
    high: float
    n: int


def mean(values: Sequence[float], *, seed: int = 0) -> Estimate | None:
    """The mean of independent values; None for none. One value has no interval: it is the whole line."""
    if not values:
        return None
    if len(values) == 1:
        return Estimate(values[0], -math.inf, math.inf, 1)
    n = len(values)
    if n <= _ALL:
        found = sorted((fmean(values[place] for place in places), weight) for places, weight in _resamples(n))
    else:
        rng = random.Random(seed)  # noqa: S311 (results that can be repeated, no secret)
        found = sorted((fmean(rng.choices(values, k=n)), 1) for _ in range(RESAMPLES))
    return Estimate(fmean(values), *_between(found, n), n)


@cache
def _resamples(n: int) -> Sequence[tuple[tuple[int, ...], int]]:
    """All resamples of n values by their places, and how many orders each of them has."""
    found = []
    for places in combinations_with_replacement(range(n), n):
        orders = math.factorial(n)
        for count in Counter(places).values():
            orders //= math.factorial(count)
        found.append((places, orders))
    return found


def difference(ones: Sequence[float], others: Sequence[float], *, seed: int = 0) -> Estimate | None:
    """Mean of `ones` less mean of `others`, of two experiments that share nothing; None without values of both."""
    if not ones or not others:
        return None
    n = min(len(ones), len(others))
    middle = fmean(ones) - fmean(others)
    if n == 1:
        return Estimate(middle, -math.inf, math.inf, 1)
    rng = random.Random(seed)  # noqa: S311 (as above)

    def again(values: Sequence[float]) -> float:
        return fmean(rng.choices(values, k=len(values)))

    return Estimate(middle, *_between(sorted((again(ones) - again(others), 1) for _ in range(RESAMPLES)), n), n)


def paired(ones: Sequence[float], others: Sequence[float], *, seed: int = 0) -> Estimate | None:
    """The mean of the differences within pairs."""
    return mean([one - other for one, other in zip(ones, others, strict=True)], seed=seed)


def ratio(ones: Sequence[float], others: Sequence[float], *, seed: int = 0) -> Estimate | None:
    """The geometric mean of the ratios within pairs; None where a value is not above zero."""
    if any(value <= 0 for value in (*ones, *others)):
        return None
    logs = [math.log(one / other) for one, other in zip(ones, others, strict=True)]
    return _mapped(math.exp, mean(logs, seed=seed))


def _mapped(to: Callable[[float], float], seen: Estimate | None) -> Estimate | None:
    if seen is None:
        return None
    return Estimate(to(seen.mean), to(seen.low), to(seen.high) if math.isfinite(seen.high) else math.inf, seen.n)


def _between(ordered: Sequence[tuple[float, int]], n: int) -> tuple[float, float]:
    """The interval that leaves out an equal share at either end of weighted means."""
    share = _NORMAL.cdf(-math.sqrt(n / (n - 1)) * _student(n - 1))
    out = share * sum(weight for _, weight in ordered)
    return _beyond(ordered, out), _beyond(ordered[::-1], out)


def _beyond(ordered: Sequence[tuple[float, int]], out: float) -> float:
    """The first mean up to which there is more than `out`."""
    reached = 0
    for value, weight in ordered:
        reached += weight
        if reached > out:
            return value
    return ordered[-1][0]


def _student(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = _NORMAL.inv_cdf(0.5 + CONFIDENCE / 2)
    return z + (z**3 + z) / (4 * freedom)  # the first term of Cornish and Fisher
