"""What an open page hears every second: how things stand, the newest slots of the timeline, and the last stalls."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from stallwatch.analysis.findings import Findings
from stallwatch.health import Health
from stallwatch.settings import Settings
from stallwatch.web.sentences import advice, reservations, verdict
from stallwatch.web.stalls import stall_document
from stallwatch.web.status import status

SLOTS_SECONDS: Final = 5.0
"""Of the timeline in each event: late figures find their slots, and an event that was missed leaves no hole."""

_STALLS_SECONDS: Final = 60.0  # after its end for which a stall is in each event


def live(
    findings: Findings,
    health: Health,
    settings: Settings,
    *,
    now: float,
    wall_offset: float,
    hardware: Mapping[str, Any],
    timeline: Callable[[], Mapping[str, Any]],
) -> Callable[[], Mapping[str, Any]]:
    """The event's content, by a call that takes a millisecond and may be made in a thread.

    `timeline` gives the newest slots; `wall_offset` turns monotonic times into unix times, in seconds.
    """
    sources = Health(sources=dict(health.sources))

    def document() -> Mapping[str, Any]:
        said = verdict(findings, sources)
        return {
            "at_unix": round(now + wall_offset, 3),
            "verdict": {
                "state": said.state,
                "sentence": said.sentence,
                "more": said.more,
                "stall": said.stall,
                "cause": said.cause,
            },
            "objectives": {
                "itl_seconds": settings.slo.itl_seconds,
                "ttft_seconds": settings.slo.ttft_seconds,
                "target": settings.slo.target,
            },
            "advice": {
                engine.engine: {
                    "sentence": advice(engine.work, settings.slo.itl_seconds),
                    "holds_for": reservations(engine.work),
                }
                for engine in findings.engines
            },
            "status": status(findings, sources, settings, now=now, hardware=hardware),
            "stalls": [
                stall_document(stall, now, wall_offset=wall_offset)
                for engine in findings.engines
                for stall in (engine.stalls.open, *engine.stalls.closed)
                if stall is not None and (stall.end is None or now - stall.end <= _STALLS_SECONDS)
            ],
            "timeline": timeline(),
        }

    return document
