#!/usr/bin/env python3
"""Says which alerts a recording would have fired, and when.

    python deploy/prometheus/backtest.py case.jsonl.gz
    python deploy/prometheus/backtest.py case.jsonl.gz --slo.itl_seconds 0.2 --rules changed.rules.yml

The recording is judged again, its metrics page is taken every 15 s as a Prometheus would have scraped it, and promtool
evaluates the rules over these series, with `for` and `keep_firing_for`, every 15 s. What was before the recording is
not known to the rules, and what Alertmanager holds back is listed too. `--blocks FOLDER` writes the same series as
blocks, to be looked at with a Prometheus.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from stallwatch import configuration
from stallwatch.commands.rejudging import judged
from stallwatch.commands.replay_series import Samples, Scraper, number, openmetrics
from stallwatch.recorder.reading import Recording, RecordingError

RULES = Path(__file__).parent / "stallwatch.rules.yml"
SCRAPE = 15
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SERIES = re.compile(r"\{(?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*\}")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
LONGEST = 2 * 86400
"""Seconds that a recording may span: beyond it promtool takes minutes."""


@dataclass(frozen=True, slots=True)
class Fired:
    """One alert from when it fires to when it resolves, in unix time; None while it still fires at the end."""

    labels: Mapping[str, str]
    firing: float
    resolved: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rules say of some series: `began` and `ended` are their first and last scrape."""

    began: float
    ended: float
    fired: tuple[Fired, ...]
    pending: tuple[str, ...]
    """Alerts whose condition holds at the end, and had not held for long enough."""


class PromtoolError(Exception):
    """promtool is missing or refused what it was given; one sentence for a person."""


def scraped(path: Path, flags: Sequence[str], labels: Mapping[str, str]) -> Samples:
    """The series of a recording. Raises `RecordingError`, and `BadConfiguration` for the flags."""
    scraper = Scraper(labels)
    for told in judged(Recording(path), flags, every=SCRAPE, beside=scraper.beside):
        scraper.take(told)
    if not scraper.samples:
        raise RecordingError(f"{path.name}: shorter than {SCRAPE} s")
    return scraper.samples


def backtest(samples: Samples, rules: Path = RULES) -> Verdict:
    """The alerts, in the order in which they fire. Raises `PromtoolError`."""
    start = min(points[0][0] for points in samples.values())
    count = _slot(max(points[-1][0] for points in samples.values()), start) + 1
    if count * SCRAPE > LONGEST:
        raise PromtoolError(f"the recording spans more than {LONGEST / 3600:.0f} hours: cut it into pieces")
    series = [{"series": name, "values": _values(name, points, start, count)} for name, points in samples.items()]
    asked = [{"expr": "ALERTS", "eval_time": f"{slot * SCRAPE}s", "exp_samples": []} for slot in range(count)]
    test = {"interval": f"{SCRAPE}s", "input_series": series, "promql_expr_test": asked}
    firing: dict[str, list[int]] = {}
    pending = set()
    for slot, alert in _answers(_promtool(test, rules)):
        labels = dict(_LABEL.findall(alert))
        if labels["alertstate"] == "firing":
            firing.setdefault(alert, []).append(slot)
        elif slot == count - 1:
            pending.add(labels["alertname"])
    fired = [one for alert, slots in firing.items() for one in _spans(alert, slots, start, count)]
    order = sorted(fired, key=lambda one: (one.firing, one.labels["alertname"]))
    return Verdict(start, start + (count - 1) * SCRAPE, tuple(order), tuple(sorted(pending)))


def write_blocks(samples: Samples, folder: Path) -> None:
    """Writes the series as blocks of a Prometheus. Raises `PromtoolError`."""
    with tempfile.NamedTemporaryFile("w", suffix=".om") as text:
        text.writelines(openmetrics(samples))
        text.flush()
        done = _run("tsdb", "create-blocks-from", "openmetrics", text.name, str(folder))
    if done.returncode != 0:
        raise PromtoolError(done.stdout.strip())


def _slot(at: float, start: float) -> int:
    return round((at - start) / SCRAPE)


def _values(name: str, points: Sequence[tuple[float, float]], start: float, count: int) -> str:
    # promtool's clock begins in 1970.
    shift = start if name.partition("{")[0].endswith("_timestamp_seconds") else 0.0
    known = {_slot(at, start): value - shift for at, value in points}
    values = []
    for slot in range(count):
        if slot in known:
            values.append(number(known[slot]))
        else:
            # As a scrape marks what is no longer on the page.
            values.append("stale" if slot - 1 in known else "_")
    return " ".join(values)


