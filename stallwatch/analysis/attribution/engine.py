"""Rules about the scheduler: what it computed beside the readers, whom it threw out, whom it let in."""

from collections.abc import Sequence
from typing import Final

from stallwatch.analysis.attribution.frozen import LATE, Frozen, Scene, Slice
from stallwatch.analysis.causes import Cause, Evidence
from stallwatch.analysis.gaps import Piece, Witness
from stallwatch.analysis.window import Stretch

_CLOCK_FELL: Final = 0.9
_TIGHT: Final = 0.8  # KV usage: those who were thrown out have just given theirs back
_ROUNDING: Final = 128.0  # tokens that rounding to blocks may show where nothing was computed


def preemption(stall: Frozen, _: Scene) -> Evidence | None:
    """Requests were thrown out of the batch for want of KV cache, and computed anew.

    The counter moves only when the victim speaks again, so a gap is looked at from its end.
    """
    seconds = 0.0
    thrown_out = [stretch for stretch in stall.stretches if stretch.preemptions > 0]
    booked = sum(stretch.preemptions for stretch in thrown_out)
    for part in stall.slices:
        witness, stretch = part.piece.gap.witness, part.stretch
        if witness is Witness.VICTIM:
            seconds += part.seconds
        elif part.waits:
            continue
        elif _ends_preempted(thrown_out, part.piece) and witness in {Witness.SAMPLES, Witness.STREAM}:
            seconds += part.seconds - part.held
        if stretch is not None and part.held > 0 and _recomputes(stretch):
            seconds += part.held
    if seconds <= 0:
        return None
    return Evidence(
        Cause.PREEMPTION,
        seconds,
        f"requests were thrown out of a full KV cache and computed anew ({booked:.0f} booked so far)",
    )


def prefill(stall: Frozen, scene: Scene) -> Evidence | None:
    """Prompts were computed in the readers' steps, and so many tokens take that long."""
    if not stall.ongoing and not any(s.booked > 0 or s.backlog is not None for s in stall.stretches):
        return None
    used: dict[int, float] = {}
    seconds = tokens = 0.0
    for part in stall.slices:
        stretch = part.stretch
        if stretch is None or not stretch.has_prefill or _recomputes(stretch):
            continue
        if stretch.backlog is None and stretch.prefill is None and stall.ongoing:
            continue
        if part.waits:
            seconds += _behind_prefill(part, stretch, scene)
            continue
        if part.held <= 0:
            continue
        left = used.setdefault(id(stretch), _allowed(stretch, scene))
        if not left:
            continue
        taken = min(part.held * _undisturbed(part, scene), left)
        used[id(stretch)] = left - taken
        seconds += taken
    if seconds <= 0:
        return None
    tokens = sum(stretch.prefill or 0.0 for stretch in stall.stretches)
    ahead = stall.stretches[-1].backlog if stall.stretches else None
    still = f", {ahead[1]:.0f} still to go" if stall.ongoing and ahead is not None and ahead[1] > 0 else ""
    return Evidence(Cause.PREFILL, seconds, f"about {tokens:.0f} prompt tokens were computed in the same steps{still}")


def admission(stall: Frozen, scene: Scene) -> Evidence | None:
    """Requests waited to be let in: no KV cache or no sequence left, or a queue that nothing is computed for."""
    seconds = most = usage = 0.0
    for part, stretch in stall.waits():
        queued = stretch.waiting - stretch.deferred
        standing = not stretch.moved and stretch.decoders >= 0.5
        if queued <= 0 or (stretch.deferred > 0 and stretch.connector) or standing:
            continue
        seconds += part.seconds - _behind_prefill(part, stretch, scene)
        most, usage = max(most, queued), max(usage, stretch.kv_usage)
    if seconds <= 0:
        return None
    return Evidence(
        Cause.ADMISSION,
        seconds,
        f"up to {most:.0f} requests waited to be let in, with the KV cache at most {usage:.0%} full",
    )


def kv_transfer(stall: Frozen, _: Scene) -> Evidence | None:
    """Requests waited for their KV cache to arrive from elsewhere."""
    seconds = most = 0.0
    for part, stretch in stall.waits():
        standing = not stretch.moved and stretch.decoders >= 0.5
        if stretch.connector and (stretch.deferred > 0 or stretch.fetching > 0) and not standing:
            seconds += part.seconds
            most = max(most, stretch.deferred, stretch.fetching)
    if seconds <= 0:
        return None
    return Evidence(
        Cause.KV_TRANSFER, seconds, f"up to {most:.0f} requests waited for their KV cache to be loaded from elsewhere"
    )


def _behind_prefill(part: Slice, stretch: Stretch, scene: Scene) -> float:
    """Seconds of a wait in which the engine computed prompts, with room for more: it waits behind those."""
    if not stretch.has_prefill or stretch.pressed or (stretch.deferred > 0 and stretch.connector):
        return 0.0
    # Tokens computed at the end of a long silence did not fill it.
    share = (part.end - part.start) / stretch.seconds if stretch.seconds > 0 else 1.0
    return min(part.seconds, _allowed(stretch, scene) * share)


def _ends_preempted(thrown_out: Sequence[Stretch], piece: Piece) -> bool:
    return any(stretch.until > piece.start and stretch.since < piece.gap.end + LATE for stretch in thrown_out)


def _recomputes(stretch: Stretch) -> bool:
    """Whether tokens were computed that no prompt explains, or a victim waits for memory: both need a full cache."""
    return stretch.kv_usage > _TIGHT and (stretch.recompute > _ROUNDING or stretch.parked)


def _allowed(stretch: Stretch, scene: Scene) -> float:
    """Seconds that the prompt tokens of a stretch may have cost its readers."""
    if stretch.prefill is None:
        return stretch.seconds
    tokens = stretch.prefill + stretch.flown if stretch.moved else 0.0
    return (tokens or _chunk(stretch, scene)) * scene.dearest()


def _chunk(stretch: Stretch, scene: Scene) -> float:
    """Tokens that the step under way may carry: as many as any stretch did lately, if a prompt is open."""
    lately = [seen.prefill or 0.0 for seen, _ in zip(scene.engine.newest(), range(32), strict=False)]
    ahead = stretch.backlog[0] if stretch.backlog is not None else 0.0
    return min(ahead, max(lately)) if lately and max(lately) > 0 else ahead


def _undisturbed(part: Slice, scene: Scene) -> float:
    """The share of a slice that the GPU had for computing at its usual clock; 1 where nothing is known of it."""
    spell = scene.gpus(part.start, part.end)
    share = 1.0 if spell.idle is None else 1.0 - spell.idle
    if spell.ratio is not None and spell.ratio < _CLOCK_FELL:
        share *= spell.ratio
    return share
