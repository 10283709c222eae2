"""Families of samples and the two text formats a vLLM server answers with.

Numbers are written as Python's Prometheus client writes them, `_created` series included, so that a page is as
large and as awkward as the real one. Samples are found by name, because a filtered request names samples, not
families.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import inf, isinf

Labels = tuple[tuple[str, str], ...]


class Kind(StrEnum):
    """Types as `# TYPE` spells them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a page."""

    name: str
    labels: Labels
    value: float


@dataclass(slots=True)
class _Distribution:
    counts: list[int]
    total: float = 0.0
    seen: int = 0


class Family:
    """One metric with all its children. `name` is the family's, without `_total`."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        *,
        help: str,  # noqa: A002  # the format's own word
        edges: Sequence[float] = (),
        created: float | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.help = help
        self.edges = tuple(edges)
        self._created = created
        self._values: dict[Labels, float] = {}
        self._distributions: dict[Labels, _Distribution] = {}

    def child(self, labels: Labels) -> Labels:
        """Makes a child exist at zero and returns its key."""
        if self.kind in {Kind.HISTOGRAM, Kind.SUMMARY}:
            self._distributions.setdefault(labels, _Distribution([0] * (len(self.edges) + 1)))
        else:
            self._values.setdefault(labels, 0.0)
        return labels

    def set(self, labels: Labels, value: float) -> None:
        """Sets a gauge."""
        self._values[labels] = value

    def add(self, labels: Labels, amount: float) -> None:
        """Advances a counter."""
        if amount:
            self._values[labels] = self._values.get(labels, 0.0) + amount
        else:
            self._values.setdefault(labels, 0.0)

    def observe(self, labels: Labels, value: float, times: int = 1) -> None:
        """Counts a value, or the same value several times."""
        distribution = self._distributions.get(labels)
        if distribution is None:
            distribution = self._distributions[self.child(labels)]
        distribution.counts[bisect_left(self.edges, value)] += times
        distribution.total += value * times
        distribution.seen += times

    def value(self, labels: Labels, suffix: str = "") -> float:
        """The value of a child: of a histogram, its `_sum` or `_count`."""
        if suffix == "_sum":
            return self._distributions[labels].total
        if suffix == "_count":
            return float(self._distributions[labels].seen)
        return self._values[labels]

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names by which a filter may ask for parts of it."""
        match self.kind:
            case Kind.COUNTER:
                own: tuple[str, ...] = (f"{self.name}_total",)
            case Kind.GAUGE:
                own = (self.name,)
            case Kind.HISTOGRAM:
                own = (f"{self.name}_bucket", f"{self.name}_count", f"{self.name}_sum")
            case Kind.SUMMARY:
                own = (f"{self.name}_count", f"{self.name}_sum")
        return own if self._created is None else (*own, f"{self.name}_created")

    @property
    def children(self) -> Iterable[Labels]:
        """The label sets that exist."""
        return self._distributions if self.kind in {Kind.HISTOGRAM, Kind.SUMMARY} else self._values

    def samples(self) -> Iterable[Sample]:
        """Every line of the family but the `_created` ones."""
        for labels in self.children:
            yield from self._child_samples(labels)

    def created_samples(self) -> Iterable[Sample]:
        """When each child came into being, as the Python client tells."""
        if self._created is not None:
            for labels in self.children:
                yield Sample(f"{self.name}_created", labels, self._created)

    def grouped_samples(self) -> Iterable[Sample]:
        """All lines with each child's `_created` among its own, as OpenMetrics wants them."""
        for labels in self.children:
            yield from self._child_samples(labels)
            if self._created is not None:
                yield Sample(f"{self.name}_created", labels, self._created)

    def _child_samples(self, labels: Labels) -> Iterable[Sample]:
        if self.kind is Kind.COUNTER:
            yield Sample(f"{self.name}_total", labels, self._values[labels])
            return
        if self.kind is Kind.GAUGE:
            yield Sample(self.name, labels, self._values[labels])
            return
        distribution = self._distributions[labels]
        running = 0
        if self.kind is Kind.HISTOGRAM:
            for edge, seen in zip((*self.edges, inf), distribution.counts, strict=True):
                running += seen
                yield Sample(f"{self.name}_bucket", _with_edge(labels, edge), running)
        yield Sample(f"{self.name}_count", labels, distribution.seen)
        yield Sample(f"{self.name}_sum", labels, distribution.total)


class Page:
    """All families of a server, in the order of its page."""

    def __init__(self, families: Iterable[Family] = ()) -> None:
        self.families: list[Family] = []
        self._by_sample: dict[str, list[Family]] = {}
        for family in families:
            self.add(family)

    def add(self, family: Family) -> Family:
        """Puts a family at the end of the page."""
        self.families.append(family)
        for name in family.sample_names:
            self._by_sample.setdefault(name, []).append(family)
        return family

    def render(self, names: frozenset[str] | None = None, *, openmetrics: bool = False) -> str:
        """The page, or only the samples with these exact names."""
        if names is None:
            families: Iterable[Family] = self.families
        else:
            wanted = dict.fromkeys(family for name in sorted(names) for family in self._by_sample.get(name, ()))
            families = sorted(wanted, key=self.families.index)
        lines: list[str] = []
        for family in families:
            _render(family, names, openmetrics=openmetrics, lines=lines)
        if openmetrics:
            lines.append("# EOF")
        return "\n".join(lines) + "\n" if lines else ""


def _render(family: Family, names: frozenset[str] | None, *, openmetrics: bool, lines: list[str]) -> None:
    offered = family.grouped_samples() if openmetrics else family.samples()
    samples = [s for s in offered if names is None or s.name in names]
    if samples or names is None:
        suffix = "_total" if family.kind is Kind.COUNTER and not openmetrics else ""
        lines.append(f"# HELP {family.name}{suffix} {family.help}")
        lines.append(f"# TYPE {family.name}{suffix} {family.kind}")
        # The Python client escapes the colons of samples in this format, and leaves them in the comments.
        written = (_line(sample) for sample in samples)
        lines.extend(line.replace("vllm:", "vllm_", 1) if openmetrics else line for line in written)
    if openmetrics:
        return
    created = [s for s in family.created_samples() if names is None or s.name in names]
    if created:
        lines.append(f"# HELP {family.name}_created {family.help}")
        lines.append(f"# TYPE {family.name}_created gauge")
        lines.extend(_line(sample) for sample in created)


@lru_cache(maxsize=16384)
def _with_edge(labels: Labels, edge: float) -> Labels:
    return tuple(sorted((*labels, ("le", number(edge)))))


@lru_cache(maxsize=16384)
def _series(name: str, labels: Labels) -> str:
    if not labels:
        return name
    inside = ",".join(f'{key}="{_escape(value)}"' for key, value in labels)
    return f"{name}{{{inside}}}"


def _line(sample: Sample) -> str:
    return f"{_series(sample.name, sample.labels)} {number(sample.value)}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def number(value: float) -> str:
    """A number in the Prometheus client's spelling: `1.0`, `1.5e+06`, `+Inf`."""
    value = float(value)
    if isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+0{dot - 1}"
    return text


def labels(**pairs: str | int) -> Labels:
    """Labels in the order of a real page: sorted by name."""
    return tuple((name, str(value)) for name, value in sorted(pairs.items()))
