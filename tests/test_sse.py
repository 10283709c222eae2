import time
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.sources.chunks import TokenCounter
from stallwatch.sources.sse import Event, SseDecoder, SseOverflowError

GOLDEN = sorted((Path(__file__).parent / "golden" / "sse").glob("*"))

CHUNK = (
    b'data: {"id":"cmpl-stallwatch-canary-0a1b2c3d-12-0","object":"text_completion","created":1764562811,'
    b'"model":"some-org/some-model-7b-instruct","choices":[{"index":0,"text":" 12","logprobs":null,'
    b'"finish_reason":null,"stop_reason":null,"token_ids":null}],"usage":{"prompt_tokens":31,"total_tokens":43,'
    b'"completion_tokens":%d}}\n\n'
)


def decode(data: bytes, *, size: int | None = None, **bounds: int) -> list[Event | str]:
    """All events of `data` fed in pieces of `size` bytes, and the name of the error that ended it."""
    decoder = SseDecoder(**bounds)
    seen: list[Event | str] = []
    try:
        for start in range(0, len(data), size or max(1, len(data))):
            seen.extend(decoder.feed(data[start : start + size] if size else data))
    except SseOverflowError as error:
        seen.append(str(error))
    return seen


@dataclass(frozen=True)
class Case:
    sent: bytes
    events: list[Event]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(b"data: a\n\n", [Event("a")]), id="lf"),
        pytest.param(Case(b"data: a\r\n\r\n", [Event("a")]), id="crlf"),
        pytest.param(Case(b"data: a\r\r", [Event("a")]), id="cr"),
        pytest.param(Case(b"data: a\r\n\ndata: b\n\r\n", [Event("a"), Event("b")]), id="mixed"),
        pytest.param(Case(b"data:a\n\n", [Event("a")]), id="no-space"),
        pytest.param(Case(b"data:  a\n\n", [Event(" a")]), id="one-space-only-is-dropped"),
        pytest.param(Case(b"data: a\ndata: b\n\n", [Event("a\nb")]), id="several-lines"),
        pytest.param(Case(b"data\n\n", [Event("")]), id="no-colon"),
        pytest.param(Case(b": keep-alive\n\ndata: a\n\n", [Event("a")]), id="comment"),
        pytest.param(Case(b"event: error\ndata: a\n\ndata: b\n\n", [Event("a", "error"), Event("b")]), id="named"),
        pytest.param(Case(b"event: lost\n\ndata: b\n\n", [Event("b")]), id="name-without-data"),
        pytest.param(Case(b"\xef\xbb\xbfdata: a\n\n", [Event("a")]), id="byte-order-mark"),
        pytest.param(Case(b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [Event("a")]), id="mark-only-at-the-start"),
        pytest.param(Case(b"id: 7\nretry: 1\nfoo: x\ndata: a\n\n", [Event("a")]), id="other-fields"),
        pytest.param(Case(b"data: a", []), id="unfinished-line"),
        pytest.param(Case(b"data: a\n", []), id="unfinished-event"),
        pytest.param(Case(b"data: \xff\n\n", [Event("�")]), id="not-utf-8"),
        pytest.param(Case("data: a\u2028b\x0bc\x85\n\n".encode(), [Event("a\u2028b\x0bc\x85")]), id="other-line-ends"),
        pytest.param(Case(b"", []), id="nothing"),
    ],
)
def test_events_follow_the_standard(case: Case) -> None:
    """The stream is read as the standard says, whole and byte by byte."""
    assert decode(case.sent) == case.events
    assert decode(case.sent, size=1) == case.events


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                b"data: ",
                b"data:",
                b"event: e",
                b": c",
                b"\n",
                b"\r",
                b"\r\n",
                b"\n\n",
                b"x" * 5,
                b"\xef\xbb\xbf",
                b"\xc3",
            ]
        )
        | st.binary(max_size=4),
        max_size=40,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_any_split_gives_the_same_events(pieces: list[bytes], cuts: list[int]) -> None:
    """However the bytes are cut, the same events come out, and the same error where a bound is exceeded."""
    data = b"".join(pieces)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    decoder = SseDecoder(max_line_bytes=16, max_event_bytes=24)
    seen: list[Event | str] = []
    try:
        for start, end in pairwise(edges):
            seen.extend(decoder.feed(data[start:end]))
    except SseOverflowError as error:
        seen.append(str(error))

    assert seen == decode(data, max_line_bytes=16, max_event_bytes=24)
    assert seen == decode(data, size=1, max_line_bytes=16, max_event_bytes=24)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        pytest.param(b"data: ok\n\ndata: " + b"x" * 100, [Event("ok"), "a line of more than 64 bytes"], id="open-line"),
        pytest.param(b"data: ok\n\n" + b"x" * 65 + b"\n", [Event("ok"), "a line of more than 64 bytes"], id="line"),
        pytest.param(b"x" * 64 + b"\ndata: ok\n\n", [Event("ok")], id="longest-line"),
        pytest.param(b"data: 0123456789\n" * 8, ["an event of more than 64 bytes"], id="event"),
    ],
)
def test_bounds_are_errors_with_a_name(sent: bytes, expected: list[Event | str]) -> None:
    """A line or an event beyond its bound ends the decoding, after the events before it."""
    assert decode(sent, max_line_bytes=64, max_event_bytes=64) == expected
    assert decode(sent, size=1, max_line_bytes=64, max_event_bytes=64) == expected


