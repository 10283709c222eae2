"""The files that a browser gets: scripts and styles, ours and the vendored plotting library."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).parent / "static"

PLOTTING: Final = (STATIC / "uplot.iife.min.js",)
"""Classic scripts that go before the modules: uPlot 1.6.32 from the npm registry, its licence beside it."""

STYLES: Final = (STATIC / "uplot.min.css", STATIC / "look.css")

_IMPORT: Final = re.compile(r'^import \{([\w\s,]*)\} from "\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)


def bundled(entry: Path) -> str:
    """A module with all that it imports as one script, so that a page needs no network.

    Modules are kept plain for it: named imports of files beside them or in `STATIC`, without renaming, and no two
    modules with a name in common at their top.
    """
    return "".join(_EXPORT.sub("", _IMPORT.sub("", path.read_text("utf-8"))) for path in _modules(entry, []))


def _modules(entry: Path, seen: list[Path]) -> Iterator[Path]:
    """What it imports first, then itself."""
    seen.append(entry)
    for _, name in _IMPORT.findall(entry.read_text("utf-8")):
        path = next(folder / name for folder in (entry.parent, STATIC) if (folder / name).is_file())
        if path not in seen:
            yield from _modules(path, seen)
    yield entry


def joined(paths: Sequence[Path]) -> str:
    """Texts of files one after another."""
    return "\n".join(path.read_text("utf-8") for path in paths)
