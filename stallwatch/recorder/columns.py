"""Aligned columns of numbers over the last minutes: a ring in which every column has one place a slot of time.

Four bytes a number, whatever happens: a column takes its room when its figure is first known and never grows. What was
not seen in a slot is NaN in memory and null outside.
"""

import math
from array import array
from dataclasses import dataclass, field
from typing import Final, NamedTuple

SLOT_SECONDS: Final = 0.25
_UNKNOWN: Final = math.nan


class Name(NamedTuple):
    """Which figure of what: ("engines", "0", "running"), ("host", "", "memory_full")."""

    group: str
    member: str
    figure: str


@dataclass(frozen=True, slots=True)
class Cut:
    """A copy of the columns over some slots, oldest first; `start` is the time at which the first begins."""

    start: float
    slots: int
    columns: dict[Name, "array[float]"]


@dataclass(slots=True)
class Columns:
    """The ring. Times older than it are passed over; a time ahead of it makes room by forgetting the oldest."""

    slots: int
    most: int  # columns
    newest: int | None = None  # number of the newest slot
    oldest: int = 0  # number of the first slot ever
    columns: dict[Name, "array[float]"] = field(default_factory=dict)

    def advance(self, at: float) -> None:
        """Opens the slot of `at`, if it is ahead."""
        slot = math.floor(at / SLOT_SECONDS)
        if self.newest is None:
            self.newest = self.oldest = slot
            return
        for number in range(max(self.newest + 1, slot - self.slots + 1), slot + 1):
            place = number % self.slots
            for column in self.columns.values():
                column[place] = _UNKNOWN
        self.newest = max(self.newest, slot)

    def put(self, name: Name, at: float, value: float | None) -> None:
        """The last value in a slot stands."""
        if value is not None and (place := self._place(at)) is not None and (column := self._column(name)):
            column[place] = value

    def peak(self, name: Name, at: float, value: float | None) -> None:
        """The largest value in a slot stands."""
        if value is not None and (place := self._place(at)) is not None and (column := self._column(name)):
            known = column[place]
            column[place] = value if math.isnan(known) else max(known, value)

    def add(self, name: Name, at: float, value: float | None) -> None:
        """Values in a slot are summed."""
        if value is not None and (place := self._place(at)) is not None and (column := self._column(name)):
            known = column[place]
            column[place] = value if math.isnan(known) else known + value

    def cut(self, seconds: float) -> Cut:
        """The last `seconds`, or as much of them as there is."""
        if self.newest is None:
            return Cut(0.0, 0, {})
        number = min(self.slots, self.newest - self.oldest + 1, max(1, math.ceil(seconds / SLOT_SECONDS)))
        first = self.newest - number + 1
        begin, end = first % self.slots, self.newest % self.slots + 1
        copies = {
            name: column[begin:end] if begin < end else column[begin:] + column[:end]
            for name, column in self.columns.items()
        }
        return Cut(first * SLOT_SECONDS, number, copies)

    def _place(self, at: float) -> int | None:
        self.advance(at)
        slot = math.floor(at / SLOT_SECONDS)
        return slot % self.slots if self.newest is not None and slot > self.newest - self.slots else None

    def _column(self, name: Name) -> "array[float] | None":
        column = self.columns.get(name)
        if column is None and len(self.columns) < self.most:
            column = self.columns[name] = array("f", [_UNKNOWN]) * self.slots
        return column
