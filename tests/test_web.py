import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.core import GaugeMetricFamily, Metric

from stallwatch.web import server
from tests import virtual


class Shown:
    """Views with one gauge and a heartbeat that can stop."""

    def __init__(self) -> None:
        self.beating = True
        self.drawn = 0

    def families(self) -> tuple[Metric, ...]:
        return (GaugeMetricFamily("stallwatch_open_gap_seconds", "Gap.", value=1.5),)

    def status(self) -> Mapping[str, Any]:
        return {"target": {"phase": "serving"}}

    def stalls(self) -> Mapping[str, Any]:
        return {"stalls": []}

    def stall(self, wanted: str) -> Mapping[str, Any] | None:
        return {"id": wanted} if wanted == "0-1" else None

    def timeline(self, seconds: float) -> Callable[[], Mapping[str, Any]]:
        self.drawn += 1
        return lambda: {"slots": int(seconds * 4), "engines": {"0": {"running": [1.0, None]}}}

    def live(self) -> Callable[[], Mapping[str, Any]]:
        return lambda: {"at_unix": 1.0}

    def alive(self) -> bool:
        return self.beating


T = TypeVar("T")


async def at_once(work: Callable[[], T], /) -> T:
    return work()


Client = TestClient[web.Request, web.Application]


def ask(talk: Callable[[Client, Shown], Awaitable[None]]) -> None:
    """Runs `talk` against the listener in virtual time."""

    async def main() -> None:
        views = Shown()
        app = server.create_app(views, run_blocking=at_once)
        plain = {"Accept-Encoding": "identity"}
        async with TestClient(TestServer(app), auto_decompress=False, headers=plain) as client:
            await talk(client, views)

    virtual.run(main())


def test_metrics_in_the_format_that_is_asked_for() -> None:
    """Prometheus text by default, OpenMetrics when the scraper prefers it."""

    async def talk(client: Client, _: Shown) -> None:
        plain = await client.get("/metrics", headers={"Accept": "text/plain;version=0.0.4"})
        modern = await client.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})

        assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "stallwatch_open_gap_seconds 1.5" in await plain.text()
        assert modern.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert (await modern.text()).endswith("# EOF\n")

    ask(talk)


def test_metrics_are_packed_for_who_takes_gzip() -> None:
    """A scraper that accepts gzip gets it, and unpacks the same page."""

    async def talk(client: Client, _: Shown) -> None:
        packed = await client.get("/metrics", headers={"Accept-Encoding": "gzip"})

        assert packed.headers["Content-Encoding"] == "gzip"
        assert b"stallwatch_open_gap_seconds 1.5" in gzip.decompress(await packed.read())

    ask(talk)


def test_liveness_is_the_loop_and_readiness_is_listening() -> None:
    """Neither depends on vLLM: a server that hangs must not get its observer killed."""

    async def talk(client: Client, views: Shown) -> None:
        assert (await client.get("/livez")).status == 200
        views.beating = False
        assert (await client.get("/livez")).status == 503
        assert (await client.get("/readyz")).status == 200

    ask(talk)


def test_status_is_json() -> None:
    """The status document comes as JSON."""

    async def talk(client: Client, _: Shown) -> None:
        answer = await client.get("/api/v1/status")

        assert answer.content_type == "application/json"
        assert json.loads(await answer.text())["target"]["phase"] == "serving"

    ask(talk)


def test_stalls_are_json_together_and_one_by_one() -> None:
    """All that are remembered, one by its id, and 404 for an id that is not."""

    async def talk(client: Client, _: Shown) -> None:
        together = await client.get("/api/v1/stalls")
        one = await client.get("/api/v1/stalls/0-1")
        other = await client.get("/api/v1/stalls/9-9")

        assert json.loads(await together.text()) == {"stalls": []}
        assert json.loads(await one.text()) == {"id": "0-1"}
        assert (other.status, other.content_type) == (404, "application/json")

    ask(talk)


def test_timeline_is_columns_of_json() -> None:
    """The timeline comes as JSON, over as many seconds as were asked for; what is no number of them is refused."""

    async def talk(client: Client, _: Shown) -> None:
        answer = await client.get("/api/v1/timeline?seconds=30")
        everything = await client.get("/api/v1/timeline")

        assert answer.content_type == "application/json"
        assert json.loads(await answer.text()) == {"slots": 120, "engines": {"0": {"running": [1.0, None]}}}
        assert json.loads(await everything.text())["slots"] == 3600
        for wrong in ("0", "-1", "nan", "inf", "7201", "soon", ""):
            refused = await client.get("/api/v1/timeline", params={"seconds": wrong})
            assert refused.status == 400, wrong
            assert "seconds: write a number" in json.loads(await refused.text())["error"]

    ask(talk)


def test_pages_that_come_together_share_a_timeline() -> None:
    """A timeline is drawn once for all who ask within two seconds, and anew after that."""

    async def talk(client: Client, views: Shown) -> None:
        answers = await asyncio.gather(*(client.get("/api/v1/timeline?seconds=900") for _ in range(50)))
        bodies = {await answer.read() for answer in answers}
        packed = await client.get("/api/v1/timeline?seconds=900", headers={"Accept-Encoding": "gzip"})
        drawn = views.drawn
        await asyncio.sleep(2.1)
        await client.get("/api/v1/timeline?seconds=900")

        assert {gzip.decompress(await packed.read())} == bodies
        assert (drawn, views.drawn) == (1, 2)

    ask(talk)


@pytest.mark.parametrize("host", ["::", "127.0.0.1", "0.0.0.0", "::1"])
def test_listens_where_it_is_told(host: str) -> None:
    """Every spelling of an address gives a listener; `::` takes IPv4 clients too."""

    async def main() -> int:
        listener = server.listen(host, 0)
        port = listener.getsockname()[1]
        target = "[::1]" if host == "::1" else "127.0.0.1"
        async with (
            server.serving(server.create_app(Shown(), run_blocking=at_once), listener),
            aiohttp.ClientSession() as session,
            session.get(f"http://{target}:{port}/livez") as answer,
        ):
            return answer.status

    assert asyncio.run(main()) == 200


def test_a_taken_port_is_an_error_at_once() -> None:
    """A second listener on the same port is refused by the system, not shared."""
    first = server.listen("127.0.0.1", 0)
    with first, pytest.raises(OSError, match="in use"):
        server.listen("127.0.0.1", first.getsockname()[1])
