import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web

from stallwatch.observations import (
    CanaryObservation,
    CanarySkipped,
    Failure,
    Outcome,
    PollFailure,
    SkipReason,
    Source,
    StreamClosed,
    StreamOpened,
    StreamTokens,
)
from stallwatch.scheduling import Poll, SourceError, every
from stallwatch.settings import CanarySettings
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.server import create_app
from stallwatch.sources.canary import Canary, Gate, TokenBudget
from stallwatch.sources.http import Target
from stallwatch.sources.served import ServedModels
from tests.raw_server import SSE_HEAD, Asked, Peer, RawServer, answer, models, serve
from tests.virtual import run

STEP = 0.02  # seconds from token to token of the small server below


@dataclass
class SmallServer:
    """A server that decodes at an even pace, and refuses, stalls or lists as the test sets it."""

    listed: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "base", "parent": None}])
    refuse: bytes | None = None
    first_token_after: float = STEP
    finish_after: int | None = None  # tokens, whatever was asked for

    async def __call__(self, asked: Asked, peer: Peer) -> None:
        if asked.path == "/v1/models":
            await peer.send(models(*self.listed))
            return
        if self.refuse is not None:
            await peer.send(self.refuse)
            return
        await peer.send(SSE_HEAD)
        await asyncio.sleep(self.first_token_after - STEP)
        for n in range(1, min(asked.body["max_tokens"], self.finish_after or 10**9) + 1):
            await asyncio.sleep(STEP)
            await peer.data({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 20, "completion_tokens": n}})
        await peer.data("[DONE]")


@dataclass
class Bench:
    """A canary before a server, and everything that it emitted."""

    server: RawServer
    small: SmallServer
    clock: Callable[[], float]
    canary: Canary = field(init=False)
    gate: Gate = field(default_factory=Gate)
    emitted: list[CanaryObservation | PollFailure] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)

    def of(self, kind: type) -> list[Any]:
        return [seen for seen in self.emitted if isinstance(seen, kind)]

    @property
    def completions(self) -> list[Asked]:
        return [asked for asked in self.server.asked if asked.path != "/v1/models"]

    @property
    def lists(self) -> int:
        return len(self.server.asked) - len(self.completions)


def bench(scenario: Callable[[Bench], Awaitable[None]], *, small: SmallServer | None = None, **given: Any) -> Bench:
    """Runs `scenario` in virtual time with a canary of these settings, and gives what was seen."""
    small = small or SmallServer()

    async def main() -> Bench:
        clock = asyncio.get_running_loop().time
        async with serve(small) as server:
            target = Target(server.url)
            async with target.session(keep_alive=False) as session:
                made = Bench(server, small, clock)
                made.canary = Canary(
                    CanarySettings(**given),
                    target,
                    session=session,
                    gate=lambda: made.gate,
                    emit=made.emitted.append,
                    clock=clock,
                    rng=random.Random(7),
                    polled=made.polls.append,
                )
                await scenario(made)
                await asyncio.sleep(0.001)
        times = [seen.at for seen in made.emitted]
        assert times == sorted(times)
        return made

    return run(main())


async def pulses(bench: Bench, *, seconds: float, interval: float = 15.0, wake: asyncio.Event | None = None) -> None:
    """Lets `every` drive the canary for some time."""
    try:
        async with asyncio.timeout(seconds):
            await every(
                interval,
                bench.canary.pulse_timeout_seconds,
                source=Source.CANARY,
                observe=bench.canary.pulse,
                emit=bench.emitted.append,
                clock=bench.clock,
                wake=wake,
                polled=bench.polls.append,
            )
    except TimeoutError:
        pass


