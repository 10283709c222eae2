from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from stallwatch.analysis.causes import WHAT_TO_TRY, Cause, StallKind
from stallwatch.analysis.episodes import Change, Stall, StallsView
from stallwatch.analysis.gaps import QUIET, Gap, Pieces, Witness, find_stalls
from stallwatch.analysis.monitor import Monitor
from stallwatch.analysis.queue import QueueWatch
from stallwatch.app import monitor_for
from stallwatch.observations import (
    Buckets,
    EngineCounters,
    EngineSample,
    Failure,
    GpuReading,
    GpuSample,
    HostSample,
    Lane,
    Observation,
    ObserverSample,
    Outcome,
    PollFailure,
    Source,
    StreamClosed,
    StreamOpened,
    StreamTokens,
)
from stallwatch.settings import Settings
from tests.harness import watch

INF = float("inf")
BEAT = 0.25


def gap(start: float, end: float, kind: StallKind = StallKind.DECODE, normal: float = 0.0) -> Gap:
    return Gap(start=start, end=end, kind=kind, witness=Witness.STREAM, normal=normal, readers=1.0)


spans = st.lists(
    st.tuples(st.floats(0, 100, allow_subnormal=False), st.floats(0, 8, allow_subnormal=False)), max_size=30
).map(lambda pairs: [gap(start, start + length) for start, length in pairs])


@given(spans, st.integers(-1000, 1000))
def test_stalls_do_not_depend_on_when_they_happen(gaps: list[Gap], shift: int) -> None:
    """The same gaps at another time are the same stalls at that time."""
    gaps = [gap(round(g.start * 64) / 64, round(g.end * 64) / 64) for g in gaps]
    moved = [gap(g.start + shift, g.end + shift) for g in gaps]

    found = find_stalls(gaps, threshold=0.5)

    assert find_stalls(moved, threshold=0.5) == [(start + shift, end + shift) for start, end in found]


@given(spans, st.floats(0.1, 4), st.floats(0, 4))
def test_a_higher_threshold_never_finds_more(gaps: list[Gap], threshold: float, more: float) -> None:
    """What is a stall above a higher threshold lies within the stalls above a lower one."""
    low, high = find_stalls(gaps, threshold=threshold), find_stalls(gaps, threshold=threshold + more)

    assert all(any(start <= s and e <= end for start, end in low) for s, e in high)


@given(spans)
def test_pieces_cover_each_second_once(gaps: list[Gap]) -> None:
    """However gaps overlap, their pieces are disjoint, in order, and cover their union."""
    pieces = Pieces()
    for each in gaps:
        pieces.add(each)
    found = pieces.all()

    assert all(a.end <= b.start for a, b in pairwise(found))
    union = sum(end - start for start, end in find_stalls(gaps, threshold=0.0, quiet=0.0))
    assert sum(piece.end - piece.start for piece in found) == pytest.approx(union)


def test_twenty_four_slow_steps_are_one_stall() -> None:
    """A long prompt is one freeze to its readers."""
    gaps = [gap(10 + i, 10.95 + i) for i in range(24)]

    assert find_stalls(gaps, threshold=0.5) == [(10, 33.95)]


class Script:
    """Feeds a monitor with a stream of ours and the heartbeat, in order."""

    def __init__(self, **stall: float) -> None:
        self.monitor = monitor_for(Settings.model_validate({"canary": {"mode": "persistent"}, "stall": stall}))
        self.at = 0.0
        self.steps = 0
        self._beat = 0.0

    def view(self, engine: str = "0") -> StallsView:
        return self.monitor.engines[engine].stalls.view(self.at)

    def pass_time(self, until: float, lag: float = 0.0) -> None:
        while self._beat + BEAT <= until:
            self._beat += BEAT
            self.monitor.observe(ObserverSample(self._beat, lag))
        self.at = until

    def stream(self, tokens: Iterable[float], number: int = 1, engine: str = "0") -> None:
        """Opens a stream now; a token after each of these waits."""
        self.monitor.observe(StreamOpened(self.at, number, engine, f"stallwatch-canary-{number}"))
        self.more(tokens, number)

    def more(self, tokens: Iterable[float], number: int = 1) -> None:
        for wait in tokens:
            self.pass_time(self.at + wait)
            self.monitor.observe(StreamTokens(self.at, number, 1))

    def finish(self, number: int = 1) -> None:
        """Ends the stream, and lets the time pass in which late evidence is waited for."""
        self.monitor.observe(StreamClosed(self.at, number, Outcome.COMPLETED))
        self.pass_time(self.at + 15)

    def scrape(self, engine: str = "0", *, lane: Lane = Lane.ESTIMATOR, **values: float | Buckets) -> None:
        counters = EngineCounters(**{"running": 1.0, "waiting": 0.0, "kv_usage": 0.1, **values})  # type: ignore[arg-type]
        self.monitor.observe(EngineSample(sent_at=self.at, at=self.at, lane=lane, engines={engine: counters}))


