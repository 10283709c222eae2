"""Figures with their spread, the table in which they are shown, and the machine on which they were measured."""

import math
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

import stallwatch

# Student's t, two-sided 95 %, by degrees of freedom.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: what was measured, the value with its spread in words, and what is aimed at."""

    what: str
    measured: str
    aim: str = ""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean of ratios with its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(ratios: Sequence[float]) -> Ratio:
    """The mean of the logarithms with Student's interval; at least two ratios."""
    logs = [math.log(one) for one in ratios]
    half = _T95[min(len(logs) - 1, max(_T95))] * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean(logs)), math.exp(mean(logs) - half), math.exp(mean(logs) + half), len(logs))


def rank(values: Iterable[float], q: float) -> float:
    """The quantile by nearest rank; not a number over nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered) * (1 - 1e-12)) - 1)] if ordered else math.nan


def milliseconds(seconds: float) -> str:
    """Three significant digits."""
    return f"{seconds * 1000:.3g} ms"


def tail(values: Sequence[float]) -> str:
    """Median, 99th percentile and worst of times in seconds, and how many there are."""
    shown = ", ".join(f"{name} {milliseconds(rank(values, q))}" for name, q in (("p50", 0.5), ("p99", 0.99)))
    return f"{shown}, worst {milliseconds(max(values, default=math.nan))} ({len(values):,})"


def spread(values: Sequence[float]) -> str:
    """Median of times in seconds, and the quartiles."""
    return f"{milliseconds(median(values))} ({milliseconds(rank(values, 0.25))} to {milliseconds(rank(values, 0.75))})"


def machine() -> str:
    """The machine in one line."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.lower().startswith(("model name", "cpu part"))
    ]
    cores = f"{os.cpu_count()} cores ({names[0] if names else platform.machine()})"
    system = f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    return f"{cores}, {system}, stallwatch {stallwatch.__version__}"


def load() -> float:
    """The load average of the last minute: what else the machine was doing."""
    return os.getloadavg()[0]


def table(figures: Sequence[Figure]) -> str:
    """Markdown."""
    rows = [f"| {one.what} | {one.measured} | {one.aim} |" for one in figures]
    return "\n".join(["| figure | measured | aim |", "|---|---|---|", *rows])