async def persists(bench: Bench, *, seconds: float, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
    """Lets the persistent mode run for some time, then cancels it."""
    task = asyncio.create_task(bench.canary.persistent())
    other = asyncio.create_task(_nothing() if meanwhile is None else _call(meanwhile))
    await asyncio.wait({task}, timeout=seconds)
    if task.done():
        task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await other


async def _nothing() -> None:
    return


async def _call(what: Callable[[], Awaitable[None]]) -> None:
    await what()


def test_pulses_come_at_the_interval_with_jitter() -> None:
    """Pulses keep the interval on average, never at exactly the same distance, and each is a whole stream."""

    async def scenario(bench: Bench) -> None:
        await pulses(bench, seconds=599)

    seen = bench(scenario)
    opened = [one.at for one in seen.of(StreamOpened)]
    distances = {round(later - earlier, 6) for earlier, later in pairwise(opened)}

    assert len(opened) == 40
    assert all(13.5 <= distance <= 16.5 for distance in distances)
    assert len(distances) > 30
    assert [one.outcome for one in seen.of(StreamClosed)] == [Outcome.COMPLETED] * 40
    assert sum(one.tokens for one in seen.of(StreamTokens)) == 40 * 64
    assert len({asked.body["prompt"] for asked in seen.completions}) == 40
    assert seen.lists == 1


@dataclass(frozen=True)
class Held:
    gate: Gate
    reason: SkipReason | None
    given: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Held(Gate(), None), id="nothing-known"),
        pytest.param(Held(Gate(waiting=31), None), id="few-waiting"),
        pytest.param(Held(Gate(waiting=32), SkipReason.BUSY), id="many-waiting"),
        pytest.param(Held(Gate(waiting=9), SkipReason.BUSY, {"skip_when_waiting": 9}), id="own-threshold"),
        pytest.param(Held(Gate(asleep=True), SkipReason.ASLEEP), id="asleep"),
        pytest.param(Held(Gate(serving=False), SkipReason.NOT_SERVING), id="not-serving"),
        pytest.param(Held(Gate(draining=True), SkipReason.NOT_SERVING), id="draining"),
        pytest.param(Held(Gate(others_running=0, waiting=0), None), id="idle"),
        pytest.param(Held(Gate(others_running=0), SkipReason.IDLE, {"only_when_busy": True}), id="only-when-busy-idle"),
        pytest.param(Held(Gate(), SkipReason.IDLE, {"only_when_busy": True}), id="only-when-busy-unknown"),
        pytest.param(Held(Gate(others_running=1), None, {"only_when_busy": True}), id="only-when-busy-busy"),
        pytest.param(Held(Gate(), SkipReason.PAUSED, {"pause_file": Path(__file__)}), id="paused"),
        pytest.param(Held(Gate(), None, {"pause_file": Path("/nonexistent/pause")}), id="not-paused"),
    ],
)
def test_a_pulse_is_skipped_for_a_reason(case: Held) -> None:
    """A pulse that would be no use or do harm is skipped, and the reason is counted."""

    async def scenario(bench: Bench) -> None:
        bench.gate = case.gate
        bench.emitted.append(await bench.canary.pulse())

    seen = bench(scenario, **case.given)

    assert [one.reason for one in seen.of(CanarySkipped)] == ([case.reason] if case.reason else [])
    assert len(seen.completions) == (0 if case.reason else 1)


def test_a_slow_engine_is_looked_at_at_once_and_within_the_budget() -> None:
    """A wake sends one pulse without jitter; when the budget of the minute is spent, the next is skipped."""

    async def scenario(bench: Bench) -> None:
        wake = asyncio.Event()

        async def slows() -> None:
            for at in (20.0, 25.0):
                await asyncio.sleep(at - bench.clock())
                bench.gate = Gate(slow=True)
                wake.set()
                await asyncio.sleep(1)
                bench.gate = Gate()

        task = asyncio.create_task(slows())
        await pulses(bench, seconds=28, wake=wake)
        await task

    seen = bench(scenario, tokens_per_minute=64 * 3)

    assert [one.at for one in seen.of(StreamOpened)][2] == 20.0
    assert seen.of(CanarySkipped) == [CanarySkipped(25.0, SkipReason.BUDGET)]


def test_the_budget_is_a_rolling_minute_of_what_was_really_taken() -> None:
    """Asked tokens count when a request is sent, taken tokens once it has ended, and neither after a minute."""
    budget = TokenBudget(100)
    correct = budget.book(100, now=0.0)
    full = budget.allows(1, now=1.0)
    correct(40)

    assert not full
    assert budget.allows(60, now=2.0)
    assert not budget.allows(61, now=59.9)
    assert budget.allows(100, now=60.0)


