import json
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.observations import (
    Buckets,
    EngineCounters,
    EngineSample,
    Failure,
    HostSample,
    Lane,
    Observation,
    ObserverSample,
    PollFailure,
    Source,
    StreamTokens,
)
from stallwatch.recorder import codec
from stallwatch.recorder.codec import UnknownWordError, UnreadableError


def some(hint: Any, *, nan: bool) -> st.SearchStrategy[Any]:
    """Any value of a type that observations use."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return st.none() | some(next(one for one in args if one is not type(None)), nan=nan)
    if origin is tuple:
        inner = [some(one, nan=nan) for one in args if one is not Ellipsis]
        return st.lists(inner[0], max_size=4).map(tuple) if Ellipsis in args else st.tuples(*inner)
    if origin is frozenset:
        return st.frozensets(some(args[0], nan=nan), max_size=4)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(some(args[0], nan=nan), some(args[1], nan=nan), max_size=3).map(MappingProxyType)
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return st.builds(hint, **{entry.name: some(hints[entry.name], nan=nan) for entry in fields(hint)})
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        float: st.floats(allow_nan=nan) | st.integers(-(2**60), 2**60),
        int: st.integers(),
        bool: st.booleans(),
        str: st.text(max_size=20),
    }
    return simple[hint]


def observations(*, nan: bool) -> st.SearchStrategy[Observation]:
    return st.one_of(*(some(kind, nan=nan) for kind in codec.OBSERVATIONS.values()))


def again(seen: Observation) -> Observation:
    return codec.decode(codec.parse(codec.encode(seen)))


@settings(max_examples=300, deadline=None)
@given(observations(nan=False))
def test_every_observation_comes_back_as_it_was(seen: Observation) -> None:
    """Whatever an observation holds, its line gives the same observation again."""
    assert again(seen) == seen


@settings(max_examples=100, deadline=None)
@given(observations(nan=True))
def test_a_line_is_strict_ascii_json(seen: Observation) -> None:
    """A line is one line of JSON that any reader takes, numbers that are not finite included, and is stable."""
    line = codec.encode(seen)

    assert line.isascii()
    assert "\n" not in line
    json.loads(line, parse_constant=pytest.fail)
    assert codec.encode(again(seen)) == line


def test_every_observation_has_a_name() -> None:
    """No type of the union was forgotten."""
    members: set[Any] = set()
    for one in get_args(Observation):
        members |= set(get_args(one)) or {one}

    assert members == set(codec.OBSERVATIONS.values())


def test_a_person_can_read_a_line() -> None:
    """Fields keep their names, what has its default is left out, and infinity is a word."""
    seen = EngineSample(
        sent_at=1.5,
        at=1.75,
        lane=Lane.DETECTION,
        engines={"0": EngineCounters(running=2.0, itl_buckets=Buckets((0.1, math.inf), (3.0, 4.0)))},
    )

    assert json.loads(codec.encode(seen)) == {
        "type": "engine",
        "sent_at": 1.5,
        "at": 1.75,
        "lane": "detection",
        "engines": {"0": {"running": 2.0, "itl_buckets": {"edges": [0.1, "inf"], "counts": [3.0, 4.0]}}},
    }
    pressure = HostSample(at=1.0, pressure_seconds={("io", "full"): 0.5})
    assert json.loads(codec.encode(pressure))["pressure_seconds"] == [["io", "full", 0.5]]


def test_whole_numbers_stay_whole() -> None:
    """What a source counted in whole numbers is not turned into fractions: findings print the same."""
    assert repr(again(ObserverSample(1, 0.0, 2))) == repr(ObserverSample(1, 0.0, 2))


def test_what_a_newer_version_added_is_passed_over() -> None:
    """A field that is not known is no obstacle; a type or a word that is not known is told apart from damage."""
    line = {"type": "stream_tokens", "at": 1.0, "stream": 3, "tokens": 1, "colour": "green"}

    assert codec.decode(line) == StreamTokens(1.0, 3, 1)
    with pytest.raises(UnknownWordError, match="type 'telepathy' is not known"):
        codec.decode({"type": "telepathy", "at": 1.0})
    with pytest.raises(UnknownWordError, match="reason: 'tired' is not one of refused, timeout"):
        codec.decode({"type": "failure", "at": 1.0, "source": "engine", "reason": "tired"})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "not JSON"),
        ("[1]", "not an object with a type"),
        ('{"at":1}', "not an object with a type"),
        ("[" * 100_000, "nested too deeply"),
        ('{"type":"observer","lag":0.1}', "at: missing"),
        ('{"type":"observer","at":"soon","lag":0.1}', "at: 'soon' is not a number"),
        ('{"type":"observer","at":true,"lag":0.1}', "at: True is not a number"),
        ('{"type":"observer","at":1,"lag":1' + "0" * 400 + "}", "lag: 1000.* is too large"),
        ('{"type":"stream_tokens","at":1,"stream":1.5,"tokens":1}', "stream: 1.5 is not a whole number"),
        ('{"type":"stream_tokens","at":1,"stream":true,"tokens":1}', "stream: True is not a whole number"),
        ('{"type":"engine","at":1,"sent_at":1,"lane":"full","engines":[]}', r"engines: \[\] is not an object"),
        ('{"type":"engine","at":1,"sent_at":1,"lane":"full","engines":{"0":{"running":"x"}}}', "engines: running: 'x'"),
        ('{"type":"engine","at":1,"sent_at":1,"lane":"full","engines":{},"filtered":1}', "filtered: 1 is not true or"),
        ('{"type":"gpu","at":1,"gpus":{},"scope":"node"}', "gpus: {} is not a list"),
        ('{"type":"host","at":1,"pressure_seconds":[["io",1]]}', r"pressure_seconds: \['io', 1\] is not a row of 3"),
        ('{"type":"canary_skipped","at":1,"reason":7}', "reason: 7 is not text"),
    ],
)
def test_what_cannot_be_true_is_refused(line: str, problem: str) -> None:
    """A line that no version writes is refused with the field and what stands there."""
    with pytest.raises(UnreadableError, match=problem):
        codec.decode(codec.parse(line))


def test_findings_become_json() -> None:
    """Dataclasses, enums, sets and keys of several words have a plain form."""
    failure = PollFailure(math.inf, Source.GPU, Failure.TIMEOUT)

    assert codec.plain({("a", Source.GPU): frozenset({"y", "x"}), 0.5: (failure,)}) == {
        "a/gpu": ["x", "y"],
        "0.5": [{"at": "inf", "source": "gpu", "reason": "timeout", "detail": ""}],
    }
