"""Process of a simulation: the command line, in bounded memory and processor time, at the lowest priority.

Run by its name, so that the gateway imports nothing of the load test. It dies with the gateway, on Linux.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal

MEMORY = 1 << 30  # bytes of addresses
CPU = 120  # seconds
FILE = 64 << 20  # bytes of one file
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def bound() -> None:
    """Set the limits of this process."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(19)
    for what, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CPU, CPU),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    bound()
    runpy.run_module("gateway.cli", run_name="__main__", alter_sys=True)
