"""Brings what the container tests need: podman and its kin, and a base image made of Debian packages.

`python3 tests/container/environment.py` installs the packages when run as root on Debian, or says what is missing, and
makes the base image once. It stands in for the image that a release is built on, where no image registry is reached.
About 200 MB outside the tree, a minute. The folder is `$STALLWATCH_CONTAINER_HOME`, or
`stallwatch/container` in the user's cache folder.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# program -> Debian package; catatonit reaps the processes of a container started with --init
PROGRAMS = {
    "podman": "podman",
    "buildah": "buildah",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "/usr/libexec/podman/catatonit": "catatonit",
    "qemu-aarch64-static": "qemu-user-static",
}
BASE = "localhost/stallwatch-base"
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-pip")
# What a slim image does not carry either.
LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists", "var/log")


class MissingError(Exception):
    """The tests cannot run here; the message says what is missing and the command to run."""


@dataclass(frozen=True, slots=True)
class Containers:
    """A container store of our own, apart from the machine's."""

    home: Path

    def options(self) -> list[str]:
        """What podman and buildah need to work in it."""
        driver = (self.home / "driver").read_text().strip()
        return [
            f"--root={self.home / 'store'}",
            f"--runroot={self.home / 'run'}",
            f"--storage-driver={driver}",
        ]

    def command(self, program: str, *arguments: str) -> list[str]:
        """A command line of podman or buildah."""
        # crun, the default, is refused by some sandboxes that let runc work.
        runtime = ["--runtime=runc"] if program == "podman" else []
        return [program, *self.options(), *runtime, *arguments]

    def call(self, program: str, *arguments: str, stdin: bytes | None = None) -> str:
        """What the command prints. Raises `RuntimeError` with everything that it said when it fails."""
        return run(self.command(program, *arguments), stdin=stdin)


def run(command: Sequence[str], *, stdin: bytes | None = None) -> str:
    """What a command prints. Raises `RuntimeError` with everything that it said when it fails."""
    done = subprocess.run(list(command), input=stdin, capture_output=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).decode(errors="replace")
        raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{said}")
    return done.stdout.decode()


def default_home() -> Path:
    """Where the store lies, by the environment variables."""
    if chosen := os.environ.get("STALLWATCH_CONTAINER_HOME"):
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "stallwatch" / "container"


def ensure(home: Path | None = None) -> Containers:
    """The store with the base image in it, made if it is not there yet."""
    _install_programs()
    home = home or default_home()
    stamp, recipe = home / "stamp", _recipe()
    containers = Containers(home)
    if stamp.exists() and stamp.read_text() == recipe:
        return containers
    if os.geteuid() != 0:
        raise MissingError("debootstrap needs root: run tests/container/environment.py as root")
    home.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    _choose_driver(containers)
    with tempfile.TemporaryDirectory(prefix="stallwatch-base-", dir=home) as folder:
        _make_base(containers, Path(folder) / "root")
    stamp.write_text(recipe)
    return containers


def _recipe() -> str:
    return hashlib.sha256(repr((SUITE, PACKAGES, LEFT_OUT)).encode()).hexdigest()


def _install_programs() -> None:
    absent = {program: package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    if not absent:
        return
    packages = " ".join(sorted(set(absent.values())))
    command = f"apt-get install --yes --no-install-recommends {packages}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise MissingError(f"the container tests need {', '.join(absent)}. On Debian, as root: {command}")
    print(f"installing {packages}", flush=True)
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    for step in ("apt-get update --quiet", command):
        run(step.split())


def _choose_driver(containers: Containers) -> None:
    for driver in ("overlay", "vfs"):  # vfs copies everything and works everywhere
        (containers.home / "driver").write_text(driver)
        try:
            containers.call("podman", "info")
        except RuntimeError:
            shutil.rmtree(containers.home / "store", ignore_errors=True)
            continue
        return
    raise MissingError("podman can store no images here: `podman info` says why")


def _make_base(containers: Containers, root: Path) -> None:
    print("making the base image", flush=True)
    run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)])
    for name in LEFT_OUT:
        shutil.rmtree(root / name, ignore_errors=True)
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        imported = subprocess.run(
            containers.command("podman", "import", "-", BASE), stdin=tar.stdout, capture_output=True, check=False
        )
    if imported.returncode != 0 or tar.returncode != 0:
        raise MissingError(f"the base image could not be imported: {imported.stderr.decode(errors='replace')}")


def main() -> int:
    """Makes everything ready. Returns an exit status."""
    try:
        containers = ensure()
    except (MissingError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(containers.home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
