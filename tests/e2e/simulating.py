"""`python -m tests.e2e.simulating PORT SCENARIO [SOONER]`: a simulated server whose trouble comes that much sooner.

A scenario is not begun anew when it is over: the server goes on with the readers that it has.
"""

import asyncio
import sys
from dataclasses import replace

from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.scenarios import SCENARIOS
from stallwatch.simulator.server import run_simulator, until_signalled


def sooner(scenario: Scenario, seconds: float) -> Scenario:
    """The scenario with its single requests and its pauses that much sooner; readers are there from the start."""
    arrivals = tuple(replace(arrival, at=arrival.at - seconds) for arrival in scenario.load.arrivals)
    pauses = tuple(replace(pause, at=pause.at - seconds) for pause in scenario.pauses)
    return replace(scenario, load=replace(scenario.load, arrivals=arrivals), pauses=pauses)


if __name__ == "__main__":
    port, name, *rest = sys.argv[1:]
    chosen = sooner(SCENARIOS[name], float(rest[0]) if rest else 0.0)
    asyncio.run(until_signalled(run_simulator(chosen, port=int(port))))
