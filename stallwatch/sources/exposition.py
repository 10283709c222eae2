"""A parser of Prometheus' text format that reads only what is wanted, four times a second, without stopping the loop.

The left part of a line, `name{labels}`, says the same thing in every scrape: it is parsed strictly once and is a key of
a dictionary afterwards. Only a left part that the strict reader accepted becomes a key, so a line with a time stamp,
an exemplar or odd blanks never meets a key by accident and is read strictly each time.

What a server can make us keep is bounded: keys by number and by size, series a family, garbage a page.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T")

SLICE_BYTES: Final = 128 * 1024  # what is parsed between two looks at the event loop
MAX_LINE: Final = 16 * 1024  # characters; an info line with all of vLLM's cache settings has 2,000
MAX_KEY: Final = 1024  # longer left parts are read each time and never kept
MAX_KEYS: Final = 4096  # a generation; a data-parallel rank needs about 90
MAX_KEY_CHARACTERS: Final = 1_000_000  # a generation
MAX_SERIES_A_NAME: Final = 4096
MAX_SERIES: Final = 20_000
MAX_NAMES: Final = 4096
MAX_GARBAGE: Final = 1000  # a page with more is not worth reading on
FORGET_AFTER_PAGES: Final = 500  # two minutes at four pages a second

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*+")
_PREFIX = re.compile(r"(?:ray_)?vllm[:_]")
_BRACE = re.compile(r"[ \t]*+\{")
_NO_LABELS = re.compile(r"[ \t]*+\}")
_LABEL = re.compile(
    r"""[ \t]*+
    (?: (?P<bare>[a-zA-Z_][a-zA-Z0-9_]*+) | "(?P<quoted>(?:[^"\\]|\\.)*+)" ) [ \t]*+
    (?: = [ \t]*+ "(?P<value>(?:[^"\\]|\\.)*+)" [ \t]*+ )?+
    (?P<end> ,[ \t]*+\}? | \} )""",
    re.VERBOSE | re.DOTALL,
)
_REST = re.compile(r"[ \t]*+(?P<value>[^ \t#]++)(?:[ \t]++[-+0-9.eE]++)?+[ \t]*+(?:\#[ \t]*+\{.*)?\Z", re.DOTALL)
_ESCAPE = re.compile(r'\\([\\n"])')
_ESCAPED = {"\\": "\\", "n": "\n", '"': '"'}


@dataclass(slots=True)
class Page(Generic[T]):
    """What one page said; `samples` is keyed by the series' own text, so a series that comes twice counts once."""

    samples: dict[str, tuple[T, float]] = field(default_factory=dict)
    unwanted: set[str] = field(default_factory=set)  # names that were on the page and not wanted
    overfull: set[str] = field(default_factory=set)  # names with more series than are read: their sums are not known
    garbage_lines: int = 0
    gave_up: bool = False
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Known(Generic[T]):
    name: str
    meaning: T | None  # None: the name is wanted, this series of it is not


