import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import pytest

from stallwatch.analysis.causes import Cause
from stallwatch.analysis.prefill import Evidence
from stallwatch.experiment.conclude import Verdict, conclude
from stallwatch.experiment.conduct import Experiment, NotPossibleError, Outcome
from stallwatch.experiment.confirm import Confirmation, Counted, confirm
from stallwatch.experiment.document import document
from stallwatch.experiment.measure import Run, Taken
from stallwatch.experiment.plan import Arm, Planned, Shape, cost, matrix
from stallwatch.experiment.record import Followed, Log, Played
from stallwatch.observations import Outcome as StreamOutcome
from stallwatch.observations import StreamClosed
from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.cost import Cause as TrueCause
from stallwatch.simulator.cost import Pause, Slowdown, StepCost
from stallwatch.simulator.faults import Fault, FaultKind
from stallwatch.simulator.load import Arrival, Load, Users
from stallwatch.simulator.scenario import Scenario, ServerConfig
from stallwatch.simulator.server import SimulatedServer
from stallwatch.sources.stream import StreamRequest
from tests import virtual
from tests.experiments import SMALL, conduct

QUIET = Scenario(name="quiet", sentence="Nobody else is there.")
FREE_PREFILL = EngineConfig(cost=StepCost(per_prefill_token=0.0, per_prefill_context=0.0))
"""Prompts cost this engine nothing: whatever pauses streams is something else."""


def arms(found: Experiment, *, void: bool) -> list[str]:
    """The kinds of the runs that are void, or of those that are not."""
    return sorted(str(run.planned.arm) for run in found.runs if bool(run.void) is void)


async def until(happens: Callable[[], bool]) -> None:
    """Looks every tenth of a second whether something has happened."""
    for _ in range(10_000):
        if happens():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it never happened")


def reasons(found: Experiment) -> str:
    """All reasons for which runs are void."""
    return "; ".join(why for run in found.runs for why in run.void)


# --- what it says beside servers with a known truth


@pytest.fixture(scope="module")
def prefill() -> tuple[Experiment, SimulatedServer, list[str]]:
    """The experiment beside a server whose long prompts pause everybody."""
    servers: list[SimulatedServer] = []
    lines: list[str] = []

    async def look(server: SimulatedServer, _stop: asyncio.Event) -> None:
        servers.append(server)

    return conduct(QUIET, beside=look, lines=lines), servers[0], lines


def test_a_long_prefill_yields_the_prefill_statement(prefill: tuple[Experiment, SimulatedServer, list[str]]) -> None:
    """Streams that pause beside the uncached prompt alone pause for building its state, and no more is claimed."""
    found, _, lines = prefill
    (said,) = found.conclusions

    assert (found.outcome, reasons(found)) == (Outcome.COMPLETE, "")
    assert said.verdict is Verdict.PREFILL
    assert "work of building prompt state; which kernel or resource is not shown" in said.statement
    assert any("which kernel" in line for line in said.not_shown)
    assert len(lines) == 9


def test_figures_are_those_of_the_engine(prefill: tuple[Experiment, SimulatedServer, list[str]]) -> None:
    """Seconds lost, longest gap, steps and tokens of an uncached run are what the engine's own steps say."""
    found, server, _ = prefill
    run = next(run for run in found.runs if run.planned.arm is Arm.UNCACHED)
    prompt = run.taken.played.prompt
    assert prompt is not None
    truth = [
        step
        for step in server.world.steps()
        if step.prefill_tokens > 512 and run.taken.played.began <= step.end <= run.taken.played.ended
    ]

    assert sum(step.prefill_tokens for step in truth) == pytest.approx(run.measures["computed_tokens"], abs=16)
    assert run.measures["longest_gap_seconds"] == pytest.approx(max(s.end - s.start for s in truth), rel=0.02)
    assert run.measures["lost_seconds"] == pytest.approx(sum(s.end - s.start - 0.031 for s in truth), rel=0.03)
    assert run.measures["prefill_tokens"] == run.measures["computed_tokens"]
    assert run.inside == pytest.approx(1.0)
    assert run.causes.keys() == {Cause.PREFILL}
    assert run.confirmation.source == "counters"


