"""Observations <-> lines of JSON, the format of every recording.

One line is one observation: an object whose `type` names it and whose other keys are the fields of the dataclass in
`observations.py`, under the same names, so that a person can read a recording with jq. A field that has its default is
left out. JSON has no word for numbers that are not finite: they are the strings "nan", "inf" and "-inf". How a field is
written comes from its type: a new one is recorded without a change here. A field that this version does not know is
passed over, as is a line of a type or with a word that a newer version added. What cannot be true is refused.
"""

import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from stallwatch.observations import (
    CanarySkipped,
    EngineSample,
    GpuSample,
    HostSample,
    Observation,
    ObserverSample,
    PollFailure,
    ServerFacts,
    StreamClosed,
    StreamOpened,
    StreamTokens,
)

T = TypeVar("T")

FORMAT: Final = "stallwatch recording"
VERSION: Final = 1

OBSERVATIONS: Final[Mapping[str, type[Observation]]] = {
    "engine": EngineSample,
    "server": ServerFacts,
    "stream_opened": StreamOpened,
    "stream_tokens": StreamTokens,
    "stream_closed": StreamClosed,
    "canary_skipped": CanarySkipped,
    "observer": ObserverSample,
    "gpu": GpuSample,
    "host": HostSample,
    "failure": PollFailure,
}
_NAMES: Final = {kind: name for name, kind in OBSERVATIONS.items()}
_LARGEST: Final = 1 << 1023  # whole numbers above cannot become a float
_NOT_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_write = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class UnreadableError(ValueError):
    """A line that no version of stallwatch writes; says what is wrong with it."""


class UnknownWordError(UnreadableError):
    """A line with a word that this version does not know and a newer one may."""


def encode(seen: Observation) -> str:
    """The observation as one line without its end."""
    return _write({"type": _NAMES[type(seen)], **_layout(type(seen)).to_plain(seen)})


def encode_note(kind: str, content: Mapping[str, Any]) -> str:
    """A line that is no observation: a header, a stall, findings."""
    return _write({"type": kind, **plain(content)})


