"""A stall as rules see it: its seconds, cut where what is known of the engine changes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from stallwatch.analysis.causes import StallKind
from stallwatch.analysis.gaps import Piece, Witness
from stallwatch.analysis.surroundings import GpuSpell, Surroundings
from stallwatch.analysis.window import EngineWindow, Stretch

LATE: Final = 0.6
"""Seconds after the end of a gap by which the server's page shows what ended it."""

_SLOWEST: Final = 0.02
"""Seconds that a token of prefill may cost before any pace is known: a few times what two CPU cores need."""
_SLOWER: Final = 4.0
"""Times the usual pace that a prompt's tokens may cost: the end of a long prompt is that much slower than its start."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a gap within one stretch of the engine's time."""

    start: float
    end: float
    piece: Piece
    stretch: Stretch | None  # None where the engine could not be read
    seconds: float
    """Excess seconds of the stall that lie in it."""
    held: float
    """Those among them in which the engine itself gave its decoders nothing; 0 for requests that were not let in."""

    @property
    def waits(self) -> bool:
        """Whether it is about being let in, not about decoding."""
        return self.piece.gap.kind is StallKind.ADMISSION


@dataclass(frozen=True, slots=True)
class Frozen:
    """One stall, as far as it is remembered."""

    start: float
    end: float
    ongoing: bool
    blind: bool
    """The first frozen step is still open: what filled it will be booked at its end."""
    slices: tuple[Slice, ...]
    stretches: tuple[Stretch, ...]
    """From its first second to shortly after its last one, where late evidence is booked."""

    @property
    def seconds(self) -> float:
        """Excess seconds to be explained."""
        return sum(part.seconds for part in self.slices)

    @property
    def slow(self) -> list[Stretch]:
        """The stretches in which the engine has samples above the threshold of a stall."""
        return [stretch for stretch in self.stretches if stretch.slow_samples > 0]

    @property
    def pieces(self) -> list[Piece]:
        """The gaps, as far as none covers the other."""
        return list({id(part.piece): part.piece for part in self.slices}.values())

    def held(self) -> Iterable[tuple[Slice, Stretch]]:
        """The slices in which the engine itself gave its decoders nothing."""
        for part in self.slices:
            if part.stretch is not None and part.held > 0:
                yield part, part.stretch

    def waits(self) -> Iterable[tuple[Slice, Stretch]]:
        """The slices in which a request was not let in."""
        for part in self.slices:
            if part.stretch is not None and part.waits:
                yield part, part.stretch


@dataclass(frozen=True, slots=True)
class Scene:
    """Where it happened: the engine, what surrounds it, and the settings that rules need."""

    engine: EngineWindow
    around: Surroundings
    hang_seconds: float
    _spells: dict[tuple[float, float], GpuSpell] = field(default_factory=dict)

    def gpus(self, start: float, end: float) -> GpuSpell:
        """The GPUs over (start, end]: several rules ask the same."""
        known = self._spells.get((start, end))
        if known is None:
            known = self._spells[start, end] = self.around.gpus(start, end)
        return known

    def dearest(self) -> float:
        """Seconds that a token of prefill may cost its readers."""
        pace = self.engine.pace()
        return _SLOWEST if pace is None else _SLOWER * pace

    def refresh(self) -> None:
        """More may be known now than when it was asked last."""
        self._spells.clear()


def cut(pieces: Sequence[Piece], stretches: Sequence[Stretch], *, end: float) -> list[Slice]:
    """Slices of disjoint pieces in order; what a stretch lost is shared out among them as it fits."""
    left = [stretch.lost for stretch in stretches]
    slices: list[Slice] = []
    first = 0
    for piece in pieces:
        start, stop = piece.start, min(piece.end, end)
        if stop <= start:
            continue
        density = piece.excess / (piece.end - piece.start)
        while first < len(stretches) and stretches[first].until <= start:
            first += 1
        at, index = start, first
        while index < len(stretches) and stretches[index].since < stop:
            stretch = stretches[index]
            begin, finish = max(at, stretch.since), min(stop, stretch.until)
            if begin > at:
                slices.append(Slice(at, begin, piece, None, (begin - at) * density, 0.0))
            if finish > begin:
                seconds = (finish - begin) * density
                held = _held(piece, seconds, left[index])
                remaining = left[index]
                if remaining is not None:
                    left[index] = remaining - held
                slices.append(Slice(begin, finish, piece, stretch, seconds, held))
                at = finish
            index += 1
        if at < stop:
            slices.append(Slice(at, stop, piece, None, (stop - at) * density, 0.0))
    return slices


def _held(piece: Piece, seconds: float, left: float | None) -> float:
    if piece.gap.kind is StallKind.ADMISSION or piece.gap.witness in {Witness.VICTIM, Witness.SAMPLES, Witness.DOWN}:
        return 0.0
    return seconds if left is None else min(seconds, max(0.0, left))
