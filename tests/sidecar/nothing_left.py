"""Leak check of tests with processes: no child, zombie or descriptor is left. Leftovers are ended, then reported."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from sidecar.core.addresses import EngineAddress
from sidecar.process import process_family
from sidecar.process.output import Ring
from sidecar.process.process import Process

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ADDRESS = EngineAddress(port=8100)
NUMBERS = itertools.count()


def descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one this very listing used
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def children() -> set[int]:
    """Pids of every child of this process, zombies too."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@contextlib.contextmanager
def nothing_left(*, heir: bool = True) -> Iterator[None]:
    """`heir`: orphans become children of the test's process, as they do of a sidecar that is process 1."""
    libc = ctypes.CDLL(None)
    before = descriptors(), children()
    libc.prctl(PR_SET_CHILD_SUBREAPER, int(heir), 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        left = children() - before[1]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        marked = process_family.orphans(f"test-{os.getpid()}")
        for _, pid, started in marked:
            process_family.send(pid, started, signal.SIGKILL)
    assert left == set(), "children or zombies were left"
    assert marked == [], "processes were left to init"
    after = descriptors()
    assert {fd: after[fd] for fd in after.keys() - before[0].keys()} == {}, "descriptors were left"


def python(program: str) -> list[str]:
    """A child that starts quickly: no site-packages, no environment."""
    return [sys.executable, "-I", "-S", "-u", "-c", program]


def sidecar_name() -> str:
    """Of a sidecar that no other test has had; `nothing_left` knows all of one process."""
    return f"test-{os.getpid()}/{next(NUMBERS)}"


def spawn(program: str, log: Path, *, engine: str = "", log_most: int = 1 << 20, ring: Ring | None = None) -> Process:
    name = engine or f"{sidecar_name()}/engine"
    return Process.spawn(python(program), env={}, engine=name, address=ADDRESS, log=log, log_most=log_most, ring=ring)
