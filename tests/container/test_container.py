"""The image, built and run for real under a pod's limits, beside the simulator from the same image."""

import re
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

import stallwatch
from tests.artifacts.manifests import EXAMPLE, documents, named, overlaid, pod
from tests.container import arm64
from tests.container.environment import BASE, Containers, ensure
from tests.container.running import (
    ROOT,
    base,
    build,
    container,
    inside,
    inspect,
    sidecar_command,
    simulator,
    value,
)
from tests.e2e.processes import free_port, get, process, until
from tests.e2e.processes import stallwatch as stallwatch_command
from tests.vllm import truth
from tests.vllm.load import decode_stream, load
from tests.vllm.plugin import mounted

pytestmark = [pytest.mark.container, pytest.mark.timeout(600)]
INCIDENTS = ("--tmpfs=/var/lib/stallwatch:rw,size=64m,mode=0777",)
ADDED_BYTES = 40_000_000
GUIDE = ROOT / "docs" / "deploy.md"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    """The store with our image in it."""
    containers = ensure()
    began = time.monotonic()
    build(containers, tmp_path_factory.mktemp("build"))
    print(f"image built in {time.monotonic() - began:.0f} s")
    return containers


def test_size_and_layers(built: Containers) -> None:
    """One layer on top of the base, below 40 MB and as large as the guide says."""
    below, image = inspect(built, BASE), inspect(built)
    added = image["Size"] - below["Size"]
    stated = re.search(r"One layer of ([\d.]+) MB on top of a Python image", GUIDE.read_text())
    print(f"base {below['Size'] / 1e6:.1f} MB, added {added / 1e6:.1f} MB")
    print(built.call("podman", "history", "--format={{.Size}} {{.CreatedBy}}", image["Id"]))

    assert len(image["RootFS"]["Layers"]) == len(below["RootFS"]["Layers"]) + 1
    assert image["RootFS"]["Layers"][:-1] == below["RootFS"]["Layers"]
    assert added < ADDED_BYTES
    assert stated
    assert float(stated[1]) == pytest.approx(added / 1e6, rel=0.05)


def test_configuration(built: Containers) -> None:
    """A numeric user that is not root, no shell in between, no health check, no NVIDIA devices asked for."""
    config = inspect(built)["Config"]

    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["/opt/stallwatch/bin/stallwatch"]
    assert config["Cmd"] == ["run"]
    assert "Healthcheck" not in config
    assert config["StopSignal"] in {"SIGTERM", "15"}
    assert not [entry for entry in config["Env"] if entry.startswith(("NVIDIA_VISIBLE", "PIP_", "STALLWATCH_"))]
    assert config["Labels"]["org.opencontainers.image.version"] == stallwatch.__version__
    assert config["Labels"]["org.opencontainers.image.base.name"] == base(built)
    assert "@sha256:" in base(built)


def test_nothing_is_there_that_is_not_needed(built: Containers) -> None:
    """No pip, backend, compiler or make, nothing that our user may write, and everything is compiled."""
    script = """
import importlib.util, os, pathlib, shutil, sys
home = pathlib.Path("/opt/stallwatch")
assert os.getuid() == 65532
packages = next(home.glob("lib/python*/site-packages"))
print(*sorted(path.name for path in packages.iterdir() if path.is_dir() and path.suffix != ".dist-info"))
tools = [name for name in ("cc", "gcc", "g++", "clang", "ld", "make", "git", "curl") if shutil.which(name)]
assert not tools, tools
assert not list(packages.glob("pip*")) and not list(packages.glob("hatchling*"))
sources = [path for path in packages.rglob("*.py")]
missing = [path for path in sources if not pathlib.Path(importlib.util.cache_from_source(str(path))).exists()]
assert not missing, missing
writable = [str(path) for path in home.rglob("*") if not path.is_symlink() and os.access(path, os.W_OK)]
assert not writable, writable
secrets = [str(path) for path in (pathlib.Path("/etc/pip.conf"), pathlib.Path("/run/secrets/ca.crt")) if path.exists()]
assert not secrets, secrets
"""
    print(inside(built, "python", "-c", script))


