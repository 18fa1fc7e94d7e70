"""Children of tests, forked from a process that has imported their program: most of a start is imports.

    python -m tests.nursery DESCRIPTOR MODULE

is such a process. What it forks is a child of the process that has started it (CLONE_PARENT), which waits for it and
ends it as any other. The child runs its program as `python -m` would, with its own arguments, environment, folder and
session. Whatever Python reads as it starts, and limits, are those of the nursery: others have a nursery of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from loadtest.die_with_parent import tie
from loadtest.processes import executed

# First words after `python -m`, and the module that is imported for them; a table of commands imports the command.
PROGRAMS = {
    ("gateway.cli", "serve"): "gateway.cli",
    ("sidecar.cli", "serve"): "sidecar.cli",
    ("loadtest.engine",): "loadtest.engine.__main__",
}
CLONE_PARENT = 0x8000  # linux/sched.h
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
MOST = 128 * 1024  # bytes of a request
KEPT = 5  # nurseries
PATIENCE = 60.0  # seconds until a nursery that answers nothing is given up
READ_EARLY = ("PYTHON", "LC_", "LANG", "TZ", "WEIR_NATIVE")  # beginnings of variables that count before a child is born


# -- the process of the tests -----------------------------------------------------------------------------------------


class Forked(subprocess.Popen[bytes]):
    """A child that is there already."""

    def __init__(self, argv: Sequence[str], pid: int) -> None:
        self._forked = pid
        super().__init__(argv)

    def _execute_child(self, *_: object) -> None:
        self.pid = self._forked
        self._child_created = True


class Nursery:
    """A process that has imported `module`, of an interpreter that was started with `environ`."""

    def __init__(self, module: str, environ: Mapping[str, str]) -> None:
        self._way, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._way.settimeout(PATIENCE)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nursery", str(theirs.fileno()), module],
                cwd=os.path.dirname(os.path.dirname(__file__)),
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )

    def start(self, request: bytes, argv: Sequence[str], output: IO[bytes]) -> Forked | None:
        """Fork a child. None where none was born, or the nursery has ended, as where a kernel refuses CLONE_PARENT."""
        told = b""
        try:
            with contextlib.suppress(OSError):
                socket.send_fds(self._way, [request], [output.fileno()])
                told = self._way.recv(64)
        finally:
            if not told:
                self._way.close()  # a late answer would be taken for the next child's
        pid = int(told or b"0")
        return Forked(argv, pid) if pid else None

    def close(self) -> None:
        self._way.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Nurseries:
    """Nurseries of the programs that were asked for last; `start` has the place of `loadtest.processes.executed`."""

    def __init__(self) -> None:
        self._made: dict[object, Nursery] = {}

    def start(self, argv: Sequence[str], output: IO[bytes], env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
        environ = dict(os.environ if env is None else env)
        module = module_of(argv)
        words = {"argv": list(argv), "env": environ, "folder": os.getcwd(), "parent": os.getpid()}
        request = json.dumps(words).encode()
        if (
            module is None
            or threading.current_thread() is not threading.main_thread()  # the nursery's children end with that one
            or len(request) > MOST
        ):
            return executed(argv, output, env)
        key = module, *inherited(environ)
        nursery = self._made.pop(key, None) or Nursery(module, environ)
        self._made[key] = nursery
        if len(self._made) > KEPT:
            self._made.pop(next(iter(self._made))).close()
        return nursery.start(request, argv, output) or executed(argv, output, env)

    def close(self) -> None:
        for nursery in self._made.values():
            nursery.close()


def module_of(argv: Sequence[str]) -> str | None:
    """The module to import for a command that a nursery can run."""
    if list(argv[:2]) != [sys.executable, "-m"] or platform.machine() not in SYS_CLONE:
        return None
    return next((module for words, module in PROGRAMS.items() if tuple(argv[2 : 2 + len(words)]) == words), None)


def inherited(environ: Mapping[str, str]) -> tuple[object, ...]:
    """Settings that a program has from its parent or reads at its start, and a nursery's children from the nursery."""
    limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)]
    early = [item for item in environ.items() if item[0].startswith(READ_EARLY)]
    return os.geteuid(), frozenset(os.sched_getaffinity(0)), *limits, frozenset(early)


# -- the nursery ------------------------------------------------------------------------------------------------------


def main(descriptor: str, module: str) -> None:
    """Run the program of a request in a child of each; the nursery itself runs none, and ends with the tests."""
    made = importlib.import_module(module)
    if module.endswith(".__main__"):
        del sys.modules[module]  # it runs in the child
    else:
        made.parser_for(["serve"])
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as way:
        program = nurse(way)
    if program:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def nurse(way: socket.socket) -> str:
    """Fork a child for each request. Returns in each child, with its program's name, and at the end of requests."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(way, MOST, 1)
        if not request:
            return ""
        if not fork():
            try:
                return born(json.loads(request), descriptors[0], way)
            except BaseException:
                way.send(b"0")
                raise
        os.close(descriptors[0])


def fork() -> int:
    """As os.fork, but the child's parent is that of this process."""
    api: Any = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(SYS_CLONE[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (api.PyOS_AfterFork_Parent if pid else api.PyOS_AfterFork_Child)()
    if pid < 0:
        raise OSError("this kernel refuses CLONE_PARENT")
    return int(pid)


def born(words: dict[str, Any], output: int, way: socket.socket) -> str:
    """Become a process like those of `executed`, and tell its parent."""
    os.setsid()
    tie(words["parent"])
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(words["folder"])
    os.environ.clear()
    os.environ.update(words["env"])
    sys.orig_argv[:], sys.argv[1:], sys.path[0] = words["argv"], words["argv"][3:], words["folder"]
    way.send(b"%d" % os.getpid())
    return str(words["argv"][2])


if __name__ == "__main__":
    main(*sys.argv[1:])
