"""Next gateway: what SIGUSR2 starts, from this one's own command line, to take over from this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

FLAG = "--take-over"
OF_THIS_PROCESS = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID")  # of the environment


class NextGateway:
    """`path`: where this gateway can be taken over. `say` takes lines for the operator."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._say(f"process {self._process.pid} is taking over already")
            return
        environ = {name: value for name, value in os.environ.items() if name not in OF_THIS_PROCESS}
        try:
            self._process = subprocess.Popen(command(sys.orig_argv, self._path), env=environ)  # noqa: S603 # this one's own
        except OSError as error:
            self._say(f"no other gateway could be started to take over: {error}")
        else:
            self._say(f"process {self._process.pid} was started to take over")

    @property
    def pid(self) -> int:
        """Process id of the last process started; 0: none was."""
        return 0 if self._process is None else self._process.pid

    def ended(self, pid: int, status: int) -> None:
        """A child of this process has ended with this status of waitpid()."""
        if self._process is not None and self._process.pid == pid:
            self._process.returncode = os.waitstatus_to_exitcode(status)


def command(words: Sequence[str], path: Path) -> list[str]:
    """The command line of a process, for one that takes over at `path`: the flag that comes last counts."""
    return [sys.executable, *[word for word in words[1:] if not word.startswith(f"{FLAG}=")], f"{FLAG}={path}"]
