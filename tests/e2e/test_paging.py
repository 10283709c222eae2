"""From a freeze to the page, in real time."""

import json
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from stallwatch.simulator.scenarios import SCENARIOS
from tests.e2e.paging import Call, Played, Server, stage
from tests.e2e.processes import get, until

WATCHED = 480.0
"""Seconds for which the table watches each scenario: long enough for every alert that a fault of a minute can cause."""
SETTLED = 60.0
"""Seconds after the last page in which a second one would come: Alertmanager's `group_wait` is 5 s."""
KILLED = 10.0
FROZEN = "StallwatchReadersFrozen"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: when the trouble begins, and who is to be paged for what.

    `close` is for freezes so near to the rule's share of time that the phase of the scrapes decides. `killed` ends the
    server when the trouble begins, in the middle of what it `plays`.
    """

    name: str
    begins: float = 0.0
    pages: tuple[str, ...] = ()
    close: bool = False
    killed: bool = False
    plays: str = ""

    @property
    def scenario(self) -> str:
        """What the server plays."""
        return self.plays or self.name

    def told(self, pages: Sequence[Call], tickets: Sequence[Call]) -> bool:
        """Whether just those calls came that should."""
        allowed = [[(name,) for name in self.pages], *([[]] if self.close else [])]
        return [call.firing for call in pages] in allowed and not tickets


ROWS = (
    Row("long-prefill", 25.0, (FROZEN,)),
    Row("long-prefill-at-lower-clock", 25.0, (FROZEN,)),
    Row("first-step-open", 25.0, (FROZEN,), close=True),
    Row("medium-prompts", 20.0, (FROZEN,)),
    Row("retry-storm", 20.0, (FROZEN,)),
    Row("engine-hang", 30.0, (FROZEN,)),
    Row("dp-rank-frozen", 30.0, (FROZEN,)),
    Row("gone", 40.0, (FROZEN,), killed=True, plays="quiet"),
    Row("gone-while-idle", 40.0, ("StallwatchServerGone",), killed=True, plays="idle"),
    Row("kv-preemption", 25.0, (FROZEN,)),
    Row("kv-offload-wait", 20.0, (FROZEN,)),
    Row("queue-full", 0.0, (FROZEN,)),
    Row("admission-livelock", 20.0, (FROZEN,)),
    Row("gpu-clock-drop", 30.0, (FROZEN,)),
    Row("host-paging", 30.0, (FROZEN,)),
    Row("interconnect-congested", 30.0, (FROZEN,), close=True),
    Row("abort-in-prefill", 20.0),
    Row("degraded", 20.0),
    Row("proxy-buffering"),
    Row("prefill-only", 3.0),
    Row("process-frozen", 30.0),
    Row("engine-restart", 30.0),
    Row("metrics-down", 20.0),
    Row("metrics-slow", 20.0),
    Row("frontend-bound", 20.0),
    Row("jit-pause", 20.0),
    Row("latch", 45.0),
    Row("acceptance-collapse", 45.0),
    Row("asleep", 17.0),
    Row("power-cap-harmless"),
    Row("large-batch"),
    Row("long-prefill-cached"),
    Row("whole-prompt-repeats"),
    Row("pd-decode-worker"),
    Row("spec-decode"),
    Row("stream-interval"),
    Row("idle"),
    Row("quiet"),
)
UNPLAYED = {"observer-late"}
"""What a server cannot play: the lateness is the observer's."""


def wait(until_time: float) -> None:
    """Sleeps until a monotonic time."""
    time.sleep(max(0.0, until_time - time.monotonic()))


def after(row: Row, server: Server, calls: list[Call]) -> str:
    """Which alerts were told, and how many seconds after the trouble began."""
    return ", ".join(f"{' and '.join(call.firing)} after {call.at - server.began - row.begins:.0f} s" for call in calls)


def computed() -> float:
    """CPU seconds of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_every_scenario_is_in_the_table() -> None:
    """A scenario that comes is watched too."""
    assert {row.scenario for row in ROWS} == set(SCENARIOS) - UNPLAYED


@pytest.mark.timeout(420)
def test_each_freeze_is_one_page_with_everything_in_it(tmp_path: Path) -> None:
    """Defaults everywhere, pulses only: a long prompt, a hang and a dead server page once each, a quiet one nobody."""
    played = {
        "long-prefill": Played("long-prefill", sooner=17.0),
        "engine-hang": Played("engine-hang", sooner=22.0),
        "gone": Played("quiet"),
        "quiet": Played("quiet"),
    }
    begins = {"long-prefill": 8.0, "engine-hang": 8.0, "gone": KILLED}
    before, started = computed(), time.monotonic()
    with stage(tmp_path, played) as seen:
        wait(seen.servers["gone"].began + KILLED)
        seen.servers["gone"].simulator.stop(signal.SIGKILL)
        for name in begins:
            until(lambda name=name: bool(seen.told.told(name)), 240, f"a page for {name}")
        wait(time.monotonic() + SETTLED)
        pages = {name: seen.told.told(name) for name in played}
        tickets = [call for call in seen.told.calls if call.receiver != "pager"]
        rules = json.loads(get(f"{seen.prometheus}/api/v1/rules"))["data"]["groups"]
    for name, seconds in begins.items():
        call = pages[name][0]
        print(f"{name}: paged {call.at - seen.servers[name].began - seconds:.0f} s after: {call.text}")
    print(f"{time.monotonic() - started:.0f} s, {computed() - before:.0f} s of CPU")

    assert {name: [call.firing for call in calls] for name, calls in pages.items()} == {
        **{name: [(FROZEN,)] for name in begins},
        "quiet": [],
    }
    assert tickets == []
    assert all("frozen for" in pages[name][0].text for name in begins)
    assert all("objective 100ms" in pages[name][0].text for name in begins)
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rows", [ROWS[: len(ROWS) // 2], ROWS[len(ROWS) // 2 :]], ids=["what-readers-feel", "what-they-hardly-feel"]
)
def test_who_is_called_for_what_and_after_how_long(rows: Sequence[Row], tmp_path: Path) -> None:
    """Every scenario makes the page that it should, once, and no other call."""
    before, started = computed(), time.monotonic()
    with stage(tmp_path, {row.name: Played(row.scenario) for row in rows}) as seen:
        for row in rows:
            if row.killed:
                wait(seen.servers[row.name].began + row.begins)
                seen.servers[row.name].simulator.stop(signal.SIGKILL)
        wait(max(server.began for server in seen.servers.values()) + WATCHED)
        found = {row.name: (seen.told.told(row.name), seen.told.told(row.name, "tickets")) for row in rows}
    print("| scenario | pages | tickets |\n|---|---|---|")
    for row in rows:
        pages, tickets = (after(row, seen.servers[row.name], calls) for calls in found[row.name])
        print(f"| `{row.name}` | {pages or 'nobody'} | {tickets} |")
    spent = time.monotonic() - started
    print(f"{len(rows)} servers: {spent:.0f} s, {(computed() - before) / spent:.2f} cores")

    assert [row.name for row in rows if not row.told(*found[row.name])] == []