STEADY = [0.03] * 40


def test_an_open_gap_opens_a_stall_and_two_quiet_seconds_close_it() -> None:
    """It is open while the gap still grows, holds through the pause, and lasts from the gap's begin to its end."""
    script = Script()
    script.stream(STEADY)
    began = script.at
    script.pass_time(began + 0.4)
    assert script.view().open is None

    script.pass_time(began + 0.8)
    opened = script.view().open
    assert opened is not None
    assert (opened.kind, opened.start, opened.cause) == (StallKind.DECODE, began, Cause.UNKNOWN)
    assert opened.detected - began <= 0.5 + BEAT

    script.more([0.4, *STEADY])
    assert script.view().open is not None
    script.more([0.03] * 60)

    assert script.view().open is None
    script.finish()
    (closed,) = script.view().closed
    assert closed.end == pytest.approx(began + 1.2)
    assert closed.seconds == pytest.approx(1.2 - 0.03, abs=0.01)
    assert script.view().active_seconds == pytest.approx(1.2)


def test_gaps_within_two_seconds_do_not_flap() -> None:
    """Long gaps that come again and again within two seconds are one stall."""
    script = Script()
    script.stream(STEADY)
    for _ in range(12):
        script.more([0.9, *[0.03] * 30])
    script.more([0.03] * 100)
    script.finish()

    news = [entry.change for entry in script.monitor.news()]
    assert len(script.view().closed) == 1
    assert news.count(Change.OPENED) == 1


def test_a_gap_that_our_own_lateness_explains_opens_nothing() -> None:
    """It is booked apart, as a stall of ours that cost nobody anything."""
    script = Script()
    script.stream(STEADY)
    began = script.at
    script.monitor.observe(ObserverSample(began + 1.9, 1.88))
    script._beat = began + 1.9
    script.at = began + 1.9
    script.monitor.observe(StreamTokens(script.at, 1, 60))
    script.more([0.03] * 120)

    (closed,) = script.view().closed
    assert closed.cause is Cause.OBSERVER
    assert closed.reader_seconds == 0
    assert script.view().active_seconds == 0
    assert Change.OPENED not in {entry.change for entry in script.monitor.news()}


def test_a_first_token_that_is_late_is_an_admission_stall() -> None:
    """It opens when the wait exceeds its own threshold, and reaches back to the sending."""
    script = Script()
    script.stream([])
    script.pass_time(9.9)
    assert script.view().open is None
    script.pass_time(10.5)

    opened = script.view().open
    assert opened is not None
    assert (opened.kind, opened.start) == (StallKind.ADMISSION, 0.0)


def test_begun_inside_a_freeze_the_age_counts_from_the_first_poll() -> None:
    """Requests run and no step was ever seen: an engine stall, of which nothing is known."""
    script = Script()
    for _ in range(20):
        script.scrape(running=3.0, iterations=100.0, itl_count=300.0, generation_tokens=300.0)
        script.pass_time(script.at + 0.25)

    opened = script.view().open
    assert opened is not None
    assert (opened.kind, opened.cause, opened.start) == (StallKind.ENGINE, Cause.UNKNOWN, 0.0)


def decode(script: Script, engine: str, seconds: float, *, frozen: bool = False) -> None:
    """Two decoders in steps of 50 ms, scraped four times a second."""
    for _ in range(int(seconds / 0.25)):
        script.pass_time(script.at + 0.25)
        script.steps += 0 if frozen else 5
        done = float(script.steps)
        edges = Buckets((0.1, 0.5, 1.0, INF), (2 * done, 2 * done, 2 * done, 2 * done))
        script.scrape(
            engine,
            running=2.0,
            iterations=done,
            itl_count=2 * done,
            itl_sum=0.1 * done,
            itl_buckets=edges,
            generation_tokens=2 * done,
            first_tokens=2.0,
            finished_count=0.0,
        )


def test_a_step_that_does_not_end_is_a_stall_without_any_stream() -> None:
    """Known decoders and no end of a step: seen from the metrics alone, and lost by both readers."""
    script = Script()
    decode(script, "0", 8)
    began = script.at
    decode(script, "0", 3, frozen=True)

    opened = script.view().open
    assert opened is not None
    assert opened.kind is StallKind.ENGINE
    assert opened.start == pytest.approx(began)
    assert opened.detected - began <= 0.5 + 0.5
    assert opened.reader_seconds == pytest.approx(2 * opened.seconds)


