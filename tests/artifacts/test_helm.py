"""The Helm chart: rendered by Helm's own library, held against schemas, and against the manifests beside it."""

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from helm_python import Chart

import stallwatch
from stallwatch import configuration
from tests.artifacts.manifests import (
    KUBERNETES,
    Object,
    built,
    containers,
    documents,
    megabytes,
    named,
    of_kind,
    overlaid,
    pod,
    template,
    validate,
    violations,
)
from tests.artifacts.promtool import ROOT, RULES, program
from tests.artifacts.test_manifests import a_deployment

CHART = ROOT / "deploy" / "helm" / "stallwatch"
WATCHING: Mapping[str, Any] = {
    "statefulSets": [{"name": "vllm", "serviceName": "vllm-headless", "namespace": "serving", "replicas": 2}],
    "watchers": [
        {"name": "solo", "url": "http://solo.llm.svc:8000", "settings": {"canary": {"mode": "persistent"}}},
    ],
}
LIGHT: Mapping[str, Any] = {"rules": {"enabled": False}, "dashboards": {"enabled": False}}


def rendered(values: Mapping[str, Any] | None = None, chart: Path = CHART) -> dict[str, str]:
    """Template -> text, as `helm install stallwatch CHART --namespace llm` would apply it."""
    with Chart.load(chart) as loaded:
        texts: dict[str, str] = loaded.render(values=dict(values or {}), name="stallwatch", namespace="llm")
    return texts


def objects(values: Mapping[str, Any] | None = None, chart: Path = CHART) -> list[Object]:
    """The objects that would be applied."""
    texts = rendered(values, chart)
    return [each for name, text in texts.items() if not name.endswith(".txt") for each in documents(text)]


def watchers(values: Mapping[str, Any]) -> dict[str, Object]:
    """Deployment by name."""
    return {each["metadata"]["name"]: each for each in objects(values) if each["kind"] == "Deployment"}


def by_name(listed: Sequence[Object]) -> dict[str, Object]:
    """Entries by their name."""
    return {each["name"]: each for each in listed}


def test_lint_finds_nothing() -> None:
    """Helm's own lint is content, strictly."""
    found = helm_python.lint(CHART)

    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize(
    "values",
    [
        {},
        WATCHING,
        {**WATCHING, "apiKeySecret": {"name": "vllm-key"}, "networkPolicy": {"enabled": True}},
        {"podMonitor": {"namespaces": ["a", "b"], "endpoint": {"scheme": "https", "tlsConfig": {"serverName": "x"}}}},
        {
            "podMonitor": {"namespaces": ["*"]},
            "image": {"digest": f"sha256:{'0' * 64}"},
            "imagePullSecrets": [{"name": "x"}],
        },
        {**WATCHING, "watcher": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]}},
    ],
    ids=["defaults", "watchers", "key-and-policy", "tls", "everywhere", "placed"],
)
def test_objects_are_valid(values: Mapping[str, Any]) -> None:
    """What is rendered is valid for Kubernetes and for the operator, and everything carries the release's labels."""
    made = objects(values)
    validate(made)

    assert made
    for each in made:
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "stallwatch"
        assert each["metadata"]["namespace"] == "llm"


def test_by_default_nothing_runs() -> None:
    """The chart alone installs the shared parts: no pod, no NetworkPolicy, no access to the API."""
    assert {each["kind"] for each in objects()} == {"PodMonitor", "PrometheusRule", "ConfigMap"}


def test_rules_are_those_of_prometheus() -> None:
    """The PrometheusRule holds the rule file word for word; templates in alerts are left alone."""
    rule = of_kind(objects(), "PrometheusRule")

    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    assert "{{ $labels" in str(rule["spec"])


def test_labels_for_an_operator_that_selects() -> None:
    """Labels can be given to monitors and rules, as kube-prometheus-stack wants them."""
    wanted = {"release": "monitoring"}
    made = objects({"podMonitor": {"labels": wanted}, "rules": {"labels": wanted}})

    assert all(
        wanted.items() <= each["metadata"]["labels"].items()
        for each in made
        if each["kind"] in {"PodMonitor", "PrometheusRule"}
    )