def test_a_failed_pulse_is_an_observation_and_a_failure() -> None:
    """A refused pulse closes its stream, then tells the loop why; nothing is tried twice."""

    async def scenario(bench: Bench) -> None:
        with pytest.raises(SourceError) as caught:
            await bench.canary.pulse()
        assert caught.value.reason is Failure.BUSY

    seen = bench(scenario, small=SmallServer(refuse=answer("503 Service Unavailable")))

    assert [one.outcome for one in seen.of(StreamClosed)] == [Outcome.BUSY]
    assert len(seen.completions) == 1


def test_a_stalled_pulse_is_a_censored_wait() -> None:
    """A pulse that gets no token ends in a timeout that the statistics see."""

    async def scenario(bench: Bench) -> None:
        await pulses(bench, seconds=60)

    seen = bench(scenario, small=SmallServer(first_token_after=1000), timeout_seconds=30)
    closed = seen.of(StreamClosed)

    assert closed[0].outcome is Outcome.TIMEOUT
    assert closed[0].at - seen.of(StreamOpened)[0].at == pytest.approx(30, abs=0.01)
    assert seen.of(PollFailure)[0].reason is Failure.TIMEOUT


def test_ranks_are_visited_in_turn() -> None:
    """With several data-parallel ranks each pulse is pinned to the next one; with one nothing is pinned."""

    async def scenario(bench: Bench) -> None:
        bench.gate = Gate(engines=("0", "1", "2"))
        for _ in range(4):
            await bench.canary.pulse()
        bench.gate = Gate(engines=("0",))
        await bench.canary.pulse()
        bench.gate = Gate(engines=("0", "1\r\nX-Evil: 1"))
        await bench.canary.pulse()

    seen = bench(scenario)

    assert [asked.headers.get("x-data-parallel-rank") for asked in seen.completions] == [
        "0", "1", "2", "0", None, None,
    ]  # fmt: skip
    assert [one.engine for one in seen.of(StreamOpened)][:4] == ["0", "1", "2", "0"]


def test_request_ids_differ_between_sidecars() -> None:
    """Two sidecars beside one server never use the same request id or salt."""
    ids = set()
    for seed in range(2):

        async def main(seed: int = seed) -> str:
            async with serve(SmallServer()) as server:
                target = Target(server.url)
                async with target.session(keep_alive=False) as session:
                    canary = Canary(
                        CanarySettings(),
                        target,
                        session=session,
                        gate=Gate,
                        emit=lambda _seen: None,
                        clock=asyncio.get_running_loop().time,
                        rng=random.Random(seed),
                    )
                    await canary.pulse()
                salt: str = server.asked[-1].body["cache_salt"]
                return salt

        ids.add(run(main()))

    assert len(ids) == 2
    assert all(one.startswith("stallwatch-canary-") and len(one) <= 128 for one in ids)


