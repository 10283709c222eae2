import math

from hypothesis import given
from hypothesis import strategies as st

from stallwatch.analysis.spans import SpanUnion

SPANS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=40)


@given(SPANS)
def test_total_is_the_length_of_the_union(spans: list[tuple[int, int]]) -> None:
    """Whatever the order and overlap, the total equals the number of unit seconds covered."""
    union = SpanUnion(keep=1000)
    covered: set[int] = set()
    for start, length in spans:
        fresh = set(range(start, start + length)) - covered

        assert union.add(start, start + length) == len(fresh)
        covered |= fresh
    assert union.total == len(covered)
    assert union.within(20, 60) == len(covered & set(range(20, 60)))


def test_memory_is_bounded_and_the_forgotten_is_not_counted_again() -> None:
    """Old spans are dropped, and a span that reaches behind them does not count them twice."""
    union = SpanUnion(keep=10)
    for second in range(0, 10_000, 2):
        union.add(second, second + 1)

    assert len(union._starts) <= 7
    before = union.total
    union.add(0, 9_998.5)
    assert union.total - before <= 10
    assert math.isclose(union.total, 5000, rel_tol=0.01)
