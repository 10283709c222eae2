from stallwatch.analysis.itl import Gap, GapWindow


def steady(window: GapWindow, start: float, count: int, gap: float, tokens: int = 1) -> float:
    """Fills the window with `count` equal gaps; returns the end of the last."""
    for i in range(count):
        window.add(Gap(start + i * gap, start + (i + 1) * gap, tokens))
    return start + count * gap


def test_a_freeze_is_invisible_to_tokens_and_plain_to_time() -> None:
    """110 s of silence in five minutes of 37 ms gaps leaves p99 at 37 ms, while half of the time is the freeze."""
    window = GapWindow(300)
    end = steady(window, 0.0, 5000, 0.037)
    window.add(Gap(end, end + 110, 1))

    seen = window.at(end + 110)

    assert round(seen.itl[0.99], 6) == 0.037
    assert seen.time_weighted[0.95] == 110


def test_an_open_gap_counts_once_it_exceeds_the_quantile() -> None:
    """While a gap is open it is one more sample of the tokens and already weighs its length in time."""
    window = GapWindow(300)
    end = steady(window, 0.0, 250, 0.01)

    shortly = window.at(end + 0.005, open_since=end)
    later = window.at(end + 60, open_since=end)

    assert round(shortly.itl[0.99], 6) == 0.01
    assert round(later.itl[0.5], 6) == 0.01
    assert later.time_weighted[0.5] == 60
    assert later.tokens == 250


def test_quantiles_are_absent_below_the_minimum_count() -> None:
    """With too few tokens p95 and p99 are not given rather than guessed."""
    window = GapWindow(300)
    end = steady(window, 0.0, 59, 0.01)

    few = window.at(end)
    end = steady(window, end, 1, 0.01)
    enough = window.at(end)

    assert set(few.itl) == {0.5}
    assert set(enough.itl) == {0.5, 0.95}
    assert few.time_weighted == {}


def test_several_tokens_in_one_gap_share_its_length() -> None:
    """ITL is the gap divided by its tokens, once for each of them."""
    window = GapWindow(300)
    end = steady(window, 0.0, 100, 0.08, tokens=4)

    seen = window.at(end)

    assert seen.tokens == 400
    assert round(seen.itl[0.99], 6) == 0.02
    assert round(seen.time_weighted[0.5], 6) == 0.08


def test_a_gap_that_began_before_the_window_weighs_what_lies_inside() -> None:
    """A long gap that ended inside the window is clipped to it in time, and keeps its full length as a value."""
    window = GapWindow(10)
    window.add(Gap(0.0, 91.0, 1))
    end = steady(window, 91.0, 180, 0.05)

    seen = window.at(end)

    assert end == 100.0
    assert seen.time_weighted[0.5] == 0.05 or round(seen.time_weighted[0.5], 6) == 0.05
    assert seen.time_weighted[0.95] == 91.0


def test_what_leaves_the_window_is_forgotten() -> None:
    """An empty window says nothing, and memory does not grow with time."""
    window = GapWindow(10)
    steady(window, 0.0, 5000, 0.01)

    seen = window.at(1000.0)

    assert (seen.tokens, seen.itl, seen.time_weighted) == (0, {}, {})
    assert len(window._gaps) == 0
