"""`python -m tests.bench` (`make bench`): measures, prints figures with their spread, and writes the README's table.

It takes 8 minutes, measures time and wants the machine for itself. What needs the real vLLM is left out, and said so,
where its environment is not there.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.bench import figures, pages
from tests.bench.beside import cost_figures
from tests.bench.counters import counter_figures
from tests.bench.figures import Figure
from tests.bench.gaps import gap_figures
from tests.vllm.environment import Environment, find

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
PARTS = ("pages", "counters", "gaps", "vllm")
HOW = "python3 tests/vllm/environment.py builds its environment (4 GB, once), then run make bench again"


def measure(wanted: Sequence[str], environment: Environment | None, folder: Path) -> tuple[list[Figure], list[str]]:
    """The figures of the parts that are wanted, and what was left out."""
    parts: dict[str, Callable[[], list[Figure]]] = {
        "pages": pages.parsing,
        "counters": partial(counter_figures, folder),
        "gaps": partial(gap_figures, environment, folder),
    }
    left_out = []
    if environment is not None:
        parts["vllm"] = partial(cost_figures, environment, folder)
    else:
        if "gaps" in wanted:
            left_out.append("the gap error of `vllm bench serve`")
        if "vllm" in wanted:
            left_out.append("CPU time, memory and observer effect beside a real vLLM")
    found = []
    for name in wanted:
        if name in parts:
            begun = time.monotonic()
            found += parts[name]()
            sys.stderr.write(f"bench: {name} took {time.monotonic() - begun:.0f} s\n")
    return found, left_out


def main() -> int:
    """Returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measures; about 8 minutes.")
    parser.add_argument("--update", action="store_true", help="write the README's table; only a whole run may")
    parser.add_argument("--only", action="append", choices=PARTS, default=[], help="a part; may be repeated")
    parser.add_argument("--without-vllm", action="store_true", help="leave out what needs the real vLLM")
    options = parser.parse_args()
    environment = None if options.without_vllm else find()
    before = figures.load()
    with tempfile.TemporaryDirectory(prefix="stallwatch-bench-") as folder:
        found, left_out = measure(options.only or PARTS, environment, Path(folder))
    where = f"{figures.machine()}; load average {before:.1f} before, {figures.load():.1f} after (one core's worth is 1)"
    text = f"{where[0].upper()}{where[1:]}:\n\n{figures.table(found)}"
    print(text)
    for what in left_out:
        print(f"left out: {what}; {HOW}")
    if not options.update:
        return 0
    if options.only or left_out:
        print("the README's table is left as it is: not everything was measured", file=sys.stderr)
        return 1
    head, _, rest = README.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    if not tail:
        print(f"the README has no {BEGIN} and {END}", file=sys.stderr)
        return 1
    README.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    print(f"written: {README.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
