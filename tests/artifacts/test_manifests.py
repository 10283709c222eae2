"""What goes into a cluster: built with kustomize, held against schemas, and against what the sidecar promises."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import build
from stallwatch import configuration
from stallwatch.settings import Settings
from tests.artifacts.manifests import (
    EXAMPLE,
    KUBERNETES,
    VERSIONS,
    Object,
    built,
    containers,
    documents,
    kubectl,
    megabytes,
    named,
    of_kind,
    overlaid,
    pod,
    quality_of_service,
    template,
    validate,
    violations,
)
from tests.artifacts.promtool import ROOT
from tests.vllm.plugin import FLAGS, mounted

VLLM, SERVICE = documents(EXAMPLE.read_text())
LEADER_WORKER_SET: Object = {
    "apiVersion": "leaderworkerset.x-k8s.io/v1",
    "kind": "LeaderWorkerSet",
    "metadata": {"name": "vllm"},
    "spec": {
        "replicas": 1,
        "leaderWorkerTemplate": {
            "size": 2,
            "leaderTemplate": {
                "metadata": {"labels": {"role": "leader"}},
                "spec": {
                    "containers": [{"name": "vllm-leader", "image": "vllm"}],
                    "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory"}}],
                },
            },
            "workerTemplate": {"spec": {"containers": [{"name": "vllm-worker", "image": "vllm"}]}},
        },
    },
}


def a_deployment() -> Object:
    """Somebody's vLLM with an init container, a mesh's sidecar and a second container of its own."""
    theirs = copy.deepcopy(VLLM)
    spec = pod(theirs)
    spec["initContainers"] = [
        {"name": "download", "image": "download"},
        {"name": "mesh", "image": "mesh", "restartPolicy": "Always"},
    ]
    spec["containers"].append({"name": "router", "image": "router"})
    return theirs


def a_stateful_set() -> Object:
    """The same as a StatefulSet."""
    theirs = a_deployment()
    theirs["kind"] = "StatefulSet"
    theirs["spec"]["serviceName"] = "vllm"
    return theirs


def one_made(folder: Path, theirs: Object, *components: str) -> Object:
    """The workload after our components were added."""
    return of_kind(overlaid(folder, theirs, components), theirs["kind"])


def loaded(sidecar: Object) -> Settings:
    """The settings that the container's variables give, but for files that only a cluster mounts."""
    environ = {entry["name"]: entry["value"] for entry in sidecar["env"] if not entry["value"].startswith("/etc/")}
    return configuration.load([], environ).settings


VARIANTS = {
    "native": ("sidecar",),
    "native-all": ("sidecar", "plugin", "guaranteed", "nvml", "nvml-cdi", "client-certificates"),
    "plain": ("sidecar-plain",),
    "plain-all": ("sidecar-plain", "plugin", "guaranteed", "nvml", "nvml-cdi", "client-certificates"),
}
every_variant = pytest.mark.parametrize("components", VARIANTS.values(), ids=VARIANTS)


@every_variant
@pytest.mark.parametrize("make", [a_deployment, a_stateful_set])
def test_components_build_objects_that_clusters_accept(make: Any, components: tuple[str, ...], tmp_path: Path) -> None:
    """Added to a Deployment or a StatefulSet, every variant is valid for the oldest and the newest Kubernetes."""
    validate(overlaid(tmp_path, [make(), SERVICE], components))


def test_the_plain_variant_is_valid_before_native_sidecars(tmp_path: Path) -> None:
    """Kubernetes 1.25 accepts the plain variant and refuses the native one."""
    plain, native = (
        one_made(tmp_path / name, copy.deepcopy(VLLM), name, "plugin", "guaranteed", "nvml")
        for name in ("sidecar-plain", "sidecar")
    )

    validate([plain], ("1.25",))
    with pytest.raises(Exception, match="restartPolicy"):
        validate([native], ("1.25",))


