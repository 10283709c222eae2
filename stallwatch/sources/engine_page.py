"""What a metrics page says, in our own words: the parser's samples become counters, engine by engine. Pure.

Series are resolved to their place in the table of families once, by the parser; here they are only added up. A sum that
is not whole, because a number was impossible or a flood of series was cut off, is not known: it is never a smaller sum.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stallwatch.observations import Buckets, CacheFacts, EngineCounters, Lane
from stallwatch.sources import families
from stallwatch.sources.exposition import Page
from stallwatch.sources.families import Fold, Row, Unit

MAX_ENGINES: Final = 64  # as many as are judged
MAX_MODELS: Final = 128
MAX_PLUGIN_SAMPLES: Final = 256  # an engine
MAX_LABEL: Final = 256  # characters of a label value that is kept
MAX_EDGES: Final = 256
MAX_VALUE: Final = 1e24  # bytes moved in a century are less; squares of more would be no finite numbers
BEYOND: Final = f"engines beyond {MAX_ENGINES}"
NO_ENGINE_LABEL: Final = "0"  # V0 engines, and the only engine of anything else

Place = tuple[int, int]  # row and alias in the table of families


@dataclass(frozen=True, slots=True)
class _Counter:
    engine: str
    places: tuple[Place, ...]  # mostly one
    edge: float | None  # of a histogram's bucket
    model: str | None


@dataclass(frozen=True, slots=True)
class _Plugin:
    engine: str
    name: str
    key: str


@dataclass(frozen=True, slots=True)
class _Sleep:
    state: str


@dataclass(frozen=True, slots=True)
class _Cache:
    engine: str | None
    facts: CacheFacts


@dataclass(frozen=True, slots=True)
class _ProcessStart:
    pass


Meaning = _Counter | _Plugin | _Sleep | _Cache | _ProcessStart


@dataclass(frozen=True, slots=True)
class Known:
    """What only a full page tells and smaller ones need."""

    caches: Mapping[str, CacheFacts] = field(default_factory=dict)
    prefix_in_blocks: bool | None = None  # what the old prefix cache counters count; None when nothing says it


@dataclass(frozen=True, slots=True)
class Reading:
    """One page."""

    engines: Mapping[str, EngineCounters]
    missing: frozenset[str]  # fields of this lane that no engine has and that need no flag, connector or plugin
    offered: frozenset[str]  # sample names that the page has, as vLLM spells them
    caches: Mapping[str, CacheFacts]
    model_name: str | None
    asleep: bool | None
    process_start: float | None
    unread: frozenset[str] = frozenset()  # what of the page could not be used, a few words each; of a bounded set


def _places() -> Mapping[str, tuple[Place, ...]]:
    found: dict[str, tuple[Place, ...]] = {}
    for index, row in enumerate(families.ROWS):
        for rank, alias in enumerate(row.aliases):
            found[alias.name] = (*found.get(alias.name, ()), (index, rank))
    return found


_PLACES: Final = _places()
_ROWS: Final = {lane: tuple((families.ROWS.index(row), row) for row in families.rows_of(lane)) for lane in Lane}
_OTHERS: Final = frozenset({families.PROCESS_START, families.SLEEP_STATE, families.CACHE_INFO})


def wanted(name: str) -> bool:
    """Whether a family is of any use; for the parser."""
    if name in _PLACES or name in _OTHERS:
        return True
    return name.startswith(families.PLUGIN_PREFIX) and not name.endswith("_created")


def resolve(name: str, labels: Mapping[str, str]) -> Meaning | None:
    """What a series stands for, or None; for the parser."""
    if name == families.PROCESS_START:
        return _ProcessStart()
    engine = labels.get("engine", NO_ENGINE_LABEL)
    if len(engine) > MAX_LABEL:
        return None
    if name == families.SLEEP_STATE:
        return _Sleep(labels.get("sleep_state", "")[:MAX_LABEL])
    if name == families.CACHE_INFO:
        return _Cache(labels.get("engine"), _cache_facts(labels))
    if name.startswith(families.PLUGIN_PREFIX):
        rest = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()) if key != "engine")
        key = f"{name}{{{rest}}}" if rest else name
        return _Plugin(engine, name, key) if len(key) <= 2 * MAX_LABEL else None
    places = tuple(place for place in _PLACES.get(name, ()) if _carries(labels, place))
    if not places:
        return None
    edge: float | None = None
    if families.ROWS[places[0][0]].buckets:
        edge = _edge(labels.get("le", ""))
        if edge is None:
            return None
    model = labels.get("model_name")
    return _Counter(engine, places, edge, model if model is None or len(model) <= MAX_LABEL else None)


def read(page: Page[Meaning], lane: Lane, known: Known) -> Reading:
    """Adds up a page that was asked for as `lane`."""
    sums = _Sums()
    for meaning, value in page.samples.values():
        sums.add(meaning, value)
    caches = _for_all(sums.caches, sums.engines.keys()) or known.caches
    rows = _ROWS[lane]
    unread = {f"series of {name} beyond those that are read" for name in page.overfull if name in _PLACES}
    if page.garbage_lines:
        unread.add("lines that are no samples")
    if sums.engines_left_out:
        unread.add(BEYOND)
    engines = {
        engine: _counters(
            rows, values, sums.plugins.get(engine, {}), page.overfull, _prefix_unit(caches.get(engine), known), unread
        )
        for engine, values in sorted(sums.engines.items())
    }
    return Reading(
        engines=engines,
        missing=frozenset(
            row.field
            for _, row in rows
            if not row.optional and all(getattr(counters, row.field) is None for counters in engines.values())
        ),
        offered=frozenset(sums.offered),
        caches=caches,
        model_name=min(sums.models, default=None),
        asleep=sums.sleep.get(families.AWAKE, 1.0) == 0 if sums.sleep else None,
        process_start=sums.process_start,
        unread=frozenset(unread),
    )


class _Sums:
    """The samples of one page, added up by engine and place."""

    def __init__(self) -> None:
        self.engines: dict[str, dict[Place, float | dict[float, float]]] = {}
        self.engines_left_out = False
        self.plugins: dict[str, dict[str, float]] = {}
        self.offered: set[str] = set()
        self.models: set[str] = set()
        self.caches: dict[str | None, CacheFacts] = {}
        self.sleep: dict[str, float] = {}
        self.process_start: float | None = None

    def add(self, meaning: Meaning, value: float) -> None:
        match meaning:
            case _Counter():
                self._count(meaning, value)
            case _Plugin(engine, name, key):
                self.offered.add(name)
                samples = self.plugins.setdefault(engine, {})
                if _possible(value) and len(samples) < MAX_PLUGIN_SAMPLES:
                    samples[key] = value
            case _Sleep(state):
                self.offered.add(families.SLEEP_STATE)
                # One sleeping engine of several does not stop the server's readers.
                self.sleep[state] = max(value, self.sleep.get(state, 0.0))
            case _Cache(engine, facts):
                self.offered.add(families.CACHE_INFO)
                if len(self.caches) < MAX_ENGINES:
                    self.caches[engine] = facts
            case _ProcessStart():
                self.offered.add(families.PROCESS_START)
                self.process_start = value if _possible(value) else None

    def _count(self, meaning: _Counter, value: float) -> None:
        values = self.engines.get(meaning.engine)
        if values is None:
            if len(self.engines) >= MAX_ENGINES:
                self.engines_left_out = True
                return
            values = self.engines[meaning.engine] = {}
        if meaning.model is not None and len(self.models) < MAX_MODELS:
            self.models.add(meaning.model)
        for place in meaning.places:
            row = families.ROWS[place[0]]
            self.offered.add(row.aliases[place[1]].name)
            before = values.get(place)
            if meaning.edge is not None:
                counts = before if isinstance(before, dict) else {}
                counts[meaning.edge] = counts.get(meaning.edge, 0.0) + value
                values[place] = counts
            elif not isinstance(before, float):
                values[place] = value
            elif row.fold is Fold.LARGEST and not math.isnan(value):
                values[place] = max(before, value)
            else:
                values[place] = before + value


def _counters(
    rows: tuple[tuple[int, Row], ...],
    values: Mapping[Place, float | dict[float, float]],
    plugin: Mapping[str, float],
    overfull: set[str],
    prefix_unit: float,
    unread: set[str],
) -> EngineCounters:
    filled: dict[str, Any] = {}
    for index, row in rows:
        for rank, alias in enumerate(row.aliases):
            value = values.get((index, rank))
            if value is None:
                continue
            if alias.name in overfull:
                break
            if isinstance(value, dict):
                filled[row.field] = _buckets(value)
                if filled[row.field] is None:
                    unread.add(f"impossible buckets of {alias.name}")
                break
            if not (_possible(value) and value >= 0):
                unread.add(f"impossible values of {alias.name}")
                break
            if alias.unit is Unit.BY_HELP:
                value *= prefix_unit
            if _possible(value):  # what no help text explains has no unit
                filled[row.field] = filled.get(row.field, 0.0) + value
            break
    return EngineCounters(**filled, plugin=plugin)


def _prefix_unit(cache: CacheFacts | None, known: Known) -> float:
    """Tokens a unit of the old prefix cache counters; not a number when nothing says what they count."""
    if known.prefix_in_blocks is None:
        return math.nan
    if not known.prefix_in_blocks:
        return 1.0
    return float(cache.block_size) if cache is not None and cache.block_size else math.nan


def _carries(labels: Mapping[str, str], place: Place) -> bool:
    where = families.ROWS[place[0]].aliases[place[1]].where
    return where is None or labels.get(where[0]) == where[1]


def _edge(text: str) -> float | None:
    try:
        edge = float(text)
    except ValueError:
        return None
    return None if math.isnan(edge) else edge


def _buckets(counts: Mapping[float, float]) -> Buckets | None:
    """A histogram, unless it makes no sense: no +Inf, or counts that fall, as when series of other edges were added."""
    edges = tuple(sorted(counts))
    if edges[-1] != math.inf or len(edges) > MAX_EDGES:
        return None
    values = tuple(counts[edge] for edge in edges)
    rising = all(below <= above for below, above in itertools.pairwise(values))
    return Buckets(edges, values) if rising and values[0] >= 0 and _possible(values[-1]) else None


def _possible(value: float) -> bool:
    return -MAX_VALUE <= value <= MAX_VALUE


def _cache_facts(labels: Mapping[str, str]) -> CacheFacts:
    window = labels.get("sliding_window")
    mamba = labels.get("mamba_block_size", "None")
    return CacheFacts(
        block_size=_whole(labels.get("block_size", "")),
        num_gpu_blocks=_whole(labels.get("num_gpu_blocks", "")),
        prefix_caching={"true": True, "false": False}.get(labels.get("enable_prefix_caching", "").lower()),
        hybrid=None if window is None else window != "None" or mamba != "None",
    )


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else None


def _for_all(caches: Mapping[str | None, CacheFacts], engines: Any) -> Mapping[str, CacheFacts]:
    """Cache facts for each engine on the page; older releases tell them once, without an engine."""
    found = {engine: caches.get(engine, caches.get(None)) for engine in engines}
    return {engine: facts for engine, facts in found.items() if facts is not None}
