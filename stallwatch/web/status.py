"""`/api/v1/status`: what is known now, for people with curl and for `healthcheck` and `check`."""

from collections.abc import Mapping
from typing import Any

import stallwatch
from stallwatch.analysis.findings import EngineFindings, Findings
from stallwatch.analysis.itl import LatencyWindow
from stallwatch.analysis.work import WorkView
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
            "last_success_seconds_ago": _rounded(
                None if findings.canary_last_success is None else now - findings.canary_last_success
            ),
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
        "slo": {
            "judged_seconds": _rounded(seen.judged_seconds),
            "missed_seconds": _rounded(seen.missed_seconds),
            "of_last_5_minutes": {
                "judged_seconds": _rounded(seen.recently_judged),
                "missed_seconds": _rounded(seen.recently_missed),
            },
        },
        "readers": _window(seen.readers) if seen.readers else None,
        "steps": _work(seen.work) if seen.work else None,
        "reader_wait_max_seconds": {
            "engine": _rounded(seen.engine_wait_max),
            "canary": _rounded(seen.canary.wait_max) if seen.canary else None,
        },
        "canary": None
        if seen.canary is None
        else {
            "open_gap_seconds": _rounded(seen.canary.open_gap),
            "streams": {"decoding": seen.canary_running, "waiting": seen.canary_waiting},
            "windows": [_window(window) for window in seen.canary.windows],
        },
    }


def _work(seen: WorkView) -> Mapping[str, Any]:
    model, budget = seen.model, seen.budget
    return {
        "evidence": seen.evidence,
        "scheduled_prefill_tokens": {evidence: round(total) for evidence, total in seen.prefill_totals.items()},
        "prefill_tokens_per_step": {"mean": _rounded(seen.per_step_mean), "max": _rounded(seen.per_step_max)},
        "backlog": {"tokens": _rounded(seen.backlog), "eta_seconds": _rounded(seen.backlog_eta)},
        "decode_baseline_seconds": _rounded(seen.baseline),
        "decode_baseline_reference_seconds": _rounded(seen.baseline_reference),
        "interference": {
            "ratio": {"mean": _rounded(seen.interference_mean), "p95": _rounded(seen.interference_p95)},
            "share": _rounded(seen.interference_share),
            "seconds": _rounded(seen.interference_seconds),
        },
        "spec_acceptance": _rounded(seen.acceptance),
        "step_model": None
        if model is None
        else {
            "a": model.base,
            "c": model.per_decoder,
            "b": {f"{q:g}": seconds for q, seconds in model.per_token.items()},
            "b0": model.per_token_start,
            "b1": model.per_token_context,
            "r2": _rounded(model.r2),
            "steps_with_prefill": model.mixed_steps,
            "context_tokens": [model.context_min, model.context_max],
        },
        "prefill_budget": None
        if budget is None
        else {
            "tokens": budget.tokens,
            "objective_seconds": budget.objective,
            "decoders": budget.decoders,
            "context_tokens": [budget.context_min, budget.context_max],
            "extrapolated": budget.extrapolated,
            "max_num_batched_tokens": {
                "advised": budget.batched_tokens,
                "now": seen.token_budget,
                "at_least_max_num_seqs": budget.max_num_seqs,
            },
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
