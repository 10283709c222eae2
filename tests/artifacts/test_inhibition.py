"""A real Alertmanager with the example configuration: who is told what, and what a freeze silences."""

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import yaml

from deploy.prometheus import build
from tests.artifacts.promtool import KUBERNETES, ROOT, program
from tests.e2e.processes import free_port, get, process, until

CONFIG = ROOT / "deploy" / "prometheus" / "alertmanager.yml"
SEVERITY = {alert.alert: alert.severity for alert in build.alerts(build.groups())}
SERVICE = {"namespace": "llm", "job": "vllm"}
RUNBOOK = ROOT / "docs" / "runbook.md"
BY_SERVICE = {alert.alert for alert in build.alerts(build.groups()) if not alert.by_pod}


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running Alertmanager."""
    folder = tmp_path_factory.mktemp("alertmanager")
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        program("prometheus-alertmanager", "prometheus-alertmanager"),
        f"--config.file={CONFIG}",
        f"--storage.path={folder}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--cluster.listen-address=",
    ]
    with process(command, folder / "log"):
        until(lambda: get(f"{url}/-/ready") == "OK", 20, "Alertmanager is ready")
        yield url


def labels_of(name: str, changes: Mapping[str, str]) -> dict[str, str]:
    """The labels with which Prometheus would send the alert."""
    place = SERVICE if name in BY_SERVICE else KUBERNETES
    return {"alertname": name, "severity": SEVERITY[name], **place, **changes}


def suppressed(url: str, case: str, *sent: str, **changes: Mapping[str, str]) -> set[str]:
    """Sends alerts of one namespace, and returns the names of those that Alertmanager holds back."""
    place = {"namespace": case}
    labels = [labels_of(name, {**changes.get(name, {}), **place}) for name in sent]
    seen = post(url, labels)
    return {alert["labels"]["alertname"] for alert in seen if alert["status"]["state"] == "suppressed"}


def post(url: str, labels: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Sends alerts, and returns them with what Alertmanager has judged."""
    body = json.dumps([{"labels": one} for one in labels]).encode()
    request = urllib.request.Request(
        f"{url}/api/v2/alerts", data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    urllib.request.urlopen(request, timeout=5).close()
    seen: list[dict[str, Any]] = []

    def judged() -> bool:
        seen[:] = [alert for alert in json.loads(get(f"{url}/api/v2/alerts")) if alert["labels"] in labels]
        return len(seen) == len(labels) and all(alert["status"]["state"] != "unprocessed" for alert in seen)

    def settled() -> bool:
        # An alert may be looked at before the one that inhibits it has been taken in.
        before = [alert["status"]["state"] for alert in seen]
        time.sleep(0.5)
        return judged() and [alert["status"]["state"] for alert in seen] == before

    until(judged, 60, "Alertmanager has judged the alerts")
    until(settled, 60, "Alertmanager's judgement stands")
    return seen


def test_the_configuration_is_valid() -> None:
    """The tool of Alertmanager has nothing to complain of."""
    done = subprocess.run(
        [program("amtool", "prometheus-alertmanager"), "check-config", str(CONFIG)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("severity", "receiver"), [("critical", "pager"), ("warning", "tickets"), ("info", "nobody")])
def test_each_severity_goes_where_it_should(severity: str, receiver: str) -> None:
    """Pages wake someone, warnings make tickets, information stays where it is."""
    done = subprocess.run(
        [
            program("amtool", "prometheus-alertmanager"),
            "config",
            "routes",
            "test",
            f"--config.file={CONFIG}",
            "alertname=StallwatchX",
            f"severity={severity}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.strip() == receiver


def test_inhibitions_name_alerts_that_exist() -> None:
    """A renamed alert would silently end an inhibition."""
    named: set[str] = set()
    for rule in yaml.safe_load(CONFIG.read_text())["inhibit_rules"]:
        for matcher in [*rule["source_matchers"], *rule["target_matchers"]]:
            if matcher.startswith("alertname"):
                inside = re.search(r'"Stallwatch\(?([\w|]+)\)?"', matcher)
                assert inside
                named |= {f"Stallwatch{name}" for name in inside[1].split("|")}

    assert named <= set(SEVERITY)


def test_one_freeze_is_one_page(alertmanager: str) -> None:
    """While readers of a server are frozen, every other page about it is held back, and only that."""
    every = [name for name, severity in SEVERITY.items() if severity == "critical"]

    assert suppressed(alertmanager, "freeze", *every) == set(every) - {"StallwatchReadersFrozen"}


def test_another_server_is_not_silenced(alertmanager: str) -> None:
    """A freeze of one pod leaves the alerts of other pods alone."""
    sent = ("StallwatchReadersFrozen", "StallwatchItlP99AboveObjective", "StallwatchAdmissionStalled")
    other = {"pod": "vllm-1", "instance": "10.0.0.8:9709"}

    assert suppressed(alertmanager, "others", *sent, **dict.fromkeys(sent[1:], other)) == set()


def test_what_says_that_nobody_watches_is_never_silenced_by_a_freeze(alertmanager: str) -> None:
    """A freeze holds back what follows from it, not the news that the watching itself is broken."""
    sent = ("StallwatchReadersFrozen", "StallwatchJudgingNothing", "StallwatchSidecarGone", "StallwatchSeriesMissing")

    assert suppressed(alertmanager, "watching", *sent) == set()


def test_a_dead_sidecar_silences_nothing_of_vllm(alertmanager: str) -> None:
    """Only its own missing series is the same news."""
    sent = ("StallwatchSidecarUnreachable", "StallwatchSidecarGone", "StallwatchItlP99AboveObjective")

    assert suppressed(alertmanager, "dead", *sent) == {"StallwatchSidecarGone"}


def test_the_p99_page_takes_the_budget_pages_place(alertmanager: str) -> None:
    """Both tell of the same waiting: the plain one is sent."""
    sent = ("StallwatchItlP99AboveObjective", "StallwatchBudgetBurnFast", "StallwatchBudgetBurnSlow")

    assert suppressed(alertmanager, "p99", *sent) == set(sent[1:])


def test_a_p99_ticket_does_not_hold_back_the_budget_page(alertmanager: str) -> None:
    """Whoever makes the p99 alert a ticket still gets the page for the budget."""
    sent = ("StallwatchItlP99AboveObjective", "StallwatchBudgetBurnFast")

    assert suppressed(alertmanager, "ticket", *sent, StallwatchItlP99AboveObjective={"severity": "warning"}) == set()


FROZEN = "StallwatchReadersFrozen"
GONE = "StallwatchServerGone"
BY_A_FREEZE = {
    *("StallwatchItlP99AboveObjective", "StallwatchTtftAboveObjective", "StallwatchAdmissionStalled"),
    *("StallwatchInterferenceHigh", "StallwatchGpuClockLow", "StallwatchServerGone", "StallwatchBlind"),
    *("StallwatchMetricsUnreachable", "StallwatchCanaryFailing"),
    *("StallwatchBudgetBurnFast", "StallwatchBudgetBurnSlow", "StallwatchReadersLate"),
}


@pytest.mark.parametrize(
    ("source", "held"),
    [
        (FROZEN, BY_A_FREEZE),
        (GONE, BY_A_FREEZE - {GONE, "StallwatchInterferenceHigh", "StallwatchGpuClockLow"}),
        ("StallwatchBudgetBurnFast", {"StallwatchBudgetBurnSlow", "StallwatchReadersLate"}),
        ("StallwatchMetricsUnreachable", {"StallwatchBlind"}),
    ],
)
def test_what_follows_from_an_alert_is_held_back_with_it(source: str, held: set[str], alertmanager: str) -> None:
    """Beside one alert just those are held back that follow from it, when nothing else fires that would."""
    others = {FROZEN, GONE, "StallwatchItlP99AboveObjective", "StallwatchBudgetBurnFast"}
    others |= {"StallwatchMetricsUnreachable", "StallwatchSidecarUnreachable"}
    sent = {source} | held | (set(SEVERITY) - others)

    assert suppressed(alertmanager, source.lower(), *sent) == held


def silences() -> list[str]:
    """The commands of the runbook that silence alerts."""
    section = RUNBOOK.read_text().partition("## Silences for maintenance and roll-outs")[2]
    commands = section.partition("```sh\n")[2].partition("```")[0].replace("\\\n", " ")
    return [line for line in commands.splitlines() if line.startswith("amtool silence add")]


def shell(command: str, url: str) -> str:
    """What a command of the runbook prints, with the address that it expects in the environment."""
    program("amtool", "prometheus-alertmanager")
    environ = {**os.environ, "AM": url, "USER": "someone"}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("recipe", "spared", "pods"),
    [
        pytest.param(0, {FROZEN}, {"vllm-0", "vllm-1"}, id="a-roll-out"),
        pytest.param(1, set(), {"vllm-0"}, id="one-pod"),
    ],
)
def test_a_silence_of_the_runbook_holds_back_what_it_says(
    recipe: int, spared: set[str], pods: set[str], alertmanager: str
) -> None:
    """The command is accepted as it stands, silences that and nothing else, and ends with the command that ends it."""
    silence = shell(silences()[recipe], alertmanager)
    sent = [FROZEN, "StallwatchSidecarGone", "StallwatchNvmlDown"]
    labels = [
        labels_of(name, {"namespace": namespace, "pod": pod})
        for name in sent
        for namespace in ("llm", "other")
        for pod in ("vllm-0", "vllm-1")
    ]
    judged = post(alertmanager, labels)
    held = {
        (one["labels"]["alertname"], one["labels"]["pod"])
        for one in judged
        if one["status"]["silencedBy"] == [silence] and one["labels"]["namespace"] == "llm"
    }
    listed = shell("amtool silence query --alertmanager.url=$AM", alertmanager)
    shell(f"amtool silence expire --alertmanager.url=$AM {silence}", alertmanager)

    assert held == {(name, pod) for name in set(sent) - spared for pod in pods}
    assert not [one for one in judged if one["labels"]["namespace"] == "other" and one["status"]["silencedBy"]]
    assert silence in listed
    assert silence not in shell("amtool silence query --alertmanager.url=$AM", alertmanager)