def test_equal_seeds_give_equal_reports(prefill: tuple[Experiment, SimulatedServer, list[str]]) -> None:
    """The same seed against the same server gives the same report, figure by figure."""
    again = document(conduct(QUIET))

    assert again == document(prefill[0])


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            Scenario(
                name="clock",
                sentence="The GPU's clock falls again and again.",
                engine=FREE_PREFILL,
                slowdowns=tuple(
                    Slowdown(start=float(at), end=at + 2.5, factor=6.0, cause=TrueCause.GPU_CLOCK)
                    for at in range(8, 200, 7)
                ),
            ),
            id="clock",
        ),
        pytest.param(
            Scenario(
                name="hang",
                sentence="The engine stands still for two seconds again and again.",
                engine=FREE_PREFILL,
                pauses=tuple(Pause(at=8.0 + 9.0 * n, seconds=2.0, cause=TrueCause.ENGINE_HANG) for n in range(20)),
            ),
            id="hang",
        ),
        pytest.param(
            Scenario(
                name="proxy",
                sentence="A proxy passes streams on in pieces.",
                engine=FREE_PREFILL,
                faults=(Fault(FaultKind.BUFFERING, 0.0, value=6_000),),
            ),
            id="proxy",
        ),
        pytest.param(
            Scenario(
                name="frontend",
                sentence="The API server is busy with something else again and again.",
                engine=FREE_PREFILL,
                faults=tuple(Fault(FaultKind.FRONTEND, 8.0 + 7 * n, 9.5 + 7 * n) for n in range(20)),
            ),
            id="frontend",
        ),
    ],
)
def test_pauses_of_another_cause_are_not_called_prefill(scenario: Scenario) -> None:
    """A server that pauses for something else in any kind of run is never said to pause for prefill."""
    found = conduct(scenario)
    (said,) = found.conclusions
    gaps = [run.measures.get("longest_gap_seconds", 0.0) for run in found.runs]

    assert max(gaps) > 0.18  # it does pause
    assert said.verdict in {Verdict.INCONCLUSIVE, Verdict.NO_PAUSE, Verdict.EITHER_WAY}
    assert "building prompt state;" not in said.statement


def test_a_path_that_chokes_on_long_prompts_is_not_called_prefill() -> None:
    """A proxy that stops everything while a large request passes pauses readers whether or not it is cached."""
    servers: list[asyncio.Server] = []

    async def choking(port: int) -> int:
        passing = asyncio.Event()
        passing.set()

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, upward: bool) -> None:
            while data := await reader.read(65536):
                if upward and len(data) > 4_000:
                    passing.clear()
                    await asyncio.sleep(2.0)
                    passing.set()
                await passing.wait()
                writer.write(data)
                await writer.drain()
            writer.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(
                pipe(reader, up_writer, upward=True), pipe(up_reader, writer, upward=False), return_exceptions=True
            )

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        return int(servers[0].sockets[0].getsockname()[1])

    async def close() -> None:
        servers[0].close()

    scenario = replace(QUIET, engine=FREE_PREFILL)
    (said,) = conduct(scenario, path=choking, after=close).conclusions

    assert said.verdict is Verdict.EITHER_WAY
    assert "the pause is not in the work of building prompt state" in said.statement


def test_a_prompt_that_costs_nothing_pauses_nobody() -> None:
    """Where nothing pauses, it is said that nothing does, up to the size that would count."""
    (said,) = conduct(replace(QUIET, engine=FREE_PREFILL)).conclusions

    assert said.verdict is Verdict.NO_PAUSE
    assert "less than 0.16 s counts as none" in said.statement


