"""Writes the generated parts of the documentation: `python -m tests.docs --update`; without the flag it compares."""

import sys
from pathlib import Path

from stallwatch import catalogue, configuration
from stallwatch.simulator import scenarios

ROOT = Path(__file__).parents[1]


def generated() -> dict[Path, str]:
    """Every file that has a generated part, with what it must hold."""
    reference = catalogue.reference("markdown")
    simulator = ROOT / "docs" / "simulator.md"
    return {
        simulator: _between(simulator, scenarios.reference_markdown(), "scenarios"),
        **{page: _between(page, reference, "metrics") for page in (ROOT / "README.md", ROOT / "docs" / "metrics.md")},
        ROOT / "docs" / "configuration.md": configuration.reference_markdown(),
    }


def _between(page: Path, text: str, what: str) -> str:
    begin, end = f"<!-- {what}:begin -->", f"<!-- {what}:end -->"
    head, _, rest = page.read_text().partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{text}\n{end}{tail}"


def main() -> int:
    """Updates or compares; returns an exit code."""
    update = "--update" in sys.argv
    stale = {path: text for path, text in generated().items() if path.read_text() != text}
    for path, text in stale.items():
        if update:
            path.write_text(text)
        print(f"{'written' if update else 'stale'}: {path.relative_to(ROOT)}")
    return 1 if stale and not update else 0


if __name__ == "__main__":
    sys.exit(main())
