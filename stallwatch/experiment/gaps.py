"""The gaps of streams in a report: those of each kind of run, longest first, in as many places as are drawn. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

ARMS: Final = ("alone", "uncached", "cached")


def gaps_by_arm(runs: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Sequence[float]]]:
    """Of the valid runs of a report that have a timeline, from the mark on; a kind without any gap is absent."""
    known = list(runs)
    return {arm: thinned(found) for arm in ARMS if (found := sorted(_gaps(known, arm), reverse=True))}


def _gaps(runs: Iterable[Mapping[str, Any]], arm: str) -> Iterator[float]:
    for run in runs:
        if run["arm"] != arm or run["void"] or "timeline" not in run or run["timeline"]["marked"] is None:
            continue
        for stream in run["timeline"]["streams"]:
            for before, at in pairwise(stream["at"]):
                if at > run["timeline"]["marked"]:
                    yield at - before


def thinned(ordered: Sequence[float], places: int = 120) -> Mapping[str, Sequence[float]]:
    """A long ordered list by its share of values that come before: dense at its beginning, where the long gaps are."""
    last = len(ordered) - 1
    picked = (
        sorted({round(last ** (place / (places - 1))) - 1 for place in range(places)} | {0, last}) if last > 0 else [0]
    )
    return {
        "share": [float(f"{(place + 1) / len(ordered):.4g}") for place in picked],
        "seconds": [float(f"{ordered[place]:.4g}") for place in picked],
    }
