"""From what was found out to findings, and from findings to an exit status. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from stallwatch.commands.finding import Area, Finding, Level
from stallwatch.commands.judging_canary import canary_findings
from stallwatch.commands.judging_local import local_findings
from stallwatch.commands.judging_metrics import metrics_findings
from stallwatch.commands.remedies import METRICS, told
from stallwatch.commands.survey import Scrapes, Survey
from stallwatch.commands.terminal import duration
from stallwatch.observations import CacheFacts, Failure
from stallwatch.settings import Settings

OK, FAILED, DEGRADED = 0, 1, 3


def judge(survey: Survey, settings: Settings) -> tuple[Finding, ...]:
    """Everything there is to say, in the order in which it is read."""
    return (
        *server_findings(survey, settings),
        *(metrics_findings(survey.scrapes, settings.engine) if survey.scrapes is not None else ()),
        *(canary_findings(survey, settings) if survey.scrapes is not None else ()),
        *local_findings(survey.local, settings),
        *(
            Finding(
                area=Area.SETTINGS,
                subject=", ".join(caution.about),
                level=Level.WARNING,
                says=caution.problem,
                remedy=caution.remedy,
            )
            for caution in settings.cautions()
        ),
    )


def exit_status(survey: Survey, findings: Iterable[Finding]) -> int:
    """0 fine, 1 not reachable, 3 reachable but degraded."""
    if survey.scrapes is None:
        return FAILED
    return DEGRADED if any(finding.degrades for finding in findings) else OK


def server_findings(survey: Survey, settings: Settings) -> Iterator[Finding]:
    """What answers, and what it is."""
    yield _target(survey, settings)
    scrapes = survey.scrapes
    if scrapes is None:
        return
    yield _phase(scrapes)
    yield _model(survey, scrapes)
    yield _ranks(scrapes)
    yield from _caches(scrapes)


def _target(survey: Survey, settings: Settings) -> Finding:
    url = str(settings.engine.url).rstrip("/")
    waited = f" after {duration(survey.waited)}" if survey.waited >= 1 else ""
    trouble = survey.trouble
    if trouble is None or survey.scrapes is not None:
        return Finding(
            area=Area.SERVER,
            subject="target",
            level=Level.OK,
            says=f"{url} answers{waited}",
            facts={"url": url, "reachable": True, "waited_seconds": survey.waited},
        )
    means, remedy = METRICS[trouble.reason]
    return Finding(
        area=Area.SERVER,
        subject="target",
        level=Level.PROBLEM,
        says=f"{url}{waited}: {means}" + told(trouble),
        remedy=remedy,
        degrades=True,
        facts={
            "url": url,
            "reachable": False,
            "reason": trouble.reason,
            "detail": trouble.detail,
            # vLLM listens only when its model is loaded.
            "may_be_loading": trouble.reason in {Failure.REFUSED, Failure.BUSY},
            "waited_seconds": survey.waited,
        },
    )


def _phase(scrapes: Scrapes) -> Finding:
    version = scrapes.facts.version if scrapes.facts is not None else None
    asleep = bool(scrapes.page.asleep)
    name = f"vLLM {version}" if version else "a version that /version does not tell"
    return Finding(
        area=Area.SERVER,
        subject="version, phase",
        level=Level.WARNING if asleep else Level.OK,
        says=f"{name}, " + ("asleep: nothing is judged and no canary is sent until it wakes" if asleep else "serving"),
        remedy="POST /wake_up wakes it" if asleep else "",
        degrades=asleep,
        facts={"version": version, "phase": "asleep" if asleep else "serving"},
    )


def _model(survey: Survey, scrapes: Scrapes) -> Finding:
    listed = survey.canary.models
    name = scrapes.facts.model_name if scrapes.facts is not None else None
    base = [model for model in listed or () if model.base]
    shown = [
        model.name + (f" (context {model.max_length:,} tokens)" if model.max_length is not None else "")
        for model in base[:3]
    ] or ([name] if name else [])
    more = f" and {len(base) - 3} more names" if len(base) > 3 else ""
    adapters = len(listed or ()) - len(base)
    return Finding(
        area=Area.SERVER,
        subject="model",
        level=Level.OK if shown else Level.WARNING,
        says=(", ".join(shown) + more if shown else "not told by /v1/models nor by the metrics page")
        + (f"; {adapters} adapter{'s' if adapters > 1 else ''}" if adapters else ""),
        remedy="" if shown else "set canary.model",
        facts={"model": name, "models": [model.name for model in base], "adapters": adapters},
    )


def _ranks(scrapes: Scrapes) -> Finding:
    engines = sorted(scrapes.page.engines)
    says = {0: "no engine has counted anything yet", 1: "one"}.get(
        len(engines), f"{len(engines)} data-parallel ranks, each judged on its own: {', '.join(engines[:16])}"
    )
    return Finding(area=Area.SERVER, subject="engines", level=Level.OK, says=says, facts={"engines": engines})


def _caches(scrapes: Scrapes) -> Iterator[Finding]:
    caches = scrapes.facts.caches if scrapes.facts is not None else {}
    by_layout: dict[CacheFacts, list[str]] = {}
    for engine, cache in sorted(caches.items()):
        by_layout.setdefault(cache, []).append(engine)
    for cache, engines in by_layout.items():
        yield _cache(cache, engines, alone=len(by_layout) == 1)
    if not by_layout:
        yield Finding(
            area=Area.SERVER,
            subject="KV cache",
            level=Level.WARNING,
            says="vllm:cache_config_info is not there: its size is not known, and prefill cannot be estimated from it",
            remedy="a newer vLLM tells it",
        )


def _cache(cache: CacheFacts, engines: Sequence[str], *, alone: bool) -> Finding:
    capacity = cache.capacity_tokens
    parts = [
        f"{cache.num_gpu_blocks:,} blocks of {cache.block_size} tokens"
        if cache.num_gpu_blocks is not None and cache.block_size is not None
        else "of unknown size",
        f"room for {capacity:,.0f} tokens" if capacity is not None else "",
        {True: "prefix caching on", False: "prefix caching off", None: ""}[cache.prefix_caching],
        "hybrid" if cache.hybrid else "",
    ]
    return Finding(
        area=Area.SERVER,
        subject="KV cache",
        level=Level.OK if capacity is not None else Level.WARNING,
        says=("" if alone else f"engine {', '.join(engines)}: ") + ", ".join(part for part in parts if part),
        facts={
            "engines": list(engines),
            "block_size": cache.block_size,
            "blocks": cache.num_gpu_blocks,
            "capacity_tokens": capacity,
            "prefix_caching": cache.prefix_caching,
            "hybrid": cache.hybrid,
        },
    )
