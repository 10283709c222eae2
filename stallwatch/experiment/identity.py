"""What was measured: server, model, settings, hardware, ourselves, so that two reports can be compared. I/O: procfs."""

import ipaddress
import json
import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import stallwatch
from stallwatch.analysis.paired import scheduler_setting
from stallwatch.experiment.watching import Watching
from stallwatch.sources.http import plain
from stallwatch.sources.served import Model

SCHEDULER_SETTINGS: Final = (
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_num_seqs",
    "max_model_len",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "async_scheduling",
    "stream_interval",
    "policy",
)
"""Those that shape interference, of what the plugin tells."""

_MOST = 2_000  # characters of a launch command
# vLLM takes several keys after one flag.
_SECRET_FLAG = re.compile(
    r"(--?(?:\w+[-_])*(?:key|token|secret|password)(?:=|\s+))[^-\s]\S*(?:\s+[^-\s]\S*)*", re.IGNORECASE
)
_SECRET_VARIABLE = re.compile(r"\b((?:\w+_)?(?:KEY|TOKEN|SECRET|PASSWORD)=)\S+", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who is who. None and absent keys are not known."""

    server: Mapping[str, Any]  # version, model, system_fingerprint, cache layout
    command: str | None  # how the server was started, secrets taken out
    scheduler: Mapping[str, str]
    scheduler_source: str | None  # "plugin", "given" or "command"
    gpus: Sequence[Mapping[str, Any]]
    driver: str | None
    host: Mapping[str, Any]
    stallwatch: str
    python: str
    seed: int


@dataclass(slots=True)
class Fingerprint:
    """The `system_fingerprint` of the chunks, as long as nobody has seen one."""

    text: str | None = None
    _looked: int = field(default=0)

    def tap(self, data: str) -> None:
        """Takes the data of an event."""
        if self.text is not None or self._looked >= 64 or "system_fingerprint" not in data:
            return
        self._looked += 1
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return
        said = found.get("system_fingerprint") if isinstance(found, dict) else None
        self.text = plain(said, 120) if isinstance(said, str) and said else None


def identity(
    seen: Watching,
    *,
    model: Model | None,
    fingerprint: str | None,
    command: str | None,
    given: Mapping[str, str],
    seed: int,
) -> Identity:
    """What is known at the end; `given` are scheduler settings that a person told."""
    facts, gpu, known = seen.facts, seen.gpu.status(), seen.known
    cache = facts.caches.get(seen.engine) if facts is not None else None
    told = {} if known is None else {name: scheduler_setting(known.plugin, name) for name in SCHEDULER_SETTINGS}
    scheduler: Mapping[str, str] = {name: value for name, value in told.items() if value is not None}
    source = "plugin" if scheduler else None
    if given:
        scheduler, source = {**scheduler, **given}, "given"
    elif not scheduler and command is not None:
        scheduler = flags(command)
        source = "command" if scheduler else None
    server = {
        "version": facts.version if facts is not None else None,
        "model": plain(model.name, 120) if model is not None else None,
        "max_model_len": model.max_length if model is not None else None,
        "system_fingerprint": fingerprint,
        "block_size": cache.block_size if cache is not None else None,
        "num_gpu_blocks": cache.num_gpu_blocks if cache is not None else None,
        "prefix_caching": cache.prefix_caching if cache is not None else None,
        "data_parallel_ranks": seen.engines or None,
    }
    return Identity(
        server={name: value for name, value in server.items() if value is not None},
        command=None if command is None else without_secrets(command),
        scheduler=scheduler,
        scheduler_source=source,
        gpus=[{"gpu": number, "name": name} for number, _, name in gpu.gpus],
        driver=gpu.driver,
        host=host(),
        stallwatch=stallwatch.__version__,
        python=platform.python_version(),
        seed=seed,
    )


def flags(command: str) -> Mapping[str, str]:
    """Scheduler settings that a launch command gives."""
    found = {}
    for name in SCHEDULER_SETTINGS:
        seen = re.search(rf"--{name.replace('_', '[-_]')}(?:=|\s+)([\w.]+)", command)
        if seen is not None:
            found[name] = seen[1]
    return found


def without_secrets(command: str) -> str:
    """A command that may be shown: keys, tokens and passwords taken out, on one line."""
    return plain(_SECRET_VARIABLE.sub(r"\1...", _SECRET_FLAG.sub(r"\1...", command)), _MOST)


def listening_command(address: str, port: int, proc: Path = Path("/proc")) -> str | None:
    """The command line of the process that listens there; None where it is not on this machine, or not to be seen."""
    try:
        if not (address == "localhost" or ipaddress.ip_address(address).is_loopback):
            return None
    except ValueError:
        return None
    inodes = {f"socket:[{inode}]" for name in ("tcp", "tcp6") for inode in _listening(proc / "net" / name, port)}
    for folder in proc.glob("[0-9]*/fd"):
        with suppress(OSError):
            if any(str(fd.readlink()) in inodes for fd in folder.iterdir()):
                words = (folder.parent / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                return shlex.join(word for word in words if word)[: 4 * _MOST]
    return None


def _listening(table: Path, port: int) -> Iterator[str]:
    """Inodes of sockets that listen on a port."""
    with suppress(OSError, ValueError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def host(proc: Path = Path("/proc")) -> Mapping[str, Any]:
    """The machine that the client ran on, without its name."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }
    cpu = _line(proc / "cpuinfo", r"^model name\s*:\s*(.+)$")
    if cpu is not None:
        found["cpu"] = plain(cpu, 80)
    memory = _line(proc / "meminfo", r"^MemTotal:\s*(\d+) kB$")
    if memory is not None:
        found["memory_bytes"] = int(memory) * 1024
    return found


def _line(path: Path, pattern: str) -> str | None:
    try:
        seen = re.search(pattern, path.read_text("utf-8", "replace")[:100_000], re.MULTILINE)
    except OSError:
        return None
    return seen[1].strip() if seen is not None else None