def test_an_endless_line_costs_its_length_only() -> None:
    """A line that drips in is refused at one mebibyte, in linear time and little memory."""
    drip = b"x" * (2 * 1024 * 1024)
    tracemalloc.start()
    try:
        seen = decode(drip, size=32)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert seen == ["a line of more than 1048576 bytes"]
    assert peak < 4 * 1024 * 1024


def test_a_million_chunks_pass_in_bounded_time_and_memory() -> None:
    """A million events pass through without leaving anything behind."""
    decoder = SseDecoder()
    block = b"data: {}\n\n" * 10_000
    started = time.perf_counter()
    events = sum(1 for _ in range(100) for _event in decoder.feed(block))
    seconds = time.perf_counter() - started
    tracemalloc.start()
    try:
        for _ in range(3):
            for _event in decoder.feed(block):
                pass
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"\na million events: {seconds:.2f} s; one read of 10,000: peak {peak / 1e6:.1f} MB, kept {held} bytes")

    assert events == 1_000_000
    assert peak < 8 * 1024 * 1024
    assert held < 4096


def test_a_token_chunk_is_cheap() -> None:
    """Decoding and counting one token's chunk stays far below the length of a step."""
    chunks = [CHUNK % n for n in range(1, 10_001)]
    best_decode = best_both = float("inf")
    for _ in range(3):
        decoder = SseDecoder()
        started = time.perf_counter()
        events = [event for chunk in chunks for event in decoder.feed(chunk)]
        best_decode = min(best_decode, (time.perf_counter() - started) / len(chunks))
        counter = TokenCounter(10_000)
        decoder = SseDecoder()
        started = time.perf_counter()
        tokens = sum(counter.read(event.data) for chunk in chunks for event in decoder.feed(chunk))
        best_both = min(best_both, (time.perf_counter() - started) / len(chunks))
    print(f"\n{len(chunks[-1])} bytes: {best_decode * 1e6:.2f} us to decode, {best_both * 1e6:.2f} us with the count")

    assert len(events) == tokens == 10_000
    assert best_both < 200e-6


def test_goldens_are_there() -> None:
    """Streams of a real server are part of the tests; without them the next test proves nothing."""
    assert GOLDEN


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_real_streams_decode(path: Path) -> None:
    """Every stream captured from a real vLLM decodes to JSON and [DONE], the same whole and byte by byte."""
    raw = path.read_bytes()

    assert decode(raw) == decode(raw, size=1)
