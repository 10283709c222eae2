"""What the metrics page is worth: the filter, its cost, its gaps, and the evidence for prefill. Pure."""

import math
from collections.abc import Iterator
from statistics import median

from stallwatch.analysis.prefill import Evidence
from stallwatch.commands.evidence import Offer, offered, worst
from stallwatch.commands.finding import Area, Finding, Level
from stallwatch.commands.survey import Scrapes
from stallwatch.commands.terminal import duration, percent
from stallwatch.observations import Lane
from stallwatch.settings import EngineSettings
from stallwatch.sources import lanes
from stallwatch.sources.families import ROWS, rows_of

_DETECTION = frozenset(row.field for row in rows_of(Lane.DETECTION))
_NAMES = {Lane.DETECTION: "detection", Lane.ESTIMATOR: "estimator", Lane.FULL: "full page"}
_OFTEN = 1.01  # an interval longer than asked for by more than rounding


def metrics_findings(scrapes: Scrapes, settings: EngineSettings) -> Iterator[Finding]:
    """All of it."""
    yield _filter(scrapes)
    yield _cost(scrapes, settings)
    yield _missing(scrapes)
    if scrapes.page.engines:
        yield _evidence(scrapes)
    if scrapes.failed:
        reasons = sorted({f"{one.reason}: {one.detail}" for one in scrapes.failed})
        yield Finding(
            area=Area.METRICS,
            subject="failures",
            level=Level.WARNING,
            says=f"{len(scrapes.failed)} scrapes failed while others were answered ({'; '.join(reasons)})",
            remedy="look at vLLM's log; under a long prefill its front end may be late: raise engine.timeout_seconds",
            facts={"failed": len(scrapes.failed)},
        )
    if scrapes.page.garbage_lines:
        yield Finding(
            area=Area.METRICS,
            subject="page",
            level=Level.WARNING,
            says=f"{scrapes.page.garbage_lines} lines of the page cannot be read",
            remedy="is there a proxy that changes it?",
        )


def _filter(scrapes: Scrapes) -> Finding:
    works = scrapes.filter_works
    if works is None:
        return Finding(
            area=Area.METRICS,
            subject="name[] filter",
            level=Level.WARNING,
            says="not tried: no filtered request was answered",
            remedy="run the check again",
            facts={"works": None},
        )
    return Finding(
        area=Area.METRICS,
        subject="name[] filter",
        level=Level.OK if works else Level.WARNING,
        says="honoured: a scrape asks only for the names it needs"
        if works
        else "not honoured: every scrape brings the whole page, so it is read once a second at most",
        remedy=""
        if works
        else "set engine.url to vLLM itself; with --api-server-count above 1 vLLM answers no filtered request",
        degrades=not works,
        facts={"works": works},
    )


def _cost(scrapes: Scrapes, settings: EngineSettings) -> Finding:
    medians = {lane: median(seconds) for lane, seconds in scrapes.seconds.items() if seconds}
    pace = lanes.Pace(settings.interval_seconds, settings.full_interval_seconds, settings.max_scrape_duty)
    asked = _plan(scrapes, medians, lanes.Pace(pace.interval, pace.full_interval, math.inf))
    planned = _plan(scrapes, medians, pace)
    shown = ", ".join(
        f"{_NAMES[lane]} {duration(seconds)} (median of {len(scrapes.seconds[lane])})"
        for lane, seconds in medians.items()
    )
    over = planned.detection > asked.detection * _OFTEN
    says = (
        f"{shown}; while the engine works that is {percent(planned.duty)} of the server's time, "
        f"of {percent(pace.max_duty)} allowed"
    )
    if over:
        says += (
            f"; to keep to that it is asked every {duration(planned.detection)} instead of {duration(pace.interval)}"
        )
    if planned.at_floors:
        says += "; rarer would be of no use, so the limit is exceeded"
    return Finding(
        area=Area.METRICS,
        subject="scrape cost",
        level=Level.WARNING if over or planned.at_floors else Level.OK,
        says=says,
        remedy="raise engine.max_scrape_duty if the server can spare it" if over else "",
        facts={
            "seconds": {str(lane): seconds for lane, seconds in medians.items()},
            "samples": {str(lane): len(seconds) for lane, seconds in scrapes.seconds.items()},
            "page_bytes": scrapes.page.bytes,
            "duty": planned.duty,
            "duty_as_configured": asked.duty,
            "duty_limit": pace.max_duty,
            "interval_seconds": planned.detection,
        },
    )