def test_dashboards_are_taken_as_they_are(tmp_path: Path) -> None:
    """None, or as many as there are: one ConfigMap each, its braces untouched."""
    chart = tmp_path / "stallwatch"
    shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("dashboards"))
    assert not [each for each in objects(chart=chart) if each["kind"] == "ConfigMap"]
    (chart / "files" / "dashboards").mkdir(parents=True)
    for name in ("stallwatch-readers", "stallwatch-why"):
        (chart / "files" / "dashboards" / f"{name}.json").write_text('{"legendFormat": "{{pod}}"}\n')
    maps = [each for each in objects(chart=chart) if each["kind"] == "ConfigMap"]
    validate(maps)

    assert [each["metadata"]["name"] for each in maps] == [
        "stallwatch-dashboard-readers",
        "stallwatch-dashboard-why",
    ]
    assert maps[0]["data"]["stallwatch-readers.json"] == '{"legendFormat": "{{pod}}"}'
    assert maps[0]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_a_packaged_chart_holds_the_dashboards(tmp_path: Path) -> None:
    """What `helm package` makes has our dashboards word for word, and fits into the Secret that Helm keeps of it."""
    package = Path(helm_python.package(CHART, destination=tmp_path))
    made = objects(chart=package)
    held = {name: text.strip() for each in made if each["kind"] == "ConfigMap" for name, text in each["data"].items()}
    release = package.read_bytes() + gzip.compress(json.dumps(made).encode())

    assert held == {path.name: path.read_text().strip() for path in (ROOT / "dashboards").glob("*.json")}
    assert {"stallwatch-readers.json", "stallwatch-why.json"} <= set(held)
    assert len(release) * (4 / 3) ** 2 < 2**20  # Helm writes base64, and Kubernetes once more