def test_ranks_stall_each_on_its_own() -> None:
    """A stall of one rank is none of another."""
    script = Script()
    script.stream(STEADY, number=1, engine="0")
    script.stream([0.03] * 5, number=2, engine="1")
    script.more([0.03] * 100, number=1)

    assert script.view("1").open is not None
    assert script.view("0").open is None


def test_a_queue_that_moves_is_no_stall() -> None:
    """Its length stays the same for long, while first tokens tell that nobody has waited for long."""
    queue = QueueWatch()
    for second in range(60):
        counters = EngineCounters(running=4.0, waiting=6.0, kv_usage=0.2, first_tokens=2.0 * second)
        queue.read(float(second), counters, moved=True, ours=0)

    assert queue.waits(threshold=0.5, ttft=10.0) == []


def test_a_queue_that_stands_is_a_stall() -> None:
    """Nobody gets a first token: the first to join has waited since."""
    queue = QueueWatch()
    for second in range(13):
        counters = EngineCounters(running=4.0, waiting=6.0, kv_usage=0.2, first_tokens=2.0)
        queue.read(float(second), counters, moved=True, ours=1)

    (wait,) = queue.waits(threshold=0.5, ttft=10.0)
    assert (wait.start, wait.end, wait.kind, wait.readers) == (0.0, 12.0, StallKind.ADMISSION, 5.0)


def test_who_is_thrown_out_of_a_full_cache_is_a_reader_who_waits() -> None:
    """One leaves the batch and joins the queue in the same interval: a decode stall at once, not after ten seconds."""
    queue = QueueWatch()
    queue.read(0.0, EngineCounters(running=8.0, waiting=0.0, kv_usage=1.0, first_tokens=8.0), moved=True, ours=0)
    for step in range(1, 6):
        counters = EngineCounters(running=7.0, waiting=1.0, kv_usage=0.9, first_tokens=8.0)
        queue.read(0.25 * step, counters, moved=True, ours=0)

    (wait,) = queue.waits(threshold=0.5, ttft=10.0)
    assert (wait.start, wait.kind, wait.witness) == (0.25, StallKind.DECODE, Witness.VICTIM)


waits = st.lists(st.one_of(st.just(0.03), st.floats(0.6, 4.0)), min_size=1, max_size=25)


@settings(max_examples=40, deadline=None)
@given(waits)
def test_what_is_found_live_is_what_is_found_afterwards(lengths: Sequence[float]) -> None:
    """The stalls of a stream as it is watched are those that its recorded gaps make up."""
    script = Script()
    script.stream(STEADY)
    gaps = []
    for length in lengths:
        began = script.at
        script.more([length])
        gaps.append(gap(began, script.at))
    script.more([0.03] * 100)
    script.finish()

    found = [(stall.start, stall.end) for stall in reversed(script.view().closed)]
    expected = find_stalls(gaps, threshold=0.5)

    assert [pytest.approx(span) for span in expected] == found


_numbers = st.one_of(st.none(), st.floats(0, 1e6))
_times = st.floats(0, 30)


@st.composite
def counters(draw: st.DrawFn) -> EngineCounters:
    names = (
        *("running", "waiting", "waiting_deferred", "kv_usage", "prefix_queries", "prefix_hits", "iterations"),
        *("generation_tokens", "itl_count", "itl_sum", "preemptions", "first_tokens", "prompt_local_compute"),
        *("finished_count", "finished_prompt_tokens", "finished_generation_tokens", "kv_load_seconds"),
    )
    values = {name: draw(_numbers) for name in draw(st.sets(st.sampled_from(names)))}
    if draw(st.booleans()):
        counts = sorted(draw(st.lists(st.floats(0, 1e6), min_size=3, max_size=3)))
        values["itl_buckets"] = Buckets((0.1, 1.0, INF), tuple(counts))  # type: ignore[assignment]
    return EngineCounters(**values)  # type: ignore[arg-type]


Sight = Callable[[float], Observation]
"""An observation that lacks its time."""

_streams = st.integers(1, 3)


def _scraped(lane: Lane, seen: EngineCounters, *, asleep: bool | None) -> Sight:
    return lambda at: EngineSample(sent_at=at, at=at, lane=lane, engines={"0": seen}, asleep=asleep)


