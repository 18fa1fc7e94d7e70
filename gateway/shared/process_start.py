"""Start times of processes, by Linux's proc(5): with its id they name a process, whose id another has later."""

from __future__ import annotations

from pathlib import Path


def born(pid: int) -> int:
    """Start time of a process, in clock ticks since boot; 0 for one that has ended, also if it is not reaped, that
    /proc hides from us, or on a system without it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = text.rpartition(b")")[2].split()  # the name before it may hold anything
    return 0 if fields[0] in {b"Z", b"X"} else int(fields[19])
