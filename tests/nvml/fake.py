import ctypes
import shutil
import subprocess
from pathlib import Path

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types
import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")

HOPPER = """

at 0 gpu * utilization 80
at 0 gpu * memory_utilization 40
at 0 gpu * sm_clock 1980
at 0 gpu * memory_clock 2619
at 0 gpu * max_sm_clock 1980
at 0 gpu * power 500000
at 0 gpu * power_limit 700000
at 0 gpu * energy 1000000 500000
at 0 gpu * temperature 60
at 0 gpu * reasons 0
at 0 gpu * memory_used 40e9
at 0 gpu * memory_total 80e9
at 0 gpu * pcie_rx 1000
at 0 gpu * pcie_tx 2000
at 0 gpu * nvlink_rx 100
at 0 gpu * nvlink_tx 200
at 0 gpu * ecc_corrected 3
at 0 gpu * ecc_uncorrected 0
at 0 gpu * dram_active 55
at 0 gpu * sm_occupancy 25
at 0 gpu * gpm_pcie_rx 3
at 0 gpu * gpm_pcie_tx 4
"""


class FakeNvml:
    """The fake driver that the real pynvml module has loaded, and the script that it follows."""

    def __init__(self, library: ctypes.CDLL, folder: Path) -> None:
        self._library = library
        self.folder = folder
        self._script = folder / "script.txt"
        library.fake_nvml_calls.restype = ctypes.c_long
        library.fake_nvml_time.argtypes = [ctypes.c_double]

    def play(self, script: str, at: float = 0.0) -> None:
        """Starts over with a script, its clock standing at `at`."""
        self._script.write_text("driver 580.126.09\n" + script, encoding="utf-8")
        bad = self._library.fake_nvml_script(str(self._script).encode())
        assert bad == 0, f"line {bad} of the script makes no sense"
        self.now = at

    @property
    def now(self) -> float:
        return self._now

    @now.setter
    def now(self, seconds: float) -> None:
        self._now = seconds
        self._library.fake_nvml_time(seconds)

    def calls(self, function: str) -> int:
        return int(self._library.fake_nvml_calls(function.encode()))

    @property
    def references(self) -> int:
        """How many starts of the library were not followed by a shutdown."""
        return int(self._library.fake_nvml_references())

    def release(self) -> None:
        """Lets every hanging call return."""
        self._library.fake_nvml_release()

    def unload(self) -> None:
        """From here on it answers like a machine without a driver."""
        self._library.fake_nvml_release()
        self._library.fake_nvml_script(None)


def build(folder: Path) -> Path:
    """Compiles the fake driver under the name that pynvml looks for."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.fail("no C compiler for the fake NVML library: apt-get install gcc libc6-dev")
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    done = subprocess.run([*command, "-o", library, SOURCE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"the fake NVML library does not compile:\n{done.stderr}")
    return library


def load(folder: Path) -> FakeNvml:
    """Builds the fake and loads it, so that pynvml's own dlopen of the same soname finds it."""
    fake = FakeNvml(ctypes.CDLL(str(build(folder))), folder)
    fake.play("gpus 1\n")
    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    pynvml.nvmlShutdown()
    if driver != "580.126.09":
        pytest.fail(
            f"a real NVIDIA driver ({driver}) was loaded before the fake: run this file in a process of its own"
        )
    return fake
