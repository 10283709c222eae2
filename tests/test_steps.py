from stallwatch.analysis.steps import StepInterval, StepWatch
from stallwatch.observations import EngineCounters


def scrape(watch: StepWatch, at: float, **counters: float) -> StepInterval | None:
    """One scrape whose request took 10 ms."""
    return watch.scraped(EngineCounters(**counters), at - 0.01, at)  # type: ignore[arg-type]


def test_decoders_are_itl_samples_per_iteration() -> None:
    """Every decoder gets a token in each step, so their number is samples over iterations."""
    watch = StepWatch()
    scrape(watch, 1.0, running=4, iterations=100, itl_count=1000, generation_tokens=1000)
    interval = scrape(watch, 1.25, running=4, iterations=110, itl_count=1030, generation_tokens=1030)

    assert watch.decoders == 3
    assert interval is not None
    assert (interval.moved, interval.steps, interval.silence) == (True, 10, 0)


def test_age_grows_while_nothing_moves_and_is_a_lower_bound() -> None:
    """Age counts from the reading that saw the last movement to the sending of the next request."""
    watch = StepWatch()
    scrape(watch, 1.0, running=2, iterations=5, itl_count=5, kv_usage=0.1)
    scrape(watch, 1.25, running=2, iterations=6, itl_count=6, kv_usage=0.11)
    for quarter in range(2, 12):
        scrape(watch, 1.0 + quarter / 4, running=2, iterations=6, itl_count=6, kv_usage=0.11)

    assert round(watch.age(), 6) == 2.49


def test_a_prefill_only_phase_is_progress_without_decoders() -> None:
    """KV usage that rises while the iteration count stands still is a step that ended, with nobody decoding."""
    watch = StepWatch()
    scrape(watch, 1.0, running=1, iterations=5, itl_count=5, kv_usage=0.1)
    scrape(watch, 1.25, running=1, iterations=6, itl_count=6, kv_usage=0.1)
    once = scrape(watch, 1.5, running=1, iterations=6, itl_count=6, kv_usage=0.14)
    kept = watch.decoders
    scrape(watch, 1.75, running=1, iterations=6, itl_count=6, kv_usage=0.18)

    assert once is not None
    assert once.moved
    assert kept == 1, "under async scheduling the gauges lead by one step"
    assert watch.decoders == 0
    assert watch.age() == 0


def test_a_decoder_that_finished_is_not_waited_for() -> None:
    """When the only decoder leaves, what remains is prefill: the silence that follows is nobody's gap."""
    watch = StepWatch()
    scrape(watch, 1.0, running=2, iterations=50, itl_count=50, finished_count=3, first_tokens=4)
    scrape(watch, 1.25, running=1, iterations=60, itl_count=60, finished_count=4, first_tokens=4)

    assert watch.decoders == 0


def test_a_request_whose_first_token_came_decodes_from_now_on() -> None:
    """A prefill that ended adds a decoder, at most as many as run."""
    watch = StepWatch()
    scrape(watch, 1.0, running=2, iterations=50, itl_count=50, finished_count=3, first_tokens=4)
    scrape(watch, 1.25, running=2, iterations=51, itl_count=51, finished_count=3, first_tokens=5)

    assert watch.decoders == 2


def test_events_between_scrapes_that_do_not_ask_for_them_are_not_lost() -> None:
    """Counters of the larger lane are compared with their own last known value."""
    watch = StepWatch()
    scrape(watch, 1.0, running=2, iterations=50, itl_count=50, finished_count=3, first_tokens=4)
    scrape(watch, 1.25, running=2, iterations=51, itl_count=52)
    scrape(watch, 1.5, running=1, iterations=52, itl_count=54, finished_count=4, first_tokens=4)

    assert watch.decoders == 1


def test_no_age_while_no_request_runs() -> None:
    """An idle engine has no step to wait for."""
    watch = StepWatch()
    scrape(watch, 1.0, running=0, iterations=5, itl_count=5)
    scrape(watch, 60.0, running=0, iterations=5, itl_count=5)

    assert watch.age() == 0


def test_age_counts_from_the_first_reading_when_no_step_was_ever_seen() -> None:
    """A freeze that began before us is as old as our first look at it."""
    watch = StepWatch()
    scrape(watch, 10.0, running=3, iterations=5, itl_count=5)
    scrape(watch, 15.0, running=3, iterations=5, itl_count=5)

    assert round(watch.age(), 6) == 4.99


def test_mean_itl_needs_both_readings_of_both_counters() -> None:
    """The mean is over the samples booked between two readings that had count and sum."""
    watch = StepWatch()
    first = scrape(watch, 1.0, running=1, itl_count=10, itl_sum=1.0)
    second = scrape(watch, 1.25, running=1, itl_count=12)
    third = scrape(watch, 1.5, running=1, itl_count=14, itl_sum=3.0)

    assert first is None
    assert second is not None
    assert second.mean_itl is None
    assert third is not None
    assert third.mean_itl == 0.5


def test_speculative_decoding_gives_several_tokens_a_sample() -> None:
    """Tokens per sample leave out first tokens and never fall below one."""
    watch = StepWatch()
    scrape(watch, 1.0, running=1, iterations=10, itl_count=10, generation_tokens=40, first_tokens=1)
    interval = scrape(watch, 1.25, running=1, iterations=20, itl_count=20, generation_tokens=72, first_tokens=3)

    assert interval is not None
    assert interval.tokens_per_sample == 3.0


def test_the_mean_covers_the_time_since_the_counters_were_last_read() -> None:
    """When a smaller scrape lay between, the samples are those of both intervals."""
    watch = StepWatch()
    scrape(watch, 1.0, running=1, itl_count=10, itl_sum=1.0)
    scrape(watch, 1.25, running=1)
    interval = scrape(watch, 1.5, running=1, itl_count=11, itl_sum=1.4)

    assert interval is not None
    assert (interval.since, interval.itl_since) == (1.25, 1.0)
