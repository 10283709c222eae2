import math

from stallwatch.analysis.itl import Gap
from stallwatch.analysis.readers import ReadersView
from stallwatch.observations import Buckets

EDGES = (0.01, 0.05, 0.1, 0.5, math.inf)


def page(*plain: int) -> Buckets:
    """A cumulative histogram from counts per bucket."""
    total = 0
    counts = []
    for count in plain:
        total += count
        counts.append(float(total))
    return Buckets(EDGES, tuple(counts))


def test_counts_since_we_watch() -> None:
    """What the server counted before stallwatch started is not ours to judge."""
    view = ReadersView(300, 0.1)
    view.scraped(0, page(1000, 0, 0, 0, 0))
    view.scraped(1, page(1000, 10, 5, 3, 2))

    assert (view.total, view.good, view.edge) == (20, 15, 0.1)


def test_our_own_samples_are_taken_out() -> None:
    """Canary gaps are subtracted from the bucket they fell into, or from its neighbour."""
    view = ReadersView(300, 0.1)
    view.scraped(0, page(0, 0, 0, 0, 0))
    view.own_gap(Gap(0.0, 0.02, 1))
    view.own_gap(Gap(0.02, 0.029, 1))
    view.scraped(1, page(0, 2, 0, 1, 0))

    assert (view.total, view.good) == (1, 0)


def test_an_own_sample_that_the_server_shows_later_is_taken_out_later() -> None:
    """The canary and the scrape see the same token at different moments."""
    view = ReadersView(300, 0.1)
    view.scraped(0, page(0, 0, 0, 0, 0))
    view.own_gap(Gap(0.0, 0.02, 1))
    view.scraped(1, page(0, 0, 0, 0, 0))
    view.scraped(2, page(0, 1, 0, 0, 0))

    assert view.total == 0


def test_a_restart_does_not_lose_what_was_counted() -> None:
    """Totals only grow when the server's histogram starts over."""
    view = ReadersView(300, 0.1)
    view.scraped(0, page(0, 0, 0, 0, 0))
    view.scraped(1, page(0, 9, 0, 0, 0))
    view.scraped(2, page(0, 1, 0, 0, 0))
    view.scraped(3, page(0, 3, 0, 0, 0))

    assert view.total == 11


def test_no_edge_at_or_below_the_objective_means_no_share() -> None:
    """Where the buckets cannot separate good from bad, good is not known."""
    view = ReadersView(300, 0.005)
    view.scraped(0, page(0, 0, 0, 0, 0))
    view.scraped(1, page(5, 0, 0, 0, 0))

    assert view.edge is None


def test_quantiles_are_of_the_window_only() -> None:
    """Samples older than the window no longer weigh, and memory is bounded."""
    view = ReadersView(300, 0.1)
    slow = 0
    for second in range(2000):
        slow = 1000 if second >= 100 else 10 * second
        fast = max(0, second - 100) * 10
        view.scraped(float(second), page(fast, 0, 0, slow, 0))

    seen = view.at(2000.0)

    assert len(view._window) < 100
    assert seen.itl[0.99] <= 0.01
    assert 2900 <= seen.tokens <= 3100


def test_few_samples_give_no_quantile() -> None:
    """Below the minimum count p95 and p99 are absent."""
    view = ReadersView(300, 0.1)
    view.scraped(0, page(0, 0, 0, 0, 0))
    view.scraped(1, page(30, 0, 0, 0, 0))

    assert set(view.at(1).itl) == {0.5}