def test_without_a_cache_the_third_run_is_void() -> None:
    """A server with prefix caching off has no cached run: two are tried, the rest is left out, nothing is concluded."""
    found = conduct(replace(QUIET, engine=EngineConfig(enable_prefix_caching=False)))
    (said,) = found.conclusions

    assert arms(found, void=True) == ["cached", "cached"]
    assert [run.arm for run in found.left_out] == [Arm.CACHED]
    assert "meant to be cached, but only 0 of" in reasons(found)
    assert said.verdict is Verdict.INCONCLUSIVE
    assert said.statement.startswith("The uncached prompt of 4,000 tokens pauses the streams by 1.6")
    assert "--enable-prefix-caching" in said.advice[0]
    assert any("prefix caching is off" in note for note in found.notes)


# --- what voids a run, and what stops all of them


def test_a_busy_server_is_refused() -> None:
    """A server with traffic is left alone, with the way to insist."""
    busy = Scenario(
        name="busy", sentence="Readers.", load=Load(users=(Users(count=2, prompt_tokens=64, output_tokens=400),))
    )

    with pytest.raises(NotPossibleError, match=r"the server is busy \(2 requests run or wait\).*--allow-busy"):
        conduct(busy)


def test_a_busy_server_is_measured_when_told() -> None:
    """With --allow-busy it is measured, and the report says what that means; counters of others confirm nothing."""
    busy = Scenario(
        name="busy", sentence="Readers.", load=Load(users=(Users(count=1, prompt_tokens=64, output_tokens=40),))
    )
    found = conduct(busy, allow_busy=True, shape=replace(SMALL, repeats=1))

    assert any(note.startswith("The server was busy (1 requests") for note in found.notes)
    assert arms(found, void=False) == ["alone"]
    assert "cannot be confirmed: requests of others are in its counters" in reasons(found)


def test_requests_of_others_void_a_run() -> None:
    """A request that somebody else sends into a run voids that run, and only that one."""
    scenario = replace(QUIET, load=Load((Arrival(at=24.0, prompt_tokens=64, output_tokens=4),)))
    found = conduct(scenario)

    assert len(arms(found, void=True)) == 1
    assert "the server answered 1 more requests than were sent: somebody else's, or retries" in reasons(found)


def test_our_own_lateness_voids_a_run() -> None:
    """A pause that our own loop made is neither counted nor explained away: the run is void."""

    async def late(server: SimulatedServer, _stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual.VirtualLoop)
        await until(lambda: server.world.engines[0].scheduler.running == 2 and loop.time() > 15.0)
        await asyncio.sleep(1.0)
        loop.stand_still(1.0)

    found = conduct(QUIET, beside=late)

    assert len(arms(found, void=True)) == 1
    assert "we were late ourselves" in reasons(found)


