"""Builds the Kubernetes manifests as a person would, and checks objects against what clusters accept."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import yaml
from cloudcoil.models.prometheus_operator import v1 as operator

from tests.artifacts.promtool import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
EXAMPLE = KUBERNETES / "example" / "vllm.yaml"
VERSIONS = ("1.29", "1.32", "1.35", "1.37")
"""Releases that know native sidecars; the oldest that we support first."""
LEADER = ("spec", "leaderWorkerTemplate", "leaderTemplate")

Object = dict[str, Any]


def kubectl(*arguments: str, stdin: str = "") -> str:
    """What kubectl prints. Raises `CalledProcessError` with its words in `stderr`."""
    program = Path(sys.executable).with_name("kubectl")
    return subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True, check=True).stdout


def documents(text: str) -> list[Object]:
    """The objects of a YAML stream."""
    return [document for document in yaml.safe_load_all(text) if document]


def built(folder: Path) -> list[Object]:
    """The objects that a kustomization makes."""
    return documents(kubectl("kustomize", str(folder)))


def overlaid(folder: Path, resource: Object | Sequence[Object], components: Sequence[str]) -> list[Object]:
    """The objects after our components were added to somebody's own, in a kustomization of theirs."""
    objects = [resource] if isinstance(resource, dict) else list(resource)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "theirs.yaml").write_text(yaml.safe_dump_all(objects))
    # kustomize does not follow a relative path out of a symbolic link.
    relative = [os.path.relpath(KUBERNETES / name, folder.resolve()) for name in components]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["theirs.yaml"], "components": relative}))
    return built(folder)


def of_kind(objects: Sequence[Object], kind: str) -> Object:
    """The one object of a kind."""
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def template(workload: Mapping[str, Any]) -> Object:
    """The pod template of a workload; of a LeaderWorkerSet its leader's."""
    found: Any = workload
    for key in LEADER if workload["kind"] == "LeaderWorkerSet" else ("spec", "template"):
        found = found[key]
    made: Object = found
    return made


def pod(workload: Mapping[str, Any]) -> Object:
    """The pod's spec of a workload."""
    spec: Object = template(workload)["spec"]
    return spec


def containers(spec: Mapping[str, Any]) -> list[Object]:
    """All containers of a pod, those for its start first."""
    return [*spec.get("initContainers", ()), *spec["containers"]]


def named(spec: Mapping[str, Any], name: str = "stallwatch") -> Object:
    """The container of that name, wherever it stands."""
    (found,) = [container for container in containers(spec) if container["name"] == name]
    return found


def validate(objects: Sequence[Object], versions: Sequence[str] = VERSIONS) -> None:
    """Holds objects against the schemas of Kubernetes and of the Prometheus operator. Raises at the first mistake."""
    for each in objects:
        if each["apiVersion"].startswith("monitoring.coreos.com/"):
            _validate_custom(each)
        elif each["kind"] == "LeaderWorkerSet":
            # Its pods are ordinary ones.
            leader = {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "leader"},
                "template": template(each),
            }
            validate([leader], versions)
        else:
            for version in versions:
                kubernetes_validate.validate(each, version, strict=True)


def _validate_custom(each: Object) -> None:
    model = getattr(operator, each["kind"])
    read = model.model_validate(each)
    # The models skip what they do not know; the API server would too, and nobody would hear of it.
    assert not list(_lost(each, read.model_dump(mode="json", by_alias=True), each["kind"]))


def _lost(given: Any, kept: Any, path: str) -> Iterator[str]:
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{path}.{key}"
            else:
                yield from _lost(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from _lost(value, kept[index], f"{path}[{index}]")


def violations(spec: Mapping[str, Any], only: Sequence[str] | None = None) -> list[str]:
    """What the `restricted` level of pod security refuses, in all containers or in those named."""
    found = []
    if only is None:
        found += [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
        found += ["sysctls"] if spec.get("securityContext", {}).get("sysctls") else []
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found += [f"volume {volume['name']}" for volume in spec.get("volumes", ()) if not set(volume) - {"name"} <= allowed]
    for container in containers(spec):
        name = container["name"]
        if only is not None and name not in only:
            continue
        own = container.get("securityContext", {})
        of_pod = spec.get("securityContext", {}) if only is None else {}
        either = {**of_pod, **own}
        capabilities = own.get("capabilities", {})
        wrong = {
            "privileged": bool(own.get("privileged")),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "capabilities": capabilities.get("drop") != ["ALL"] or bool(capabilities.get("add")),
            "runAsNonRoot": either.get("runAsNonRoot") is not True,
            "runAsUser": either.get("runAsUser") == 0,
            "seLinuxOptions": {"user", "role"} & set(either.get("seLinuxOptions", {})) != set(),
            "appArmorProfile": either.get("appArmorProfile", {}).get("type") == "Unconfined",
            "procMount": own.get("procMount", "Default") != "Default",
            "hostProcess": bool(either.get("windowsOptions", {}).get("hostProcess")),
            "seccompProfile": either.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"},
            "hostPort": any("hostPort" in port for port in container.get("ports", ())),
        }
        found += [f"{name}: {what}" for what, is_wrong in wrong.items() if is_wrong]
    return found


def quality_of_service(spec: Mapping[str, Any]) -> str:
    """The class that Kubernetes gives the pod."""
    every = [container.get("resources", {}) for container in containers(spec)]
    if not any(resources.get("requests") or resources.get("limits") for resources in every):
        return "BestEffort"
    equal = all(
        name in resources.get("limits", {})
        and resources.get("requests", resources["limits"]).get(name) == resources["limits"][name]
        for resources in every
        for name in ("cpu", "memory")
    )
    return "Guaranteed" if equal else "Burstable"


def megabytes(quantity: str) -> float:
    """A quantity of memory in MiB."""
    return float(quantity.removesuffix("i")[:-1]) * {"Ki": 1 / 1024, "Mi": 1, "Gi": 1024}[quantity[-2:]]
