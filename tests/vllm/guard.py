"""Starts one command in a process group of its own, and kills that group when whoever asked for it is gone.

`python guard.py COMMAND...`, the command's output to this process's standard error. The first line on standard output
is the command's pid, which is also its process group. While standard input stays open the command may run; at end of
file, which the kernel brings about however the asking process ends, the whole group gets SIGKILL (stopped processes
too), and the shared memory that it had mapped is unlinked. The guard is not in the group that it guards, so a SIGSTOP
to the group leaves it awake.

A group, not a session: `README.md` beside this file says why server, sidecar and load client must share a session.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

# A command that ends by itself leaves its helpers this long to tidy up (multiprocessing's resource tracker does).
TIDY_SECONDS = 3.0


def members(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group and state != "Z":
                    found.append(int(folder.name))
    return found


def shared_memory(pids: list[int]) -> list[Path]:
    """The files in /dev/shm that these processes have mapped, by inode: glibc names a semaphore after it is mapped."""
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            inodes.update(int(line.split()[4]) for line in maps.splitlines() if " /dev/shm/" in line)
    return [path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in inodes]


def clear_away(group: int, *, patience: float) -> None:
    """Waits up to `patience` seconds for the group to end, then kills it; unlinks the shared memory it leaves."""
    memory = shared_memory(members(group))
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and members(group):
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for path in memory:
        path.unlink(missing_ok=True)


def main() -> int:
    """Returns the command's exit code."""
    ended_read, ended_write = os.pipe()
    command = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, process_group=0
    )
    print(command.pid, flush=True)

    def watch() -> None:
        command.wait()
        os.write(ended_write, b".")

    threading.Thread(target=watch, daemon=True).start()
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(ended_read, selectors.EVENT_READ)
        selector.select()
    clear_away(command.pid, patience=TIDY_SECONDS if command.returncode is not None else 0.0)
    return command.wait()


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # ending is the asking process's decision, told by end of file
    sys.exit(main())