class TimedLines(list[str]):
    """Lines, and when they were said."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def append(self, line: str) -> None:
        """Says a line."""
        self.at.append(asyncio.get_running_loop().time())
        super().append(line)


def test_what_we_do_after_a_run_is_not_held_against_it() -> None:
    """A run is judged only when the sample of our lateness that holds its end, 0.25 s long, cannot hold the judging."""
    lines = TimedLines()
    found = conduct(QUIET, lines=lines, rooms={"engine": {"interval_seconds": 0.1, "max_scrape_duty": 1}})
    ends = [run.taken.played.ended for run in found.runs]

    assert len(ends) == len(lines.at)
    assert min(said - ended for said, ended in zip(lines.at, ends, strict=True)) > 0.25


def test_failed_requests_void_a_run() -> None:
    """Streams that break off void their run; the next one is made as if nothing had been."""
    found = conduct(replace(QUIET, faults=(Fault(FaultKind.STREAM_ERROR, 20.0, 20.1),)))

    assert len(arms(found, void=True)) == 1
    assert "2 of 2 streams failed; the first ended as server_error" in reasons(found)


def test_a_server_that_hangs_for_good_ends_it() -> None:
    """Requests of two runs in a row that fail, or an engine that never comes to rest, end the experiment."""
    hang = Pause(at=25.0, seconds=1e9, cause=TrueCause.ENGINE_HANG)
    found = conduct(replace(QUIET, pauses=(hang,)))

    assert found.outcome is Outcome.STOPPED
    assert "no new token for 30 s" in reasons(found)
    assert "the server hangs" in found.why
    assert found.conclusions[0].verdict is Verdict.INCONCLUSIVE


def test_an_interruption_keeps_what_there_is() -> None:
    """Ctrl-C gives up the run under way at once and reports those before it."""
    ended: list[float] = []

    async def interrupt(server: SimulatedServer, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        await until(lambda: sum(answer.ended is not None for answer in server.world.answers) >= 14)
        stop.set()
        ended.append(loop.time())

    found = conduct(QUIET, beside=interrupt)

    assert found.outcome is Outcome.INTERRUPTED
    assert 1 <= len(found.runs) < 9
    assert reasons(found) == ""
    assert found.ended - ended[0] < 0.5
    assert found.conclusions[0].verdict is Verdict.INCONCLUSIVE


def test_all_requests_go_to_one_rank() -> None:
    """With several data-parallel ranks streams and prompt are pinned to the first: else nobody would share a step."""
    ranks: list[int] = []

    async def look(server: SimulatedServer, stop: asyncio.Event) -> None:
        await until(lambda: sum(answer.ended is not None for answer in server.world.answers) >= 12)
        ranks.extend(answer.request.rank for answer in server.world.answers)
        stop.set()

    found = conduct(replace(QUIET, server=ServerConfig(data_parallel_size=2)), beside=look)

    assert set(ranks) == {0}
    assert max(run.measures["running"] for run in found.runs) >= 2
    assert reasons(found) == ""


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    """A prompt longer than the model's context is refused before anything is sent."""
    with pytest.raises(NotPossibleError, match="does not fit into the model's 131,072"):
        conduct(QUIET, shape=replace(SMALL, prompt_tokens=(200_000,)))


def test_streams_that_end_too_early_void_their_run() -> None:
    """Streams must outlast the prompt: else what it did to them was cut off."""
    small = EngineConfig(max_num_batched_tokens=256, max_num_seqs=64)
    found = conduct(replace(QUIET, engine=small), shape=replace(SMALL, output_tokens=20, settle_tokens=8, repeats=1))

    assert "streams ended before the prompt was computed: ask for more output tokens" in reasons(found)


def test_the_cost_is_a_bound(prefill: tuple[Experiment, SimulatedServer, list[str]]) -> None:
    """What the server was asked for is not more than the plan said."""
    found, server, _ = prefill
    asked = [answer.request for answer in server.world.answers]
    price = cost(found.asked.shape)

    assert len(asked) <= price.requests
    assert sum(request.max_tokens for request in asked) <= price.output_tokens
    assert sum(request.prompt_tokens for request in asked) <= 1.02 * (price.computed_tokens + price.cached_tokens)


# --- the plan


def test_every_block_has_every_run_in_an_order_of_its_own() -> None:
    """Blocks are complete, their orders differ, and a seed gives one order."""
    runs = matrix(Shape(repeats=20, prompt_tokens=(1_000, 4_000), seed=5))
    blocks = [[(run.arm, run.prompt_tokens) for run in block] for _, block in groupby(runs, lambda run: run.block)]

    assert len({tuple(sorted(map(str, block))) for block in blocks}) == 1
    assert len(set(map(tuple, blocks))) > 10
    assert runs == matrix(Shape(repeats=20, prompt_tokens=(1_000, 4_000), seed=5))
    assert [run.number for run in runs] == list(range(1, 101))


# --- confirmation


def played(*, prompt_tokens: int | None = 1_000, cached: int | None = None) -> Played:
    """A run of one stream and a prompt that the server said this about."""
    request = StreamRequest(stream=1, engine="0", request_id="x", model="m", prompt="p", tokens=1)
    prompt = Followed(
        request, 1.0, [(2.0, 1)], 1, StreamClosed(2.0, 1, StreamOutcome.COMPLETED, "", prompt_tokens, cached)
    )
    return Played(began=0.0, marked=1.0, ended=3.0, readers=(Followed(request),), prompt=prompt)