def test_one_watcher_for_each_engine() -> None:
    """Pods of a StatefulSet are watched one by one under their stable names; series carry the engine's own labels."""
    made = watchers(WATCHING)
    first = made["stallwatch-vllm-0"]
    labels = template(first)["metadata"]["labels"]
    environ = {entry["name"]: entry["value"] for entry in named(pod(first))["env"]}
    monitors = {each["metadata"]["name"]: each for each in objects(WATCHING) if each["kind"] == "PodMonitor"}
    monitor = monitors["stallwatch-watchers"]["spec"]

    assert set(made) == {"stallwatch-solo", "stallwatch-vllm-0", "stallwatch-vllm-1"}
    assert environ["STALLWATCH_ENGINE__URL"] == "http://vllm-0.vllm-headless.serving.svc:8000"
    for target, value in (("pod", "vllm-0"), ("namespace", "serving"), ("job", "vllm")):
        assert labels[f"stallwatch/engine-{target}"] == value
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert "stallwatch/sidecar" not in labels
    assert first["spec"]["strategy"] == {"type": "Recreate"}
    assert first["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_prometheus_gives_series_the_labels_of_the_engine(tmp_path: Path) -> None:
    """Its own relabelling, with the monitor's steps behind those that the operator writes, names the watched engine."""
    made = objects(WATCHING)
    (monitor,) = [each for each in made if each["metadata"]["name"] == "stallwatch-watchers"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    steps = [
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
        {"target_label": "job", "replacement": "llm/stallwatch-watchers"},
    ]
    steps += [
        {
            "source_labels": each["sourceLabels"],
            "regex": each["regex"],
            "target_label": each["targetLabel"],
        }
        for each in endpoint["relabelings"]
    ]
    pods = {name: template(each)["metadata"]["labels"] for name, each in watchers(WATCHING).items()}
    targets = [
        {
            "targets": [f"10.0.0.{index}:9709"],
            "labels": {
                "__meta_kubernetes_namespace": "llm",
                "__meta_kubernetes_pod_name": f"{name}-7d9c",
                # Prometheus writes every other character of a label's name as an underscore.
                **{"__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", key): value for key, value in labels.items()},
            },
        }
        for index, (name, labels) in enumerate(sorted(pods.items()))
    ]
    (tmp_path / "targets.json").write_text(json.dumps(targets))
    job = {
        "job_name": "watchers",
        "file_sd_configs": [{"files": [str(tmp_path / "targets.json")]}],
        "relabel_configs": steps,
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    command = [program("promtool", "prometheus"), "check", "service-discovery", "--timeout=1s"]
    done = subprocess.run(
        [*command, str(tmp_path / "prometheus.yml"), "watchers"], capture_output=True, text=True, check=True
    )
    found = {
        tuple(each["labels"].get(name) for name in ("namespace", "pod", "job")) for each in json.loads(done.stdout)
    }

    assert found == {
        ("serving", "vllm-0", "vllm"),
        ("serving", "vllm-1", "vllm"),
        # Not told whose series they are, they keep the watcher's own.
        ("llm", "stallwatch-solo-7d9c", "llm/stallwatch-watchers"),
    }


def test_watchers_do_not_take_their_own_machine_for_the_engines() -> None:
    """GPUs and pressure of the node that a watcher happens to run on are not read, and its settings load."""
    for deployment in watchers({**WATCHING, "settings": {"slo": {"itl_seconds": 0.25}}}).values():
        environ = {entry["name"]: entry["value"] for entry in named(pod(deployment))["env"]}
        settings = configuration.load([], environ).settings

        assert settings.gpu.enabled == "false"
        assert settings.host.enabled is False
        assert settings.slo.itl_seconds == 0.25


def test_pods_pass_the_restricted_level() -> None:
    """Watchers and the test's pods: whole pods, without service links and without a token."""
    made = objects({**WATCHING, "apiKeySecret": {"name": "vllm-key"}})
    specs = [each["spec"] for each in made if each["kind"] == "Pod"]
    specs += [pod(each) for each in made if each["kind"] == "Deployment"]

    assert len(specs) == 6
    for spec in specs:
        assert violations(spec) == []
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in containers(spec))


@pytest.mark.parametrize(
    "size", [None, 200_000_000, 400_000_000, 0x40000000, "300MiB", "1.5 GiB", "900mb", "5e8", "700000K"], ids=str
)
def test_incidents_have_twice_the_room_that_they_may_take(size: str | int | None) -> None:
    """However the size is spelt, also where Helm turned it into a float: the volume holds twice what is written."""
    settings = {} if size is None else {"recorder": {"max_bytes": size}}
    own = {**WATCHING["watchers"][0], "name": "own", "settings": settings}
    for values in ({**WATCHING, "settings": settings}, {"watchers": [own]}):
        (deployment, *_) = watchers(values).values()
        environ = {entry["name"]: entry["value"] for entry in named(pod(deployment))["env"]}
        bytes_written = configuration.load([], environ).settings.recorder.max_bytes
        (limit,) = [each["emptyDir"]["sizeLimit"] for each in pod(deployment)["volumes"] if "incidents" in each["name"]]

        assert bytes_written == size or not isinstance(size, int)
        assert 512 <= megabytes(limit) <= max(512, 2 * bytes_written / 2**20 + 1)
        assert megabytes(limit) * 2**20 >= 2 * bytes_written


def parent(folder: Path, values: Mapping[str, Any]) -> Object:
    """The Deployment of a vLLM chart that has ours as a dependency and includes its sidecar."""
    chart = folder / "vllm"
    (chart / "templates").mkdir(parents=True)
    shutil.copytree(CHART, chart / "charts" / "stallwatch")
    (chart / "Chart.yaml").write_text(
        "apiVersion: v2\nname: vllm\nversion: 1.0.0\n"
        f"dependencies: [{{name: stallwatch, version: {stallwatch.__version__}}}]\n"
    )
    (chart / "templates" / "vllm.yaml").write_text(
        """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: vllm}
spec:
  selector: {matchLabels: {app: vllm}}
  template:
    metadata:
      labels:
        app: vllm
        {{- include "stallwatch.podLabels" .Subcharts.stallwatch | nindent 8 }}
    spec:
      {{- if .Values.stallwatch.sidecar.native }}
      initContainers:
        {{- include "stallwatch.sidecar" .Subcharts.stallwatch | nindent 8 }}
      {{- end }}
      containers:
        - {name: vllm, image: vllm}
        {{- if not .Values.stallwatch.sidecar.native }}
        {{- include "stallwatch.sidecar" .Subcharts.stallwatch | nindent 8 }}
        {{- end }}
      volumes:
        {{- include "stallwatch.volumes" .Subcharts.stallwatch | nindent 8 }}
"""
    )
    return of_kind(objects({"stallwatch": {**LIGHT, **values}}, chart), "Deployment")


@pytest.mark.parametrize("native", [True, False])
def test_the_chart_and_kustomize_make_the_same_sidecar(native: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """A vLLM chart that includes the named template gets the container, volumes and label of the component."""
    values = {"sidecar": {"native": native}, "image": {"tag": "latest"}}
    made = parent(tmp_path, values)
    (other,) = overlaid(tmp_path / "other", a_deployment(), ["sidecar" if native else "sidecar-plain"])
    ours, theirs = named(pod(made)), named(pod(other))
    for container in (ours, theirs):
        container["env"].sort(key=lambda entry: entry["name"])
    volumes = [each for each in pod(other)["volumes"] if each["name"].startswith("stallwatch")]
    validate([made])

    assert ours == theirs
    assert by_name(pod(made)["volumes"]) == by_name(volumes)
    assert template(made)["metadata"]["labels"]["stallwatch/sidecar"] == "true"


def test_the_named_sidecar_has_its_variants(tmp_path: Path) -> None:
    """Equal requests and limits, NVML without a GPU, a key from a secret, settings of one's own."""
    values = {
        "sidecar": {"guaranteed": True, "gpu": True},
        "apiKeySecret": {"name": "vllm-key"},
        "settings": {"canary": {"mode": "persistent"}},
    }
    made = parent(tmp_path, values)
    sidecar = named(pod(made))
    environ = {entry["name"]: entry["value"] for entry in sidecar["env"]}
    validate([made])

    assert sidecar["resources"]["requests"] == sidecar["resources"]["limits"] == {"cpu": "500m", "memory": "256Mi"}
    assert environ["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environ["STALLWATCH_CANARY__MODE"] == "persistent"
    mounts = {mount["name"]: mount["mountPath"] for mount in sidecar["volumeMounts"]}
    assert Path(environ["STALLWATCH_ENGINE__API_KEY_FILE"]).parent == Path(mounts["stallwatch-api-key"])


def test_the_chart_and_kustomize_want_the_same_certificates(tmp_path: Path) -> None:
    """With a secret and client certificates, container and volumes are those of the component, in watchers too."""
    values = {"tlsSecret": {"name": "stallwatch-tls", "clientCertificates": True}, "image": {"tag": "latest"}}
    made = parent(tmp_path, values)
    (other,) = overlaid(tmp_path / "other", a_deployment(), ["sidecar", "client-certificates"])
    ours, theirs = named(pod(made)), named(pod(other))
    for container in (ours, theirs):
        for key in ("env", "volumeMounts"):
            container[key].sort(key=lambda entry: entry["name"])
    volumes = [each for each in pod(other)["volumes"] if each["name"].startswith("stallwatch")]
    watching = list(watchers({**WATCHING, **values}).values())
    validate([made, *watching])

    assert ours == theirs
    assert by_name(pod(made)["volumes"]) == by_name(volumes)
    for watcher in watching:
        assert named(pod(watcher))["livenessProbe"] == theirs["livenessProbe"]
        assert by_name(pod(watcher)["volumes"])["stallwatch-tls"] == by_name(volumes)["stallwatch-tls"]


def test_with_a_certificate_the_probe_speaks_https() -> None:
    """Where clients need none of their own, the kubelet goes on asking; by default there is no TLS."""
    for tls, scheme in ({"name": "mine"}, "HTTPS"), ({}, None):
        for deployment in watchers({**WATCHING, "tlsSecret": tls}).values():
            container = named(pod(deployment))
            environ = {entry["name"]: entry["value"] for entry in container["env"]}

            assert container["livenessProbe"]["httpGet"].get("scheme") == scheme
            assert ("STALLWATCH_WEB__TLS_CERT_FILE" in environ) is (scheme is not None)
            assert "STALLWATCH_WEB__CLIENT_CA_FILE" not in environ


def test_the_network_policy_is_off_and_leaves_vllm_open_when_on() -> None:
    """None by default; with it, vLLM's ports are open to everyone, as with kustomize."""
    made = of_kind(objects({"networkPolicy": {"enabled": True}}), "NetworkPolicy")
    (other,) = [each for each in built_policy() if each["kind"] == "NetworkPolicy"]

    assert "NetworkPolicy" not in {each["kind"] for each in objects()}
    assert made["spec"] == other["spec"]


def built_policy() -> list[Object]:
    """The policy of the kustomize component."""
    return documents((KUBERNETES / "network-policy" / "network-policy.yaml").read_text())


def test_the_chart_and_kustomize_make_the_same_monitor() -> None:
    """One way to scrape, whichever way it was installed."""
    (made,) = [each for each in objects() if each["kind"] == "PodMonitor"]

    assert made["spec"] == of_kind(built(KUBERNETES / "monitoring"), "PodMonitor")["spec"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"podMonitr": {}}, "podMonitr"),
        ({"watchers": [{"name": "a"}]}, "url"),
        ({"watchers": [{"name": "a", "url": "a:8000"}]}, "url"),
        ({"statefulSets": [{"name": "a", "serviceName": "a", "replicas": 0}]}, "replicas"),
        ({"settings": {"canry": {"mode": "pulse"}}}, "canry"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"podMonitor": {"interval": "15 s"}}, "interval"),
        ({"networkPolicy": {"enabled": True, "vllmPorts": []}}, "vllmPorts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_cannot_work_are_refused(values: Mapping[str, Any], said: str) -> None:
    """A misspelt name, a missing address and the like end the installation with the name of the value."""
    with Chart.load(CHART) as chart, pytest.raises(helm_python.HelmError, match=said):
        chart.validate_schema(chart.merge_values(dict(values)))


def test_every_value_is_described() -> None:
    """The README's table has one row for each value of values.yaml, with its default."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = dict(re.findall(r"^\| `([^`]+)` \| (?:`([^`]*)`)? *\|", (CHART / "README.md").read_text(), re.MULTILINE))

    def flat(value: Any, path: str) -> dict[str, str]:
        whole = {"podMonitor.endpoint", "sidecar.livenessProbe", "resources", "networkPolicy.metricsFrom", "settings"}
        if isinstance(value, dict) and value and path not in whole and not path.endswith(("abels", "annotations")):
            return {
                name: text
                for key, each in value.items()
                for name, text in flat(each, f"{path}.{key}".lstrip(".")).items()
            }
        return {path: yaml.safe_dump(value, default_flow_style=True, width=1000).strip().removesuffix("\n...").strip()}

    expected = flat(values, "")
    assert set(rows) == set(expected)
    for name, default in expected.items():
        assert yaml.safe_load(rows[name] or '""') == yaml.safe_load(default), name


def test_versions_agree() -> None:
    """Chart and program are released together."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["version"] == chart["appVersion"] == stallwatch.__version__


@pytest.mark.parametrize("values", [{}, WATCHING, {"networkPolicy": {"enabled": True}}])
def test_notes_say_what_to_look_at_next(values: Mapping[str, Any]) -> None:
    """They name a query, the objective and the drill, and metrics that exist."""
    (notes,) = [text for name, text in rendered(values).items() if name.endswith("NOTES.txt")]
    reference = (ROOT / "docs" / "metrics.md").read_text()

    assert "deploy/kubernetes/drill" in notes
    for metric in re.findall(r"stallwatch_\w+", notes):
        assert metric in reference
