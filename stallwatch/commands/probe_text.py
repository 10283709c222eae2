"""How a probe is shown: for eyes, and as JSON. Pure."""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import stallwatch
from stallwatch.analysis.itl import MINIMUM_TOKENS, QUANTILES
from stallwatch.commands.bars import as_rows, drawn, histogram
from stallwatch.commands.terminal import WIDTH, duration
from stallwatch.commands.timing import Timing

SCHEMA = "stallwatch.probe/1"
_PROMPT_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a probe came to, without secrets."""

    url: str
    api: str
    outcome: str
    model: str | None = None
    request_id: str | None = None
    asked: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reason: str | None = None
    detail: str = ""
    timing: Timing | None = None  # None when no stream was opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Debug:
    """What `--debug` adds."""

    method: str
    address: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    events: Sequence[tuple[float, str]]  # seconds since sending, and the data as it came
    events_left_out: int
    metrics: str


def text(told: Told, *, gaps: bool, unicode: bool) -> str:
    """The whole answer for eyes."""
    heads = (f"stallwatch {stallwatch.__version__} probes {told.url}", *_what(told))
    lines = [line for head in heads for line in textwrap.wrap(head, WIDTH, subsequent_indent="  ")]
    timing = told.timing
    if timing is not None and (timing.tokens or timing.open_gap is not None):
        lines += ["", *_figures(timing)]
        if timing.counted:
            rows = drawn(histogram([gap.seconds for gap in timing.counted]), width=WIDTH - 2, unicode=unicode)
            lines += ["", "gaps by length", *(f"  {row}" for row in rows)]
        if gaps and timing.gaps:
            lines += ["", "every gap, at seconds since sending", *_every_gap(timing)]
    return "\n".join(lines) + "\n"


def _what(told: Told) -> Iterator[str]:
    timing = told.timing
    if told.model is not None:
        yield f"model {told.model}, {told.api}, request {told.request_id or '-'}"
    prompt = f"; prompt of {told.prompt_tokens:,} tokens" if told.prompt_tokens is not None else ""
    prompt += f", {told.cached_tokens:,} of them cached" if told.cached_tokens is not None else ""
    got = f"{timing.tokens:,} of {told.asked:,} tokens" if timing is not None else "no stream"
    took = f" in {duration(timing.seconds)}" if timing is not None else ""
    why = ": ".join(part for part in (told.reason if told.reason != told.outcome else "", told.detail) if part)
    why = f" ({why})" if why else ""
    yield f"{told.outcome}{why}: {got}{took}{prompt}"


def _figures(timing: Timing) -> Iterator[str]:
    yield f"{'first token':<22}{duration(timing.ttft):>10}"
    if timing.open_gap is not None:
        yield f"{'still open at the end':<22}{duration(timing.open_gap):>10}"
    if timing.tokens_a_second is not None:
        yield f"{'rate':<22}{timing.tokens_a_second:>10.1f} tokens/s"
    if timing.tokens_a_chunk is not None:
        yield f"{'tokens a chunk':<22}{timing.tokens_a_chunk:>10.2f}, at most {timing.most_tokens}"
    if timing.gaps:
        yield from _quantiles(timing)
    if timing.lateness is not None:
        ours = f"; {timing.excluded} gaps are our own and left out" if timing.excluded else ""
        yield f"{'own lateness':<22}{duration(timing.lateness):>10} at worst{ours}"


def _quantiles(timing: Timing) -> Iterator[str]:
    heads = [f"p{q * 100:g}" for q in QUANTILES]
    yield ""
    yield f"{'':<22}" + "".join(f"{head:>10}" for head in (*heads, "max"))
    for name, values, longest in (
        ("gap (ICL)", timing.icl, timing.icl_max),
        ("per token (ITL)", timing.itl, timing.itl_max),
        ("gap, by time spent", timing.time_weighted, None),
    ):
        shown = [*(values.get(q) for q in QUANTILES), longest]
        yield f"{name:<22}" + "".join(f"{duration(value):>10}" for value in shown)
    most = max(MINIMUM_TOKENS.values())
    if timing.tokens < most:
        yield f"{'':<22}(p95 needs {MINIMUM_TOKENS[0.95]} tokens, p99 {most})"
    yield ""


def _every_gap(timing: Timing) -> Iterator[str]:
    for gap in timing.gaps:
        tokens = f"  {gap.tokens} tokens" if gap.tokens > 1 else ""
        yield f"  {gap.at:>10.4f}  {duration(gap.seconds):>9}{tokens}{'  our own lateness' if gap.ours else ''}"


def debug_text(debug: Debug) -> str:
    """What `--debug` prints below the answer."""
    lines = ["", "request", f"  {debug.method} {debug.address}"]
    lines += [f"  {name}: {value}" for name, value in debug.headers.items()]
    lines += [f"  {line}" for line in json.dumps(_shortened(debug.body), indent=2).splitlines()]
    lines += ["", "events, as they came, at milliseconds since sending"]
    lines += [f"  {at * 1000:>10.2f}  {data}" for at, data in debug.events]
    if debug.events_left_out:
        lines.append(f"  and {debug.events_left_out:,} more")
    lines += ["", "metrics that this stream alone would have given", debug.metrics.rstrip("\n")]
    return "\n".join(lines) + "\n"


def _shortened(body: Mapping[str, Any]) -> Mapping[str, Any]:
    def short(value: Any) -> Any:
        match value:
            case str() if len(value) > _PROMPT_SHOWN:
                return f"{value[:_PROMPT_SHOWN]}... ({len(value):,} characters)"
            case dict():
                return {key: short(one) for key, one in value.items()}
            case list():
                return [short(one) for one in value]
        return value

    return {key: short(value) for key, value in body.items()}


def document(told: Told, *, gaps: bool, debug: Debug | None) -> str:
    """The whole answer as one JSON object; seconds, and null where a figure is not known."""
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "stallwatch": stallwatch.__version__,
        "url": told.url,
        "api": told.api,
        "model": told.model,
        "request_id": told.request_id,
        "outcome": told.outcome,
        "reason": told.reason,
        "detail": told.detail or None,
        "asked_tokens": told.asked,
        "prompt_tokens": told.prompt_tokens,
        "cached_tokens": told.cached_tokens,
        "timing": _timing(told.timing, gaps=gaps) if told.timing is not None else None,
    }
    if debug is not None:
        answer["debug"] = {
            "method": debug.method,
            "address": debug.address,
            "headers": dict(debug.headers),
            "body": debug.body,
            "events": [{"at_seconds": at, "data": data} for at, data in debug.events],
            "events_left_out": debug.events_left_out,
            "metrics": debug.metrics,
        }
    return json.dumps(answer, indent=2, allow_nan=False) + "\n"


def _timing(timing: Timing, *, gaps: bool) -> Mapping[str, Any]:
    def quantiles(values: Mapping[float, float], **more: float | None) -> Mapping[str, float | None]:
        return {f"p{q * 100:g}": values.get(q) for q in QUANTILES} | more

    known: dict[str, Any] = {
        "ttft_seconds": timing.ttft,
        "seconds": timing.seconds,
        "tokens": timing.tokens,
        "chunks": timing.chunks,
        "tokens_a_chunk": timing.tokens_a_chunk,
        "most_tokens_a_chunk": timing.most_tokens,
        "tokens_a_second": timing.tokens_a_second,
        "open_gap_seconds": timing.open_gap,
        "icl_seconds": quantiles(timing.icl, max=timing.icl_max),
        "itl_seconds": quantiles(timing.itl, max=timing.itl_max),
        "time_weighted_seconds": quantiles(timing.time_weighted),
        "histogram": list(as_rows(histogram([gap.seconds for gap in timing.counted]))),
        "observer": {"worst_lag_seconds": timing.lateness, "excluded_gaps": timing.excluded},
    }
    if gaps:
        known["gaps"] = [
            {"at_seconds": gap.at, "seconds": gap.seconds, "tokens": gap.tokens, "ours": gap.ours}
            for gap in timing.gaps
        ]
    return known


def without_secrets(headers: Mapping[str, str], redact: Callable[[str], str]) -> Mapping[str, str]:
    """Headers as they may be shown."""
    hidden = {"authorization", "cookie", "proxy-authorization"}
    return {
        name: f"{value.partition(' ')[0]} (hidden)" if name.lower() in hidden else redact(value)
        for name, value in headers.items()
    }
