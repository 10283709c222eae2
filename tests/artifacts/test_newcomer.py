"""The commands of docs/deploy.md that lead from a vLLM Deployment to a page, run as they are written there.

Registry and cluster are stood in for: `docker` only notes what it is asked, `kubectl` really builds and writes what it
would apply. tests/container builds the image with the same Dockerfile, tests/e2e lets the drill's scenario page.
"""

import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.artifacts.manifests import EXAMPLE, Object, containers, documents, named, of_kind, pod, template, validate
from tests.artifacts.promtool import ROOT

GUIDE = (ROOT / "docs" / "deploy.md").read_text()
IMAGE = "REGISTRY/stallwatch:0.1.0"
FOLDERS = ("deploy", "dashboards")

DOCKER = """#!/bin/sh
echo "$@" >> "$NOTES/docker"
"""
# `get` answers as the API server does, with what only it knows; `apply` keeps the objects in the order of the calls.
KUBECTL = """#!/bin/sh
set -eu
count=$(ls "$NOTES" | wc -l)
case "$*" in
"get deployment vllm --output yaml") cat "$NOTES/../live.yaml" ;;
"kustomize "*) exec "$KUBECTL" "$@" ;;
"apply --filename -") cat > "$NOTES/applied-$count.yaml" ;;
"apply --kustomize "*) "$KUBECTL" kustomize "$3" > "$NOTES/applied-$count.yaml" ;;
*) echo "not expected: kubectl $*" >&2; exit 1 ;;
esac
"""


def block() -> list[str]:
    """The lines of the guide's first block of commands."""
    section = GUIDE.split("## From a vLLM Deployment to a page", 1)[1]
    found = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert found
    return [line for line in found[1].splitlines() if line]


@dataclass(frozen=True, slots=True)
class Followed:
    """What came of the commands: words for docker, one list of objects for each `kubectl apply`."""

    docker: list[list[str]]
    applied: list[list[Object]]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """The commands, followed in a checkout of what they need."""
    folder = tmp_path_factory.mktemp("newcomer")
    checkout, notes, programs = (folder / name for name in ("checkout", "notes", "bin"))
    for name in FOLDERS:
        shutil.copytree(ROOT / name, checkout / name)
    for path in (notes, programs):
        path.mkdir()
    for name, script in (("docker", DOCKER), ("kubectl", KUBECTL)):
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    live = copy.deepcopy(documents(EXAMPLE.read_text())[0])
    live["metadata"] |= {"namespace": "llm", "uid": "0", "resourceVersion": "1", "generation": 1}
    live["status"] = {"replicas": 1, "readyReplicas": 1}
    (folder / "live.yaml").write_text(yaml.safe_dump(live))
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "NOTES": str(notes),
        "KUBECTL": str(Path(sys.executable).with_name("kubectl")),
    }
    script = "set -euo pipefail\n" + "\n".join(block())
    done = subprocess.run(
        ["bash", "-c", script], cwd=checkout, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Followed(
        [shlex.split(line) for line in (notes / "docker").read_text().splitlines()],
        [documents(path.read_text()) for path in sorted(notes.glob("applied-*.yaml"))],
    )


def test_there_are_at_most_six_commands() -> None:
    """Besides the name of the image, which is the only thing to fill in."""
    first, *commands = block()

    assert first == f"IMAGE={IMAGE}"
    assert len(commands) <= 6
    assert "REGISTRY" not in "".join(commands)


def test_the_image_is_built_and_pushed_under_its_name(followed: Followed) -> None:
    """From the folder with the Dockerfile."""
    assert followed.docker == [["build", "--tag", IMAGE, "."], ["push", IMAGE]]


def test_what_is_applied_is_valid_and_runs_that_image(followed: Followed) -> None:
    """Three times objects that clusters accept, and no image of ours under another name."""
    everything = [each for objects in followed.applied for each in objects]
    validate(everything)
    ours = [
        container
        for each in everything
        if each["kind"] == "Deployment"
        for container in containers(pod(each))
        if "stallwatch" in container["image"]
    ]

    assert [sorted({each["kind"] for each in objects}) for objects in followed.applied] == [
        ["Deployment"],
        ["ConfigMap", "PodMonitor", "PrometheusRule"],
        ["Deployment"],
    ]
    assert {container["image"] for container in ours} == {IMAGE}
    assert len(ours) == 3


def test_their_deployment_is_the_same_but_for_the_sidecar(followed: Followed) -> None:
    """Same name, same namespace, same vLLM; the conflict check of the API server still works."""
    (made,) = followed.applied[0]
    theirs = documents(EXAMPLE.read_text())[0]

    assert (made["metadata"]["name"], made["metadata"]["namespace"]) == ("vllm", "llm")
    assert made["metadata"]["resourceVersion"] == "1"
    assert pod(made)["containers"] == pod(theirs)["containers"]
    assert named(pod(made))["image"] == IMAGE


def test_the_drill_is_scraped_and_there_is_a_rule_for_it(followed: Followed) -> None:
    """The monitor that was applied selects both pods, the alert that the guide promises is among the rules."""
    monitor = of_kind(followed.applied[1], "PodMonitor")["spec"]["selector"]["matchLabels"]
    rules = of_kind(followed.applied[1], "PrometheusRule")["spec"]["groups"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"] if "alert" in rule}

    assert "StallwatchReadersFrozen" in alerts
    for objects in (followed.applied[0], followed.applied[2]):
        assert monitor.items() <= template(objects[0])["metadata"]["labels"].items()
    assert "kubectl delete deployment " + followed.applied[2][0]["metadata"]["name"] in GUIDE
