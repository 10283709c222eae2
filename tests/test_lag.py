"""The sleeper that measures our own lateness."""

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import pairwise

import pytest

from stallwatch.observations import ObserverSample
from stallwatch.sources.lag import LagSource
from tests.cgroups import limited
from tests.virtual import VirtualLoop, run


async def for_a_while(
    seconds: float,
    disturb: Callable[[VirtualLoop], None] | None = None,
    totals: list[float | None] | None = None,
    *,
    closely: bool = True,
) -> list[ObserverSample]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    left = list(totals or [])
    source = LagSource(clock=loop.time, throttled_seconds=lambda: left.pop(0) if left else None, closely=closely)
    seen: list[ObserverSample] = []
    task = asyncio.create_task(source.run(seen.append))
    if disturb is not None:
        loop.call_at(0.6, disturb, loop)
    await asyncio.sleep(seconds)
    task.cancel()
    return seen


def block(seconds: float) -> Callable[[VirtualLoop], None]:
    """A callback that holds the loop for that long, in virtual time."""

    def held(loop: VirtualLoop) -> None:
        loop._jumping.now += seconds

    return held


def test_a_free_loop_is_not_late() -> None:
    """Without disturbance there is a sample every quarter of a second and each says zero."""
    seen = run(for_a_while(2.1))
    assert [pytest.approx(0.25 * k, abs=0.02) for k in range(1, 9)] == [sample.at for sample in seen]
    assert max(sample.lag for sample in seen) < 1e-9


def test_a_blocked_loop_says_so_at_once() -> None:
    """A lateness of two seconds is reported as soon as the loop turns again, and only there."""
    seen = run(for_a_while(4.0, block(2.0)))
    (late,) = [sample for sample in seen if sample.lag > 0.001]
    assert late.at == pytest.approx(2.6, abs=0.011)
    assert late.lag == pytest.approx(2.0, abs=0.011)


def test_a_short_delay_waits_for_the_next_sample() -> None:
    """A lateness of 50 ms is reported with the quarter of a second that it falls into."""
    seen = run(for_a_while(1.3, block(0.05)))
    assert [pytest.approx(0.05, abs=0.011)] == [sample.lag for sample in seen if sample.lag > 0.001]
    assert len(seen) <= 5


def test_a_long_nap_tells_the_same_within_its_length() -> None:
    """While nobody stamps tokens, samples come nearly as often, and a lateness is told too short by 50 ms at most."""
    seen = run(for_a_while(4.0, block(2.0), closely=False))
    (late,) = [sample for sample in seen if sample.lag > 0.001]

    assert 1.95 <= late.lag <= 2.0
    assert max(after.at - before.at for before, after in pairwise(seen) if after is not late) < 0.31


def test_a_long_nap_ends_when_it_matters() -> None:
    """From the moment at which tokens are stamped, a lateness is known to 10 ms."""

    async def scenario() -> list[ObserverSample]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        source = LagSource(clock=loop.time, closely=False)
        seen: list[ObserverSample] = []
        task = asyncio.create_task(source.run(seen.append))
        loop.call_at(0.601, source.watch_closely, True)  # noqa: FBT003  (what the loop takes)
        loop.call_at(0.615, block(0.2), loop)
        await asyncio.sleep(1.5)
        task.cancel()
        return seen

    (late,) = [sample for sample in run(scenario()) if sample.lag > 0.001]

    assert late.lag == pytest.approx(0.2, abs=0.011)


def test_an_error_of_the_listener_ends_the_sleeper() -> None:
    """A bug in what takes the samples comes out of the task, as from any other source."""

    def broken(_: ObserverSample) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            await LagSource(clock=loop.time).run(broken)

    with pytest.raises(ZeroDivisionError):
        run(scenario())


def test_a_stamp_is_judged_with_its_lateness_known() -> None:
    """What the late loop handles before the sleeper wakes can have the lateness told first, and it is told once."""

    async def scenario() -> list[ObserverSample | str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        source = LagSource(clock=loop.time)
        seen: list[ObserverSample | str] = []
        task = asyncio.create_task(source.run(seen.append))

        def token() -> None:
            block(2.0)(loop)
            source.speak_up()
            seen.append("token")

        source.speak_up()
        loop.call_at(0.105, source.speak_up)
        loop.call_at(0.106, token)
        await asyncio.sleep(0.2)
        task.cancel()
        return seen

    first, second, *later = run(scenario())
    assert isinstance(first, ObserverSample)
    assert first.lag == pytest.approx(2.0, abs=0.011)
    assert second == "token"
    assert [sample for sample in later if isinstance(sample, ObserverSample) and sample.lag > 0.001] == []


def test_throttling_is_a_difference() -> None:
    """Throttled seconds are those since the sample before, and absent where the total is absent or was reset."""
    seen = run(for_a_while(1.3, totals=[1.0, 1.2, None, 1.3, 0.1, 0.3]))
    assert [pytest.approx(0.2), None, None, None, pytest.approx(0.2)] == [sample.throttled for sample in seen]


# a process that may run for 10 ms in each 100 ms, as under a limit of 100 millicores
THROTTLED = """
    import asyncio, json, sys, time
    from stallwatch.sources.host import OwnCgroup
    from stallwatch.sources.lag import LagSource

    async def main():
        seen = []
        own = OwnCgroup()
        lag = LagSource(clock=time.monotonic, throttled_seconds=own.throttled_seconds)
        task = asyncio.create_task(lag.run(seen.append))
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            busy = time.monotonic() + 0.004
            while time.monotonic() < busy:
                pass
            await asyncio.sleep(0.001)
        task.cancel()
        print(json.dumps([[each.lag, each.throttled] for each in seen]))

    asyncio.run(main())
"""


def test_a_limit_of_100_millicores_is_seen() -> None:
    """Under a real CPU limit the sleeper is late by tens of milliseconds, and the cgroup says for how long."""
    with limited(100) as members:
        program = f"import pathlib, os; pathlib.Path({str(members)!r}).write_text(str(os.getpid()))\n"
        # The imports would take a minute under the limit: it is entered after them.
        program = "import asyncio, stallwatch.sources.host, stallwatch.sources.lag\n" + program
        program += textwrap.dedent(THROTTLED)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    seen = json.loads(done.stdout)
    assert max(lag for lag, _ in seen) > 0.05
    assert sum(throttled or 0.0 for _, throttled in seen) > 0.5