def parse(line: str | bytes) -> dict[str, Any]:
    """The object of one line. Raises `UnreadableError`."""
    try:
        found = json.loads(line)
    except RecursionError as error:
        raise UnreadableError("nested too deeply") from error
    except ValueError as error:
        raise UnreadableError(f"not JSON ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise UnreadableError("not an object with a type")
    return found


def decode(found: Mapping[str, Any]) -> Observation:
    """The observation in the object of one line. Raises `UnreadableError`; `UnknownWordError` for another type."""
    kind = OBSERVATIONS.get(found["type"])
    if kind is None:
        raise UnknownWordError(f"type {_quoted(found['type'])} is not known")
    seen: Observation = _layout(kind).from_plain(found)
    return seen


def fields_of(value: Any) -> dict[str, Any]:
    """One of our dataclasses as an object: the fields that have not their default."""
    return _layout(type(value)).to_plain(value)


def from_fields(kind: type[T], found: Any) -> T:
    """The dataclass that `fields_of` made an object of. Raises `UnreadableError`."""
    made: T = _layout(kind).from_plain(found)
    return made


def plain(value: Any) -> Any:
    """Any value of ours as JSON takes it: dataclasses as objects, sets sorted, enums by their value."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return _number(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def _key(key: Any) -> str:
    if isinstance(key, tuple):
        return "/".join(_key(part) for part in key)
    return f"{key:g}" if isinstance(key, float) else str(plain(key))


# --- one dataclass --------------------------------------------------------------------------------------------------

_Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    default: Any  # MISSING when there is none
    to_plain: _Convert | None  # None: the value is JSON already
    from_plain: _Convert


@dataclass(frozen=True, slots=True)
class _Layout:
    """How one dataclass becomes an object and comes back."""

    kind: type[Any]
    fields: tuple[_Field, ...]

    def to_plain(self, value: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for entry in self.fields:
            part = getattr(value, entry.name)
            default = entry.default
            if part is default or (type(part) is type(default) and part == default) or _both_empty(part, default):
                continue
            found[entry.name] = part if entry.to_plain is None else entry.to_plain(part)
        return found

    def from_plain(self, found: Any) -> Any:
        if not isinstance(found, Mapping):
            raise UnreadableError(f"{_quoted(found)} is not an object")
        given: dict[str, Any] = {}
        for entry in self.fields:
            if entry.name in found:
                try:
                    given[entry.name] = entry.from_plain(found[entry.name])
                except UnreadableError as error:
                    raise type(error)(f"{entry.name}: {error}") from error
            elif entry.default is MISSING:
                raise UnreadableError(f"{entry.name}: missing")
        return self.kind(**given)


_LAYOUTS: Final[dict[type[Any], _Layout]] = {}


def _layout(kind: type[Any]) -> _Layout:
    if kind not in _LAYOUTS:
        hints = get_type_hints(kind)
        found = []
        for entry in fields(kind):
            make: Any = entry.default_factory
            default = make() if make is not MISSING else entry.default
            found.append(_Field(entry.name, default, *_conversion(hints[entry.name])))
        _LAYOUTS[kind] = _Layout(kind, tuple(found))
    return _LAYOUTS[kind]


def _both_empty(part: Any, default: Any) -> bool:
    return isinstance(default, Mapping) and isinstance(part, Mapping) and not part and not default


def _conversion(hint: Any) -> tuple[_Convert | None, _Convert]:
    """How a value of that type becomes JSON, and how it comes back."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        (inner,) = (one for one in args if one is not type(None))
        to_plain, from_plain = _conversion(inner)
        return _optional(to_plain), lambda found: None if found is None else from_plain(found)
    if origin is tuple:
        to_plain, from_plain = _conversion(args[0])
        return _list_to(to_plain), lambda found: tuple(from_plain(item) for item in _a(list, found))
    if origin is frozenset:
        to_plain, from_plain = _conversion(args[0])
        return sorted, lambda found: frozenset(from_plain(item) for item in _a(list, found))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(*args)
    if is_dataclass(hint) and isinstance(hint, type):
        layout = _layout(hint)
        return layout.to_plain, layout.from_plain
    if issubclass(hint, StrEnum):
        return None, _word(hint)
    if hint is float:
        return _number, _float
    return None, lambda found: _a(hint, found)


def _optional(to_plain: _Convert | None) -> _Convert | None:
    if to_plain is None:
        return None
    return lambda value: None if value is None else to_plain(value)


def _list_to(to_plain: _Convert | None) -> _Convert:
    return list if to_plain is None else lambda value: [to_plain(item) for item in value]


def _mapping(key: Any, item: Any) -> tuple[_Convert, _Convert]:
    to_plain, from_plain = _conversion(item)
    take: _Convert = to_plain or (lambda value: value)
    if key is str:
        return (
            lambda value: {name: take(part) for name, part in value.items()},
            lambda found: MappingProxyType({name: from_plain(part) for name, part in _a(dict, found).items()}),
        )
    # Keys of several words are rows [word, word, value].
    width = len(get_args(key)) + 1

    def row(found: Any) -> tuple[Any, Any]:
        parts = _a(list, found)
        if len(parts) != width:
            raise UnreadableError(f"{_quoted(found)} is not a row of {width}")
        return tuple(_a(str, part) for part in parts[:-1]), from_plain(parts[-1])

    return (
        lambda value: [[*words, take(part)] for words, part in value.items()],
        lambda found: MappingProxyType(dict(row(part) for part in _a(list, found))),
    )


# --- one value ------------------------------------------------------------------------------------------------------


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def _float(found: Any) -> float:
    if isinstance(found, str) and found in _NOT_FINITE:
        return _NOT_FINITE[found]
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise UnreadableError(f"{_quoted(found)} is not a number")
    if isinstance(found, int) and abs(found) > _LARGEST:
        raise UnreadableError(f"{_quoted(found)} is too large")
    return found


def _a(kind: type[Any], found: Any) -> Any:
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        names = {int: "a whole number", str: "text", bool: "true or false", list: "a list", dict: "an object"}
        raise UnreadableError(f"{_quoted(found)} is not {names[kind]}")
    return found


def _word(kind: type[StrEnum]) -> _Convert:
    def from_plain(found: Any) -> StrEnum:
        try:
            return kind(_a(str, found))
        except UnreadableError:
            raise
        except ValueError as error:
            raise UnknownWordError(f"{_quoted(found)} is not one of {', '.join(kind)}") from error

    return from_plain


def _quoted(found: Any) -> str:
    text = ascii(found)
    return text if len(text) <= 60 else f"{text[:57]}..."
