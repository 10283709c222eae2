import asyncio

from stallwatch.observations import Failure, PollFailure, Source
from stallwatch.scheduling import Poll, SourceError, every
from tests import virtual


class Script:
    """A source whose polls take the scripted seconds; a string is an expected failure after no time."""

    def __init__(self, *steps: float | str) -> None:
        self.steps = list(steps)
        self.started: list[float] = []
        self.loop = asyncio.get_running_loop()

    async def observe(self) -> float:
        self.started.append(round(self.loop.time(), 6))
        step = self.steps.pop(0) if self.steps else 0.0
        if isinstance(step, str):
            raise SourceError(Failure.REFUSED, step)
        await asyncio.sleep(step)
        return step


async def run_for(seconds: float, script: Script, seen: list[object], **more: object) -> None:
    """Runs the loop for a while with an interval of 1 s and a timeout of 5 s."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(
        every(
            1.0,
            5.0,
            source=Source.ENGINE,
            observe=script.observe,
            emit=seen.append,
            clock=loop.time,
            **more,  # type: ignore[arg-type]
        )
    )
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_polls_at_a_fixed_rate() -> None:
    """The time that a poll takes does not move the next one."""

    async def main() -> list[float]:
        script = Script(0.3, 0.0, 0.9)
        await run_for(4.5, script, [])
        return script.started

    assert virtual.run(main()) == [0, 1, 2, 3, 4]


def test_an_overrun_is_followed_by_one_poll_and_no_burst() -> None:
    """After a poll that took several intervals the next comes at once and the rate is kept from there."""

    async def main() -> list[float]:
        script = Script(0.0, 3.5)
        await run_for(7.0, script, [])
        return script.started

    assert virtual.run(main()) == [0, 1, 4.5, 5.5, 6.5]


def test_expected_failures_are_values() -> None:
    """A refusal and a hang become observations at the moment they are known, and polling goes on."""

    async def main() -> list[object]:
        seen: list[object] = []
        await run_for(8.0, Script(0.0, "nobody listens", 99.0), seen)
        return seen

    seen = virtual.run(main())
    assert seen[1] == PollFailure(1.0, Source.ENGINE, Failure.REFUSED, "nobody listens")
    assert seen[2] == PollFailure(7.0, Source.ENGINE, Failure.TIMEOUT, "no answer within 5 s")
    assert seen[3] == 0.0


def test_a_wake_brings_one_poll_forward() -> None:
    """Setting the event polls at once, and once."""

    async def main() -> list[float]:
        wake = asyncio.Event()
        asyncio.get_running_loop().call_later(1.25, wake.set)
        script = Script()
        await run_for(3.5, script, [], wake=wake)
        return script.started

    assert virtual.run(main()) == [0, 1, 1.25, 3]


def test_every_poll_is_reported_with_its_duration() -> None:
    """Health hears of successes and failures alike."""

    async def main() -> list[Poll]:
        polls: list[Poll] = []
        await run_for(1.5, Script(0.25, "no"), [], polled=polls.append)
        return polls

    polls = virtual.run(main())
    assert [(poll.started, poll.ended, poll.failure is None) for poll in polls] == [(0, 0.25, True), (1, 1, False)]


def test_a_bug_in_a_consumer_is_not_a_failure_of_the_source() -> None:
    """An exception from the consumer of observations leaves the loop."""

    async def main() -> BaseException | None:
        def broken(_: object) -> None:
            raise KeyError("a bug")

        task = asyncio.create_task(
            every(
                1.0,
                5.0,
                source=Source.GPU,
                observe=Script().observe,
                emit=broken,
                clock=asyncio.get_running_loop().time,
            )
        )
        await asyncio.wait([task])
        return task.exception()

    assert isinstance(virtual.run(main()), KeyError)