@pytest.mark.parametrize(
    ("arm", "run", "seen", "expected"),
    [
        pytest.param(Arm.UNCACHED, played(cached=0), Counted(), "", id="uncached by usage"),
        pytest.param(Arm.UNCACHED, played(), Counted(cached=0, first_tokens=2), "", id="uncached by counters"),
        pytest.param(Arm.UNCACHED, played(cached=16), Counted(), "16 of 1,000 prompt tokens", id="a block cached"),
        pytest.param(Arm.CACHED, played(cached=950), Counted(), "", id="cached by usage"),
        pytest.param(Arm.CACHED, played(cached=949), Counted(), "only 949 of 1,000", id="too little cached"),
        pytest.param(Arm.CACHED, played(), Counted(cached=960, first_tokens=2), "", id="cached by counters"),
        pytest.param(Arm.CACHED, played(), Counted(), "neither usage details nor counters", id="nothing known"),
        pytest.param(Arm.CACHED, played(prompt_tokens=None), Counted(cached=960), "how long", id="no length"),
        pytest.param(Arm.CACHED, played(cached=960), Counted(external=32), "KV transfer", id="from elsewhere"),
        pytest.param(Arm.UNCACHED, played(cached=0), Counted(first_tokens=3), "1 more requests", id="somebody else"),
    ],
)
def test_a_run_is_what_it_was_meant_to_be_or_void(arm: Arm, run: Played, seen: Counted, expected: str) -> None:
    """Uncached means no token from the cache, cached at least 95 %, and what cannot be confirmed is void."""
    said = "; ".join(confirm(Planned(1, 1, arm, 1_000), run, seen, allow_busy=False).problems)

    assert expected in said
    assert bool(expected) == bool(said)


# --- conclusions


def runs(
    lost: Mapping[Arm, Sequence[float]],
    *,
    inside: float = 1.0,
    causes: dict[Cause, float] | None = None,
    preemptions: float = 0.0,
    clock: float = 1.0,
) -> list[Run]:
    """Valid runs whose streams lost these seconds, a block each."""
    made = []
    for arm, values in lost.items():
        for block, value in enumerate(values, 1):
            planned = Planned(block, block, arm, None if arm is Arm.ALONE else 1_000)
            empty = Played(began=0.0, marked=0.0, ended=1.0, readers=())
            taken = Taken(planned=planned, played=empty, log=Log(), counted=Counted(), ended=1.0)
            made.append(
                Run(
                    taken=taken,
                    measures={
                        "lost_seconds": value,
                        "preemptions": preemptions,
                        "gpu_sm_clock_hertz": 2e9,
                        "gpu_sm_clock_beside_hertz": clock * 2e9,
                    },
                    confirmation=Confirmation(),
                    evidence=Evidence.UNKNOWN,
                    causes=causes or {},
                    inside=inside,
                )
            )
    return made