class Exposition(Generic[T]):
    """Reads pages of one server. `resolve` says once a series what it stands for, or None when it is of no use."""

    def __init__(self, wanted: Callable[[str], bool], resolve: Callable[[str, Mapping[str, str]], T | None]) -> None:
        self._wanted = wanted
        self._resolve = resolve
        # Two generations: what is met moves to the young one, and the old one is dropped as a whole. So entries that
        # are no longer seen go without a stamp on each hit.
        self._young: dict[str, _Known[T]] = {}
        self._old: dict[str, _Known[T]] = {}
        self._characters = 0
        self._pages = 0
        self._skipped: set[str] = set()

    @property
    def keys(self) -> int:
        """Series that are known without parsing."""
        return len(self._young.keys() | self._old.keys())

    def parse(self, body: bytes) -> Page[T]:
        """Reads a whole page."""
        page: Page[T] = Page()
        for _ in self.slices(body, page):
            pass
        return page

    def slices(self, body: bytes, page: Page[T]) -> Iterator[None]:
        """Reads a page into `page`, and yields between slices so that a huge one does not hold the loop."""
        self._pages += 1
        if self._pages >= FORGET_AFTER_PAGES:
            self._age()
        start = 0
        while start < len(body) and not page.gave_up:
            end = len(body)
            if end - start > SLICE_BYTES:
                end = body.rfind(b"\n", start, start + SLICE_BYTES) + 1 or body.find(b"\n", start) + 1 or end
            # Bytes that are not UTF-8 can only be inside a label value or in garbage; neither may stop the page.
            self._feed(page, body[start:end].decode("utf-8", "replace"))
            start = end
            yield

    def _feed(self, page: Page[T], text: str) -> None:
        known = self._young
        skipped = self._skipped
        unwanted = page.unwanted
        for line in text.split("\n"):
            key, _, tail = line.rpartition(" ")
            entry = known.get(key)
            if entry is not None:
                try:
                    self._add(page, key, entry, _number(tail))
                except ValueError:
                    self._read(page, line)
                continue
            if not line or line[0] == "#":
                continue
            name = line.partition("{")[0]
            if name in skipped:
                unwanted.add(name)
                continue
            self._read(page, line)
            known = self._young
            if page.gave_up:
                return

    def _read(self, page: Page[T], line: str) -> None:
        """The strict way: for a series that is met for the first time, and for every unusual line."""
        line = line.strip(" \t\r")
        if not line or line[0] == "#":
            return
        try:
            name, labels, end, value = self._strict(line)
        except ValueError:
            page.garbage_lines += 1
            page.gave_up = page.garbage_lines >= MAX_GARBAGE
            return
        if labels is None:
            if len(self._skipped) >= MAX_NAMES:
                self._skipped.clear()
            self._skipped.add(name)
            if len(page.unwanted) < MAX_NAMES:
                page.unwanted.add(name)
            return
        key = line[:end]
        self._add(page, key, self._learn(key, normalised(name), labels), value)

    def _strict(self, line: str) -> tuple[str, dict[str, str] | None, int, float]:
        """Name as written, labels (None when the name is not wanted), where they end, value. Raises `ValueError`."""
        if len(line) > MAX_LINE:
            raise ValueError("line too long")
        found = _NAME.match(line)
        name = found[0] if found else ""
        if name:
            # All that an unwanted line must have is a name and something behind it.
            if line[len(name) : len(name) + 1] not in {"{", " ", "\t"}:
                raise ValueError("not a name")
            if not self._wanted(normalised(name)):
                return name, None, 0, 0.0
        end = len(name)
        labels: dict[str, str] = {}
        brace = _BRACE.match(line, end)
        if brace:
            name, labels, end = _labels(line, brace.end(), name)
        rest = _REST.match(line, end)
        if not rest or not name:
            raise ValueError("no value")
        return name, labels if self._wanted(normalised(name)) else None, end, _number(rest["value"])

    def _add(self, page: Page[T], key: str, entry: _Known[T], value: float) -> None:
        if entry.meaning is None:
            return
        count = page.counts.get(entry.name, 0)
        if count >= MAX_SERIES_A_NAME or len(page.samples) >= MAX_SERIES:
            page.overfull.add(entry.name)
            return
        page.counts[entry.name] = count + 1
        page.samples[key] = (entry.meaning, value)

    def _learn(self, key: str, name: str, labels: Mapping[str, str]) -> _Known[T]:
        entry = self._young.get(key) or self._old.get(key)
        if entry is None:
            entry = _Known(name, self._resolve(name, labels))
        if len(key) <= MAX_KEY and key not in self._young:
            if len(self._young) >= MAX_KEYS or self._characters >= MAX_KEY_CHARACTERS:
                self._age()
            self._young[key] = entry
            self._characters += len(key)
        return entry

    def _age(self) -> None:
        self._old, self._young = self._young, {}
        self._characters = 0
        self._pages = 0


def normalised(name: str) -> str:
    """The name as vLLM itself spells it: Ray adds a prefix, and some stacks write `vllm_` for `vllm:`."""
    found = _PREFIX.match(name)
    return "vllm:" + name[found.end() :] if found else name


def _number(text: str) -> float:
    if "_" in text:  # Python's digit grouping is no number here
        raise ValueError(text)
    return float(text)


def _labels(line: str, start: int, name: str) -> tuple[str, dict[str, str], int]:
    """Reads from behind the opening brace; the name may stand inside, quoted, when it is not a plain one."""
    labels: dict[str, str] = {}
    if found := _NO_LABELS.match(line, start):
        return name, labels, found.end()
    while found := _LABEL.match(line, start):
        label = found["bare"] if found["bare"] is not None else _unescaped(found["quoted"])
        if found["value"] is None:
            if found["bare"] is not None or name:
                break
            name = label
        elif label in labels:
            break
        else:
            labels[label] = _unescaped(found["value"])
        start = found.end()
        if found["end"][-1] == "}":
            return name, labels, start
    raise ValueError("labels")


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPED[found[1]], text) if "\\" in text else text
