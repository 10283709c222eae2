"""The GPU under a scenario, as a timeline of plain values: what an NVML that belongs to this run would answer.

Utilisation follows from the steps, clocks from the slowdowns that a clock caused, power from both. A power-cap bit
may be set the whole time and mean nothing; a clock may fall without any bit. Whoever simulates the driver plays
these values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from stallwatch.simulator.cost import Cause
from stallwatch.simulator.scenario import GpuProfile, Scenario
from stallwatch.simulator.world import World

# NVML's clock event reasons, by bit.
REASON_GPU_IDLE = 0x1
REASON_SW_POWER_CAP = 0x4
REASON_SW_THERMAL = 0x20

# Below this share of a sampling period the driver reports the idle clock.
_IDLE_SHARE = 0.05
# While a kernel spins in a collective that never completes, the device counts as fully used and draws little.
_SPIN_POWER = 0.35
# Causes during which the engine is in a step but the device has nothing to do.
_STARVING = frozenset({Cause.GPU_IDLE, Cause.HOST_PRESSURE, Cause.INTERCONNECT, Cause.ENGINE_HANG, Cause.UNKNOWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """What NVML's calls would return at a time, in its units."""

    at: float
    utilization: int
    memory_utilization: int
    sm_clock_mhz: int
    max_sm_clock_mhz: int
    memory_clock_mhz: int
    power_milliwatts: int
    power_limit_milliwatts: int
    temperature: int
    reasons: int
    memory_used: int
    memory_total: int
    energy_millijoules: int


class GpuMeter:
    """Reads the GPU of one rank of a world; each sample describes the `interval` that it ends."""

    def __init__(self, world: World, *, rank: int = 0, interval: float = 0.1) -> None:
        self._world = world
        self._rank = rank
        self._interval = interval
        self._energy = 0.0
        self._at = 0.0

    def sample(self, at: float) -> GpuSample:
        """The GPU at a time up to which the world has advanced; times must not fall."""
        scenario = self._world.scenario
        start = at - self._interval
        clock = _clock(scenario, at, rank=self._rank)
        spinning = any(
            p.gpu_busy and p.rank in {None, self._rank} and p.at < at and p.at + p.seconds > start
            for p in scenario.pauses
        )
        busy = self._busy(start, at) / self._interval
        sample = _sample(scenario.gpu, at, busy=busy, spinning=spinning, clock=clock, energy=self._energy)
        self._energy += sample.power_milliwatts * max(0.0, at - self._at)
        self._at = at
        return sample

    def _busy(self, start: float, end: float) -> float:
        engine = self._world.engines[self._rank]
        busy = 0.0
        for step in chain([engine.executing] if engine.executing else [], reversed(engine.steps)):
            if step.end <= start:
                break
            covered = min(end, step.end) - max(start, step.start)
            if covered > 0 and not step.empty:
                starved = sum(seconds for cause, seconds in step.seconds_by_cause if cause in _STARVING)
                busy += covered * max(0.0, 1.0 - starved / step.seconds)
        return busy


def gpu_timeline(scenario: Scenario, until: float, *, interval: float = 0.1, rank: int = 0) -> list[GpuSample]:
    """Samples at a fixed interval of a scenario with no other client than its own load."""
    world = World(scenario)
    meter = GpuMeter(world, rank=rank, interval=interval)
    samples = []
    for index in range(1, int(until / interval) + 1):
        world.advance(index * interval)
        samples.append(meter.sample(index * interval))
    return samples


def gpu_script(samples: Sequence[GpuSample]) -> list[dict[str, float]]:
    """The timeline as rows of numbers, repeated values left out: what changes, and when."""
    rows: list[dict[str, float]] = []
    last: dict[str, float] = {}
    for sample in samples:
        row = {name: getattr(sample, name) for name in GpuSample.__dataclass_fields__ if name != "at"}
        changed = {name: value for name, value in row.items() if last.get(name) != value}
        if changed:
            rows.append({"at": sample.at, **changed})
        last = row
    return rows


def _clock(scenario: Scenario, at: float, *, rank: int) -> float:
    factor = 1.0
    for slowdown in scenario.slowdowns:
        if slowdown.cause is Cause.GPU_CLOCK and slowdown.start <= at < slowdown.end and slowdown.rank in {None, rank}:
            factor *= slowdown.factor
    return scenario.gpu.sm_clock_mhz / factor


def _sample(profile: GpuProfile, at: float, *, busy: float, spinning: bool, clock: float, energy: float) -> GpuSample:
    share = 1.0 if spinning else min(1.0, busy)
    idle = share < _IDLE_SHARE
    level = _SPIN_POWER if spinning else share
    power = profile.idle_watts + (profile.busy_watts - profile.idle_watts) * level * clock / profile.sm_clock_mhz
    reasons = REASON_GPU_IDLE if idle else 0
    if not idle and profile.power_capped:
        reasons |= REASON_SW_POWER_CAP
    if clock < profile.sm_clock_mhz and profile.thermal_flag:
        reasons |= REASON_SW_THERMAL
    return GpuSample(
        at=round(at, 6),
        utilization=round(100 * share),
        memory_utilization=round(60 * (0.0 if spinning else share)),
        sm_clock_mhz=round(profile.idle_clock_mhz if idle else clock),
        max_sm_clock_mhz=round(profile.sm_clock_mhz),
        memory_clock_mhz=round(profile.memory_clock_mhz),
        power_milliwatts=round(1000 * min(power, profile.power_limit_watts)),
        power_limit_milliwatts=round(1000 * profile.power_limit_watts),
        temperature=round(38 + 32 * level),
        reasons=reasons,
        memory_used=profile.memory_used_bytes,
        memory_total=profile.memory_total_bytes,
        energy_millijoules=round(energy),
    )
