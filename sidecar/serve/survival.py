"""Whether engines outlive this sidecar: by its systemd unit, or by the container that it is the command of.

Engines have sessions of their own, so nothing that ends the sidecar's process alone ends them. What ends its whole
control group does: systemd, unless the unit has KillMode=process. And process 1 of a container takes all others with
it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

FIRST_NAMESPACE = "pid:[4026531836]"  # of process numbers: a constant of Linux (PROC_PID_INIT_INO)
SURVIVING = "process"  # the KillMode with which a unit's other processes go on
UNIT = "deploy/systemd/weir-sidecar.service"
ASK_WITHIN = 2.0  # seconds for systemctl
_SERVICE = re.compile(r"/([^/]+\.service)$")
_USERS = re.compile(r"/user@\d+\.service/")

Ask = Callable[[Sequence[str]], str]


class Surroundings(msgspec.Struct, frozen=True):
    """Surroundings of this process: its control groups (/proc/self/cgroup), its pid namespace, its pid and its
    parent's."""

    cgroups: str
    namespace: str
    pid: int
    parent: int


class Unit(msgspec.Struct, frozen=True):
    """A systemd service. `user`: a user's own manager runs it."""

    name: str
    user: bool


def surroundings() -> Surroundings:
    """Return the surroundings of this process; its control groups and namespace are empty if /proc does not tell
    them."""
    try:
        cgroups, namespace = Path("/proc/self/cgroup").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        cgroups = namespace = ""
    return Surroundings(cgroups, namespace, os.getpid(), os.getppid())


def unit_of(cgroups: str) -> Unit | None:
    """The service whose process this is; None: it is of none, but a person's session, say."""
    for line in cgroups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        service = _SERVICE.search(path)
        if controllers in ("", "name=systemd") and service is not None:
            return Unit(service[1], _USERS.search(path) is not None)
    return None


def systemctl(arguments: Sequence[str]) -> str:
    """Answer of systemctl; empty where there is none."""
    try:
        asked = subprocess.run(  # noqa: S603 # no shell, and the unit's name is systemd's own
            [shutil.which("systemctl") or "/usr/bin/systemctl", *arguments],
            capture_output=True,
            timeout=ASK_WITHIN,
            check=False,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def end_with_sidecar(around: Surroundings, ask: Ask = systemctl) -> str:
    """The reason why engines end when this sidecar does, in words; empty: they go on, for all that can be known."""
    if around.namespace not in ("", FIRST_NAMESPACE) and 1 in (around.pid, around.parent):
        return (
            "it is the command of a container, which ends with it: engines outlive it in a container that another "
            "command keeps running"
        )
    unit = unit_of(around.cgroups)
    if unit is None:
        return ""
    user = ("--user",) if unit.user else ()
    mode = ask((*user, "show", "--property=KillMode", "--value", "--", unit.name))
    if mode == SURVIVING:
        return ""
    is_ = f"is {mode}" if mode in ("control-group", "mixed", "none") else "cannot be asked for"
    return f"KillMode of {unit.name} {is_}, and only KillMode={SURVIVING} leaves them running: see {UNIT}"
