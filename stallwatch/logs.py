"""Our own log: one event a line on standard error, ours and the libraries' alike.

JSON unless a person looks. Event names are constant lower-case phrases, everything that varies is a key. What a hostile
server wrote may end up in a value, so a line is bounded, carries no control characters, and is searched for secrets.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

MAX_LINE_BYTES = 8192
HIDDEN = "***"

_SECRET_KEY = re.compile(r"authorization|api[-_]?key$|cookie|passw(or)?d|secret", re.IGNORECASE)
_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=://)[^/\s?#]*@"), f"{HIDDEN}@"),  # userinfo of a URL
    (re.compile(r"\b((?i:bearer))\s+[\w.~+/=-]{6,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"\b((?i:basic))\s+(?=\S*[A-Z0-9=])[\w+/=-]{6,}"), rf"\1 {HIDDEN}"),
    (
        re.compile(
            r"((?:authorization|cookie|api[-_]?key|access[-_]token)[\"']?\s*[:=]\s*[\"']?(?:bearer |basic )?)"
            r"[^\s\"',;&]+",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
)
# Everything that moves the cursor, colours, ends a line or reorders text in a terminal or a viewer.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
_UNPRINTABLE_BUT_NEWLINE = re.compile(_UNPRINTABLE.pattern.replace(r"\x00-\x1f", r"\x00-\x09\x0b-\x1f"))

# Longest string, most items and deepest nesting; the next row is tried when a line is still too long.
_CLIPS = ((2048, 64, 5), (512, 32, 4), (128, 16, 3))
# First in every line, looked at first, and kept when nothing else fits.
_ALWAYS_KEPT = ("timestamp", "level", "logger", "event")


def configure(
    level: Literal["debug", "info", "warning", "error"] = "info",
    format: Literal["auto", "json", "console"] = "auto",  # noqa: A002 (the setting's name)
    *,
    stream: TextIO | None = None,
) -> None:
    """Sends every event of ours and of the standard library's loggers to `stream` (standard error)."""
    stream = stream or sys.stderr
    is_json = format == "json" or (format == "auto" and not stream.isatty())
    threshold = getattr(logging, level.upper())
    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*before, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                redact,
                _Bounded(_render_json if is_json else _console(stream)),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
    # Their debug output is about their own insides, several lines for each of our polls.
    logging.getLogger("asyncio").setLevel(max(threshold, logging.INFO))
    access = logging.getLogger("aiohttp.access")
    access.handlers[:] = [logging.NullHandler()]
    access.propagate = False
    logging.captureWarnings(capture=True)
    structlog.configure(
        processors=[*before, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.stdlib.LoggerFactory(),
        # Lines are rare, so nothing is gained by loggers that keep the first configuration they meet.
        cache_logger_on_first_use=False,
    )


def redact(_logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
    """Hides what must not be written down, at any depth: keys, cookies, credentials inside URLs and sentences."""
    budget = _Budget()
    ordered = {key: event_dict[key] for key in _ALWAYS_KEPT if key in event_dict} | dict(event_dict)
    return {
        key: HIDDEN if _is_secret(key, value) else _redacted(value, budget=budget) for key, value in ordered.items()
    }


class _Budget:
    """How much of one event is looked at: far more than a line can hold, so that no event takes long."""

    def __init__(self) -> None:
        self.left = 16 * MAX_LINE_BYTES


def _is_secret(key: object, value: object) -> bool:
    return value is not None and not isinstance(value, bool) and _SECRET_KEY.search(str(key)) is not None


def _redacted(value: object, *, budget: _Budget, depth: int = 0) -> object:
    budget.left -= 16  # what a value costs beside its text
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        budget.left -= len(value)
        if budget.left >= 0:
            return _redacted_text(value)
        # Cut between words: half a secret would not be recognised.
        head = re.sub(r"\S*\Z", "", value[:512])
        return f"{_redacted_text(head)}...[{len(value) - len(head)} characters]..."
    if isinstance(value, Mapping):
        if depth >= _CLIPS[0][2]:
            return "..."
        hidden: dict[object, object] = {}
        for key, one in value.items():
            if budget.left < 0:
                hidden["..."] = f"+{len(value) - len(hidden)} items"
                break
            hidden[key] = HIDDEN if _is_secret(key, one) else _redacted(one, budget=budget, depth=depth + 1)
        return hidden
    if isinstance(value, list | tuple | set | frozenset):
        if depth >= _CLIPS[0][2]:
            return "..."
        shown: list[object] = []
        for one in value:
            if budget.left < 0:
                shown.append(f"...+{len(value) - len(shown)} items")
                break
            shown.append(_redacted(one, budget=budget, depth=depth + 1))
        return shown
    return _redacted(str(value), budget=budget, depth=depth)


def _redacted_text(text: str) -> str:
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class _Bounded:
    """Renders an event, with less of its values when the line would be longer than a log collector takes."""

    def __init__(self, render: Any) -> None:
        self._render = render

    def __call__(self, _logger: WrappedLogger, _method: str, event_dict: EventDict) -> str:
        for longest, most, deepest in _CLIPS:
            clipped = _clip(event_dict, longest, most, deepest)
            line: str = self._render(clipped)
            if _size(line) <= MAX_LINE_BYTES:
                return line
        kept = {key: _clip(event_dict[key], 256, 0, 0) for key in _ALWAYS_KEPT if key in event_dict}
        shortened: str = self._render({**kept, "dropped_keys": len(event_dict) - len(kept)})
        return shortened


def _size(line: str) -> int:
    return len(line.encode("utf-8", "backslashreplace"))


def _clip(value: object, longest: int, most: int, deepest: int) -> object:
    if isinstance(value, str):
        return _clip_text(value, longest)
    if isinstance(value, Mapping):
        if deepest <= 0:
            return "..."
        items = list(value.items())
        clipped = {_clip_text(str(key), longest): _clip(one, longest, most, deepest - 1) for key, one in items[:most]}
        return clipped if len(items) <= most else {**clipped, "...": f"+{len(items) - most} items"}
    if isinstance(value, list | tuple):
        if deepest <= 0:
            return "..."
        listed = [_clip(one, longest, most, deepest - 1) for one in value[:most]]
        return listed if len(value) <= most else [*listed, f"...+{len(value) - most} items"]
    return value


def _clip_text(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    # A traceback's last lines say what happened, its first lines where it began.
    head, tail = longest // 4, longest - longest // 4
    return f"{text[:head]}...[{len(text) - longest} characters]...{text[-tail:]}"


def _render_json(event_dict: EventDict) -> str:
    try:
        return json.dumps(event_dict, default=str, allow_nan=False)
    except ValueError:  # NaN and infinity are no JSON
        return json.dumps(_without_nan(event_dict), default=str)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    if isinstance(value, float) and (value != value or value in {float("inf"), float("-inf")}):  # noqa: PLR0124
        return str(value)
    return value


def _console(stream: TextIO) -> Any:
    renderer = structlog.dev.ConsoleRenderer(
        colors=stream.isatty() and not os.environ.get("NO_COLOR"),
        # The default formatter prints local variables where rich is installed, and those may be secrets.
        exception_formatter=structlog.dev.plain_traceback,
    )

    def render(event_dict: EventDict) -> str:
        return str(renderer(None, "", {key: _escaped(key, value) for key, value in event_dict.items()}))

    return render


def _escaped(key: str, value: object) -> object:
    if isinstance(value, str):
        pattern = _UNPRINTABLE_BUT_NEWLINE if key in {"exception", "stack"} else _UNPRINTABLE
        return pattern.sub(lambda match: ascii(match[0])[1:-1], value)
    if isinstance(value, Mapping):
        return {_escaped("", str(name)): _escaped("", one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped("", one) for one in value]
    return value