@pytest.mark.parametrize("name", ["monitoring", "example", "drill"])
def test_kustomizations_build_objects_that_clusters_accept(name: str) -> None:
    """What is applied as it stands builds, and is valid for Kubernetes and for the operator."""
    validate(built(KUBERNETES / name))


def test_an_object_as_the_cluster_gives_it_can_be_patched(tmp_path: Path) -> None:
    """`kubectl get -o yaml` beside the kustomization `existing` is enough."""
    for name in ("existing", "sidecar", "sidecar-leader"):
        shutil.copytree(KUBERNETES / name, tmp_path / name)
    live = copy.deepcopy(VLLM)
    live["metadata"] |= {"uid": "0", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    live["status"] = {"replicas": 1}
    (tmp_path / "existing" / "vllm.yaml").write_text(yaml.safe_dump(live))
    (made,) = built(tmp_path / "existing")

    assert named(pod(made))["image"] == "stallwatch:latest"
    assert made["metadata"]["resourceVersion"] == "1"


@pytest.mark.parametrize("variant", ["sidecar", "sidecar-plain"])
@pytest.mark.parametrize("make", [a_deployment, a_stateful_set])
def test_adding_the_sidecar_again_changes_nothing(make: Any, variant: str, tmp_path: Path) -> None:
    """What the cluster gives back with the sidecar in it can be patched with a newer one."""
    once = one_made(tmp_path / "once", make(), variant)

    assert one_made(tmp_path / "twice", once, variant) == once


@every_variant
def test_nothing_of_theirs_is_changed(components: tuple[str, ...], tmp_path: Path) -> None:
    """Without the plugin, containers, volumes and the rest of the pod stay as they were and in their order."""
    theirs = a_deployment()
    made = one_made(tmp_path, theirs, *(name for name in components if name != "plugin"))
    before, after = pod(theirs), copy.deepcopy(pod(made))
    for key in ("containers", "initContainers", "volumes"):
        after[key] = [each for each in after[key] if not each["name"].startswith("stallwatch")]
    if "nvml" in components:
        assert after.pop("runtimeClassName") == "nvidia"

    assert after == before
    assert made["spec"]["selector"] == theirs["spec"]["selector"]


@every_variant
def test_the_sidecar_comes_last(components: tuple[str, ...], tmp_path: Path) -> None:
    """Nothing of the pod waits for it that need not: a native sidecar ends its list, a plain one stands after vLLM."""
    spec = pod(one_made(tmp_path, a_deployment(), *components))
    place = "initContainers" if "sidecar" in components else "containers"

    assert spec[place][-1]["name"] == "stallwatch"
    assert spec["containers"][0]["name"] == "vllm"


@every_variant
def test_probes_never_restart_or_unready_the_pod_for_vllm(components: tuple[str, ...], tmp_path: Path) -> None:
    """There is no readiness and no startup probe, and the liveness probe asks only whether our own loop turns."""
    spec = pod(one_made(tmp_path, a_deployment(), *components))
    sidecar = named(spec)
    probe = sidecar["livenessProbe"]

    assert not {"readinessProbe", "startupProbe", "lifecycle"} & set(sidecar)
    if "client-certificates" in components:
        assert probe["exec"]["command"] == ["stallwatch", "healthcheck"]
        assert "httpGet" not in probe
    else:
        assert probe["httpGet"] == {"path": "/livez", "port": "stallwatch"}


@every_variant
def test_containers_of_ours_pass_the_restricted_level(components: tuple[str, ...], tmp_path: Path) -> None:
    """By themselves, whatever the pod says: no privilege, no capability, no root, no token, a read-only root."""
    spec = pod(one_made(tmp_path, a_deployment(), *components))
    ours = [container for container in containers(spec) if container["name"].startswith("stallwatch")]

    assert violations(spec, [container["name"] for container in ours]) == []
    for container in ours:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["runAsUser"] == 65532
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts["/var/run/secrets/kubernetes.io/serviceaccount"] == "stallwatch-no-token"


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("pod", {"hostNetwork": True}),
        ("pod", {"hostPID": True}),
        ("pod", {"securityContext": {"sysctls": [{"name": "net.ipv4.ip_forward", "value": "1"}]}}),
        ("pod", {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}),
        ("container", {"privileged": True}),
        ("container", {"allowPrivilegeEscalation": True}),
        ("container", {"allowPrivilegeEscalation": None}),
        ("container", {"capabilities": {"drop": ["NET_RAW"]}}),
        ("container", {"capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]}}),
        ("container", {"runAsNonRoot": None}),
        ("container", {"runAsUser": 0}),
        ("container", {"seccompProfile": None}),
        ("container", {"seccompProfile": {"type": "Unconfined"}}),
        ("container", {"procMount": "Unmasked"}),
        ("port", {"hostPort": 9709}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_restricted_level_is_judged(place: str, change: Object) -> None:
    """Each thing that the level refuses would be found in the drill's pod, which passes without it."""
    spec = pod(documents((KUBERNETES / "drill" / "drill.yaml").read_text())[0])
    container = spec["containers"][0]
    spec["securityContext"] = {"runAsUser": 65532}  # leaves the rest to the containers
    container["ports"] = [{"containerPort": 9709}]
    places = {"pod": spec, "container": container["securityContext"], "port": container["ports"][0]}
    assert violations(spec) == []
    places[place].update(change)
    for key in [key for key, value in change.items() if value is None]:
        del places[place][key]

    assert len(violations(spec)) == 1


@pytest.mark.parametrize("name", ["example", "drill"])
def test_pods_of_ours_pass_the_restricted_level(name: str) -> None:
    """Whole pods that we define pass, take no service links and no token."""
    spec = pod(of_kind(built(KUBERNETES / name), "Deployment"))

    assert violations(spec) == []
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False


@every_variant
def test_incidents_have_twice_the_room_that_they_may_take(components: tuple[str, ...], tmp_path: Path) -> None:
    """The volume holds more than twice what the recorder may write: over its limit the kubelet evicts vLLM."""
    spec = pod(one_made(tmp_path, a_deployment(), *components))
    sidecar = named(spec)
    settings = loaded(sidecar)
    directory = str(settings.recorder.directory)
    (volume,) = [mount["name"] for mount in sidecar["volumeMounts"] if mount["mountPath"] == directory]
    (limit,) = [each["emptyDir"]["sizeLimit"] for each in spec["volumes"] if each["name"] == volume]

    assert megabytes(limit) * 2**20 >= 2 * settings.recorder.max_bytes


@every_variant
def test_variables_are_settings(components: tuple[str, ...], tmp_path: Path) -> None:
    """Every variable of the sidecar is a setting that loads, and the target is vLLM's port in the same pod."""
    spec = pod(one_made(tmp_path, a_deployment(), *components))
    settings = loaded(named(spec))

    assert str(settings.engine.url) == "http://127.0.0.1:8000/"
    assert settings.web.port == named(spec)["ports"][0]["containerPort"]


def test_resources(tmp_path: Path) -> None:
    """CPU is requested and not limited; the overlay `guaranteed` keeps vLLM in its class, with the plugin as well."""
    theirs = copy.deepcopy(VLLM)
    usual = pod(one_made(tmp_path / "usual", theirs, "sidecar"))
    equal = pod(one_made(tmp_path / "equal", theirs, "sidecar", "plugin", "guaranteed"))
    resources = named(usual)["resources"]

    assert quality_of_service(pod(theirs)) == "Guaranteed"
    assert quality_of_service(usual) == "Burstable"
    assert "cpu" not in resources["limits"]
    assert resources["requests"]["cpu"] == "100m"
    assert quality_of_service(equal) == "Guaranteed"
    assert named(equal)["resources"]["limits"] == {"cpu": "500m", "memory": "256Mi"}


@pytest.mark.parametrize("variant", ["sidecar", "sidecar-plain"])
def test_gpus_are_seen_and_not_taken(variant: str, tmp_path: Path) -> None:
    """The overlay `nvml` asks the runtime, not the scheduler; without it nothing is asked."""
    usual = pod(one_made(tmp_path / "usual", a_deployment(), variant))
    seen = pod(one_made(tmp_path / "seen", a_deployment(), variant, "nvml"))
    names = {entry["name"]: entry["value"] for entry in named(seen)["env"]}

    assert "runtimeClassName" not in usual
    assert not [entry for entry in named(usual)["env"] if entry["name"].startswith("NVIDIA")]
    assert (seen["runtimeClassName"], names["NVIDIA_VISIBLE_DEVICES"]) == ("nvidia", "all")
    assert names["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    assert not [key for kind in named(seen)["resources"].values() for key in kind if "gpu" in key]


def test_gpus_are_asked_for_by_name_of_the_container(tmp_path: Path) -> None:
    """The overlay `nvml-cdi` annotates the pod for this container alone; no runtime class, nothing of the scheduler."""
    made = one_made(tmp_path, a_deployment(), "sidecar", "nvml-cdi")

    assert template(made)["metadata"]["annotations"] == {
        "nvidia.cdi.k8s.io/container.stallwatch": "management.nvidia.com/gpu=all"
    }
    assert pod(made) == pod(one_made(tmp_path / "usual", a_deployment(), "sidecar"))


def test_the_network_policy_is_off_and_leaves_vllm_open_when_on(tmp_path: Path) -> None:
    """None by default; with it, vLLM's ports stay open to everyone and ours to Prometheus."""
    theirs = [VLLM, SERVICE]
    usual = overlaid(tmp_path / "usual", theirs, ["sidecar"])
    made = overlaid(tmp_path / "made", theirs, ["sidecar", "network-policy"])
    policy = of_kind(made, "NetworkPolicy")["spec"]
    open_to_all = {port["port"] for rule in policy["ingress"] if "from" not in rule for port in rule["ports"]}
    labels = template(of_kind(made, "Deployment"))["metadata"]["labels"]

    assert not [each for each in usual if each["kind"] == "NetworkPolicy"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert {port["containerPort"] for port in pod(VLLM)["containers"][0]["ports"]} <= open_to_all
    assert 9709 not in open_to_all
    assert [
        rule
        for rule in policy["ingress"]
        if "from" in rule and rule.get("ports") == [{"protocol": "TCP", "port": 9709}]
    ]
    assert policy["policyTypes"] == ["Ingress"]
    validate(made)


@pytest.mark.parametrize("variant", ["sidecar", "sidecar-plain"])
def test_a_leader_worker_set_is_watched_at_its_leader(variant: str, tmp_path: Path) -> None:
    """The leader gets the same sidecar as a Deployment, workers and vLLM's own container stay as they were."""
    made = one_made(tmp_path / "leader", LEADER_WORKER_SET, variant)
    usual = pod(one_made(tmp_path / "usual", a_deployment(), variant))
    theirs = LEADER_WORKER_SET["spec"]["leaderWorkerTemplate"]

    assert named(pod(made)) == named(usual)
    assert pod(made)["containers"][:1] == pod(LEADER_WORKER_SET)["containers"]
    assert len(containers(pod(made))) == 2
    assert ("initContainers" in pod(made)) is (variant == "sidecar")
    assert made["spec"]["leaderWorkerTemplate"]["workerTemplate"] == theirs["workerTemplate"]
    assert template(made)["metadata"]["labels"] == {"role": "leader", "stallwatch/sidecar": "true"}
    validate([made])


def test_the_variants_for_a_leader_are_those_for_a_deployment(tmp_path: Path) -> None:
    """Equal requests and limits, GPUs and client certificates make the same container of both."""
    variants = ("sidecar", "guaranteed", "nvml", "nvml-cdi", "client-certificates")
    made = one_made(tmp_path / "leader", LEADER_WORKER_SET, *variants)
    usual = one_made(tmp_path / "usual", a_deployment(), *variants)
    ours, theirs = named(pod(made)), named(pod(usual))
    for container in (ours, theirs):
        for key in ("env", "volumeMounts"):
            container[key].sort(key=lambda entry: entry["name"])
    validate([made])

    assert ours == theirs
    assert pod(made)["runtimeClassName"] == pod(usual)["runtimeClassName"] == "nvidia"
    assert template(made)["metadata"]["annotations"] == template(usual)["metadata"]["annotations"]
    assert [each for each in pod(made)["volumes"] if each["name"] == "stallwatch-tls"] == [
        each for each in pod(usual)["volumes"] if each["name"] == "stallwatch-tls"
    ]


def test_a_leader_with_init_containers_is_refused_loudly(tmp_path: Path) -> None:
    """Where the patch would overwrite something, building fails instead."""
    theirs = copy.deepcopy(LEADER_WORKER_SET)
    pod(theirs)["initContainers"] = [{"name": "download", "image": "download"}]

    with pytest.raises(subprocess.CalledProcessError) as refused:
        one_made(tmp_path, theirs, "sidecar")
    assert "testing value /spec/leaderWorkerTemplate" in refused.value.stderr


def test_the_plain_and_the_native_sidecar_are_the_same_container(tmp_path: Path) -> None:
    """They differ in the place and in `restartPolicy`."""
    native = named(pod(one_made(tmp_path / "native", a_deployment(), "sidecar")))
    plain = named(pod(one_made(tmp_path / "plain", a_deployment(), "sidecar-plain")))

    assert native.pop("restartPolicy") == "Always"
    assert native == plain


def test_the_plugin_is_mounted_where_vllm_looks(tmp_path: Path) -> None:
    """An init container copies the files out of our image; vLLM has them on PYTHONPATH and the flags that they need."""
    spec = pod(one_made(tmp_path, a_deployment(), "sidecar", "plugin"))
    copies, vllm = named(spec, "stallwatch-plugin"), named(spec, "vllm")
    (path,) = [entry["value"] for entry in vllm["env"] if entry["name"] == "PYTHONPATH"]
    (mount,) = [mount for mount in vllm["volumeMounts"] if path == f"{mount['mountPath']}/site"]
    expected = [flag for flag in FLAGS if flag in {"--enable-logging-iteration-details", "--disable-log-stats"}]

    assert mount["readOnly"] is True
    assert mount["name"] in {each["name"] for each in copies["volumeMounts"]}
    assert vllm["args"] == [*pod(VLLM)["containers"][0]["args"], *expected]
    assert spec["initContainers"].index(copies) < len(spec["initContainers"]) - 1


def test_the_copy_of_the_plugin_is_what_the_tests_mount(tmp_path: Path) -> None:
    """The init container's own command, with the image's folder stood in for, lays out what the real vLLM was given."""
    source, target = tmp_path / "source", tmp_path / "target"
    mounted(source)
    (made,) = overlaid(tmp_path / "made", VLLM, ["sidecar", "plugin"])
    command = named(pod(made), "stallwatch-plugin")["command"]
    code = command[2].replace("/opt/stallwatch/plugin", str(source)).replace("'/plugin/site'", repr(str(target)))
    for _ in range(2):  # again after a restart of the pod's containers
        subprocess.run([sys.executable, *command[1:2], code], check=True)

    assert {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} == {
        str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("change", ["name", "args", "command", "kind"])
def test_the_plugin_is_refused_where_it_cannot_be_added(change: str, tmp_path: Path) -> None:
    """Another name, no args, a shell that would swallow the flags, or a leader: building fails, and not the cluster."""
    theirs = copy.deepcopy(LEADER_WORKER_SET if change == "kind" else VLLM)
    vllm = pod(theirs)["containers"][0]
    if change == "name":
        vllm["name"] = "server"
    elif change == "args":
        del vllm["args"]
    elif change == "command":
        vllm |= {"command": ["/bin/sh", "-c"], "args": ["vllm serve some/model"]}
    with pytest.raises(subprocess.CalledProcessError):
        overlaid(tmp_path, theirs, ["sidecar", "plugin"])


def test_the_image_alone_can_be_changed_in_a_live_pod(tmp_path: Path) -> None:
    """The command of the docs changes one image of the pod and nothing else, which Kubernetes allows on a live pod."""
    made = one_made(tmp_path, a_deployment(), "sidecar")
    live = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "vllm-0"}, "spec": pod(made)}
    text = kubectl(
        "set", "image", "--local", "--filename=-", "--output=json", "stallwatch=stallwatch:2", stdin=json.dumps(live)
    )
    after = json.loads(text)["spec"]
    for container in containers(after):
        if not container["resources"]:  # kubectl writes them out
            del container["resources"]
    expected = copy.deepcopy(pod(made))
    named(expected)["image"] = "stallwatch:2"

    assert after == expected


def test_the_monitor_finds_the_sidecar(tmp_path: Path) -> None:
    """Selector and port of the PodMonitor are those of the pods, in every variant and in the drill."""
    monitor = of_kind(built(KUBERNETES / "monitoring"), "PodMonitor")["spec"]
    workloads = [
        one_made(tmp_path / "native", a_deployment(), "sidecar"),
        one_made(tmp_path / "plain", a_deployment(), "sidecar-plain"),
        one_made(tmp_path / "leader", LEADER_WORKER_SET, "sidecar"),
        of_kind(built(KUBERNETES / "drill"), "Deployment"),
    ]
    (endpoint,) = monitor["podMetricsEndpoints"]

    for workload in workloads:
        assert monitor["selector"]["matchLabels"].items() <= template(workload)["metadata"]["labels"].items()
        assert [port["name"] for port in named(pod(workload))["ports"]] == [endpoint["port"]]


def test_the_drill_runs_a_scenario_that_pages() -> None:
    """The drill's simulator plays the scenario whose page the end-to-end test sees, on the port that is watched."""
    spec = pod(of_kind(built(KUBERNETES / "drill"), "Deployment"))

    assert named(spec, "simulator")["args"] == ["simulate", "--scenario", "engine-hang"]
    assert named(spec, "simulator")["image"] == named(spec)["image"]


def test_what_is_generated_is_up_to_date() -> None:
    """`make docs` has been run since a rule, a panel or the list of dashboards changed."""
    assert [path for path, text in build.files().items() if path.read_text() != text] == []
    assert build.main(["--check"]) == 0


def test_dashboards_become_config_maps(tmp_path: Path) -> None:
    """Each dashboard, ours or somebody else's, is one ConfigMap that Grafana's sidecar finds."""
    (tmp_path / "stallwatch-more.json").write_text(json.dumps({"title": "{{ not a template }}"}))
    wanted = build.files(boards=tmp_path)
    for path in wanted:
        if path.parent == tmp_path:
            path.write_text(wanted[path])
    made = built(tmp_path)

    assert [each["metadata"]["name"] for each in made] == [
        f"stallwatch-dashboard-{name}" for name in ("fleet", "more", "readers", "self", "why")
    ]
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in made)
    assert all(len(json.dumps(each)) < 2**18 for each in made)  # kubectl apply notes all of it in one annotation
    assert json.loads(made[1]["data"]["stallwatch-more.json"])["title"] == "{{ not a template }}"
    assert made[0]["data"]["stallwatch-fleet.json"] == wanted[tmp_path / "stallwatch-fleet.json"]
    validate(made)


def test_images_are_named_in_one_way() -> None:
    """Ours is `stallwatch`, for kustomize's `images`; no manifest names a registry of ours."""
    texts = {path: path.read_text() for path in (ROOT / "deploy" / "kubernetes").rglob("*.yaml")}
    images = {
        line.split("image:", 1)[1].strip(" }\"'")
        for text in texts.values()
        for line in text.splitlines()
        if "image:" in line and not line.lstrip().startswith("#")
    }

    assert images == {"stallwatch:latest", "vllm/vllm-openai:v0.32.0"}


def test_the_oldest_release_is_stated() -> None:
    """The docs name the release that native sidecars need, which is the oldest that these tests hold them against."""
    assert f"Kubernetes {VERSIONS[0]}" in (ROOT / "docs" / "deploy.md").read_text()