def _gpu(busy: float, clock: float | None) -> Sight:
    reading = GpuReading(gpu="0", uuid="u", utilization=busy, sm_clock=clock)
    return lambda at: GpuSample(at=at, gpus=(reading,), scope="container")


sights = st.one_of(
    st.floats(0, 3).map(lambda lag: lambda at: ObserverSample(at, lag)),
    st.builds(_scraped, st.sampled_from(Lane), counters(), asleep=st.one_of(st.none(), st.booleans())),
    _streams.map(lambda number: lambda at: StreamOpened(at, number, "0", "x")),
    st.builds(lambda number, tokens: lambda at: StreamTokens(at, number, tokens), _streams, st.integers(1, 50)),
    st.builds(lambda number, end: lambda at: StreamClosed(at, number, end), _streams, st.sampled_from(Outcome)),
    st.sampled_from(Failure).map(lambda reason: lambda at: PollFailure(at, Source.ENGINE, reason)),
    st.builds(_gpu, st.floats(0, 1), _numbers),
    st.floats(0, 1e3).map(lambda total: lambda at: HostSample(at=at, pressure_seconds={("memory", "some"): total})),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_times, sights), max_size=60))
def test_no_sequence_of_observations_breaks_it(seen: list[tuple[float, Sight]]) -> None:
    """Whatever comes, counters never fall, stalls are well-formed, and findings can be had at any moment."""
    monitor = monitor_for(Settings())
    at = active = 0.0
    for step, sight in seen:
        at += step
        monitor.observe(sight(at))
        for engine in monitor.findings(at).engines:
            assert engine.stalls.active_seconds >= active - 1e-9
            active = engine.stalls.active_seconds
            for stall in (*engine.stalls.closed, engine.stalls.open):
                assert stall is None or well_formed(stall, at)


def well_formed(stall: Stall, now: float) -> bool:
    end = now if stall.end is None else stall.end
    return stall.start <= end <= now + 1e-9 and 0 <= stall.seconds <= end - stall.start + 1e-6 and stall.cause in Cause


def test_memory_is_bounded() -> None:
    """An hour of gaps without end keeps a bounded record and the right sum."""
    script = Script()
    script.stream(STEADY)
    for _ in range(4_000):
        script.more([0.7, 0.03])
    opened = script.view().open

    assert opened is not None
    assert opened.seconds == pytest.approx(4_000 * 0.67, rel=0.01)
    current = script.monitor.engines["0"].stalls.ledger.current
    assert current is not None
    assert len(current.pieces.all()) <= 1024


def closed_of(monitor: Monitor) -> tuple[Stall, ...]:
    return monitor.engines["0"].stalls.view(1e9).closed


def test_the_log_tells_a_stall_from_begin_to_end() -> None:
    """One line when it opens, one when its cause is known, one when it closes with what to try and where to read on."""
    with capture_logs() as lines:
        watched = watch("long-prefill", canary={"enabled": False}, seconds=70)
    told = [line for line in lines if line["event"].startswith("stall ")]

    assert [line["event"] for line in told] == ["stall opened", "stall cause changed", "stall closed"]
    assert told[0]["cause"] == "unknown"
    last = told[-1]
    assert (last["cause"], last["engine"], last["kind"]) == ("prefill", "0", "engine")
    assert last["what_to_try"] == WHAT_TO_TRY[Cause.PREFILL]
    assert last["runbook"] == "docs/runbook.md#prefill"
    assert last["largest_prompt"] == "60000 tokens"
    assert last["seconds"] == pytest.approx(32, abs=1.5)
    assert last["reader_seconds_lost"] == pytest.approx(3 * last["stall_seconds"], rel=0.05)
    assert last["evidence"][0].startswith("prefill ")
    (stall,) = closed_of(watched.sidecar.monitor)
    assert watched.sidecar.stall(stall.id) is not None
    assert watched.sidecar.stall("no-such") is None
    listed = watched.sidecar.stalls()["stalls"]
    assert [entry["id"] for entry in listed] == [stall.id]
    assert listed[0]["cause"] == "prefill"


def test_the_same_observations_give_the_same_stalls() -> None:
    """A recorded list of observations is judged as it was when it was lived."""
    watched = watch("jit-pause", canary={"mode": "pulse"})
    again = monitor_for(watched.sidecar.settings)
    for seen in watched.observations:
        again.observe(seen)

    assert closed_of(again) == closed_of(watched.sidecar.monitor)
    assert len(closed_of(again)) == 2


def test_quiet_is_two_seconds() -> None:
    """The pause that ends a stall is part of its definition."""
    assert QUIET == 2.0
