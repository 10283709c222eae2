"""The truth helpers, against figures worked out by hand."""

import math

import pytest

from tests.vllm import truth
from tests.vllm.load import Read, Stream
from tests.vllm.truth import Gap


def stream(*reads: float | tuple[float, int], sent: float = 0.0, ended: float | None = None, name: str = "s") -> Stream:
    """A stream by its read times; a pair gives the number of tokens too."""
    pairs = [read if isinstance(read, tuple) else (read, 1) for read in reads]
    return Stream(name=name, sent=sent, reads=tuple(Read(at, tokens) for at, tokens in pairs), ended=ended)


def test_gaps_lie_between_token_reads_and_belong_to_the_window_of_their_end() -> None:
    """The wait for the first token is no gap, and a window takes the gaps that end in it."""
    seen = stream(1.0, 1.5, (4.0, 3))

    assert truth.gaps(seen) == [Gap(1.0, 1.5, 1), Gap(1.5, 4.0, 3)]
    assert truth.gaps(seen, window=(1.5, 4.0)) == [Gap(1.0, 1.5, 1)]


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        pytest.param(-0.1, None, id="not sent yet"),
        pytest.param(0.4, Gap(0.0, 0.4, 0), id="no token yet"),
        pytest.param(2.5, Gap(1.5, 2.5, 0), id="between tokens"),
        pytest.param(6.0, None, id="ended"),
    ],
)
def test_the_open_gap_counts_from_the_last_token(at: float, expected: Gap | None) -> None:
    """While a stream is open a gap is open, from send when no token has come."""
    assert truth.open_gap(stream(1.0, 1.5, 4.0, ended=5.0), at) == expected


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        pytest.param([], 0.5, None, id="nothing"),
        pytest.param([3.0], 0.01, 3.0, id="one"),
        pytest.param([float(n) for n in range(1, 101)], 0.95, 95.0, id="95 of 100, not 96"),
        pytest.param([float(n) for n in range(1, 101)], 0.99, 99.0, id="99 of 100"),
        pytest.param([4.0, 1.0, 2.0, 3.0], 0.5, 2.0, id="even count takes the lower"),
        pytest.param([1.0, 2.0], 1.0, 2.0, id="the largest"),
    ],
)
def test_nearest_rank_gives_a_value_that_was_seen(values: list[float], q: float, expected: float | None) -> None:
    """The quantile is the value of rank ceil(q * n), never a mean of two."""
    assert truth.nearest_rank(values, q) == expected


def test_itl_is_weighted_by_tokens_and_icl_is_not() -> None:
    """Nine tokens in one read weigh nine times in the ITL and once in the inter-chunk latency."""
    samples = [Gap(0.0, 0.9, 9), Gap(0.9, 1.4, 1)]

    assert truth.itl_quantile(samples, 0.9) == pytest.approx(0.1)
    assert truth.icl_quantile(samples, 0.9) == pytest.approx(0.9)


def test_the_time_weighted_quantile_tells_a_freeze_that_the_plain_one_hides() -> None:
    """22 gaps of 5 s among 190 s of 37 ms gaps leave the token-weighted p99 calm; the time-weighted p95 says 5 s."""
    calm = [Gap(0.037 * n, 0.037 * (n + 1), 1) for n in range(5_135)]
    frozen = [Gap(190.0 + 5.0 * n, 195.0 + 5.0 * n, 1) for n in range(22)]

    assert truth.itl_quantile([*calm, *frozen], 0.99) == pytest.approx(0.037)
    assert truth.time_weighted_quantile([*calm, *frozen], 0.95, window=(0.0, 300.0)) == pytest.approx(5.0)


def test_time_weighted_gaps_are_clipped_to_the_window() -> None:
    """Of a gap that began before the window only the part inside counts."""
    assert truth.time_weighted_quantile([Gap(0.0, 10.0, 1)], 0.95, window=(8.0, 20.0)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("tokens", "objective", "expected"),
    [
        pytest.param(1, 0.1, 0.1, id="one token"),
        pytest.param(4, 0.1, 0.4, id="four tokens have four times as long"),
        pytest.param(50, 0.1, 1.0, id="never more than a second by count"),
        pytest.param(1, 2.0, 2.0, id="but at least the objective"),
    ],
)
def test_the_limit_of_a_gap_grows_with_its_tokens_up_to_a_second(
    tokens: int, objective: float, expected: float
) -> None:
    """A gap of k tokens may last k times the objective, within the bounds of the objective and one second."""
    assert truth.limit(tokens, objective) == pytest.approx(expected)


def test_missed_seconds_are_the_union_of_whole_gaps_over_streams() -> None:
    """Two readers frozen by the same step miss its seconds once, and short gaps cost nothing."""
    one = stream(1.0, 1.05, 3.05, 3.1, ended=3.1)
    two = stream(1.5, 3.5, (5.5, 50), ended=5.5)

    assert truth.missed_seconds([one], objective=0.1) == pytest.approx(2.0)
    assert truth.missed_seconds([one, two], objective=0.1) == pytest.approx(5.5 - 1.05)
    assert truth.missed_seconds([one, two], objective=0.1, window=(3.0, 4.0)) == pytest.approx(1.0)


def test_a_late_first_token_is_missed_whole() -> None:
    """A first-token wait above its objective counts from the send; one below it counts nothing."""
    late = stream(7.0, 7.01, sent=1.0, ended=7.01)

    assert truth.missed_seconds([late], objective=0.1, ttft=5.0) == pytest.approx(6.0)
    assert truth.missed_seconds([late], objective=0.1, ttft=6.5) == 0.0
    assert truth.missed_seconds([late], objective=0.1) == 0.0


def test_the_open_gap_is_missed_only_when_asked_for() -> None:
    """With a time of judgement the gap that is open then counts, too."""
    frozen = stream(1.0, 1.05)

    assert truth.missed_intervals(frozen, objective=0.1, ttft=5.0) == []
    assert truth.missed_intervals(frozen, objective=0.1, ttft=5.0, at=4.0) == [(1.05, 4.0)]


def test_reader_wait_remembers_thirty_seconds() -> None:
    """The largest wait that ended or is open in the last 30 s is told, an older one is not."""
    seen = stream(1.0, 6.0, *(6.0 + 0.1 * n for n in range(1, 400)), ended=46.0)

    assert truth.reader_wait([seen], 20.0) == pytest.approx(5.0)
    assert truth.reader_wait([seen], 40.0) == pytest.approx(0.1)
    assert truth.reader_wait([stream(1.0)], 3.0) == pytest.approx(2.0)


def test_served_seconds_count_overlapping_streams_once() -> None:
    """Two streams that overlap serve the time from the first send to the last end."""
    streams = [stream(1.0, sent=0.0, ended=4.0), stream(3.5, sent=3.0, ended=6.0)]

    assert truth.served_seconds(streams) == pytest.approx(6.0)
    assert truth.served_seconds([stream(1.0)], window=(0.0, 9.0)) == pytest.approx(9.0)


def test_stall_seconds_are_what_long_gaps_exceed_the_baseline() -> None:
    """Gaps above the threshold count, less the baseline each."""
    samples = [Gap(0.0, 0.1, 1), Gap(0.1, 2.1, 1), Gap(2.1, 3.1, 1)]

    assert truth.stall_seconds(samples, threshold=0.5, baseline=0.1) == pytest.approx(2.8)
    assert math.isclose(truth.stall_seconds(samples, threshold=5.0, baseline=0.1), 0.0)
