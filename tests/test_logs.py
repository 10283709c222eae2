import io
import json
import logging
import re
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog
from pydantic import SecretStr

from stallwatch import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def one_line(stream: io.StringIO) -> str:
    (line,) = stream.getvalue().splitlines()
    return line


def as_json(write: Callable[[Any], object], level: Any = "debug") -> dict[str, Any]:
    stream = io.StringIO()
    logs.configure(level, stream=stream)
    write(structlog.get_logger("stallwatch.test"))
    line: dict[str, Any] = json.loads(one_line(stream))
    return line


def on_terminal(write: Callable[[Any], object]) -> str:
    stream = Terminal()
    logs.configure("debug", stream=stream)
    write(structlog.get_logger("stallwatch.test"))
    return stream.getvalue()


def raised(message: str) -> ValueError:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        raise ValueError(message)
    return caught.value


def test_one_json_object_a_line_unless_a_person_looks() -> None:
    """Into a pipe each event is JSON with time, level, event and logger in front; a terminal gets words."""
    line = as_json(lambda log: log.warning("source down", source="engine", reason="refused"))
    at = datetime.fromisoformat(line.pop("timestamp"))
    assert abs((datetime.now(UTC) - at).total_seconds()) < 60
    assert list(line.items()) == [
        ("level", "warning"),
        ("logger", "stallwatch.test"),
        ("event", "source down"),
        ("source", "engine"),
        ("reason", "refused"),
    ]
    assert "source down" in on_terminal(lambda log: log.warning("source down"))
    assert "{" not in on_terminal(lambda log: log.warning("source down"))


def test_the_format_can_be_forced() -> None:
    """`json` holds on a terminal and `console` in a pipe, there without colours."""
    terminal, pipe = Terminal(), io.StringIO()
    logs.configure(format="json", stream=terminal)
    structlog.get_logger().info("up")
    logs.configure(format="console", stream=pipe)
    structlog.get_logger().info("up")
    assert json.loads(terminal.getvalue())["event"] == "up"
    assert "\x1b" not in pipe.getvalue()
    assert not pipe.getvalue().startswith("{")


