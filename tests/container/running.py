"""Builds our image and runs containers of it under the limits that a pod has."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.container.environment import BASE, Containers
from tests.e2e.processes import get, until

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/stallwatch"

AS_IN_A_POD = (
    "--network=host",
    "--read-only",
    "--read-only-tmpfs=false",
    "--user=65532",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    "--memory=128m",
    "--memory-swap=128m",
    # Within what sandboxes allow root itself.
    "--ulimit=nofile=1024:1024",
    "--ulimit=nproc=1000:1000",
)


def base(containers: Containers) -> str:
    """The stand-in base by its digest, as a release names the official one."""
    return f"{BASE}@{inspect(containers, BASE)['Digest']}"


def build(containers: Containers, folder: Path) -> None:
    """Builds the Dockerfile on the stand-in base, with this machine's package index and authorities as secrets."""
    authorities = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt"
    lines = ["[global]", "cert = /run/secrets/ca.crt"]
    if index := os.environ.get("PIP_INDEX_URL"):
        lines.append(f"index-url = {index}")
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    containers.call(
        "buildah",
        "bud",
        "--isolation=chroot",
        "--layers=false",
        "--format=oci",
        f"--build-arg=PYTHON_IMAGE={base(containers)}",
        f"--secret=id=pip.conf,src={folder / 'pip.conf'}",
        f"--secret=id=ca.crt,src={authorities}",
        f"--tag={IMAGE}",
        str(ROOT),
    )


def inspect(containers: Containers, image: str = IMAGE) -> Any:
    """What podman knows of an image."""
    (known,) = json.loads(containers.call("podman", "image", "inspect", image))
    return known


def inside(containers: Containers, *command: str, options: tuple[str, ...] = ()) -> str:
    """Runs one command in a fresh container and returns what it prints."""
    entry, *rest = command
    return containers.call("podman", "run", "--rm", *AS_IN_A_POD, *options, f"--entrypoint={entry}", IMAGE, *rest)


@dataclass(frozen=True, slots=True)
class Container:
    """A running container."""

    containers: Containers
    name: str

    def __call__(self, verb: str, *arguments: str) -> str:
        """A podman command about this container."""
        return self.containers.call("podman", verb, *arguments)

    def log(self) -> str:
        """Everything that it wrote."""
        done = subprocess.run(self.containers.command("podman", "logs", self.name), capture_output=True, check=True)
        return (done.stdout + done.stderr).decode(errors="replace")

    def terminate(self) -> tuple[int, float]:
        """Sends SIGTERM to its first process. Returns exit status and seconds."""
        began = time.monotonic()
        self("kill", "--signal=TERM", self.name)
        status = int(self("wait", "--interval=20ms", self.name))
        return status, time.monotonic() - began

    def state(self) -> Mapping[str, Any]:
        """What podman knows of its state."""
        (known,) = json.loads(self("container", "inspect", self.name))
        state: Mapping[str, Any] = known["State"]
        return state


@contextmanager
def container(
    containers: Containers, name: str, *command: str, options: tuple[str, ...] = (), cpus: float | None = None
) -> Iterator[Container]:
    """Runs our image with these arguments while the block runs."""
    limit = [] if cpus is None else [f"--cpus={cpus}"]
    name = f"stallwatch-test-{name}-{os.getpid()}"
    containers.call("podman", "run", "--detach", f"--name={name}", *AS_IN_A_POD, *limit, *options, IMAGE, *command)
    try:
        yield Container(containers, name)
    finally:
        containers.call("podman", "rm", "--force", "--time=0", name)


@contextmanager
def simulator(containers: Containers, scenario: str, port: int) -> Iterator[Container]:
    """A simulated vLLM in a container of our image."""
    command = ("simulate", "--scenario", scenario, "--port", str(port))
    with container(containers, "simulator", *command) as running:
        until(lambda: get(f"http://127.0.0.1:{port}/health") == "", 30, "the simulator answers")
        yield running


def sidecar_command(target: int, port: int, *more: str) -> tuple[str, ...]:
    """Arguments of a sidecar with a persistent canary."""
    return (
        "run", "--engine.url", f"http://127.0.0.1:{target}", "--web.port", str(port),
        "--canary.mode", "persistent", "--recorder.directory", "/var/lib/stallwatch", *more,
    )  # fmt: skip


def value(page: str, name: str, *, absent: float | None = None, **labels: str) -> float:
    """The sum of the samples that carry the labels. Raises `KeyError` when there is none and `absent` says nothing."""
    found = []
    for line in page.splitlines():
        series, _, number = line.rpartition(" ")
        own, _, rest = series.partition("{")
        if own == f"stallwatch_{name}" and all(f'{key}="{each}"' in rest for key, each in labels.items()):
            found.append(float(number))
    if found:
        return sum(found)
    if absent is None:
        raise KeyError(name)
    return absent
