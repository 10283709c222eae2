"""Programs that the tests run and that pip does not bring: installed where we may, named with the command where not."""

import ctypes.util
import os
import shutil
import subprocess
import sys

# program -> Debian package
PROGRAMS = {
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "cc": "gcc",
    "systemd-analyze": "systemd",
    "nginx": "nginx-light",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
}
# library that vLLM's CPU build loads -> Debian package
LIBRARIES = {"numa": "libnuma1"}


def missing() -> dict[str, str]:
    """The programs and libraries that are not there, with the Debian package of each."""
    programs = {program: package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    libraries = {f"lib{name}": package for name, package in LIBRARIES.items() if ctypes.util.find_library(name) is None}
    return programs | libraries


def main() -> int:
    """Installs what is missing when run as root on Debian; otherwise says what to run. Returns an exit code."""
    absent = missing()
    if not absent:
        return 0
    packages = " ".join(sorted(set(absent.values())))
    command = f"apt-get install --yes --no-install-recommends {packages}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"The tests need {', '.join(absent)}. On Debian, as root: {command}", file=sys.stderr)
        return 1
    print(f"installing {packages}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in ("apt-get update --quiet", command):
        done = subprocess.run(
            step.split(), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode != 0:
            sys.stderr.buffer.write(done.stdout)
            print(f"'{step}' failed; the tests need {', '.join(absent)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
