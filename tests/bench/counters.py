"""What GPU counters cost us, and what our plugin costs a step of vLLM."""

import asyncio
import time
from pathlib import Path

from stallwatch.settings import GpuSettings
from stallwatch.sources.blocking import BlockingThread
from stallwatch.sources.gpu import Gpu
from tests.bench.figures import Figure, rank
from tests.nvml.fake import HOPPER, load
from tests.test_vllm_plugin import Shown, bench_step_cost

GPUS, HERTZ = 8, 5
ROUNDS, POLLS = 9, 100


def counter_figures(folder: Path) -> list[Figure]:
    """Both."""
    return [*_gpus(folder), *_plugin()]


def _gpus(folder: Path) -> list[Figure]:
    """CPU time of polls through the real `pynvml` and a fake NVML library, whose calls cost nothing."""
    fake = load(folder)
    fake.play(f"gpus {GPUS}\n" + HOPPER)
    blocking = BlockingThread("nvml-bench", deadline_seconds=5)
    source = Gpu(GpuSettings(), environ={}, clock=lambda: fake.now, run_blocking=blocking, system_memory=lambda: None)

    async def measured() -> list[float]:
        await source.poll()
        found = []
        for _ in range(ROUNDS):
            started = time.process_time()
            for _ in range(POLLS):
                fake.now += 1 / HERTZ
                await source.poll()
            found.append((time.process_time() - started) / POLLS)
        return found

    try:
        shares = [100 * HERTZ * seconds for seconds in asyncio.run(measured())]
    finally:
        blocking.close()
        fake.unload()
    said = f"{rank(shares, 0.5):.2f} % of a core ({min(shares):.2f} to {max(shares):.2f}), the driver's own time apart"
    return [Figure(f"{GPUS} GPUs polled {HERTZ} times a second", said)]


def _plugin() -> list[Figure]:
    costs = [bench_step_cost(Shown().logger()) for _ in range(ROUNDS)]
    said = f"{rank(costs, 0.5):.2f} µs ({min(costs):.2f} to {max(costs):.2f})"
    return [Figure("our plugin in vLLM, a step", said, "5 µs")]