def test_levels_below_the_setting_are_silent_for_everyone() -> None:
    """The level counts for our events and for the libraries'; asyncio's own debug output never shows."""
    stream = io.StringIO()
    logs.configure("warning", stream=stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("aiohttp.server").info("quiet")
    assert stream.getvalue() == ""
    logs.configure("debug", stream=stream)
    logging.getLogger("asyncio").debug("Using selector")
    assert stream.getvalue() == ""


def test_libraries_log_through_the_same_renderer() -> None:
    """What aiohttp and asyncio log has our form, with its arguments filled in and its traceback in one key."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    logging.getLogger("aiohttp.server").error("Error handling %s", "request", exc_info=raised("peer"))
    line = json.loads(one_line(stream))
    assert (line["event"], line["level"], line["logger"]) == ("Error handling request", "error", "aiohttp.server")
    assert line["exception"].endswith("ValueError: peer")


def test_there_is_no_access_log() -> None:
    """Scrapes and probes of ours are not logged one by one."""
    stream = io.StringIO()
    logs.configure("debug", stream=stream)
    logging.getLogger("aiohttp.access").info("GET /metrics")
    assert stream.getvalue() == ""


def test_warnings_of_python_are_events() -> None:
    """A library's warning is a line of the log, not loose text on standard error."""
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.configure(stream=stream)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(capture=False)
    line = json.loads(one_line(stream))
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "DeprecationWarning: old" in line["event"]


def test_configuring_twice_does_not_double_lines() -> None:
    """A second set-up replaces the first."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    logs.configure(stream=stream)
    structlog.get_logger().info("once")
    logging.getLogger("x").warning("once")
    assert len(stream.getvalue().splitlines()) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"authorization": "hunter2"},
        {"headers": {"Authorization": "Bearer hunter2", "X-Api-Key": "hunter2", "Set-Cookie": "s=hunter2"}},
        {"api_key": SecretStr("hunter2")},
        {"engine.api_key": "hunter2"},
        {"password": ["hunter2"]},
        {"url": "http://me:hunter2@vllm:8000/metrics"},
        {"url": "https://hunter2@vllm/x"},
        {"detail": "cannot connect to http://me:hun@ter2:hunter2@vllm:8000"},
        {"detail": "GET /?x=1&api_key=hunter2&y=2 failed"},
        {"detail": "sent Authorization: Bearer hunter2 and more"},
        {"detail": "sent 'authorization': 'Basic hunter2'"},
        {"detail": 'got {"api_key": "hunter2"}'},
        {"nested": [{"cookie": "hunter2"}, "Bearer hunter2"]},
        {"error": ValueError("http://me:hunter2@vllm")},
        {"long": "x " * 250 + "http://me:hunter2@vllm " + "x" * 200_000},
    ],
)
def test_secrets_are_hidden_wherever_they_stand(given: dict[str, Any]) -> None:
    """Keys, cookies and credentials do not reach the log in either format, by key or inside a sentence."""
    assert "hunter2" not in json.dumps(as_json(lambda log: log.info("asked", **given)))
    assert "hunter2" not in on_terminal(lambda log: log.info("asked", **given))


def test_what_only_looks_like_a_secret_stays() -> None:
    """Token counts, paths of key files, flags and plain addresses are what a person needs to read."""
    given = {
        "tokens": 64,
        "api_key_file": "/run/key",
        "url": "http://vllm:8000/a@b",
        "detail": "bearer token missing, basic authentication off, see me@example.org",
        "has_cookie": True,
        "api_key": None,
    }
    line = as_json(lambda log: log.info("asked", **given))
    assert {key: line[key] for key in given} == given


def test_a_secret_inside_a_traceback_is_hidden() -> None:
    """The text of an exception is searched like any other value."""

    def fail(log: Any) -> None:
        log.error("failed", exc_info=raised("http://me:hunter2@vllm"))

    assert "hunter2" not in as_json(fail)["exception"]
    assert "hunter2" not in on_terminal(fail)


@pytest.mark.parametrize(
    "given",
    [
        {"detail": "x" * 100_000},
        {"detail": "é" * 100_000},
        {"detail": "\x00" * 100_000},
        {f"key{number}": "x" * 1000 for number in range(100)},
        {"k" * 20_000: "x"},
        {"detail": "x" * 1_000_000, "more": ["y" * 9000] * 10_000},
        {"deep": [[[[[["x" * 9000] * 50] * 50]]]]},
        {"wide": {str(number): list(range(100)) for number in range(1000)}},
    ],
    ids=["long", "wide characters", "escapes", "many keys", "long key", "endless", "deep", "wide"],
)
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_no_line_is_longer_than_a_collector_takes(given: dict[str, Any], stream: type[io.StringIO]) -> None:
    """Whatever a server made us log, the line ends within 8 KiB, is whole, and still says what happened."""
    out = stream()
    logs.configure(stream=out)
    structlog.get_logger("stallwatch.test").info("answer malformed", **given)
    line = one_line(out)
    assert len(line.encode()) <= logs.MAX_LINE_BYTES
    assert "answer malformed" in line
    if stream is io.StringIO:
        assert json.loads(line)["logger"] == "stallwatch.test"


def test_a_shortened_value_says_so_and_keeps_both_ends() -> None:
    """The mark counts what is missing; the end of a traceback, which names the error, survives."""
    detail = as_json(lambda log: log.info("failed", detail="start " + "x" * 9000 + " end"))["detail"]
    assert detail.startswith("start ")
    assert detail.endswith(" end")
    assert "...[6962 characters]..." in detail


@pytest.mark.parametrize(
    "hostile", ["\x1b[2J", "\x9b31m", "a\r\nforged line", "\u202eevil", "\u2028", "\ud800", "\x07"]
)
def test_control_characters_do_not_reach_a_terminal(hostile: str) -> None:
    """A server cannot move the cursor, forge a line or reorder text through our log."""
    for write in (
        lambda log: log.info("answer", detail=hostile),
        lambda log: log.info("answer", detail={"k": [hostile], hostile: 1}),
        lambda log: log.info(hostile),
    ):
        text = on_terminal(write)
        assert text.count("\n") == 1
        assert hostile not in text
        assert re.sub(r"\x1b\[[0-9;]*m", "", text).removesuffix("\n").isprintable()


def test_a_traceback_on_a_terminal_keeps_its_lines() -> None:
    """Only what a stranger wrote is escaped; a traceback stays readable."""

    def fail(log: Any) -> None:
        log.error("failed", exc_info=raised("\x1b[2J"))

    text = on_terminal(fail)
    assert "\nTraceback (most recent call last):\n" in text
    assert "ValueError: \\x1b[2J" in text


def test_numbers_that_json_does_not_know_are_words() -> None:
    """NaN and infinity do not make a line that no collector can read."""
    line = as_json(lambda log: log.info("odd", a=float("nan"), b=[float("inf")], c=1.5))
    assert (line["a"], line["b"], line["c"]) == ("nan", ["inf"], 1.5)


def test_events_can_be_captured_after_configuration() -> None:
    """The testing tool of structlog still sees the events of tests that set the log up."""
    logs.configure("debug", stream=io.StringIO())
    with structlog.testing.capture_logs() as captured:
        structlog.get_logger().info("source up", source="engine")
    assert captured == [{"event": "source up", "source": "engine", "log_level": "info"}]
