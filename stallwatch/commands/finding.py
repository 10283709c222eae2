"""One thing that `stallwatch check` has to say."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from stallwatch.sources.http import plain

_LONGEST = 1000  # characters of a sentence; what a server says is bounded before


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Area(StrEnum):
    """Where it belongs in the table."""

    SERVER = "server"
    METRICS = "metrics"
    CANARY = "canary"
    HERE = "this machine"
    SETTINGS = "settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A sentence, what to do about it, and the figures behind it.

    A finding degrades when the numbers that stallwatch exports would be missing or wrong because of it.
    """

    area: Area
    subject: str
    level: Level
    says: str
    remedy: str = ""
    options: tuple[str, ...] = ()  # what would be better still, each with its price
    degrades: bool = False
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def cleaned(findings: Iterable[Finding], redact: Callable[[str], str]) -> tuple[Finding, ...]:
    """The findings without secrets and without anything that a terminal would obey."""

    def clean(value: Any) -> Any:
        match value:
            case str():
                return plain(redact(value), _LONGEST)
            case Mapping():
                return {clean(key): clean(one) for key, one in value.items()}
            case list() | tuple():
                return [clean(one) for one in value]
        return value

    return tuple(
        replace(
            one,
            says=clean(one.says),
            remedy=clean(one.remedy),
            options=tuple(clean(one.options)),
            facts=clean(one.facts),
        )
        for one in findings
    )
