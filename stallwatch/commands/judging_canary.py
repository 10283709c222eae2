"""Whether the canary works, and what it costs. Pure."""

from collections.abc import Iterator

from stallwatch.commands.finding import Area, Finding, Level
from stallwatch.commands.remedies import CANARY, told
from stallwatch.commands.survey import CanaryTry, Survey
from stallwatch.commands.terminal import duration, percent
from stallwatch.settings import CanarySettings, Settings

_DAY = 86400.0
_MINUTES_A_DAY = 1440
_SHORT_LIFE = 600.0  # seconds of the server's life below which its average says nothing


def canary_findings(survey: Survey, settings: Settings) -> Iterator[Finding]:
    """All of it."""
    tried = survey.canary
    yield _request(tried, settings)
    if tried.usage_in_chunks is not None:
        yield _usage(survey, tried)
    if settings.canary.enabled:
        yield _cost(survey, settings.canary)


def _request(tried: CanaryTry, settings: Settings) -> Finding:
    url = settings.canary_access.url.rstrip("/")
    if tried.skipped:
        held = settings.canary.enabled and not tried.skipped.startswith("not tried: --no-canary")
        return Finding(
            area=Area.CANARY,
            subject="request",
            level=Level.WARNING if held else Level.OK,
            says=tried.skipped,
            facts={"tried": False},
        )
    facts = {
        "tried": True,
        "url": url,
        "outcome": tried.outcome,
        "model": tried.model.name if tried.model else None,
        "api": settings.canary.api,
        "ttft_seconds": tried.ttft,
        "tokens": tried.tokens,
        "asked": tried.asked,
        "mean_gap_seconds": tried.mean_gap,
        "prompt_tokens": tried.prompt_tokens,
        "cached_tokens": tried.cached_tokens,
    }
    if tried.trouble is not None:
        means, remedy = CANARY[tried.trouble.reason]
        got = f"; {tried.tokens} of {tried.asked} tokens came" if tried.tokens else ""
        return Finding(
            area=Area.CANARY,
            subject="request",
            level=Level.PROBLEM,
            says=f"failed at {url}: {means}{told(tried.trouble)}{got}",
            remedy=remedy,
            degrades=True,
            facts=facts | {"reason": tried.trouble.reason, "detail": tried.trouble.detail},
        )
    name = tried.model.name if tried.model else "?"
    says = f"{tried.tokens} tokens of {name}: the first after {duration(tried.ttft)}"
    if tried.mean_gap is not None:
        says += f", then one every {duration(tried.mean_gap)}"
    if tried.tokens < tried.asked:
        return Finding(
            area=Area.CANARY,
            subject="request",
            level=Level.WARNING,
            says=f"{says}; {tried.asked} were asked for, so the server or a gateway does not honour ignore_eos",
            remedy="set canary.url to vLLM itself; else streams end early and see less",
            facts=facts,
        )
    slow = tried.ttft is not None and tried.ttft > settings.slo.ttft_seconds
    return Finding(
        area=Area.CANARY,
        subject="request",
        level=Level.WARNING if slow else Level.OK,
        says=says + (f"; that is more than slo.ttft_seconds, {duration(settings.slo.ttft_seconds)}" if slow else ""),
        remedy="see what waits or is being prefilled now; a canary meets what every new reader meets" if slow else "",
        facts=facts,
    )


def _usage(survey: Survey, tried: CanaryTry) -> Finding:
    speculative = any(counters.spec_draft_tokens for counters in survey.engines.values())
    return Finding(
        area=Area.CANARY,
        subject="usage per chunk",
        level=Level.OK if tried.usage_in_chunks else Level.WARNING,
        says="sent: each chunk says how many tokens it carries"
        if tried.usage_in_chunks
        else "not sent: each chunk counts as one token, which is wrong under speculative decoding or --stream-interval",
        remedy="" if tried.usage_in_chunks else "set canary.url to vLLM itself; a gateway may drop stream_options",
        degrades=speculative and not tried.usage_in_chunks,
        facts={"works": tried.usage_in_chunks},
    )


def _cost(survey: Survey, settings: CanarySettings) -> Finding:
    tokens, held = _per_day(survey.canary, settings)
    prompts = _prompt_tokens_per_day(survey.canary, settings)
    usual = _generated_per_day(survey)
    if settings.mode == "persistent":
        says = "one stream that is always open: one place in the batch"
        says += f", about {tokens:,.0f} tokens a day" if tokens is not None else ""
    else:
        says = f"{settings.stream_tokens} tokens every {settings.interval_seconds:g} s"
        says += f": {tokens:,.0f} tokens a day" if tokens is not None else ""
        says += f", and {prompts:,.0f} of prompts" if prompts is not None else ""
        says += f"; a place in the batch for {percent(held)} of the time" if held is not None else ""
    share = tokens / usual if tokens is not None and usual else None
    if share is not None:
        says += f"; {percent(share)} of what this server has generated a day since its start"
    return Finding(
        area=Area.CANARY,
        subject="cost",
        level=Level.OK,
        says=says,
        facts={
            "mode": settings.mode,
            "tokens_per_day": tokens,
            "prompt_tokens_per_day": prompts,
            "batch_place_share": held,
            "share_of_generated": share,
        },
    )


def _per_day(tried: CanaryTry, settings: CanarySettings) -> tuple[float | None, float | None]:
    """Generated tokens a day as configured, and the share of the time in which a stream is open."""
    limit = None if settings.token_budget is None else float(settings.token_budget * _MINUTES_A_DAY)
    if settings.mode == "persistent":
        if not tried.mean_gap:
            return limit, 1.0
        flat_out = _DAY / tried.mean_gap
        return (flat_out if limit is None else min(flat_out, limit)), 1.0
    tokens = _DAY / settings.interval_seconds * settings.stream_tokens
    if limit is not None:
        tokens = min(tokens, limit)
    if tried.mean_gap is None or tried.ttft is None:
        return tokens, None
    lasts = tried.ttft + tried.mean_gap * (settings.stream_tokens - 1)
    return tokens, min(1.0, tokens / settings.stream_tokens * lasts / _DAY)


def _prompt_tokens_per_day(tried: CanaryTry, settings: CanarySettings) -> float | None:
    if tried.prompt_tokens is None or settings.mode == "persistent":
        return None
    tokens, _ = _per_day(tried, settings)
    return None if tokens is None else tokens / settings.stream_tokens * tried.prompt_tokens


def _generated_per_day(survey: Survey) -> float | None:
    scrapes = survey.scrapes
    started = scrapes.facts.process_start_unix if scrapes is not None and scrapes.facts is not None else None
    if started is None:
        return None
    lived = survey.wall_time - started
    generated = sum(counters.generation_tokens or 0.0 for counters in survey.engines.values())
    return generated / lived * _DAY if lived >= _SHORT_LIFE and generated > 0 else None
