"""Bytes that nobody thought of, in bounded time: streams against the standard's own words, pages through to ours."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from stallwatch.app import Sidecar
from stallwatch.observations import EngineSample, Lane, ObserverSample, ServerFacts
from stallwatch.recorder.scribe import InlineScribe
from stallwatch.settings import Settings
from stallwatch.simulator.nvml import ScriptedNvml
from stallwatch.sources.engine_page import Known, Meaning, read, resolve, wanted
from stallwatch.sources.exposition import Exposition
from stallwatch.sources.sse import Event, SseDecoder
from tests.hostile import page, read_page, strict

GOLDEN = Path(__file__).parent / "golden" / "vllm" / "0.32.0.prom"
_NUMBERS = [
    "0",
    "-0.0",
    "1",
    "3",
    "7.5",
    "1e6",
    "1e15",
    "1e24",
    "1e25",
    "1e308",
    "5e-324",
    "-1",
    "NaN",
    "+Inf",
    "-Inf",
    "",
]


def by_the_standard(data: bytes) -> Iterator[Event]:
    """WHATWG's rules as they are written, over a whole stream: https://html.spec.whatwg.org (event stream)."""
    lines = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    name = b""
    values: list[bytes] = []
    for line in lines[:-1]:  # the last is not ended
        if not line:
            if values:
                text = b"\n".join(values).decode("utf-8", "replace")
                yield Event(text, name.decode("utf-8", "replace") or "message")
            name, values = b"", []
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            values.append(value)
        elif field == b"event":
            name = value


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [b"data:", b"data: ", b"event:", b"event: e", b":", b"id: 1", b"\n", b"\r", b"\r\n", b"\n\n", b"x"]
        )
        | st.just(b"\xef\xbb\xbf")
        | st.binary(max_size=3),
        max_size=30,
    ),
    st.integers(1, 12),
)
def test_streams_are_read_as_the_standard_says(pieces: list[bytes], size: int) -> None:
    """Whatever the bytes and however they are cut, the events are those of the standard's rules taken literally."""
    data = b"".join(pieces)
    decoder = SseDecoder()
    seen = [event for start in range(0, len(data), size) for event in decoder.feed(data[start : start + size])]

    assert seen == list(by_the_standard(data))


@st.composite
def pages(draw: st.DrawFn) -> list[bytes]:
    """A few pages after another, each damaged in its own way; they come from a real server and from our harness."""
    real = [line for line in GOLDEN.read_text().splitlines() if wanted(line.partition("{")[0].partition(" ")[0])]
    made: list[bytes] = []
    for number in range(draw(st.integers(2, 5))):
        lines = list(real) if draw(st.booleans()) else page(float(number * 3)).splitlines()
        for place in draw(st.lists(st.integers(0, len(lines) - 1), max_size=25)):
            key = lines[place].rpartition(" ")[0]
            damage = draw(st.sampled_from(["number", "number", "number", "gone", "twice", "engine", "bytes"]))
            if damage == "number":
                lines[place] = f"{key} {draw(st.sampled_from(_NUMBERS))}"
            elif damage == "gone":
                lines[place] = ""
            elif damage == "twice":
                lines.append(lines[place])
            elif damage == "engine":
                lines[place] = lines[place].replace('engine="0"', f'engine="{draw(st.sampled_from("01x"))}"')
            else:
                cut = draw(st.integers(0, len(lines[place])))
                lines[place] = lines[place][:cut] + draw(st.text(max_size=5)) + lines[place][cut:]
        made.append("\n".join(lines).encode("utf-8", "surrogatepass") + b"\n")
    return made


class _Ours(Collector):
    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._sidecar.families()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(pages(), st.floats(0.05, 40.0))
def test_damaged_pages_give_valid_pages(bodies: list[bytes], apart: float) -> None:
    """After any sequence of damaged pages, our page and documents parse strictly and hold finite numbers only."""
    now = 0.0
    sidecar = Sidecar(
        Settings.model_validate({"engine": {"url": "http://127.0.0.1:9"}}),
        clock=lambda: now,
        nvml=ScriptedNvml(lambda _now: [], lambda: now),
        scribe=InlineScribe(),
    )
    parser: Exposition[Meaning] = Exposition(wanted, resolve)
    registry = CollectorRegistry()
    registry.register(_Ours(sidecar))
    for body in bodies:
        reading = read(parser.parse(body), Lane.FULL, Known())
        now += apart
        sidecar.observe(
            EngineSample(
                sent_at=now - 0.01,
                at=now,
                lane=Lane.FULL,
                engines=reading.engines,
                missing=reading.missing,
                asleep=reading.asleep,
                process_start_unix=reading.process_start,
            )
        )
        sidecar.observe(ServerFacts(at=now, model_name=reading.model_name, caches=reading.caches))
        sidecar.observe(ObserverSample(now, 0.0))
        values = read_page(generate_latest(registry).decode())
        assert all(math.isfinite(value) for value in values.values())
        for document in (sidecar.status(), sidecar.stalls(), sidecar.live()(), sidecar.timeline(60.0)()):
            strict(json.dumps(document))
