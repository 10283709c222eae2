"""The image's environment for arm64, laid out as the Dockerfile does and run by an emulator of that processor.

No image is built: that would need the kernel to start foreign programs. Debian's Python for arm64, the pinned wheels
and our own finishing are the same as in one.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.image import finish
from tests.container.environment import SUITE, run
from tests.container.running import ROOT

PYTHON = "3.11"
"""Of the suite."""


def make(folder: Path) -> Path:
    """Lays it out below `folder` and returns the folder of its packages."""
    root = folder / "root"
    options = ("--arch=arm64", "--download-only", "--variant=minbase", "--include=python3")
    run(["debootstrap", *options, SUITE, str(root)])
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        run(["dpkg", "--extract", str(package), str(root)])
        package.unlink()
    home = root / "opt" / "stallwatch"
    packages = home / "lib" / f"python{PYTHON}" / "site-packages"
    run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--require-hashes",
            "--only-binary=:all:", f"--target={packages}", f"--python-version={PYTHON}", "--implementation=cp",
            *(f"--platform=manylinux{tag}_aarch64" for tag in ("2014", "_2_17", "_2_28")),
            f"--requirement={ROOT / 'requirements' / 'runtime.txt'}",
        ]
    )  # fmt: skip
    shutil.copytree(ROOT / "stallwatch", packages / "stallwatch", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "bin").mkdir()
    finish.prune(home, packages)
    return packages


def command(packages: Path, *arguments: str) -> tuple[list[str], Mapping[str, str]]:
    """A command line of the emulated Python, and the variables that it needs."""
    root = packages.parents[4]
    line = ["qemu-aarch64-static", "-L", str(root), str(root / "usr" / "bin" / f"python{PYTHON}"), *arguments]
    return line, {"PYTHONPATH": str(packages), "PYTHONHOME": str(root / "usr"), "PYTHONDONTWRITEBYTECODE": "1"}


def output(packages: Path, *arguments: str) -> str:
    """What a command of the emulated Python prints. Raises `CalledProcessError` when it fails."""
    line, environ = command(packages, *arguments)
    return subprocess.run(
        line, env={"PATH": "/usr/bin:/bin", **environ}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
