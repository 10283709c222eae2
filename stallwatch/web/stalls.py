"""`/api/v1/stalls`: the stall that is going on and the last ones that closed, each with the evidence for its cause."""

from collections.abc import Mapping
from typing import Any

from stallwatch.analysis.causes import WHAT_TO_TRY, runbook
from stallwatch.analysis.episodes import Stall
from stallwatch.analysis.findings import Findings


def stalls(findings: Findings, *, wall_offset: float) -> Mapping[str, Any]:
    """All that are remembered, open ones first, then the newest first; ready for JSON.

    `wall_offset` turns a monotonic time into unix time, in seconds.
    """
    seen = [stall for engine in findings.engines for stall in (engine.stalls.open, *engine.stalls.closed) if stall]
    seen.sort(key=lambda stall: (stall.end is not None, -stall.start, stall.id))
    return {"stalls": [stall_document(stall, findings.at, wall_offset=wall_offset) for stall in seen]}


def stall(findings: Findings, wanted: str, *, wall_offset: float) -> Mapping[str, Any] | None:
    """One of them by its id; None when it is not remembered."""
    for engine in findings.engines:
        for seen in (engine.stalls.open, *engine.stalls.closed):
            if seen is not None and seen.id == wanted:
                return stall_document(seen, findings.at, wall_offset=wall_offset)
    return None


def stall_document(seen: Stall, now: float, *, wall_offset: float) -> Mapping[str, Any]:
    """One stall, ready for JSON; seconds and unix times."""
    return {
        "id": seen.id,
        "engine": seen.engine,
        "kind": seen.kind,
        "open": seen.end is None,
        "start_unix": round(seen.start + wall_offset, 3),
        "end_unix": None if seen.end is None else round(seen.end + wall_offset, 3),
        "detected_unix": round(seen.detected + wall_offset, 3),
        "duration_seconds": round(seen.duration(now), 3),
        "stall_seconds": round(seen.seconds, 3),
        "longest_gap_seconds": round(seen.longest, 3),
        "reader_seconds_lost": round(seen.reader_seconds, 3),
        "cause": seen.cause,
        "evidence": [
            {"cause": evidence.cause, "explains_seconds": round(evidence.seconds, 3), "what": evidence.sentence}
            for evidence in seen.evidence
        ],
        "largest_prompt_tokens": seen.culprit_tokens,
        "notes": list(seen.notes),
        "what_to_try": WHAT_TO_TRY[seen.cause],
        "runbook": runbook(seen.cause),
    }
