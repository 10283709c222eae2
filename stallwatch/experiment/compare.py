"""Two or more reports side by side: what differs in what was measured, and in what came out. Pure, on their JSON."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from stallwatch.experiment import statistics
from stallwatch.experiment.document import COMPARISON_SCHEMA, estimate, values
from stallwatch.experiment.gaps import ARMS, gaps_by_arm
from stallwatch.experiment.markdown import SHOWN, facts

Named = tuple[str, Mapping[str, Any]]


def comparison(reports: Sequence[Named]) -> dict[str, Any]:
    """The object for JSON: every report against the first."""
    return {
        "schema": COMPARISON_SCHEMA,
        "reports": [{"name": name, **_about(report)} for name, report in reports],
        "differs": [{"fact": fact, "values": list(told)} for fact, told in differences(reports)],
        "same": [{"fact": fact, "value": told} for fact, told in _same(reports)],
        "cautions": list(_cautions(reports)),
        "measures": reports[0][1]["measures"],
        "effects": list(_effects(reports)),
        "gaps": [_gaps(report) for _, report in reports],
    }


def _about(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "began": report["began"],
        "prompt_tokens": report["plan"]["prompt_tokens"],
        "verdicts": [one["verdict"] for one in report["conclusions"]],
        "statements": [one["statement"] for one in report["conclusions"]],
    }


def differences(reports: Sequence[Named]) -> Iterator[tuple[str, tuple[str | None, ...]]]:
    """Facts that are not the same in all of them; None where a report does not know one."""
    for fact, told in _facts(reports):
        if len(set(told)) > 1:
            yield fact, told


def _same(reports: Sequence[Named]) -> Iterator[tuple[str, str]]:
    for fact, told in _facts(reports):
        if len(set(told)) == 1 and told[0] is not None:
            yield fact, told[0]


def _facts(reports: Sequence[Named]) -> Iterator[tuple[str, tuple[str | None, ...]]]:
    known = [dict(facts(report)) for _, report in reports]
    for fact in dict.fromkeys(name for told in known for name in told):
        if fact not in {"began", "a gap is slow above"}:
            yield fact, tuple(told.get(fact) for told in known)


def _cautions(reports: Sequence[Named]) -> Iterator[str]:
    """Why a difference need not be the effect of what a person thinks they changed."""
    plans = [report["plan"] for _, report in reports]
    load = ("streams", "output_tokens", "prompt_tokens")
    if any(one[name] != other[name] for one, other in pairwise(plans) for name in load):
        yield "The loads differ: differences between the reports are not those of the server alone."
    machines = [(report["identity"]["gpus"], report["identity"]["host"]) for _, report in reports]
    if any(one != other for one, other in pairwise(machines)):
        yield "The hardware or the client's machine differs."
    changed = [fact for fact, _ in differences(reports) if fact.startswith(("server:", "scheduler:", "launch"))]
    # A setting that is known to differ is the same change in the command and in the fingerprint.
    if any(fact.startswith("scheduler:") for fact in changed):
        changed = [fact for fact in changed if fact not in {"launch command", "server: system fingerprint"}]
    if len(changed) > 1:
        yield f"{len(changed)} facts of the server differ: change one factor at a time to know which it was."
    if any(report["plan"]["allow_busy"] for _, report in reports):
        yield "At least one of them was made beside other requests."
    yield (
        "The reports were made at different times: what drifted between them is part of every difference, and no "
        "interval can tell it."
    )


def _effects(reports: Sequence[Named]) -> Iterator[Mapping[str, Any]]:
    """Means of each measure by arm, and what each report has more than the first."""
    lengths = sorted({tokens for _, report in reports for tokens in report["plan"]["prompt_tokens"]})
    for arm in ARMS:
        for tokens in [None] if arm == "alone" else lengths:
            for measure in SHOWN:
                seen = [values(report, arm, tokens, measure) for _, report in reports]
                if sum(1 for each in seen if each) < 2:
                    continue
                means = [statistics.mean(each) for each in seen]
                against = [statistics.difference(each, seen[0]) for each in seen]
                yield {
                    "arm": arm,
                    "prompt_tokens": tokens,
                    "measure": measure,
                    "means": [None if one is None else estimate(one) for one in means],
                    "more_than_first": [
                        None if one is None or number == 0 else estimate(one) for number, one in enumerate(against)
                    ],
                    "apart": [
                        None if one is None or number == 0 else one.low > 0 or one.high < 0
                        for number, one in enumerate(against)
                    ],
                }


def _gaps(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is drawn; a report of a sweep keeps no timelines, but what is drawn of them."""
    kept: Mapping[str, Any] | None = report.get("gaps")
    return gaps_by_arm(report["runs"]) if kept is None else kept
