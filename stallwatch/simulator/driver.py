"""The GPU driver of a simulated server: its timeline behind NVML, so that a GPU reader needs no GPU."""

from stallwatch.simulator.frontend import SimulatedServer
from stallwatch.simulator.gpu import GpuMeter, GpuSample
from stallwatch.simulator.nvml import ScriptedGpu, ScriptedNvml

# A reader makes a dozen calls in a row; they are answered from one moment.
_SAME_MOMENT = 0.02


def driver_of(server: SimulatedServer) -> ScriptedNvml:
    """What `pynvml` would be on the server's host: one GPU a rank, at the server's own time."""
    profile = server.scenario.gpu
    meters = [GpuMeter(server.world, rank=rank) for rank in range(server.scenario.server.data_parallel_size)]
    moment: list[ScriptedGpu] = []
    taken_at = -1.0

    def timeline(now: float) -> list[ScriptedGpu]:
        nonlocal taken_at
        if not moment or now - taken_at > _SAME_MOMENT:
            taken_at = now
            moment[:] = [_scripted(meter.sample(now), rank, profile.name) for rank, meter in enumerate(meters)]
        return moment

    return ScriptedNvml(timeline, lambda: server.now)


def _scripted(sample: GpuSample, index: int, name: str) -> ScriptedGpu:
    return ScriptedGpu(
        uuid=f"GPU-00000000-0000-0000-0000-{index:012d}",
        name=name,
        utilization=sample.utilization,
        memory_utilization=sample.memory_utilization,
        sm_clock=sample.sm_clock_mhz,
        memory_clock=sample.memory_clock_mhz,
        max_sm_clock=sample.max_sm_clock_mhz,
        power=sample.power_milliwatts,
        power_limit=sample.power_limit_milliwatts,
        energy=sample.energy_millijoules,
        temperature=sample.temperature,
        event_reasons=sample.reasons,
        memory_used=sample.memory_used,
        memory_total=sample.memory_total,
    )