@dataclass(frozen=True)
class Choice:
    listed: list[Any]
    chosen: str
    configured: str | None = None


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Choice([{"id": "a"}], "a"), id="one"),
        pytest.param(Choice([{"id": "lora", "parent": "b"}, {"id": "b"}, {"id": "c"}], "b"), id="first-base"),
        pytest.param(Choice([{"id": "lora", "parent": "b"}], "lora"), id="adapters-only"),
        pytest.param(Choice([{"id": "a"}, {"id": "b"}], "b", "b"), id="configured"),
        pytest.param(Choice([{"id": "a"}], "z", "z"), id="configured-and-not-listed"),
        pytest.param(Choice([{"id": "x" * 257}, {"id": 7}, None, {"id": "a\n"}, {"id": "b"}], "b"), id="odd-ids"),
        pytest.param(Choice([{"id": f"m{n}", "parent": None} for n in range(1000)], "m0"), id="a-thousand"),
    ],
)
def test_the_model_is_the_configured_or_the_first_base_model(case: Choice) -> None:
    """The canary asks for the configured model, else for the first that is not an adapter, and says which once."""

    async def scenario(bench: Bench) -> None:
        await bench.canary.pulse()
        await bench.canary.pulse()

    with structlog.testing.capture_logs() as logs:
        seen = bench(scenario, small=SmallServer(listed=case.listed), model=case.configured)

    assert [asked.body["model"] for asked in seen.completions] == [case.chosen] * 2
    assert [line["model"] for line in logs] == [case.chosen]
    assert len(logs[0]["others"]) <= 5


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        pytest.param(models(), Failure.MALFORMED, id="none"),
        pytest.param(answer("200 OK", b"<html>"), Failure.MALFORMED, id="web-page"),
        pytest.param(answer("200 OK", b'{"data": 7}'), Failure.MALFORMED, id="no-list"),
        pytest.param(answer("200 OK", b"[" * 100_000), Failure.MALFORMED, id="deep"),
        pytest.param(answer("401 Unauthorized"), Failure.AUTH, id="401"),
        pytest.param(answer("200 OK", b" " * 5_000_000), Failure.TOO_LARGE, id="huge"),
    ],
)
def test_a_list_of_models_that_is_none(raw: bytes, reason: Failure) -> None:
    """Without a usable list and without a configured model the pulse fails by name, and no request is sent."""

    async def script(_asked: Asked, peer: Peer) -> None:
        await peer.send(raw)

    async def main() -> Failure:
        async with serve(script) as server:
            target = Target(server.url)
            async with target.session(keep_alive=False) as session:
                with pytest.raises(SourceError) as caught:
                    await ServedModels(target, session, configured=None).choose()
                return caught.value.reason

    assert run(main()) is reason


def test_the_list_is_read_again_after_a_404() -> None:
    """When the server refuses the model, the message names what it serves, and the next pulse asks for that."""
    gone = answer("404 Not Found", json.dumps({"error": {"message": "no such model"}}).encode())

    async def scenario(bench: Bench) -> None:
        await bench.canary.pulse()
        bench.small.listed = [{"id": "new"}]
        bench.small.refuse = gone
        with pytest.raises(SourceError) as caught:
            await bench.canary.pulse()
        assert caught.value.detail == "HTTP 404: no such model; served: base"
        bench.small.refuse = None
        await bench.canary.pulse()

    seen = bench(scenario)

    assert [asked.body["model"] for asked in seen.completions] == ["base", "base", "new"]


def test_the_list_is_read_again_while_it_is_empty() -> None:
    """A gateway whose servers are not up yet lists no model; once it does, the canary works."""

    async def scenario(bench: Bench) -> None:
        bench.small.listed = []
        with pytest.raises(SourceError):
            await bench.canary.pulse()
        bench.small.listed = [{"id": "new"}]
        await bench.canary.pulse()

    seen = bench(scenario)

    assert [asked.body["model"] for asked in seen.completions] == ["new"]


def test_the_list_is_read_again_after_a_restart() -> None:
    """When the server was away, it may serve another model afterwards."""

    async def scenario(bench: Bench) -> None:
        await bench.canary.pulse()
        bench.gate = Gate(serving=False)
        await bench.canary.pulse()
        bench.small.listed = [{"id": "new"}]
        bench.gate = Gate()
        await bench.canary.pulse()

    seen = bench(scenario)

    assert [asked.body["model"] for asked in seen.completions] == ["base", "new"]


def test_a_short_context_gets_a_shorter_request() -> None:
    """A model whose context cannot hold the tokens asked for is asked for fewer."""

    async def scenario(bench: Bench) -> None:
        await bench.canary.pulse()

    seen = bench(scenario, small=SmallServer(listed=[{"id": "tiny", "max_model_len": 256}]), tokens=200)

    assert seen.completions[0].body["max_tokens"] == 128


