"""The image's recipe, without building it: tests/container does."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import stallwatch
from deploy.image import finish
from tests.artifacts.promtool import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_hadolint_finds_nothing() -> None:
    """The Dockerfile passes hadolint with no rule switched off."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")
    assert "hadolint ignore" not in DOCKERFILE


def test_both_stages_stand_on_the_base_that_the_builder_names() -> None:
    """One argument, to be given by digest; no other image is pulled, no frontend either."""
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["${PYTHON_IMAGE}", "${PYTHON_IMAGE}"]
    assert "# syntax" not in DOCKERFILE
    assert re.findall(r"--from=(\S+)", DOCKERFILE) == ["build"]


def test_nothing_is_installed_without_a_hash() -> None:
    """Each pip command checks hashes or reaches no index, and never compiles."""
    commands = [each.replace("\\\n", " ") for each in re.split(r"&&|\nRUN|\nCOPY", DOCKERFILE) if "-m pip" in each]

    assert len(commands) == 4
    for command in commands:
        assert "--require-hashes" in command or "--no-index" in command
        assert "--only-binary :all:" in command or "--no-index" in command


def test_the_backend_is_pinned_as_for_developers() -> None:
    """requirements/build.txt has hatchling and what it needs, in the versions of requirements/dev.txt."""

    def pins(name: str) -> dict[str, str]:
        text = (ROOT / "requirements" / name).read_text()
        return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))

    build, dev = pins("build.txt"), pins("dev.txt")

    assert "hatchling" in build
    assert {name: dev.get(name) for name in build} == build
    assert "--hash" in (ROOT / "requirements" / "build.txt").read_text()


def test_the_image_is_unprivileged_and_quiet() -> None:
    """A numeric user, an entry point without a shell, a version label that is ours, and no health check."""
    assert re.search(r"^USER 65532:65532$", DOCKERFILE, re.MULTILINE)
    assert re.search(r"^ENTRYPOINT \[", DOCKERFILE, re.MULTILINE)
    assert not re.search(r"^HEALTHCHECK", DOCKERFILE, re.MULTILINE)
    assert f"ARG VERSION={stallwatch.__version__}\n" in DOCKERFILE
    assert not re.search(r"^ENV.*STALLWATCH_", DOCKERFILE, re.MULTILINE)


def test_the_context_holds_only_what_is_copied() -> None:
    """`.dockerignore` starts from nothing and lets in exactly what the Dockerfile copies."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }

    assert lines[1] == "*"
    assert allowed == copied
    assert all((ROOT / name).exists() for name in allowed)


def elf(*, segments: list[tuple[int, int]], length: int) -> bytes:
    """A 64-bit ELF file with these segments (offset, length) and section headers at its end."""
    header = bytearray(length)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<QQ", header, 0x20, 64, length - 64)  # program headers, section headers
    struct.pack_into("<HHHHH", header, 0x36, 56, len(segments), 64, 1, 0)
    for index, (offset, size) in enumerate(segments):
        struct.pack_into("<IIQQQQ", header, 64 + 56 * index, 1, 4, offset, offset, offset, size)
    return bytes(header)


def test_symbols_are_cut_behind_the_last_segment() -> None:
    """What is loaded stays byte for byte; the header no longer points to what is gone."""
    content = elf(segments=[(0, 200), (300, 500)], length=5000)
    short = finish.without_symbols(content)

    assert len(short) == 800
    assert short[:0x28] == content[:0x28]
    assert short[0x40:] == content[0x40:800]
    assert struct.unpack_from("<Q", short, 0x28) == (0,)
    assert struct.unpack_from("<HH", short, 0x3C) == (0, 0)


@pytest.mark.parametrize(
    "content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x02" + bytes(100)]
)
def test_other_files_are_left_alone(content: bytes) -> None:
    """Scripts, 32-bit and big-endian files stay as they are."""
    assert finish.without_symbols(content) == content
