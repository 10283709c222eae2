"""What `stallwatch replay` prints: lines for a terminal, and one JSON object a line."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from stallwatch import configuration
from stallwatch.analysis.episodes import Change, Stall, StallNews
from stallwatch.analysis.findings import EngineFindings, Findings
from stallwatch.commands.rejudging import Begun, Ended, Happened, Lost, Stands, Told
from stallwatch.commands.terminal import duration
from stallwatch.observations import ServerFacts
from stallwatch.recorder import codec


class AsText:
    """Lines for a terminal."""

    def lines(self, told: Told) -> Iterator[str]:
        """What to print of one thing told."""
        match told:
            case Begun():
                yield from _heading(told)
            case Stands():
                yield f"{_clock(told.unix)}  {_standing(told.findings)}"
            case Happened():
                yield f"{_clock(told.unix)}  {_news(told.news)}"
            case Lost():
                yield f"{'':10}  {told.observations} observations are missing here: they could not be written"
            case Ended():
                yield from _summary(told)


def _heading(told: Begun) -> Iterator[str]:
    header = told.header
    yield f"{'an incident' if header.incident else 'a recording'} by stallwatch {_safe(header.stallwatch)}"
    if header.server is not None:
        yield f"beside {_server(header.server)}"
    if header.gpus is not None and header.gpus.gpus:
        names = sorted({_safe(gpu.name or "GPU") for gpu in header.gpus.gpus})
        yield f"on {len(header.gpus.gpus)} x {', '.join(names)}, driver {_safe(header.gpus.driver or 'unknown')}"
    for name, (before, after) in told.changed.items():
        yield (
            f"judged with {name} = {after:g} instead of {before:g}"
            if isinstance(after, float)
            else (f"judged with {name} = {after} instead of {before}")
        )


def _server(server: ServerFacts) -> str:
    version = f"vLLM {_safe(server.version)}" if server.version else "a vLLM"
    return f"{version} with {_safe(server.model_name)}" if server.model_name else version


def _standing(findings: Findings) -> str:
    parts = [str(findings.phase)]
    for engine in findings.engines:
        name = f"engine {_safe(engine.engine)}: " if len(findings.engines) > 1 else ""
        parts.append(name + _engine(engine))
    return " | ".join(parts)


def _engine(engine: EngineFindings) -> str:
    waits = [engine.engine_wait_max, engine.canary.wait_max if engine.canary is not None else None]
    longest = max((wait for wait in waits if wait is not None), default=None)
    words = [f"longest wait of 30 s {duration(longest)}"]
    running = engine.requests.get("running")
    if running is not None:
        waiting = sum(number for state, number in engine.requests.items() if state != "running")
        words.append(f"{running:.0f} running, {waiting:.0f} waiting")
    words.append(f"missed {engine.missed_seconds:.1f} of {engine.judged_seconds:.1f} s")
    if engine.stalls.open is not None:
        words.append(f"stalled: {engine.stalls.open.cause}")
    return "; ".join(words)


def _news(news: StallNews) -> str:
    stall = news.stall
    name = f"stall {_safe(stall.id)}"
    if news.change is Change.OPENED:
        return f"{name} opens: {stall.kind}"
    if news.change is Change.CAUSE:
        return f"{name}: {stall.cause}, it seems"
    return f"{name} is over: {_stall(stall)}"


def _stall(stall: Stall) -> str:
    words = [
        f"{stall.kind}, cause {stall.cause}, {duration(stall.duration(stall.start))} long",
        f"readers stood still for {duration(stall.seconds)}",
    ]
    if stall.culprit_tokens is not None:
        words.append(f"largest prompt {stall.culprit_tokens:,.0f} tokens")
    words += [f"{one.cause}: {_safe(one.sentence)}" for one in stall.evidence]
    return "; ".join(words)


def _summary(told: Ended) -> Iterator[str]:
    yield ""
    length = told.unix - told.began_unix
    yield f"{_counted(told.observations, 'observation')} over {length:,.1f} s, from {_date(told.began_unix)}"
    for engine in told.findings.engines:
        yield (
            f"engine {_safe(engine.engine)}: missed {engine.missed_seconds:.1f} of {engine.judged_seconds:.1f} s "
            f"judged, {_counted(sum(engine.stalls.counts.values()), 'stall')}"
        )
    for stall in told.stalls:
        at = stall.start + (told.unix - told.findings.at)
        became = _stall(stall) if stall.end is not None else "still open"
        yield f"  {_clock(at)}  engine {_safe(stall.engine)}: {became}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _clock(unix: float) -> str:
    return f"{_moment(unix):%H:%M:%S}.{int(unix * 10) % 10}"


def _date(unix: float) -> str:
    return f"{_moment(unix):%Y-%m-%d %H:%M:%S} UTC"


def _moment(unix: float) -> datetime:
    # A file of somebody else's may say anything.
    return datetime.fromtimestamp(min(max(unix, 0.0), 253402300799.0), tz=UTC)


def _safe(text: str) -> str:
    return configuration.shown(text)


class AsJson:
    """One object a line."""

    def lines(self, told: Told) -> Iterator[str]:
        """What to print of one thing told."""
        match told:
            case Begun():
                changed = {
                    name: {"recorded": before, "judged_by": after} for name, (before, after) in told.changed.items()
                }
                yield _object("session", {**codec.plain(told.header), "changed": changed})
            case Stands():
                yield _object("findings", {"unix": told.unix, **codec.plain(told.findings)})
            case Happened():
                news = told.news
                yield _object("stall", {"unix": told.unix, "change": news.change.value, **codec.plain(news.stall)})
            case Lost():
                yield _object("lost", {"observations": told.observations})
            case Ended():
                about = {"unix": told.unix, "began_unix": told.began_unix, "observations": told.observations}
                stalls = [codec.plain(stall) for stall in told.stalls]
                yield _object("end", {**about, "stalls": stalls, "findings": codec.plain(told.findings)})


def _object(kind: str, content: Mapping[str, Any]) -> str:
    return json.dumps({"type": kind, **content}, separators=(",", ":"), allow_nan=False)