def test_persistent_streams_are_handed_over_without_a_break() -> None:
    """In quiet the next stream is opened before the last is closed, and the last ends at the next one's first token."""

    async def scenario(bench: Bench) -> None:
        bench.gate = Gate(waiting=0)
        await persists(bench, seconds=100)

    seen = bench(scenario, mode="persistent", tokens=1000)
    opened, closed = seen.of(StreamOpened), seen.of(StreamClosed)
    first_token = {one.stream: one.at for one in reversed(seen.of(StreamTokens))}

    assert [one.outcome for one in closed] == [Outcome.ROTATED] * (len(opened) - 1) + [Outcome.CANCELLED]
    assert len(opened) == 7
    for before, after in zip(closed, opened[1:], strict=False):
        assert after.at < before.at
        assert before.at == pytest.approx(first_token[after.stream], abs=1e-6)
    assert seen.server.most_open == 2
    gaps = [one.at for one in seen.of(StreamTokens)]
    assert max(later - earlier for earlier, later in pairwise(gaps)) <= STEP + 1e-6
    assert [poll.failure for poll in seen.polls] == [None] * 7


@pytest.mark.parametrize("waiting", [3, None])
def test_a_persistent_stream_runs_to_its_end_while_others_wait(waiting: int | None) -> None:
    """While requests wait, or nobody knows, no second place is taken: the next stream opens when the last has ended."""

    async def scenario(bench: Bench) -> None:
        bench.gate = Gate(waiting=waiting)
        await persists(bench, seconds=45)

    seen = bench(scenario, mode="persistent", tokens=1000)

    assert [one.outcome for one in seen.of(StreamClosed)] == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.CANCELLED]
    assert seen.of(StreamOpened)[1].at == pytest.approx(seen.of(StreamClosed)[0].at, abs=0.01)
    assert seen.server.most_open == 1


@pytest.mark.parametrize("gate", [Gate(draining=True), Gate(asleep=True)])
def test_a_persistent_stream_ends_when_the_server_drains_or_sleeps(gate: Gate) -> None:
    """A drain or a sleep of the server ends the stream within a second, and it comes back afterwards."""

    async def scenario(bench: Bench) -> None:
        async def drains() -> None:
            await asyncio.sleep(5)
            bench.gate = gate
            await asyncio.sleep(20)
            bench.gate = Gate()

        await persists(bench, seconds=30, meanwhile=drains)

    seen = bench(scenario, mode="persistent")
    closed = seen.of(StreamClosed)

    assert closed[0].outcome is Outcome.CANCELLED
    assert 5 <= closed[0].at <= 6
    assert seen.server.hung_up[0] == pytest.approx(closed[0].at)
    assert seen.of(StreamOpened)[1].at == pytest.approx(25, abs=1)
    assert len(seen.of(CanarySkipped)) == 2


def test_a_persistent_stream_survives_a_metrics_page_that_is_gone() -> None:
    """A stream that brings tokens is kept although the metrics say that the server is gone."""

    async def scenario(bench: Bench) -> None:
        async def loses_metrics() -> None:
            await asyncio.sleep(5)
            bench.gate = Gate(serving=False)

        await persists(bench, seconds=20, meanwhile=loses_metrics)

    seen = bench(scenario, mode="persistent")

    assert [one.at for one in seen.of(StreamClosed)] == [pytest.approx(20)]


def test_persistent_failures_back_off() -> None:
    """A server that refuses is asked again after the interval, then ever more rarely, and at once after a success."""

    async def scenario(bench: Bench) -> None:
        await persists(bench, seconds=1000)

    seen = bench(scenario, mode="persistent", small=SmallServer(refuse=answer("500 Internal Server Error")))
    opened = [one.at for one in seen.of(StreamOpened)]

    assert [round(later - earlier) for earlier, later in pairwise(opened)] == [
        15, 30, 60, 120, 240, 300,
    ]  # fmt: skip
    assert [poll.failure.reason for poll in seen.polls if poll.failure] == [Failure.SERVER_ERROR] * 7
    assert [one.reason for one in seen.of(PollFailure)] == [Failure.SERVER_ERROR] * 7


