"""`python -m stallwatch.simulator`: a simulated vLLM server on a port, without the rest of stallwatch."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from stallwatch.simulator.scenarios import SCENARIOS
from stallwatch.simulator.server import run_simulator, until_signalled


def main(argv: Sequence[str] | None = None) -> int:
    """Serves one scenario until SIGTERM or SIGINT, or until its end with `--once`."""
    parser = argparse.ArgumentParser(prog="python -m stallwatch.simulator", description="A simulated vLLM server.")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="long-prefill")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--speed", type=float, default=1.0, help="simulated seconds in a second")
    parser.add_argument("--once", action="store_true", help="end when the scenario ends")
    options = parser.parse_args(argv)
    scenario = SCENARIOS[options.scenario]
    sys.stderr.write(f"{scenario.name}: {scenario.sentence}\nhttp://{options.host}:{options.port}\n")
    until = scenario.duration if options.once else None
    served = run_simulator(scenario, host=options.host, port=options.port, speed=options.speed, until=until)
    asyncio.run(until_signalled(served))
    return 0


if __name__ == "__main__":
    sys.exit(main())
