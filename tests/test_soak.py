"""The whole sidecar for days, in virtual time: what it holds after a while is what it holds at the end."""

import asyncio
import gc
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests import virtual
from tests.hostile import TOKEN_SECONDS, TOKENS, chunk, descriptors, is_counter, only, page, read_page, watching
from tests.raw_server import SSE_HEAD, Asked, Peer, answer, models, serve

HOUR, DAY = 3600.0, 86_400.0
MIB = 1024 * 1024

LIFE_SECONDS = 2 * HOUR  # of one server process
DOWN_SECONDS = 40.0  # until the next one answers
FREEZE_AGE = HOUR  # of a process when it freezes
FREEZE_SECONDS = 5.0
PULSE_SECONDS = 60.0
BUNDLES_BYTES = 2 * MIB


@dataclass(slots=True)
class Soaked:
    """What was held, an entry an hour, and how the last page began."""

    resident: list[float] = field(default_factory=list)  # bytes
    objects: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    series: list[int] = field(default_factory=list)
    values: Mapping[str, float] = field(default_factory=dict)
    tasks_left: int = 0
    wall: float = 0.0

    def value(self, name: str, labels: str = "") -> float:
        """A sample of the last page; 0 where there is none."""
        return self.values.get(f"stallwatch_{name}{labels}", 0.0)


def _age(now: float) -> tuple[int, float]:
    """Which process of the server this is, and for how long it has worked; negative while it is down."""
    number, since = divmod(now, LIFE_SECONDS)
    return int(number), since - (DOWN_SECONDS if number else 0.0)


def _thaws_in(age: float) -> float:
    """Seconds for which the engine stays frozen."""
    return FREEZE_AGE + FREEZE_SECONDS - age if FREEZE_AGE <= age < FREEZE_AGE + FREEZE_SECONDS else 0.0


async def _play(asked: Asked, peer: Peer) -> None:
    loop = asyncio.get_running_loop()
    process, age = _age(loop.time())
    if age < 0:
        peer.reset()
    elif asked.path == "/v1/models":
        await peer.send(models({"id": "tiny", "max_model_len": 4096}))
    elif asked.path.startswith("/version"):
        await peer.send(answer("200 OK", b'{"version": "0.32.0"}'))
    elif asked.path.startswith("/metrics"):
        text = page(FREEZE_AGE if _thaws_in(age) else age, start=1.7e9 + process * LIFE_SECONDS)
        await peer.send(answer("200 OK", only(text, asked.path), kind="text/plain; version=0.0.4"))
    else:
        await peer.send(SSE_HEAD)
        for number in range(1, TOKENS + 1):
            await asyncio.sleep(TOKEN_SECONDS)
            await asyncio.sleep(_thaws_in(_age(loop.time())[1]))
            await peer.data(chunk(number))
        await peer.data("[DONE]")


def soak(seconds: float, folder: Path, **rooms: Any) -> Soaked:
    """Watches for so many virtual seconds; the server freezes and starts anew every few hours."""
    begun = time.perf_counter()
    found = virtual.run(_soak(seconds, folder, rooms))
    found.wall = time.perf_counter() - begun
    return found


async def _soak(seconds: float, folder: Path, rooms: dict[str, Any]) -> Soaked:
    loop = asyncio.get_running_loop()
    found = Soaked()
    highest: dict[str, float] = {}
    rooms["recorder"] = {"directory": str(folder), "max_bytes": BUNDLES_BYTES}
    async with serve(_play) as target, watching(target.url, rooms) as own:
        while loop.time() < seconds:
            await asyncio.sleep(HOUR - 600.0)  # between two freezes, with what a freeze leaves behind gone
            own.check()
            found.values = read_page(await own.get("/metrics"))
            fallen = [key for key, value in found.values.items() if is_counter(key) and value < highest.get(key, 0.0)]
            assert not fallen, fallen
            highest |= found.values
            target.asked.clear()
            target.hung_up.clear()
            gc.collect()
            found.resident.append(_resident())
            found.objects.append(len(gc.get_objects()))
            found.tasks.append(len(asyncio.all_tasks()))
            found.descriptors.append(descriptors())
            found.series.append(len(found.values))
            await asyncio.sleep(600.0)
    await asyncio.sleep(1.0)
    found.tasks_left = len(asyncio.all_tasks()) - 1
    return found


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))


def _holds_no_more(found: Soaked, *, warm_hours: int, bytes_more: float) -> None:
    """Compares the last quarter of the hours with the first quarter after everything that has a bound is full."""
    hours = len(found.resident)
    quarter = max(1, (hours - warm_hours) // 4)
    early, late = slice(warm_hours, warm_hours + quarter), slice(hours - quarter, hours)
    grew = median(found.resident[late]) - median(found.resident[early])
    more = median(found.objects[late]) - median(found.objects[early])
    print(
        f"{hours} hours in {found.wall:.0f} s: resident {median(found.resident[early]) / MIB:.1f} MiB, later "
        f"{grew / MIB:+.2f} MiB; {median(found.objects[early]):.0f} objects, later {more:+.0f}; "
        f"{median(found.tasks[late]):.0f} tasks, {median(found.descriptors[late]):.0f} descriptors, "
        f"{found.series[-1]} series"
    )

    assert grew < bytes_more
    assert more < 0.02 * median(found.objects[early])
    assert max(found.tasks[late]) <= max(found.tasks[early]) + 1  # a pulse may be under way
    assert max(found.descriptors[late]) <= max(found.descriptors[early]) + 2
    assert max(found.series[late]) <= max(found.series[early]) + 20
    assert found.tasks_left == 0


def _worked_all_the_time(found: Soaked, seconds: float, folder: Path) -> None:
    restarts = math.floor(seconds / LIFE_SECONDS - 1e-9)

    assert found.value("canary_requests_total", '{outcome="completed"}') > 0.75 * seconds / PULSE_SECONDS
    assert found.value("source_up", '{source="engine"}') == 1
    assert found.value("target_phase", '{phase="serving"}') == 1
    assert found.value("source_failures_total", '{reason="refused",source="engine"}') >= restarts
    assert found.value("slo_seconds_total", '{engine="0"}') > 0.9 * seconds
    assert found.value("incidents_written_total") >= restarts
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= BUNDLES_BYTES


PACE = {"engine": {"interval_seconds": 5}, "canary": {"interval_seconds": PULSE_SECONDS}}


@pytest.mark.timeout(300)
def test_three_hours(tmp_path: Path) -> None:
    """Over hours with freezes and restarts, what is held does not grow, and everything still works."""
    found = soak(3 * HOUR, tmp_path, **PACE)

    _holds_no_more(found, warm_hours=1, bytes_more=6 * MIB)
    _worked_all_the_time(found, 3 * HOUR, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_a_week(tmp_path: Path) -> None:
    """Over a week, what is held after a day and a half is what is held at the end."""
    found = soak(7 * DAY, tmp_path, **PACE)

    _holds_no_more(found, warm_hours=36, bytes_more=6 * MIB)
    _worked_all_the_time(found, 7 * DAY, tmp_path)
