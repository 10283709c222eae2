"""Rules about the machine: clocks, an idle GPU, links, the host, an engine that does not step at all."""

from typing import Final

from stallwatch.analysis.attribution.frozen import Frozen, Scene, Slice
from stallwatch.analysis.causes import Cause, Evidence
from stallwatch.analysis.window import Stretch

_CLOCK_FELL: Final = 0.9
_LONGER: Final = 3.0  # times the longest step with prefill
_WORKS: Final = 0.8  # share of the power drawn before, from which on a busy GPU computes and does not spin
_BEFORE: Final = 30.0  # seconds before a stall that its GPU power is compared with
_PRESSURE: Final = 0.1  # share of the time beyond the usual, from which on pressure counts
_UNREAD: Final = 3.0  # seconds without an answered scrape after which it is not known that requests run


def gpu_clock(stall: Frozen, scene: Scene) -> Evidence | None:
    """The clock was below what it usually is under work. Whatever reason bits say: capping is normal."""
    seconds, lowest = 0.0, 1.0
    for part, _ in stall.held():
        ratio = scene.gpus(part.start, part.end).ratio
        if ratio is not None and ratio < _CLOCK_FELL:
            seconds += min(part.held, (part.end - part.start) * (1.0 - ratio))
            lowest = min(lowest, ratio)
    if seconds <= 0:
        return None
    return Evidence(Cause.GPU_CLOCK, seconds, f"the SM clock was at {lowest:.0%} of what it usually is under work")


def interconnect(stall: Frozen, scene: Scene) -> Evidence | None:
    """A link between hosts was congested or broken while the GPUs waited."""
    shown = ""
    seconds = 0.0
    for part, _ in stall.held():
        host = scene.around.host(part.start, part.end)
        if host.congested > 0:
            seconds += part.held * host.congested * _waiting_share(part, stall, scene)
            shown = host.network
    return Evidence(Cause.INTERCONNECT, seconds, shown) if seconds > 0 else None


def host_pressure(stall: Frozen, scene: Scene) -> Evidence | None:
    """The host waited for memory or disk, or vLLM's container was not allowed to run."""
    seconds = worst = throttled = 0.0
    for part, _ in stall.held():
        host = scene.around.host(part.start, part.end)
        if max(host.pressure, host.throttled) >= _PRESSURE:
            idle = scene.gpus(part.start, part.end).idle
            share = min(1.0, host.pressure + host.throttled)
            seconds += part.held * share * (1.0 if idle is None else idle)
            worst, throttled = max(worst, host.pressure), max(throttled, host.throttled)
    if seconds <= 0:
        return None
    return Evidence(
        Cause.HOST_PRESSURE,
        seconds,
        f"tasks waited for memory or disk {worst:.0%} of the time more than usual"
        if worst >= throttled
        else f"vLLM's container was kept from running {throttled:.0%} of the time",
    )


def engine_hang(stall: Frozen, scene: Scene) -> Evidence | None:
    """Requests were decoding and no step ended, for longer than any step takes."""
    held = [part for part in stall.slices if part.stretch is not None and _stands_still(part.stretch, scene)]
    silence = max((_silence(part.stretch, stall) for part in held if part.stretch is not None), default=0.0)
    legitimate = [seen.slow_seconds for seen in scene.engine.newest() if seen.has_prefill and seen.until < stall.start]
    limit = max(scene.hang_seconds, _LONGER * max(legitimate, default=0.0))
    if silence <= limit or _computes(stall, scene):
        return None
    seconds = sum(
        part.seconds if part.waits else part.held
        for part in held
        if part.stretch is not None and _silence(part.stretch, stall) > limit
    )
    if seconds <= 0:
        return None
    return Evidence(Cause.ENGINE_HANG, seconds, f"no step ended for {silence:.0f} s while requests were decoding")


def gpu_idle(stall: Frozen, scene: Scene) -> Evidence | None:
    """Requests ran and the GPU had nothing to do: the host, a compilation, or communication held it up."""
    seconds = sum(part.held * _idle(part, stretch, scene) for part, stretch in stall.held())
    if seconds <= 0:
        return None
    for specific in (interconnect(stall, scene), host_pressure(stall, scene), engine_hang(stall, scene)):
        seconds -= specific.seconds if specific is not None else 0.0
    if seconds <= 0:
        return None
    return Evidence(Cause.GPU_IDLE, seconds, f"the GPU idled for {seconds:.1f} s of it while requests were running")


def _idle(part: Slice, stretch: Stretch, scene: Scene) -> float:
    if stretch.answered * _UNREAD < stretch.seconds:
        return 0.0
    return scene.gpus(part.start, part.end).idle or 0.0


def _stands_still(stretch: Stretch, scene: Scene) -> bool:
    """Whether hardly a step ended in it, and not because of prompts."""
    lost = stretch.lost or 0.0
    if stretch.decoders < 0.5 or lost <= 0.5 * stretch.seconds:
        return False
    # Requests that came during a freeze are let in at its end, our own prompt may be open: few tokens fill no freeze.
    ahead = stretch.backlog[0] if stretch.backlog is not None else 0.0
    return max(ahead, (stretch.prefill or 0.0) + stretch.flown) * scene.dearest() <= 0.5 * lost


def _silence(stretch: Stretch, stall: Frozen) -> float:
    """The longest time in a stretch without the end of a step."""
    if stretch.moved:
        return stretch.slow_seconds
    return stall.end - stretch.since


def _computes(stall: Frozen, scene: Scene) -> bool:
    """Whether the GPU drew as much power as before, so that it works on one enormous step."""
    before = scene.gpus(stall.start - _BEFORE, stall.start)
    during = scene.gpus(stall.start, stall.end)
    if before.power is None or during.power is None or during.idle is None or before.idle is None:
        return False
    return during.idle < 0.5 and before.idle < 0.5 and during.power >= _WORKS * before.power


def _waiting_share(part: Slice, stall: Frozen, scene: Scene) -> float:
    """The share of a slice in which the GPU idled or spun; 1 where nothing is known of it."""
    during = scene.gpus(part.start, part.end)
    if during.idle is None:
        return 1.0
    before = scene.gpus(stall.start - _BEFORE, stall.start)
    if during.power is not None and before.power and before.idle is not None and before.idle < 0.5:
        spins = during.power < _WORKS * before.power
        return 1.0 if spins else during.idle
    return during.idle
