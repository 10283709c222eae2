"""Pages in one file: data, scripts and styles inside, nothing fetched, and nothing else allowed to run.

What comes from a server that was watched is data: it is read by scripts that make text of it, never markup.
"""

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stallwatch.drawing.files import PLOTTING, STYLES, bundled, joined
from stallwatch.drawing.plain import as_json


def self_contained(title: str, data: Mapping[str, Any], entry: Path, *, styles: Sequence[Path] = ()) -> str:
    """A whole page that draws itself from `data`.

    Args:
        title: Of the window, any text.
        data: For JSON; the script finds it by `data()` of `dom.js`. Numbers that are not finite become null.
        entry: The module that draws into `<main id="main">`; what it imports comes along.
        styles: Style sheets after those of the house.
    """
    scripts = [joined(PLOTTING), bundled(entry)]
    style = joined([*STYLES, *styles])
    allowed = " ".join(_hash(script) for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<main id="main"><noscript>This page draws itself with a script; the same findings are in the Markdown '
        "beside it.</noscript></main>\n"
        f'<script type="application/json" id="data">{_for_script(data)}</script>\n'
        f"<script>{scripts[0]}</script>\n"
        f'<script type="module">{scripts[1]}</script>\n</body>\n</html>\n'
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _for_script(data: Mapping[str, Any]) -> str:
    """JSON in which nothing can end the element that holds it."""
    return as_json(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
