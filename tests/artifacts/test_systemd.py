"""The unit for bare metal, judged by systemd's own tools."""

import re
import subprocess
from pathlib import Path

from stallwatch import configuration
from tests.artifacts.promtool import ROOT, program

UNIT = ROOT / "deploy" / "systemd" / "stallwatch.service"
ENVIRONMENT = UNIT.with_name("stallwatch.env")


def analyze(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """What systemd-analyze says."""
    command = [program("systemd-analyze", "systemd"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_unit_is_valid(tmp_path: Path) -> None:
    """Systemd understands every line of it."""
    # The program is not installed here, so something that is stands in for it.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/stallwatch/bin/stallwatch", "/bin/true"))
    done = analyze("verify", "--man=no", str(unit))

    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_installed_without_a_hash() -> None:
    """The commands above the unit pin everything that pip fetches, the build backend too, as the image does."""
    commands = re.findall(r"^#   \S+/pip (.+)$", UNIT.read_text(), re.MULTILINE)
    named = re.findall(r"requirements/\S+", " ".join(commands))

    assert len(commands) == 2
    assert all("--require-hashes" in command or "--no-index" in command for command in commands)
    assert named == ["requirements/runtime.txt", "requirements/build.txt"]
    assert all((ROOT / name).exists() for name in named)


def test_the_unit_is_confined() -> None:
    """Systemd's own score of exposure is below 2 of 10, and GPUs are the only devices."""
    done = analyze("security", "--offline=true", "--threshold=20", str(UNIT))
    found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)

    assert found, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout
    assert float(found[1]) < 2.0
    assert re.findall(r"^DeviceAllow=(\S+)", UNIT.read_text(), re.MULTILINE) == [
        "char-nvidia",
        "char-nvidia-frontend",
        "char-nvidiactl",
        "char-nvidia-caps",
        "char-nvidia-uvm",
    ]


def test_the_environment_loads() -> None:
    """Every variable of the example and of the unit is a setting."""
    lines = ENVIRONMENT.read_text().splitlines()
    lines += re.findall(r"^Environment=(STALLWATCH_\S+)", UNIT.read_text(), re.MULTILINE)
    environ = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    settings = configuration.load([], environ).settings

    assert str(settings.engine.url) == "http://127.0.0.1:8000/"
    assert str(settings.recorder.directory) == "/var/lib/stallwatch"
