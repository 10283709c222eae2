"""A real CPU limit around a process of the tests, in a cgroup that the test makes."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_MICROSECONDS = 100_000


class NoCgroupError(Exception):
    """No cgroup with a CPU limit can be made here: it takes root and a writable cgroup file system."""


@contextmanager
def limited(millicores: int) -> Iterator[Path]:
    """A new cgroup, version 1 or 2, that may use this much CPU; gives the file that takes its members."""
    group = _made(f"stallwatch-test-{os.getpid()}-{time.monotonic_ns()}", millicores * PERIOD_MICROSECONDS // 1000)
    try:
        yield group / "cgroup.procs"
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:  # a member is still ending
                time.sleep(0.02)


def _made(name: str, quota: int) -> Path:
    for root in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError:
            group.rmdir()
            continue
        return group
    raise NoCgroupError("run the tests as root on a machine whose cgroup file system is writable")