NONE = (0.0, 0.01, 0.0, 0.02, 0.01)
LONG = (2.0, 2.2, 2.1, 1.9, 2.0)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        pytest.param(runs({Arm.ALONE: NONE, Arm.UNCACHED: LONG, Arm.CACHED: NONE}), Verdict.PREFILL, id="prefill"),
        pytest.param(
            runs({Arm.ALONE: NONE, Arm.UNCACHED: LONG, Arm.CACHED: LONG}), Verdict.EITHER_WAY, id="either way"
        ),
        pytest.param(runs({Arm.ALONE: NONE, Arm.UNCACHED: NONE, Arm.CACHED: NONE}), Verdict.NO_PAUSE, id="no pause"),
        pytest.param(
            runs({Arm.ALONE: NONE, Arm.UNCACHED: LONG, Arm.CACHED: (0.9, 1.0, 0.8, 0.9, 1.1)}),
            Verdict.PARTLY,
            id="partly",
        ),
        pytest.param(runs({Arm.ALONE: LONG, Arm.UNCACHED: LONG, Arm.CACHED: LONG}), Verdict.NO_PAUSE, id="always"),
        pytest.param(
            runs({Arm.ALONE: NONE, Arm.UNCACHED: (0.0, 9.0, 0.0, 0.0, 8.0), Arm.CACHED: NONE}),
            Verdict.INCONCLUSIVE,
            id="now and then",
        ),
        pytest.param(
            runs({Arm.ALONE: NONE, Arm.UNCACHED: LONG, Arm.CACHED: (0.0, 3.0, 0.0, 0.0, 2.0)}),
            Verdict.INCONCLUSIVE,
            id="cached now and then",
        ),
        pytest.param(runs({Arm.ALONE: NONE, Arm.UNCACHED: LONG}), Verdict.INCONCLUSIVE, id="no cached run"),
        pytest.param(
            runs({Arm.ALONE: NONE[:2], Arm.UNCACHED: LONG[:2], Arm.CACHED: NONE[:2]}),
            Verdict.INCONCLUSIVE,
            id="too few",
        ),
        pytest.param(
            runs({Arm.ALONE: NONE, Arm.UNCACHED: LONG, Arm.CACHED: NONE}, inside=0.3),
            Verdict.INCONCLUSIVE,
            id="elsewhere",
        ),
        pytest.param(
            runs(
                {Arm.ALONE: NONE, Arm.UNCACHED: LONG, Arm.CACHED: NONE},
                causes={Cause.GPU_CLOCK: 2.0, Cause.PREFILL: 0.3},
            ),
            Verdict.CONTRADICTED,
            id="clock seen",
        ),
        pytest.param(
            runs({Arm.ALONE: NONE, Arm.UNCACHED: LONG, Arm.CACHED: NONE}, causes={Cause.UNKNOWN: 2.0}),
            Verdict.PREFILL,
            id="unknown is no rival",
        ),
        pytest.param(
            runs({Arm.ALONE: NONE, Arm.UNCACHED: LONG, Arm.CACHED: NONE}, preemptions=1.0),
            Verdict.CONTRADICTED,
            id="preempted",
        ),
        pytest.param(
            runs({Arm.ALONE: NONE, Arm.UNCACHED: LONG, Arm.CACHED: NONE}, clock=0.7),
            Verdict.CONTRADICTED,
            id="a lower clock",
        ),
    ],
)
def test_a_statement_needs_all_of_its_grounds(made: list[Run], expected: Verdict) -> None:
    """Each pattern of lost seconds gets the verdict that follows, and other evidence can only take one away."""
    said = conclude(made, 1_000, usual_gap=0.02, seed=1)

    assert said.verdict is expected
    assert (said.verdict is Verdict.PREFILL) == ("building prompt state; which kernel" in said.statement)
    assert said.advice


def test_void_runs_take_no_part() -> None:
    """A void run is in no effect, whatever it would have shown."""
    made = runs({Arm.ALONE: NONE, Arm.UNCACHED: LONG, Arm.CACHED: NONE})
    made = [replace(run, void=("late",)) if run.planned.block > 3 else run for run in made]

    assert {effect.difference.n for effect in conclude(made, 1_000, usual_gap=0.02, seed=1).effects} == {3}


def test_chance_alone_is_rarely_called_prefill() -> None:
    """Of 60 experiments in which pauses fall on any run by chance, hardly one is called prefill."""
    rng = random.Random(3)
    called = 0
    for _ in range(60):
        lost = {arm: [rng.choice((0.0, 0.0, 2.0)) for _ in range(5)] for arm in Arm}
        called += conclude(runs(lost), 1_000, usual_gap=0.02, seed=1).verdict is Verdict.PREFILL

    print(f"{called} of 60 experiments by chance")
    assert called <= 2
