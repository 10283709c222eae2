"""`/api/v1/status`: what is known now, for people with curl and for `healthcheck` and `check`."""

from collections.abc import Mapping
from typing import Any

import stallwatch
from stallwatch.analysis.findings import EngineFindings, Findings
from stallwatch.analysis.itl import LatencyWindow
from stallwatch.health import Health
from stallwatch.settings import Settings


def status(
    findings: Findings, health: Health, settings: Settings, *, now: float, hardware: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The document, ready for JSON; times are ages in seconds, and what is not known is null.

    `hardware` is what the GPU source says of itself.
    """
    return {
        "stallwatch": stallwatch.__version__,
        "target": {
            "url": str(settings.engine.url),
            "phase": findings.phase,
            "restarts_seen": findings.restarts,
            "version": findings.version,
            "model": findings.model_name,
            "metrics_missing": sorted(findings.missing_fields),
        },
        "sources": {
            source: {
                "up": state.up,
                "since_seconds": _rounded(now - state.since),
                "last_success_seconds_ago": _rounded(None if state.last_success is None else now - state.last_success),
                "reason": state.reason,
                "detail": state.detail or None,
            }
            for source, state in health.sources.items()
        },
        "engines": {engine.engine: _engine(engine) for engine in findings.engines},
        "canary": {
            "enabled": settings.canary.enabled,
            "mode": settings.canary.mode if settings.canary.enabled else None,
            "requests": {outcome: count for outcome, count in findings.canary_requests.items() if count},
            "skipped": {reason: count for reason, count in findings.canary_skipped.items() if count},
            "tokens": findings.canary_tokens,
        },
        "gpu": hardware,
        "observer": {
            "lag_seconds": _rounded(findings.observer_lag),
            "excluded_gaps": findings.observer_excluded,
            "throttled_seconds": _rounded(findings.observer_throttled),
        },
    }


def _engine(seen: EngineFindings) -> Mapping[str, Any]:
    return {
        "requests": dict(seen.requests),
        "step_age_seconds": _rounded(seen.step_age),
        "decoders": _rounded(seen.decoders),
        "slo": {"judged_seconds": _rounded(seen.judged_seconds), "missed_seconds": _rounded(seen.missed_seconds)},
        "readers": _window(seen.readers) if seen.readers else None,
        "reader_wait_max_seconds": {
            "engine": _rounded(seen.engine_wait_max),
            "canary": _rounded(seen.canary.wait_max) if seen.canary else None,
        },
        "canary": None
        if seen.canary is None
        else {
            "open_gap_seconds": _rounded(seen.canary.open_gap),
            "windows": [_window(window) for window in seen.canary.windows],
        },
    }


def _window(window: LatencyWindow) -> Mapping[str, Any]:
    return {
        "seconds": window.seconds,
        "tokens": window.tokens,
        "itl_seconds": {f"{q:g}": _rounded(value) for q, value in window.itl.items()},
        "time_weighted_seconds": {f"{q:g}": _rounded(value) for q, value in window.time_weighted.items()},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
