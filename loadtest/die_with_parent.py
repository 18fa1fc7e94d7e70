"""Parent-death signal: ends a process when its parent ends, in whatever way.

    python -IS die_with_parent.py PARENT PROGRAM ...

This program arms the signal and then becomes PROGRAM. The kernel sends SIGTERM: SIGKILL would leave a sidecar or a vLLM
no time to end children of its own. A program does it rather than Popen's preexec_fn, which is not safe beside threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tie(parent: int) -> None:
    """SIGTERM for this process when the thread that has started it ends, or now, where `parent` is gone already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGTERM)


def main(parent: str, *argv: str) -> str:
    """Does not return but with the reason why it could not become the program."""
    tie(int(parent))
    try:
        os.execvp(argv[0], argv)  # noqa: S606 # no shell is meant
    except OSError as error:
        return f"{argv[0]}: {error.strerror}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
