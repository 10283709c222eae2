import asyncio
import json
import math
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from stallwatch.web.events import Events, packed
from tests import virtual

T = TypeVar("T")


async def at_once(work: Callable[[], T], /) -> T:
    return work()


class Source:
    """Content that counts how often it was made."""

    def __init__(self, padding: int = 0) -> None:
        self.made = 0
        self.padding = "x" * padding

    def __call__(self) -> Callable[[], Mapping[str, Any]]:
        self.made += 1
        made = self.made
        return lambda: {"number": made, "padding": self.padding}


def app_of(events: Events) -> web.Application:
    app = web.Application()
    app.router.add_get("/events", events.serve)
    app.on_shutdown.append(lambda _: events.close())
    return app


async def heard(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """The next event."""
    line = await answer.content.readline()
    await answer.content.readline()
    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return found


def test_every_page_hears_the_same_event_and_it_is_made_once() -> None:
    """Ten pages cost as many events as one, and nothing is made before the first comes or after the last is gone."""

    async def main() -> tuple[list[int], int, int, int]:
        source = Source()
        events = Events(source, at_once)
        making = asyncio.create_task(events.run())
        async with TestClient(TestServer(app_of(events))) as client:
            await asyncio.sleep(30.0)
            idle = source.made
            answers = [await client.get("/events") for _ in range(10)]
            await heard(answers[0])  # which came before the others
            seconds = []
            for _ in range(5):
                numbers = {(await heard(answer))["number"] for answer in answers}
                assert len(numbers) == 1
                seconds.append(numbers.pop())
            for answer in answers:
                answer.close()
            await asyncio.sleep(5.0)
            before = source.made
            await asyncio.sleep(30.0)
            left = source.made - before
            making.cancel()
            return seconds, idle, left, len(events)

    seconds, idle, left, listening = virtual.run(main())

    assert seconds == [seconds[0] + place for place in range(5)]
    assert (idle, left, listening) == (0, 0, 0)


def test_an_event_is_one_line_of_json() -> None:
    """Whatever is in it, an event cannot end early or begin another."""
    event = packed({"model": "a\n\ndata: {}\r\n\u2028 b"})

    assert event.count(b"\n") == 2
    assert event.endswith(b"}\n\n")
    assert json.loads(event.removeprefix(b"data: "))["model"] == "a\n\ndata: {}\r\n\u2028 b"


def test_what_is_no_number_is_null() -> None:
    """A server that tells NaN or infinity breaks neither the page nor the sidecar."""
    event = packed({"kv": math.nan, "engines": [{"running": math.inf, "waiting": (1.5, -math.inf)}], "name": "inf"})

    assert json.loads(event.removeprefix(b"data: "), parse_constant=pytest.fail) == {
        "kv": None,
        "engines": [{"running": None, "waiting": [1.5, None]}],
        "name": "inf",
    }


def test_no_more_pages_than_there_is_room_for() -> None:
    """One page too many is told to come back, a HEAD is answered at once, and a page that goes makes room."""

    async def main() -> tuple[int, str | None, int, int]:
        events = Events(Source(), at_once, most=2)
        making = asyncio.create_task(events.run())
        async with TestClient(TestServer(app_of(events))) as client:
            first, _ = await client.get("/events"), await client.get("/events")
            refused = await client.get("/events")
            head = await client.head("/events")
            first.close()
            await asyncio.sleep(3.0)
            again = await client.get("/events")
            making.cancel()
            return refused.status, refused.headers.get("Retry-After"), head.status, again.status

    assert virtual.run(main()) == (503, "5", 200, 200)


def test_a_page_that_reads_nothing_is_dropped() -> None:
    """Its few events wait, then it is cut off; whoever reads hears every event meanwhile."""

    async def main() -> tuple[list[int], int]:
        source = Source(padding=400_000)
        events = Events(source, at_once)
        making = asyncio.create_task(events.run())
        async with TestServer(app_of(events)) as server:
            deaf = socket.create_connection(("127.0.0.1", server.port or 0))
            deaf.sendall(b"GET /events HTTP/1.1\r\nHost: here\r\n\r\n")
            async with aiohttp.ClientSession() as session:
                answer = await session.get(server.make_url("/events"), read_bufsize=1 << 20)
                numbers: list[int] = []
                async with asyncio.timeout(120):
                    while len(events) > 1 or len(numbers) < 5:
                        numbers.append((await heard(answer))["number"])
                answer.close()
            deaf.close()
            making.cancel()
            return numbers, len(events)

    numbers, listening = virtual.run(main())
    print(f"dropped after {len(numbers)} events of 400 kB")

    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert listening <= 1


def test_closing_ends_every_stream() -> None:
    """A sidecar that stops does not wait for pages that are open."""

    async def main() -> tuple[float, bytes]:
        loop = asyncio.get_running_loop()
        events = Events(Source(), at_once)
        making = asyncio.create_task(events.run())
        async with TestClient(TestServer(app_of(events))) as client:
            answer = await client.get("/events")
            await heard(answer)
            began = loop.time()
            await events.close()
            rest = await answer.content.read()
            making.cancel()
            return loop.time() - began, rest

    seconds, rest = virtual.run(main())

    assert seconds < 1.0
    assert rest == b""
