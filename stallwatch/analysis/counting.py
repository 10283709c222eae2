"""Differences of counters between two scrapes, where either may be unknown and a server may have restarted."""

from dataclasses import dataclass, field

from stallwatch.observations import Buckets, EngineCounters

MONOTONE = (
    "prefix_queries",
    "iterations",
    "generation_tokens",
    "itl_count",
    "first_tokens",
    "finished_count",
)
"""Fields that only a restart lets fall."""


def delta(before: float | None, after: float | None) -> float | None:
    """What a counter grew by; None when either value is unknown or the counter fell."""
    if before is None or after is None or after < before:
        return None
    return after - before


def was_reset(before: EngineCounters, after: EngineCounters) -> bool:
    """Whether any counter fell, so that nothing may be compared across the two."""
    for name in MONOTONE:
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None and new < old:
            return True
    return False


@dataclass(slots=True)
class Growth:
    """Growth of counters that not every scrape asks for: each is compared with its own last known value."""

    _known: dict[str, float] = field(default_factory=dict)

    def of(self, counters: EngineCounters, name: str) -> float | None:
        """What the field grew by since it was last known; None when it is unknown, new or fell."""
        value: float | None = getattr(counters, name)
        if value is None:
            return None
        before = self._known.get(name)
        self._known[name] = value
        return delta(before, value)

    def forget(self) -> None:
        """The counters belong to another process now."""
        self._known.clear()


@dataclass(slots=True)
class NetCounter:
    """A counter of the server's with our canary's share taken out; it never falls.

    The server and we book the same request at different moments: a share not yet seen in the server's counter waits.
    """

    total: float = 0.0
    _own: float = 0.0

    def own(self, amount: float) -> None:
        """Our canary caused `amount` of the server's count."""
        self._own += amount

    def grew(self, amount: float | None) -> None:
        """The server's counter grew by `amount`."""
        if amount is not None and amount > 0:
            taken = min(self._own, amount)
            self._own -= taken
            self.total += amount - taken


def bucket_delta(before: Buckets | None, after: Buckets | None) -> Buckets | None:
    """What a histogram grew by; None when it is unknown, changed its edges or fell."""
    if before is None or after is None or before.edges != after.edges:
        return None
    grown = tuple(new - old for old, new in zip(before.counts, after.counts, strict=True))
    return Buckets(after.edges, grown) if all(count >= 0 for count in grown) else None
