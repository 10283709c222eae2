"""The compose files: read by compose itself, and their parts by the programs that they are for."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import compose  # type: ignore[import-untyped]
import pytest
import yaml

from stallwatch import configuration
from stallwatch.simulator.scenarios import SCENARIOS
from tests.artifacts.promtool import ROOT, program

COMPOSE = ROOT / "deploy" / "compose"


def config(*names: str, **environ: str) -> Any:
    """The merged and interpolated model, as `docker compose config` shows it."""
    # Its wrapper on the path ends with status 0 whatever happened.
    program_itself = Path(compose.__file__).with_name("docker-compose")
    files = [argument for name in names for argument in ("--file", str(COMPOSE / name))]
    done = subprocess.run(
        [program_itself, *files, "config", "--format=json"],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def sources(service: Any) -> list[str]:
    """The paths that a service mounts."""
    return [each["source"] for each in service.get("volumes", ()) if each["type"] == "bind"]


def test_everything_is_there_with_one_command() -> None:
    """Simulator, stallwatch, Prometheus, Alertmanager and Grafana; what they mount exists; only loopback listens."""
    services = config("compose.yaml")["services"]

    assert set(services) == {"simulator", "stallwatch", "prometheus", "alertmanager", "grafana"}
    for service in services.values():
        assert all(Path(source).exists() for source in sources(service))
        assert {port["host_ip"] for port in service.get("ports", ())} <= {"127.0.0.1"}


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "vllm.yaml")], ids=["simulated", "real"])
def test_our_containers_are_as_restricted_as_in_a_pod(files: tuple[str, ...]) -> None:
    """A read-only root, no capabilities, no new privileges, and memory for the process and all incidents."""
    services = config(*files, MODEL="some/model")["services"]
    ours = services["stallwatch"]
    settings = configuration.load([], ours["environment"]).settings

    for service in (ours, *([services["simulator"]] if "simulator" in services else [])):
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert int(service["mem_limit"]) == 256 * 2**20
    (size,) = [re.search(rf"^{settings.recorder.directory}:size=(\d+)m,", each) for each in ours["tmpfs"]]
    assert size
    assert int(size[1]) * 2**20 >= 2 * settings.recorder.max_bytes
    # A tmpfs is charged to the container: full, it leaves the process what pods are given as a request.
    assert int(ours["mem_limit"]) - int(size[1]) * 2**20 >= 128 * 2**20
    assert ours["healthcheck"]["test"] == ["CMD", "stallwatch", "healthcheck"]


def test_the_simulator_plays_a_scenario_that_exists() -> None:
    """The default freezes readers; another can be named."""
    command = config("compose.yaml")["services"]["simulator"]["command"]
    other = config("compose.yaml", SCENARIO="quiet")["services"]["simulator"]["command"]

    assert command[command.index("--scenario") + 1] in SCENARIOS
    assert other[-1] == "quiet"


def test_beside_a_real_vllm_the_network_is_shared() -> None:
    """Stallwatch is in vLLM's network and keeps the name by which Prometheus finds it; NVML alone is asked for."""
    services = config("compose.yaml", "vllm.yaml", MODEL="some/model")["services"]
    ours, vllm = services["stallwatch"], services["vllm"]
    (devices,) = ours["deploy"]["resources"]["reservations"]["devices"]

    assert "simulator" not in services
    assert ours["network_mode"] == "service:vllm"
    assert "stallwatch" in vllm["networks"]["default"]["aliases"]
    assert "ports" not in ours
    assert devices["capabilities"] == ["utility"]
    assert "some/model" in vllm["command"]
    assert str(configuration.load([], ours["environment"]).settings.engine.url) == "http://127.0.0.1:8000/"


def test_a_model_must_be_named() -> None:
    """Without one compose ends before it pulls anything, and says so."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        config("compose.yaml", "vllm.yaml")
    assert "name a model" in refused.value.stderr


def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    """Promtool reads it with the rules where the container has them, and it scrapes the name that compose gives."""
    given = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    mounts = {each["target"]: each["source"] for each in config("compose.yaml")["services"]["prometheus"]["volumes"]}
    given["rule_files"] = [mounts[name] for name in given["rule_files"]]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(given))
    promtool = program("promtool", "prometheus")
    subprocess.run([promtool, "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, check=True)

    assert given["scrape_configs"][0]["static_configs"] == [{"targets": ["stallwatch:9709"]}]
    assert given["alerting"]["alertmanagers"][0]["static_configs"] == [{"targets": ["alertmanager:9093"]}]


def test_grafana_finds_what_is_provisioned() -> None:
    """The data source is Prometheus by the name that compose gives, the dashboards are ours."""
    service = config("compose.yaml")["services"]["grafana"]
    mounts = {each["target"]: each["source"] for each in service["volumes"]}
    source = yaml.safe_load((COMPOSE / "grafana" / "datasources" / "prometheus.yaml").read_text())["datasources"][0]
    boards = yaml.safe_load((COMPOSE / "grafana" / "dashboards" / "stallwatch.yaml").read_text())["providers"][0]

    assert source["url"] == "http://prometheus:9090"
    assert mounts[boards["options"]["path"]] == str(ROOT / "dashboards")
    assert {path.stem for path in (ROOT / "dashboards").glob("*.json")} >= {"stallwatch-readers", "stallwatch-why"}
