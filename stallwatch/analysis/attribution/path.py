"""Rules about the way between the engine and its reader: ourselves, a server that is gone, a stream held up."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from stallwatch.analysis.attribution.frozen import LATE, Frozen, Scene, Slice
from stallwatch.analysis.causes import Cause, Evidence
from stallwatch.analysis.gaps import Witness
from stallwatch.analysis.window import Stretch

_LEAST_LAG: Final = 0.02
_SAME: Final = 0.5  # share of a gap from which on a sample of the engine's is that gap


def observer(stall: Frozen, scene: Scene) -> Evidence | None:
    """Our own event loop was late while the gap was measured."""
    seconds = worst = 0.0
    if scene.around.observer.lag_within(stall.start, stall.end) < _LEAST_LAG:
        return None
    for piece in stall.pieces:
        lag = scene.around.observer.lag_within(piece.start, min(piece.end, stall.end))
        if lag >= _LEAST_LAG:
            seconds += min(lag, piece.excess)
            worst = max(worst, lag)
    if seconds <= 0:
        return None
    return Evidence(Cause.OBSERVER, seconds, f"our own loop ran up to {worst:.2f} s late")


def engine_down(stall: Frozen, scene: Scene) -> Evidence | None:
    """The server refused everybody, or became another process."""
    seconds = 0.0
    for part in stall.slices:
        down = scene.around.down_within(part.start, part.end)
        seconds += min(part.seconds, part.seconds if part.piece.gap.witness is Witness.DOWN else down)
    if seconds <= 0:
        return None
    return Evidence(Cause.ENGINE_DOWN, seconds, f"the server was away or starting anew for {seconds:.1f} s of it")


def delivery(stall: Frozen, _: Scene) -> Evidence | None:
    """The engine went on giving tokens, and the stream did not."""
    seconds = 0.0
    slow = stall.slow
    for part in stall.slices:
        witness, stretch = part.piece.gap.witness, part.stretch
        if witness not in {Witness.STREAM, Witness.PAGE} or stretch is None:
            continue
        if part.waits:
            # A request that neither waits in the engine nor is computed is held up before or after it.
            if stretch.moved or stretch.running == 0:
                here = stretch.waiting > 0 or stretch.has_prefill or stretch.prefilling >= 1
                seconds += 0.0 if here else part.seconds
            continue
        if stretch.lost is None or not stretch.steps or _engine_felt_it(slow, part):
            continue
        # While the cache is full and others wait, a silent stream may be one that was thrown out of the batch.
        if stall.ongoing and stretch.waiting > 0 and stretch.pressed:
            continue
        seconds += part.seconds - part.held
    if seconds <= 0:
        return None
    return Evidence(
        Cause.DELIVERY,
        seconds,
        f"for {seconds:.1f} s the engine gave tokens in its usual steps and the stream got none",
    )


def _engine_felt_it(slow: Sequence[Stretch], part: Slice) -> bool:
    """Whether the engine has a sample as long as the gap: then it was the one that stopped."""
    piece = part.piece
    for index in range(bisect_right(slow, piece.start, key=attrgetter("until")), len(slow)):
        if slow[index].since >= piece.end + LATE:
            break
        if slow[index].slow_seconds >= _SAME * piece.gap.seconds:
            return True
    return False