def _promtool(test: Mapping[str, object], rules: Path) -> str:
    document = {"rule_files": [str(rules.resolve())], "evaluation_interval": f"{SCRAPE}s", "tests": [test]}
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        yaml.safe_dump(document, file, width=10_000_000)
        file.flush()
        done = _run("test", "rules", file.name)
    # No alert is expected, so that promtool lists every one that is there.
    if done.returncode != 0 and "got:" not in done.stdout:
        raise PromtoolError(done.stdout.strip())
    return done.stdout


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(  # noqa: S603
            ["promtool", *arguments],  # noqa: S607
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise PromtoolError(
            "promtool is missing: it comes with Prometheus (Debian: apt-get install prometheus)"
        ) from error


def _answers(output: str) -> Iterator[tuple[int, str]]:
    """Slot and labels of everything that promtool found at each moment."""
    for moment, got in re.findall(r"time: (\S+),\s+exp:[^\n]*\n\s+got:([^\n]*)", output):
        at = sum(float(length) * _UNITS[unit] for length, unit in re.findall(r"([\d.]+)(ms|[smhd])", moment))
        for alert in _SERIES.findall(got):
            yield round(at / SCRAPE), alert


def _spans(alert: str, slots: Sequence[int], start: float, count: int) -> Iterator[Fired]:
    held = set(slots)
    labels = {name: value for name, value in _LABEL.findall(alert) if name not in {"__name__", "alertstate"}}
    for begin in sorted(slot for slot in held if slot - 1 not in held):
        end = next(slot for slot in range(begin, count + 1) if slot not in held)
        yield Fired(labels, start + begin * SCRAPE, None if end == count else start + end * SCRAPE)


def table(verdict: Verdict, given: Mapping[str, str]) -> Iterator[str]:
    """The verdict for a person, line by line; `given` are labels that all series have."""
    yield f"{_day(verdict.began)} {_time(verdict.began)} to {_time(verdict.ended)} UTC, a scrape every {SCRAPE} s"
    if not verdict.fired:
        yield "no alert fires"
    for one in verdict.fired:
        until = "fires at the end" if one.resolved is None else f"until {_time(one.resolved)}"
        told = {name: text for name, text in one.labels.items() if name not in given and name != "alertname"}
        rest = " ".join(f"{name}={text}" for name, text in told.items())
        yield f"{_time(one.firing)}  {until:<16}  {one.labels['alertname']}  {rest}"
    if verdict.pending:
        yield f"not yet for long enough at the end: {', '.join(verdict.pending)}"


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%H:%M:%S")


def _day(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d")


def main(arguments: Sequence[str]) -> int:
    """Runs the program. Returns an exit status: 0 when the rules were evaluated, whatever they said."""
    parser = argparse.ArgumentParser(
        description="Says which alerts a recording would have fired, and when.",
        epilog="Other flags are settings to judge by instead of the recorded ones, as for `stallwatch replay`.",
        allow_abbrev=False,
    )
    parser.add_argument("recording", type=Path, help="a recording of `stallwatch run --record`, or an incident bundle")
    parser.add_argument("--rules", type=Path, default=RULES, help="rules to evaluate (default: those beside this file)")
    parser.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="a label of all series")
    parser.add_argument("--blocks", type=Path, metavar="FOLDER", help="write the series as blocks of a Prometheus too")
    options, flags = parser.parse_known_args(arguments)
    labels = {"job": "stallwatch", "instance": options.recording.name}
    for given in options.label:
        name, equals, value = given.partition("=")
        if not (equals and re.fullmatch(r"[A-Za-z_]\w*", name)):
            parser.error(f"argument --label: {given!r} is not NAME=VALUE")
        labels[name] = value
    try:
        samples = scraped(options.recording, flags, labels)
        if options.blocks is not None:
            write_blocks(samples, options.blocks)
        for line in table(backtest(samples, options.rules), labels):
            sys.stdout.write(f"{line}\n")
    except configuration.BadConfiguration as refused:
        sys.stderr.writelines(f"{fault}\n" for fault in refused.faults)
        return 2
    except (RecordingError, PromtoolError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
