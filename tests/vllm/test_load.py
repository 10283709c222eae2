"""The load client, against a scripted server on a loopback socket: what it counts, and that it stamps honestly."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.vllm import load
from tests.vllm.load import Read, Stream

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(payload: str) -> bytes:
    """One HTTP chunk."""
    return f"{len(payload.encode()):x}\r\n{payload}\r\n".encode()


def token(count: int) -> bytes:
    """An SSE event that says `count` tokens so far."""
    event = {"choices": [{"text": ""}], "usage": {"prompt_tokens": 16, "completion_tokens": count}}
    return chunked(f"data: {json.dumps(event)}\n\n")


DONE = chunked("data: [DONE]\n\n") + b"0\r\n\r\n"


@contextlib.contextmanager
def scripted(script: Sequence[bytes | float]) -> Iterator[str]:
    """A server that answers one request with bytes and pauses (seconds), then hangs up."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65_536)
            for step in script:
                if isinstance(step, bytes):
                    connection.sendall(step)
                else:
                    time.sleep(step)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def victim(script: Sequence[bytes | float]) -> Stream:
    """What the client makes of a scripted answer."""
    with scripted(script) as url:
        return load.run(url, load.decode_stream(tokens=3))["victim"]


def test_every_read_with_new_tokens_is_counted_once() -> None:
    """Usage counts are cumulative: a read is booked with what is new, and reads without news are none."""
    comment = chunked(": keep-alive\n\n")
    seen = victim([HEAD, 0.05, token(1), 0.05, comment, 0.05, token(1), 0.05, token(2) + token(4), 0.05, DONE])

    assert [read.tokens for read in seen.reads] == [1, 3]
    assert (seen.tokens, seen.outcome, seen.status, seen.prompt_tokens) == (4, "complete", 200, 16)


def test_an_event_split_between_reads_belongs_to_the_read_that_ends_it() -> None:
    """A token counts when its event is complete, however HTTP or the network cut it."""
    whole = token(1)
    seen = victim([HEAD[:20], 0.05, HEAD[20:] + whole[:40], 0.3, whole[40:], DONE])
    assert seen.first_token_wait is not None

    assert seen.first_token_wait > 0.3
    assert seen.tokens == 1


def test_gaps_are_as_long_as_the_server_paused() -> None:
    """A pause of 0.3 s at the server is a gap of 0.3 s at the client."""
    seen = victim([HEAD, token(1), 0.3, token(2), DONE])
    first, second = seen.reads

    assert second.at - first.at == pytest.approx(0.3, abs=0.1)


@pytest.mark.parametrize(
    ("script", "outcome", "status"),
    [
        pytest.param([HEAD, token(1)], "cut", 200, id="cut"),
        pytest.param([], "cut", None, id="no answer"),
        pytest.param([b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"], "status", 404, id="refused"),
        pytest.param(
            [HEAD, chunked('data: {"error": {"code": 400}}\n\n'), DONE], "error", 200, id="error inside the stream"
        ),
    ],
)
def test_how_a_stream_ended_is_told(script: list[bytes | float], outcome: str, status: int | None) -> None:
    """Cut, refused and failed streams are told apart."""
    seen = victim(script)

    assert (seen.outcome, seen.status) == (outcome, status)


def test_nobody_listening_is_an_outcome() -> None:
    """A refused connection ends the stream, not the client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    assert load.run(f"http://127.0.0.1:{port}", load.decode_stream())["victim"].outcome == "refused"


def test_events_fold_into_streams() -> None:
    """A stream that has not ended is open; its reads are kept in order."""
    events = [
        {"event": "send", "stream": "a", "at": 1.0},
        {"event": "read", "stream": "a", "at": 2.0, "tokens": 1},
        {"event": "read", "stream": "a", "at": 2.5, "tokens": 2},
    ]

    assert load.streams(events) == {"a": Stream(name="a", sent=1.0, reads=(Read(2.0, 1), Read(2.5, 2)))}


def test_a_prompt_has_as_many_bytes_as_tokens_were_asked_for() -> None:
    """One ASCII byte is one token for the byte-level tokenizer; seeds make prompts that share no prefix."""
    assert len(load.prompt_text(12_000).encode()) == 12_000
    assert load.prompt_text(50, seed=1)[:6] != load.prompt_text(50, seed=2)[:6]
