#!/usr/bin/env python3
"""Makes the image's environment small and quick to start: run once, at the end of the build stage.

Takes away what nobody runs there (debugging symbols, sources of compiled modules, activation scripts), compiles
everything, because the root file system is read-only and every probe would compile it again, and lays out the
directory that is mounted into vLLM.
"""

import compileall
import importlib.metadata
import py_compile
import shutil
import struct
import sys
import sysconfig
from pathlib import Path

SOURCES = ("*.c", "*.h", "*.pyi", "*.pyx", "*.pxd", "*.pxi", "RECORD", "direct_url.json", "REQUESTED")
SCRIPTS = ("stallwatch", "python", "python3")
PLUGIN_FILES = ("__init__.py", "vllm_plugin.py")


def without_symbols(content: bytes) -> bytes:
    """A 64-bit little-endian ELF file without what the loader never reads: all that lies behind its last segment."""
    if content[:6] != b"\x7fELF\x02\x01":
        return content
    offset = struct.unpack_from("<Q", content, 0x20)[0]
    size, count = struct.unpack_from("<HH", content, 0x36)
    ends = [offset + size * count]
    for index in range(count):
        start, _, _, length = struct.unpack_from("<QQQQ", content, offset + index * size + 8)
        ends.append(start + length)
    header = bytearray(content[: max(ends)])
    struct.pack_into("<Q", header, 0x28, 0)  # no section headers: offset, number and names
    struct.pack_into("<HH", header, 0x3C, 0, 0)
    return bytes(header)


def prune(home: Path, packages: Path) -> None:
    """Removes and shortens files of the environment."""
    for pattern in SOURCES:
        for path in packages.rglob(pattern):
            path.unlink()
    for path in (home / "bin").iterdir():
        if path.name not in SCRIPTS and not path.name.startswith("python3."):
            path.unlink()
    for path in packages.rglob("*.so*"):
        path.write_bytes(without_symbols(path.read_bytes()))


def lay_out_plugin(home: Path, packages: Path) -> None:
    """The package and its entry point as vLLM needs them on its PYTHONPATH, and nothing else."""
    version = importlib.metadata.version("stallwatch")
    package, info = home / "plugin" / "stallwatch", home / "plugin" / f"stallwatch-{version}.dist-info"
    for folder in (package, info):
        folder.mkdir(parents=True)
    for name in PLUGIN_FILES:
        shutil.copy(packages / "stallwatch" / name, package)
    group = "vllm.stat_logger_plugins"
    entries = importlib.metadata.distribution("stallwatch").entry_points.select(group=group)
    lines = "".join(f"{entry.name} = {entry.value}\n" for entry in entries)
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stallwatch\nVersion: {version}\n")


def main() -> int:
    """Finishes the environment that the argument names. Returns an exit status."""
    home = Path(sys.argv[1])
    packages = Path(sysconfig.get_path("purelib"))
    prune(home, packages)
    # The files never change once they are in the image, so nothing has to look at their times.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compiled = compileall.compile_dir(packages, quiet=1, invalidation_mode=mode)
    lay_out_plugin(home, packages)
    return 0 if compiled else 1


if __name__ == "__main__":
    sys.exit(main())
