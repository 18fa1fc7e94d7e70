"""Spawning of a program in a session of its own, with the given environment and descriptors and no others."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sidecar.process import process_family


class SpawnFailed(Exception):
    """The engine's program could not be started; the message says why."""


def start(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, output: int) -> process_family.ProcessSnapshot:
    """The leader of a new session. The caller reaps it. Raises SpawnFailed, and nothing runs then.

    `env` is its whole environment; `output` is the descriptor it writes to. No shell sees `argv`.
    """
    try:
        child = subprocess.Popen(  # noqa: S603 # the caller builds argv from an allowlist
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise SpawnFailed(f"{argv[0]} could not be started: {error}") from error
    child.returncode = 0  # it is the caller's to reap from here on: Popen must neither try nor warn
    try:
        seen = process_family.look(child.pid)
        why = "/proc does not show it"
    except OSError as error:
        seen, why = None, str(error)
    if seen is None:
        os.killpg(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        raise SpawnFailed(f"{argv[0]} was ended again, since the sidecar could not look after it: {why}")
    return seen
