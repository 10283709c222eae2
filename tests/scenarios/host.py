"""The host under a scenario, as files below a folder: what procfs and sysfs of this machine would say."""

import asyncio
from pathlib import Path

from stallwatch.simulator.cost import Cause
from stallwatch.simulator.frontend import SimulatedServer
from tests.harness import Beside

_EVERY = 0.25


def host(folder: Path) -> Beside:
    """Plays memory pressure and a congested link where the scenario's disturbances come from them."""
    folder.joinpath("proc/pressure").mkdir(parents=True)
    port = folder / "sys/class/infiniband/mlx5_0/ports/1"
    for part in ("counters", "hw_counters"):
        (port / part).mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")

    async def play(server: SimulatedServer) -> None:
        stalled, marks = 0.0, 0.0
        while True:
            at = server.now
            causes = {slow.cause for slow in server.scenario.slowdowns if slow.start <= at < slow.end}
            stalled += _EVERY * (0.93 if Cause.HOST_PRESSURE in causes else 0.001)
            marks += _EVERY * (4000.0 if Cause.INTERCONNECT in causes else 2.0)
            some = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={int(stalled * 1e6)}\n"
            for resource in ("memory", "io"):
                (folder / "proc/pressure" / resource).write_text(some + some.replace("some", "full"))
            (port / "hw_counters/np_ecn_marked_roce_packets").write_text(f"{int(marks)}\n")
            (port / "hw_counters/np_cnp_sent").write_text(f"{int(marks)}\n")
            await asyncio.sleep(_EVERY)

    return play


def rooms(folder: Path) -> dict[str, object]:
    """Settings that let the sidecar read these files."""
    return {"enabled": True, "proc_path": str(folder / "proc"), "sys_path": str(folder / "sys")}
