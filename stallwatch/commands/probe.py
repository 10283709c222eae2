"""`stallwatch probe`: one stream, token by token, as a reader would feel it."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stallwatch import configuration, exporter
from stallwatch.commands.bars import UNICODE_BARS
from stallwatch.commands.probe_text import Debug, Told, debug_text, document, text, without_secrets
from stallwatch.commands.probing import Asked, Probe, run_probe
from stallwatch.commands.terminal import (
    StatusLine,
    can_show,
    quiet_log,
    redactor,
    run,
    showable,
    switch_threads_fast,
)
from stallwatch.commands.timing import timing
from stallwatch.configuration import BadConfiguration, Fault
from stallwatch.settings import Settings
from stallwatch.sources.http import plain, target_of

if TYPE_CHECKING:
    import argparse

    from stallwatch.cli import Invocation

_TOKENS = 256  # enough for a p99
_MOST_TOKENS = 65_536
_MOST_PROMPT_TOKENS = 2_000_000
_EVENT_SHOWN = 2_000  # characters
_SHORT = {"url": "canary.url", "model": "canary.model", "api": "canary.api"}
_OK, _FAILED, _INTERRUPTED = 0, 1, 130


def probe(invocation: "Invocation") -> int:
    """Runs the command."""
    parser = _parser(invocation)
    if invocation.wants_help:
        rooms = ("engine", "canary", "slo", "stall", "log")
        invocation.write(parser.format_help() + "\n" + configuration.settings_help(rooms))
        return _OK
    options, rest = parser.parse_known_args(invocation.arguments)
    for name, value, most in (
        ("--tokens", options.tokens, _MOST_TOKENS),
        ("--prompt-tokens", options.prompt_tokens, _MOST_PROMPT_TOKENS),
    ):
        if value is not None and not 1 <= value <= most:
            parser.error(f"argument {name}: {value} is not between 1 and {most:,}")
    settings = _settings(rest, options, invocation)
    quiet_log(settings.log, invocation.stderr)
    switch_threads_fast()
    line = StatusLine(invocation.stderr)
    asked = Asked(tokens=options.tokens, prompt_tokens=options.prompt_tokens)
    try:
        found = run(run_probe(settings, asked, clock=time.monotonic, rng=random.SystemRandom(), progress=line.show))
    finally:
        line.clear()
    redact = redactor(settings.canary_access, settings.engine_access)
    told = tell(found, settings, asked, redact)
    debug = _debug(found, settings, redact) if options.debug else None
    if options.json:
        shown = document(told, gaps=options.gaps, debug=debug)
    else:
        shown = text(told, gaps=options.gaps, unicode=can_show(UNICODE_BARS, invocation.stdout))
        shown += debug_text(debug) if debug is not None else ""
    invocation.write(showable(shown, invocation.stdout))
    if found.interrupted:
        return _INTERRUPTED
    return _OK if found.finished else _FAILED


def tell(found: Probe, settings: Settings, asked: Asked, redact: Callable[[str], str]) -> Told:
    """What a probe came to."""
    recording, failure = found.recording, found.failure
    closed = recording.closed if recording is not None else None
    sent_at = recording.sent_at if recording is not None else None
    return Told(
        url=settings.canary_access.url.rstrip("/"),
        api=settings.canary.api,
        outcome=found.outcome,
        model=plain(redact(found.model.name)) if found.model is not None else None,
        request_id=recording.request.request_id if recording is not None else None,
        asked=asked.tokens,
        prompt_tokens=closed.prompt_tokens if closed is not None else None,
        cached_tokens=closed.cached_tokens if closed is not None else None,
        reason=str(failure.reason) if failure is not None else None,
        detail=plain(redact(failure.detail), 400) if failure is not None else "",
        timing=timing(
            sent_at,
            recording.arrivals,
            until=closed.at if closed is not None else found.ended_at,
            is_open=found.waiting,
            lags=found.lags,
        )
        if recording is not None and sent_at is not None
        else None,
    )


def _debug(found: Probe, settings: Settings, redact: Callable[[str], str]) -> Debug | None:
    recording, monitor = found.recording, found.monitor
    if recording is None or monitor is None:
        return None
    target = target_of(settings.canary_access)
    now = max(found.ended_at, found.lags[-1].at if found.lags else 0.0)
    families = exporter.families(
        monitor.findings(now), found.health, settings, wall_offset=time.time() - time.monotonic()
    )
    page, _ = exporter.render(families, "text/plain")
    sent_at = recording.sent_at or found.ended_at
    return Debug(
        method="POST",
        address=str(target.url(recording.request.path)),
        headers=without_secrets(found.headers, redact),
        body=recording.request.body(),
        events=[(at - sent_at, plain(redact(data), _EVENT_SHOWN)) for at, data in recording.events],
        events_left_out=recording.events_left_out,
        metrics=redact(page.decode()),
    )


def _settings(rest: Sequence[str], options: "argparse.Namespace", invocation: "Invocation") -> Settings:
    """The settings, with the short options for those of the canary; a fault names what was written."""
    short = {name: getattr(options, name) for name in _SHORT if getattr(options, name) is not None}
    flags = [f"--{_SHORT[name]}={value}" for name, value in short.items()]
    try:
        return configuration.load([*rest, *flags], invocation.environ).settings
    except BadConfiguration as refused:
        faults = []
        for fault in refused.faults:
            subject = fault.subject
            for name in short:
                subject = subject.replace(f"--{_SHORT[name]}", f"--{name}")
            faults.append(Fault(subject, fault.problem, fault.remedy))
        raise BadConfiguration(faults) from refused


def _parser(invocation: "Invocation") -> "argparse.ArgumentParser":
    parser = invocation.parser()
    parser.usage = (
        f"stallwatch {invocation.command} [--url URL] [--tokens N] [--prompt-tokens N] [--model MODEL] "
        "[--api completions|chat] [--gaps] [--json] [--debug] [--config FILE] [--SETTING VALUE ...]"
    )
    parser.epilog = (
        "Asks canary.url, by default engine.url, with the canary's key. Exits 0 when the stream came to its end, 1 "
        "when it did not, 2 for settings that are refused, 130 after Ctrl-C, which prints what there is."
    )
    parser.add_argument("--url", metavar="URL", help="server to ask, instead of canary.url")
    parser.add_argument("--tokens", type=int, default=_TOKENS, metavar="N", help=f"tokens to time (default: {_TOKENS})")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="length of the prompt, about; no cache has seen it (default: a short one)",
    )
    parser.add_argument("--model", metavar="MODEL", help="model to ask for, instead of canary.model")
    parser.add_argument("--api", metavar="API", help="completions or chat, instead of canary.api")
    parser.add_argument("--gaps", action="store_true", help="list every gap")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--debug", action="store_true", help="show the request, every event as it came, and the metrics it would give"
    )
    return parser
