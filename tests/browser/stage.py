"""What the browser tests look at: the demo with a scenario of their own: python -m tests.browser.stage."""

import asyncio
import sys

from stallwatch import demo, logs
from stallwatch.simulator.cost import Cause
from stallwatch.simulator.load import Arrival, Load, Users
from stallwatch.simulator.scenario import Scenario, ServerConfig, StallKind

HOSTILE = '"><img src=x onerror="window.broken=1"></script><script>window.broken=1</script>{{7*7}}'
"""A model's name that would be markup, if it were taken for it."""

FREEZE_AT = 15.0
"""Seconds into the scenario."""

STAGE = Scenario(
    name="stage",
    sentence=f"Three readers, a long prompt at {FREEZE_AT:g} s.",
    duration=600.0,
    cause=Cause.PREFILL,
    kind=StallKind.DECODE,
    server=ServerConfig(model=HOSTILE),
    load=Load(
        (Arrival(at=FREEZE_AT, prompt_tokens=16_000, output_tokens=50),),
        (Users(count=3, prompt_tokens=64, output_tokens=4_000, stagger=0.2),),
    ),
)


def main(target_port: int, web_port: int) -> int:
    """Shows the scenario until SIGTERM."""
    logs.configure("error", "auto", stream=sys.stderr)
    options = demo.DemoOptions((STAGE,), target_port, web_port)
    return asyncio.run(demo.run(options, out=sys.stdout))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
