"""A report as Markdown: what happened, why, and what readers and engine did in quiet and in stalls."""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from stallwatch import configuration
from stallwatch.commands.terminal import duration, percent

_ACTIVE = re.compile(r"([\\`*_{}\[\]<>()#+!|~&])")


def markdown(title: str, found: Mapping[str, Any]) -> str:
    """The summary; `found` is what `reporting.reported` gathered."""
    return "\n".join(_lines(title, found)).rstrip("\n") + "\n"


def _lines(title: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {_safe(title)}"
    yield ""
    yield _watched(found)
    yield ""
    if not found["stalls"]:
        yield "No stalls."
    for stall in found["stalls"]:
        yield from _stall(stall)
    for sentence in found["differs"]:
        yield f"> {_safe(sentence)}"
        yield ""
    for engine, rows in found["compared"].items():
        name = f" of engine {_safe(engine)}" if len(found["compared"]) > 1 else ""
        yield f"## Quiet and stalled{name}"
        yield ""
        yield "| | quiet: typical | most | stalled: typical | most |"
        yield "|---|---:|---:|---:|---:|"
        for row in rows:
            cells = [
                _figure(row["unit"], row[when][what]) for when in ("quiet", "stalled") for what in ("typical", "most")
            ]
            yield f"| {row['figure']}{' (sum)' if row['summed'] else ''} | {' | '.join(cells)} |"
        yield ""
    yield from _latency(found)
    for engine, said in found["advice"].items():
        name = f" (engine {_safe(engine)})" if len(found["advice"]) > 1 else ""
        yield f"Token budget{name}: {_safe(said['sentence'])} {_safe(said['holds_for'])}".rstrip()
        yield ""
    yield from _small_print(found)


def _watched(found: Mapping[str, Any]) -> str:
    server = found["server"] or {}
    parts = [f"vLLM {_safe(server['version'])}" if server.get("version") else "a vLLM of unknown version"]
    if server.get("model"):
        parts.append(f"with {_safe(server['model'])}")
    names = sorted({gpu["name"] or "GPU" for gpu in found["gpus"]})
    if names:
        parts.append(f"on {len(found['gpus'])} x {', '.join(_safe(name) for name in names)}")
        parts.append(f"(driver {_safe(found['driver'] or 'unknown')})")
    length = found["ended_unix"] - found["began_unix"]
    return f"{' '.join(parts)}; {duration(length)} from {_safe(found['began'])}."


def _stall(stall: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {_clock(stall['start_unix'])} UTC: {_safe(stall['sentence'])}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| cause | {_safe(stall['cause'])} |"
    yield f"| kind | {_safe(stall['kind'])} |"
    yield f"| engine | {_safe(stall['engine'])} |"
    yield f"| lasted | {duration(stall['duration_seconds'])}{' (open when written)' if stall['open'] else ''} |"
    yield f"| longest gap | {duration(stall['longest_gap_seconds'])} |"
    yield f"| readers lost | {stall['reader_seconds_lost']:,.1f} reader-seconds |"
    if stall["largest_prompt_tokens"] is not None:
        yield f"| largest prompt | {stall['largest_prompt_tokens']:,.0f} tokens |"
    yield ""
    for one in stall["evidence"]:
        yield f"- **{_safe(one['cause'])}** explains {duration(one['explains_seconds'])}: {_safe(one['what'])}"
    if not stall["evidence"]:
        yield "- no evidence: nothing that was seen explains it"
    for note in stall["notes"]:
        yield f"- {_safe(note)}"
    yield ""
    yield f"Try: {_safe(stall['what_to_try'])} ({stall['runbook']})."
    yield ""


def _latency(found: Mapping[str, Any]) -> Iterator[str]:
    yield "## Inter-token latency at the end"
    yield ""
    yield "| engine | quantile | by tokens | by time | all readers |"
    yield "|---|---|---:|---:|---:|"
    for engine, seen in found["status"]["engines"].items():
        windows = seen["canary"]["windows"] if seen["canary"] else []
        window: Mapping[str, Any] = windows[0] if windows else {"itl_seconds": {}, "time_weighted_seconds": {}}
        readers = seen["readers"] or {"itl_seconds": {}}
        for q, name in (("0.5", "p50"), ("0.95", "p95"), ("0.99", "p99")):
            values = (window["itl_seconds"], window["time_weighted_seconds"], readers["itl_seconds"])
            cells = " | ".join(duration(value.get(q)) for value in values)
            yield f"| {_safe(engine)} | {name} | {cells} |"
    yield ""
    for engine, seen in found["status"]["engines"].items():
        slo = seen["slo"]
        yield (
            f"Engine {_safe(engine)}: {slo['missed_seconds']:.1f} of {slo['judged_seconds']:.1f} s judged were missed "
            f"(objective {duration(found['objectives']['itl_seconds'])} a token)."
        )
    yield ""


def _small_print(found: Mapping[str, Any]) -> Iterator[str]:
    lost = f", {found['lost']} lost" if found["lost"] else ""
    torn = ", its end is missing" if found["torn"] else ""
    yield (
        f"From {_safe(found['file'])}: {found['observations']:,} observations{lost}{torn}; written by stallwatch "
        f"{_safe(found['written_by'])}, reported by {found['made_by']}."
    )
    for name, (before, after) in found["changed"].items():
        yield f"Judged with {_safe(name)} = {_safe(str(after))} instead of {_safe(str(before))}."


def _figure(unit: str, value: float | None) -> str:
    if value is None:
        return "-"
    if unit == "seconds":
        return duration(value)
    if unit == "ratio":
        return percent(value)
    if unit == "hertz":
        return f"{value / 1e9:.2f} GHz"
    return f"{value:,.0f} W" if unit == "watts" else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _clock(unix: float) -> str:
    return f"{datetime.fromtimestamp(min(max(unix, 0.0), 253402300799.0), tz=UTC):%H:%M:%S}"


def _safe(text: str) -> str:
    """Text of somebody else's as text: nothing of it is markup."""
    return _ACTIVE.sub(r"\\\1", configuration.shown(text)) if text else ""
