"""How findings are shown: a table for a terminal of 100 columns, and JSON. Pure."""

import json
import textwrap
from collections.abc import Sequence
from itertools import groupby

import stallwatch
from stallwatch.commands.finding import Finding, Level
from stallwatch.commands.terminal import WIDTH

SCHEMA = "stallwatch.check/1"
STATUSES = {0: "ok", 1: "failed", 3: "degraded"}

_LEVEL_WIDTH = max(len(level) for level in Level)


def table(url: str, findings: Sequence[Finding], status: int) -> str:
    """Everything, a finding a row, wrapped; what to do stands below, behind an arrow."""
    subjects = max((len(finding.subject) for finding in findings if len(finding.subject) <= 20), default=0)
    lines = [f"stallwatch {stallwatch.__version__} checks {url}"]
    for area, members in groupby(findings, key=lambda finding: finding.area):
        lines += ["", area]
        for finding in members:
            lines += _row(finding, subjects)
    lines += ["", _verdict(findings, status)]
    return "\n".join(lines) + "\n"


def _row(finding: Finding, subjects: int) -> list[str]:
    mark = finding.level.upper() if finding.level is Level.PROBLEM else str(finding.level)
    head = f"  {mark:<{_LEVEL_WIDTH}}  "
    indent = " " * (len(head) + subjects + 2)
    if len(finding.subject) <= subjects:
        rows = _wrapped(finding.says, f"{head}{finding.subject:<{subjects}}  ", indent)
    else:
        rows = [*_wrapped(finding.subject, head, " " * len(head)), *_wrapped(finding.says, indent, indent)]
    for way in (finding.remedy, *finding.options):
        if way:
            rows += _wrapped(way, f"{indent}-> ", f"{indent}   ")
    return rows


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False) or [
        first.rstrip()
    ]


def _verdict(findings: Sequence[Finding], status: int) -> str:
    if status == 1:
        return "failed: the server cannot be watched (exit 1)"
    degrading = [finding.subject for finding in findings if finding.degrades]
    warnings = sum(finding.level is not Level.OK and not finding.degrades for finding in findings)
    if degrading:
        return "\n".join(textwrap.wrap(f"degraded: {', '.join(degrading)} (exit 3)", WIDTH))
    more = f", with {warnings} {'warning' if warnings == 1 else 'warnings'}" if warnings else ""
    return f"ok{more} (exit 0)"


def document(url: str, findings: Sequence[Finding], status: int) -> str:
    """The same as one JSON object."""
    return (
        json.dumps(
            {
                "schema": SCHEMA,
                "stallwatch": stallwatch.__version__,
                "target": url,
                "status": STATUSES[status],
                "exit_status": status,
                "findings": [
                    {
                        "area": finding.area,
                        "subject": finding.subject,
                        "level": finding.level,
                        "says": finding.says,
                        "remedy": finding.remedy or None,
                        "options": list(finding.options),
                        "degrades": finding.degrades,
                        "facts": dict(finding.facts),
                    }
                    for finding in findings
                ],
            },
            indent=2,
            allow_nan=False,
            default=str,
        )
        + "\n"
    )