def _plan(scrapes: Scrapes, medians: dict[Lane, float], pace: lanes.Pace) -> lanes.Plan:
    full = medians.get(Lane.FULL, 0.0)
    if scrapes.filter_works is False:
        return lanes.unfiltered_plan(pace, full=full)
    detection = medians.get(Lane.DETECTION, 0.0)
    return lanes.plan(pace, detection=detection, estimator=medians.get(Lane.ESTIMATOR, detection), full=full)


def _missing(scrapes: Scrapes) -> Finding:
    missing = scrapes.page.missing
    wanted = len({row.field for row in ROWS if not row.optional})
    if not scrapes.page.engines:
        return Finding(
            area=Area.METRICS,
            subject="figures",
            level=Level.WARNING,
            says="none is there yet: this server shows them with its first request",
            remedy="send it a request, or run the check without --no-canary",
            facts={"missing": sorted(missing)},
        )
    if not missing:
        return Finding(
            area=Area.METRICS,
            subject="figures",
            level=Level.OK,
            says=f"all {wanted} are there",
            facts={"missing": []},
        )
    vital = sorted(missing & _DETECTION)
    return Finding(
        area=Area.METRICS,
        subject="figures",
        level=Level.PROBLEM if vital else Level.WARNING,
        says=f"{len(missing)} of {wanted} are missing: {', '.join(sorted(missing))}"
        + (f"; without {', '.join(vital)} freezes are seen late or not at all" if vital else ""),
        remedy="a newer vLLM has them; what needs them stays absent, never 0",
        degrades=True,
        facts={"missing": sorted(missing), "vital": vital},
    )


def _evidence(scrapes: Scrapes) -> Finding:
    facts = scrapes.facts
    caches = facts.caches if facts is not None else {}
    version = facts.version if facts is not None else None
    offers = {
        engine: offered(counters, caches.get(engine), version) for engine, counters in scrapes.page.engines.items()
    }
    offer = worst(offers)
    poor = offer.evidence in {Evidence.COMPLETION, Evidence.UNKNOWN}
    return Finding(
        area=Area.METRICS,
        subject="prefill evidence",
        level=Level.WARNING if poor else Level.OK,
        says=f"{_BY[offer.evidence]}" + "".join(f"; {obstacle}" for obstacle in offer.obstacles),
        options=_climbing(offer),
        degrades=offer.evidence is Evidence.UNKNOWN,
        facts={
            "evidence": {engine: str(one.evidence) for engine, one in offers.items()},
            "obstacles": list(offer.obstacles),
            "better": [
                {"evidence": climb.evidence, "needs": climb.needs, "since": climb.since, "cost": climb.cost}
                for climb in offer.better
            ],
        },
    )


_BY = {
    Evidence.PLUGIN: "plugin: every step's prompt tokens, exact",
    Evidence.MFU: "mfu: prompt tokens between two polls, exact once calibrated",
    Evidence.BALANCE: "balance: estimated from default flags",
    Evidence.COMPLETION: "completion: prompt tokens are known only when a prefill has ended, too late to blame it",
    Evidence.UNKNOWN: "unknown: nothing tells how many prompt tokens are computed",
}


def _climbing(offer: Offer) -> tuple[str, ...]:
    return tuple(
        f"{climb.evidence}: {climb.gives}; needs {climb.needs} (vLLM {climb.since} or later), costs {climb.cost}"
        for climb in reversed(offer.better)
    )