def test_streams_that_end_early_back_off_too() -> None:
    """A server that finishes each stream after a few tokens is not hammered with new ones."""

    async def scenario(bench: Bench) -> None:
        await persists(bench, seconds=100)

    seen = bench(scenario, mode="persistent", small=SmallServer(finish_after=10))

    assert len(seen.of(StreamOpened)) <= 7


def test_a_failed_hand_over_keeps_the_old_stream() -> None:
    """When the next stream is refused, the old one goes on, and the next attempt waits."""

    async def scenario(bench: Bench) -> None:
        bench.gate = Gate(waiting=0)

        async def refuses() -> None:
            await asyncio.sleep(10)
            bench.small.refuse = answer("429 Too Many Requests")
            await asyncio.sleep(15)
            bench.small.refuse = None

        await persists(bench, seconds=50, meanwhile=refuses)

    seen = bench(scenario, mode="persistent", tokens=1000)

    assert [one.outcome for one in seen.of(StreamClosed)][:2] == [Outcome.BUSY, Outcome.COMPLETED]
    assert seen.of(StreamClosed)[1].at == pytest.approx(20.0, abs=0.1)
    assert seen.of(StreamOpened)[2].at > seen.of(StreamClosed)[0].at + 4


def test_a_persistent_budget_leaves_the_stream_closed() -> None:
    """With a budget a minute, the stream stays closed once it is spent, and that is counted."""

    async def scenario(bench: Bench) -> None:
        bench.gate = Gate(waiting=0)
        await persists(bench, seconds=59)

    seen = bench(scenario, mode="persistent", tokens=500, tokens_per_minute=600)

    assert len(seen.of(StreamOpened)) == 1
    assert {one.reason for one in seen.of(CanarySkipped)} == {SkipReason.BUDGET}


def test_shutdown_closes_the_stream_at_once() -> None:
    """Cancelling the persistent mode hangs up at once and leaves one cancelled stream."""

    async def scenario(bench: Bench) -> None:
        await persists(bench, seconds=7)

    seen = bench(scenario, mode="persistent")

    assert seen.server.hung_up == [pytest.approx(7)]
    assert seen.emitted[-1] == StreamClosed(seen.emitted[-1].at, 1, Outcome.CANCELLED, "", 20, None)


def test_a_bug_in_a_consumer_is_not_swallowed() -> None:
    """An error in what consumes observations ends the persistent mode."""

    async def main() -> None:
        async with serve(SmallServer()) as server:
            target = Target(server.url)
            async with target.session(keep_alive=False) as session:

                def emit(seen: object) -> None:
                    if type(seen) is StreamTokens:
                        raise ConnectionError("a bug")

                canary = Canary(
                    CanarySettings(mode="persistent"),
                    target,
                    session=session,
                    gate=Gate,
                    emit=emit,
                    clock=asyncio.get_running_loop().time,
                    rng=random.Random(7),
                )
                await canary.persistent()

    with pytest.raises(ConnectionError):
        run(main())


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_pulse_reads_the_simulated_vllm(api: str) -> None:
    """Against the simulated vLLM a pulse completes with all its tokens, one a step, in both forms of the API."""

    async def main() -> list[CanaryObservation | PollFailure]:
        clock = asyncio.get_running_loop().time
        runner = web.AppRunner(create_app(Scenario(name="quiet", sentence="nothing happens"), clock=clock))
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            target = Target(f"http://{host}:{port}")
            emitted: list[CanaryObservation | PollFailure] = []
            async with target.session(keep_alive=False) as session:
                canary = Canary(
                    CanarySettings.model_validate({"api": api}),
                    target,
                    session=session,
                    gate=Gate,
                    emit=emitted.append,
                    clock=clock,
                    rng=random.Random(7),
                )
                emitted.append(await canary.pulse())
            return emitted
        finally:
            await runner.cleanup()

    emitted = run(main())
    closed = emitted[-1]

    assert isinstance(closed, StreamClosed)
    assert (closed.outcome, closed.detail) == (Outcome.COMPLETED, "")
    assert sum(seen.tokens for seen in emitted if isinstance(seen, StreamTokens)) == 64
    assert closed.prompt_tokens is not None