MODULES = """
import importlib, pkgutil, stallwatch
import aiohttp, aiohttp._http_parser, aiohttp._http_writer, frozenlist._frozenlist, multidict._multidict
import propcache._helpers_c, pydantic_core, uvloop, yaml, yaml._yaml, yarl
count = 0
for module in pkgutil.walk_packages(stallwatch.__path__, "stallwatch."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        count += 1
print(count, "modules")
"""
"""Imports everything of ours, and every compiled module."""


def test_every_command_and_module_runs(built: Containers) -> None:
    """Compiled modules survived the stripping, and every command of the program imports what it needs."""
    print(inside(built, "python", "-W", "error", "-c", MODULES))

    assert inside(built, "/opt/stallwatch/bin/stallwatch", "version").startswith(f"stallwatch {stallwatch.__version__}")


def test_a_bad_configuration_is_one_line_and_status_2(built: Containers) -> None:
    """The container ends at once and says which setting is wrong."""
    with container(built, "bad", "run", "--canary.mode", "sometimes") as running:
        status = int(running("wait", running.name))

        assert status == 2
        assert "canary.mode" in running.log()
        assert "Traceback" not in running.log()


def test_the_plugin_comes_out_of_the_image(built: Containers, tmp_path: Path) -> None:
    """The init container's own command copies what the tests with the real vLLM mount, readable for every user."""
    (made,) = overlaid(tmp_path / "made", documents(EXAMPLE.read_text())[0], ["sidecar", "plugin"])
    command = named(pod(made), "stallwatch-plugin")["command"]
    volume = tmp_path / "plugin"
    volume.mkdir()
    volume.chmod(0o777)  # an emptyDir is root's, and everybody may write
    for _ in range(2):  # again after a restart
        inside(built, *command, options=(f"--volume={volume}:/plugin",))
    target = volume / "site"
    mounted(tmp_path / "expected")
    expected = {path.relative_to(tmp_path / "expected"): path for path in (tmp_path / "expected").rglob("*.*")}
    copied = {path.relative_to(target): path for path in target.rglob("*.*")}

    assert set(copied) == set(expected)
    for name, path in copied.items():
        assert path.stat().st_mode & 0o044 == 0o044
        if path.is_file() and name.name != "METADATA":
            assert path.read_text() == expected[name].read_text()
    # As vLLM finds it: by the entry point, with nothing else of ours on the path.
    script = (
        "import importlib.metadata as m; (e,) = m.entry_points(group='vllm.stat_logger_plugins'); "
        "print(e.name, e.value, m.version('stallwatch'))"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={"PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["stallwatch", "stallwatch.vllm_plugin:StepLogger", stallwatch.__version__]


def test_probes_hold_without_vllm_and_without_a_shell(built: Containers) -> None:
    """Nothing answers where vLLM should be and no shell can be started: alive, ready, ended quickly all the same."""
    nobody, port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    shells = tuple(f"--volume=/dev/null:/usr/bin/{name}:ro" for name in ("bash", "dash"))
    with pytest.raises(RuntimeError, match="executable file not found"):
        inside(built, "sh", "-c", "true", options=shells)
    command = sidecar_command(nobody, port)
    with container(built, "alone", *command, cpus=0.5, options=(*INCIDENTS, *shells)) as sidecar:
        until(lambda: value(get(f"{url}/metrics"), "source_failures_total", source="engine") > 3, 30, "polls fail")
        probes = [get(f"{url}/{name}") for name in ("livez", "readyz")]
        page = get(f"{url}/metrics")
        status, seconds = sidecar.terminate()

    assert all(probe.strip() for probe in probes)
    assert value(page, "source_up", source="engine") == 0.0
    assert status == 0
    assert seconds < 2.0


def test_the_probe_inside_needs_no_certificate(built: Containers, tmp_path: Path) -> None:
    """Whoever shows no certificate is refused, as the kubelet would be; the probe of `client-certificates` is not."""
    (made,) = overlaid(tmp_path / "made", documents(EXAMPLE.read_text())[0], ["sidecar", "client-certificates"])
    described = named(pod(made))
    probe = described["livenessProbe"]
    authority = trustme.CA()
    mine, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("prometheus")
    secret = tmp_path / "secret"
    secret.mkdir()
    mine.cert_chain_pems[0].write_to_path(secret / "tls.crt")
    mine.private_key_pem.write_to_path(secret / "tls.key")
    authority.cert_pem.write_to_path(secret / "ca.crt")
    for path in secret.iterdir():
        path.chmod(0o444)
    port = free_port()
    variables = [f"{entry['name']}={entry['value']}" for entry in described["env"] if "_WEB__" in entry["name"]]
    options = [f"--env={each}" for each in (*variables, f"STALLWATCH_WEB__PORT={port}")]
    (mount,) = [each["mountPath"] for each in described["volumeMounts"] if each["name"] == "stallwatch-tls"]
    strangers = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    known = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    client.configure_cert(known)

    def asked(context: ssl.SSLContext) -> str:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/livez", timeout=5.0, context=context) as answer:
            body: bytes = answer.read()
            return body.decode()

    command = sidecar_command(free_port(), port)
    options += [*INCIDENTS, f"--volume={secret}:{mount}:ro"]
    with container(built, "guarded", *command, cpus=0.5, options=tuple(options)) as sidecar:
        until(lambda: asked(known), 30, "the listener answers")
        with pytest.raises(OSError, match=r"certificate required|closed|reset"):
            asked(strangers)
        began = time.monotonic()
        sidecar("exec", sidecar.name, *probe["exec"]["command"])
        took = time.monotonic() - began
    print(f"the probe inside took {took:.2f} s at half a CPU")

    assert took < probe["timeoutSeconds"]


@pytest.fixture
def target(built: Containers) -> Iterator[int]:
    """The port of a simulated vLLM whose readers are frozen from 25 s on."""
    port = free_port()
    with simulator(built, "long-prefill", port):
        yield port


def test_numbers_memory_and_end_beside_a_freeze(built: Containers, target: int) -> None:
    """Half a CPU and 128 MiB are enough: figures are an independent reader's, memory is stable, the end quick."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    resident: list[tuple[float, float]] = []
    with container(built, "sidecar", *sidecar_command(target, port), cpus=0.5, options=INCIDENTS) as sidecar:
        until(lambda: value(get(f"{url}/metrics"), "stream_seconds_total", absent=0.0) > 0, 30, "the canary streams")
        with load(f"http://127.0.0.1:{target}", [decode_stream(tokens=2000)]) as client:
            before = get(f"{url}/metrics")
            began = time.monotonic()
            while (now := time.monotonic()) < began + 45.0:
                page = get(f"{url}/metrics")
                rss = next(line for line in page.splitlines() if line.startswith("process_resident_memory_bytes"))
                resident.append((now - began, float(rss.split()[1])))
                time.sleep(1.0)
            page, until_then = get(f"{url}/metrics"), time.monotonic()
            reader = client.streams()["victim"]
        alive = sidecar("exec", f"--env=STALLWATCH_WEB__PORT={port}", sidecar.name, "stallwatch", "healthcheck")
        status, seconds = sidecar.terminate()
        state, log = sidecar.state(), sidecar.log()
    window = (began, until_then)
    missed = truth.missed_seconds([reader], objective=0.1, window=window)
    exported = value(page, "slo_missed_seconds_total") - value(before, "slo_missed_seconds_total")
    waited = truth.reader_wait([reader], until_then)
    gaps = truth.gaps(reader, window=window)
    median, p99 = truth.itl_quantile(gaps, 0.5), truth.itl_quantile(gaps, 0.99)
    assert median is not None
    assert p99 is not None
    told = {q: value(page, "itl_seconds", source="canary", q=q, window="5m") for q in ("0.5", "0.99")}
    settled = [each for at, each in resident if at > 15.0]
    print(
        f"missed {exported:.2f} s, truth {missed:.2f} s; p50 {told['0.5'] * 1e3:.1f} ms, truth {median * 1e3:.1f} ms; "
        f"p99 {told['0.99']:.3f} s, truth {p99:.3f} s; largest wait {waited:.2f} s; resident "
        f"{settled[0] / 2**20:.1f} MiB, then {settled[-1] / 2**20:.1f} MiB; ended {seconds:.2f} s after SIGTERM"
    )

    assert missed > 10.0
    assert exported == pytest.approx(missed, rel=0.05, abs=0.5)
    assert told["0.5"] == pytest.approx(median, rel=0.15)
    assert told["0.99"] == pytest.approx(p99, rel=0.25)
    assert value(page, "stall_active", kind="decode") == 1.0
    assert value(page, "reader_wait_max_seconds", source="canary") == pytest.approx(waited, rel=0.2)
    assert "ok" in alive or alive == ""
    # The recorder fills its quarter of an hour: some growth is due, a leak would be more.
    assert settled[-1] - settled[0] < 4 * 2**20
    assert settled[-1] < 100 * 2**20
    assert (status, state["OOMKilled"]) == (0, False)
    assert seconds < 2.0
    assert "incident bundle written" in log
    assert "Traceback" not in log


def test_the_container_knows_that_it_is_throttled(built: Containers) -> None:
    """At 100 millicores and ten scrapes a second it is starved: it says so, and holds none of it against the server."""
    port, quiet, own = free_port(), free_port(), "observer_throttled_seconds_total"
    url = f"http://127.0.0.1:{port}/metrics"
    with (
        simulator(built, "quiet", quiet),
        container(built, "starved", *sidecar_command(quiet, port), cpus=0.1, options=INCIDENTS),
    ):
        until(lambda: value(get(url, timeout=30.0), "stream_seconds_total", absent=0.0) > 1, 90, "the canary streams")
        before = get(url, timeout=30.0)
        end = time.monotonic() + 15.0
        while time.monotonic() < end:
            page = get(url, timeout=30.0)
            time.sleep(0.05)
    grew = {
        name: value(page, name) - value(before, name, absent=0.0)
        for name in (own, "observer_excluded_gaps_total", "slo_missed_seconds_total", "slo_seconds_total")
    }
    print(grew)

    assert grew[own] > 1.0
    assert grew["observer_excluded_gaps_total"] > 10
    assert grew["slo_missed_seconds_total"] < 0.05 * grew["slo_seconds_total"]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_dependency_has_a_wheel(machine: str, python: str, tmp_path: Path) -> None:
    """Nothing would be compiled for amd64 or arm64 (GB10, Grace), by the pinned hashes, the build backend included."""
    for name in ("runtime", "build"):
        subprocess.run(
            [
                sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
                "--require-hashes", "--only-binary=:all:", f"--target={tmp_path}", f"--python-version={python}",
                "--implementation=cp", *(f"--platform=manylinux{tag}_{machine}" for tag in ("2014", "_2_17", "_2_28")),
                f"--requirement={ROOT / 'requirements' / name}.txt",
            ],
            check=True,
        )  # fmt: skip


def test_what_the_image_holds_runs_on_arm64(tmp_path: Path) -> None:
    """The wheels for arm64 survive the stripping too: emulated, the sidecar watches, and ends when it is told to."""
    ensure()
    packages = arm64.make(tmp_path)
    script = f"import platform; assert platform.machine() == 'aarch64'\n{MODULES}"
    print(arm64.output(packages, "-W", "error", "-c", script))
    target, port = free_port(), free_port()
    settings = {"engine.url": f"http://127.0.0.1:{target}", "web.port": port, "canary.mode": "persistent"}
    flags = [f"--{name}={setting}" for name, setting in settings.items()]
    line, environ = arm64.command(packages, "-m", "stallwatch", "run", *flags)
    simulating = stallwatch_command("simulate", "--scenario=quiet", f"--port={target}")
    with (
        process(simulating, tmp_path / "simulator.log"),
        process(line, tmp_path / "sidecar.log", environ) as sidecar,
    ):
        url = f"http://127.0.0.1:{port}/metrics"
        until(lambda: value(get(url), "itl_samples", absent=0.0, source="canary") > 60, 90, "the canary streams")
        page = get(url)
        status, seconds = sidecar.stop()
    print(f"emulated, it ended {seconds:.2f} s after SIGTERM")

    assert value(page, "source_up", source="engine") == 1.0
    assert value(page, "source_up", source="canary") == 1.0
    assert status == 0
    assert "Traceback" not in sidecar.output()
