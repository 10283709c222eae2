import math
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from stallwatch.analysis.quantiles import WeightedQuantiles, bucket_quantile

VALUES = st.sampled_from([0.001, 0.004, 0.004000001, 0.1, 0.25, 1.0, 5.0, 110.0]) | st.floats(0, 1e3)
ENTRIES = st.lists(st.tuples(VALUES, st.integers(1, 5)), max_size=60)
SHARES = st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0])


def naive(entries: list[tuple[float, int]], q: float) -> float | None:
    """The definition, read off a sorted list."""
    ordered = sorted(entries)
    total = sum(weight for _, weight in ordered)
    if total <= 0:
        return None
    goal = max(1, math.ceil(q * total - 1e-9))
    reached = accumulate(weight for _, weight in ordered)
    return next(value for (value, _), sofar in zip(ordered, reached, strict=True) if sofar >= goal)


@given(ENTRIES, ENTRIES, SHARES)
def test_agrees_with_the_definition(entries: list[tuple[float, int]], extra: list[tuple[float, int]], q: float) -> None:
    """A quantile equals the one read off the sorted list, entries of this question included."""
    quantiles = WeightedQuantiles()
    for value, weight in entries:
        quantiles.add(value, weight)

    assert naive(entries + extra, q) == quantiles.quantile(q, extra)


@given(ENTRIES, st.data())
def test_forgets_what_is_removed(entries: list[tuple[float, int]], data: st.DataObject) -> None:
    """After any removals the quantiles are those of what is left, and the total is exact."""
    kept = list(entries)
    quantiles = WeightedQuantiles()
    for value, weight in entries:
        quantiles.add(value, weight)
    for _ in range(data.draw(st.integers(0, len(entries)))):
        quantiles.remove(*kept.pop(data.draw(st.integers(0, len(kept) - 1))))

    assert sum(weight for _, weight in kept) == quantiles.total
    assert naive(kept, 0.95) == quantiles.quantile(0.95)


def test_many_values_keep_their_order_across_blocks() -> None:
    """Thousands of values, enough to split blocks, give the same answers as a sorted list."""
    entries = [((i * 7919) % 10_007 / 1000, 1 + i % 3) for i in range(10_000)]
    quantiles = WeightedQuantiles()
    for value, weight in entries:
        quantiles.add(value, weight)

    for q in (0.001, 0.5, 0.95, 0.99, 1.0):
        assert naive(entries, q) == quantiles.quantile(q)
    for entry in entries:
        quantiles.remove(*entry)
    assert (quantiles.total, len(quantiles)) == (0, 0)


def test_negative_extra_takes_weight_away() -> None:
    """A negative entry shortens an entry that is held, for one question only."""
    quantiles = WeightedQuantiles()
    quantiles.add(1.0, 10)
    quantiles.add(9.0, 10)

    assert quantiles.quantile(0.6, [(9.0, -8)]) == 1.0
    assert quantiles.quantile(0.6) == 9.0


def test_nearest_rank_is_not_moved_by_rounding() -> None:
    """The p99 of 200 values is the 198th."""
    quantiles = WeightedQuantiles()
    for i in range(200):
        quantiles.add(float(i + 1), 1)

    assert quantiles.quantile(0.99) == 198.0


def test_bucket_quantile_interpolates_like_promql() -> None:
    """Inside a bucket the quantile is linear; above the last finite edge it is that edge."""
    edges = (0.1, 0.2, math.inf)

    assert bucket_quantile(0.5, edges, (10.0, 20.0, 20.0)) == 0.1
    assert math.isclose(bucket_quantile(0.75, edges, (10.0, 20.0, 20.0)) or 0, 0.15)
    assert bucket_quantile(0.99, edges, (0.0, 0.0, 5.0)) == 0.2
    assert bucket_quantile(0.5, edges, (0.0, 0.0, 0.0)) is None
