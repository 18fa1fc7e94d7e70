"""Whether engines outlive the sidecar: what it says at its start, and the unit that keeps the promise."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sidecar.serve import survival
from sidecar.serve.survival import FIRST_NAMESPACE, Surroundings, Unit, end_with_sidecar, surroundings, unit_of

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy/systemd/weir-sidecar.service"
CGROUPS: dict[str, tuple[str, Unit | None]] = {
    "a service": ("0::/system.slice/weir-sidecar.service\n", Unit("weir-sidecar.service", user=False)),
    "of the old hierarchy": (
        "4:memory:/system.slice/a.service\n1:name=systemd:/system.slice/b.service\n0::/\n",
        Unit("b.service", user=False),
    ),
    "of a user": (
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/weir.service\n",
        Unit("weir.service", user=True),
    ),
    "of a template": ("0::/system.slice/system-weir.slice/weir@gpu.service", Unit("weir@gpu.service", user=False)),
    "a session": ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
    "a container": ("0::/\n", None),
    "nothing": ("", None),
    "garbage": ("a.service\n::\n0\n", None),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_the_unit_is_that_of_the_control_group(name: str) -> None:
    text, expected = CGROUPS[name]
    assert unit_of(text) == expected


def around(cgroups: str = "", namespace: str = FIRST_NAMESPACE, pid: int = 500, parent: int = 400) -> Surroundings:
    return Surroundings(cgroups, namespace, pid, parent)


SERVICE = "0::/system.slice/weir.service\n"


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("process", ""),
        ("control-group", "KillMode of weir.service is control-group"),
        ("mixed", "is mixed"),
        ("", "cannot be asked for"),
        ("\x1b[31m", "cannot be asked for"),
    ],
)
def test_a_unit_that_ends_all_its_processes_is_named(mode: str, says: str) -> None:
    asked: list[Sequence[str]] = []

    def ask(arguments: Sequence[str]) -> str:
        asked.append(arguments)
        return mode

    found = end_with_sidecar(around(SERVICE), ask)
    assert (found == "") is (says == "")
    assert says in found
    end_with_sidecar(around(CGROUPS["of a user"][0]), ask)
    assert asked == [
        ("show", "--property=KillMode", "--value", "--", "weir.service"),
        ("--user", "show", "--property=KillMode", "--value", "--", "weir.service"),
    ]


@pytest.mark.parametrize(
    ("seen", "ends"),
    [
        (around(), False),
        (around(namespace="pid:[4026532500]", pid=1, parent=0), True),
        (around(namespace="pid:[4026532500]", pid=7, parent=1), True),  # under a small init
        (around(namespace="pid:[4026532500]", pid=70, parent=30), False),  # another command keeps the container
        (around(pid=70, parent=1), False),  # no container: its parent has ended
        (around(namespace=""), False),
    ],
)
def test_the_command_of_a_container_takes_engines_with_it(seen: Surroundings, ends: bool) -> None:
    assert ("command of a container" in end_with_sidecar(seen, lambda _: "")) is ends


def test_its_own_surroundings() -> None:
    seen = surroundings()
    assert (seen.pid, seen.parent) == (os.getpid(), os.getppid())
    assert seen.namespace.startswith("pid:[")
    assert seen.cgroups == Path("/proc/self/cgroup").read_text()


NAMESPACE = [shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
ALONE = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0  # fixed words


@pytest.mark.skipif(not ALONE, reason="this machine gives no namespace of process numbers (unshare)")
def test_in_a_namespace_of_its_own_it_is_the_command_of_a_container() -> None:
    program = "from sidecar.serve.survival import *; print(end_with_sidecar(surroundings()))"
    argv = [*NAMESPACE, sys.executable, "-c", program]
    asked = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60.0, check=True)  # fixed
    assert "command of a container" in asked.stdout


@pytest.mark.parametrize(
    ("script", "answer"),
    [("echo process", "process"), ("echo process; exit 1", ""), ("printf '\\377'", ""), ("sleep 60", "")],
    ids=["answers", "fails", "no text", "hangs"],
)
def test_systemctl_is_asked_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, answer: str
) -> None:
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(survival, "ASK_WITHIN", 0.5 if "sleep" in script else 60.0)
    assert survival.systemctl(("show",)) == answer


def test_without_systemctl_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert survival.systemctl(("show",)) == ""


# -- the unit ---------------------------------------------------------------------------------------------------------


def test_the_unit_leaves_engines_running() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign] # names as they are written
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert (service["KillMode"], service["OOMPolicy"], service["PrivateTmp"]) == ("process", "continue", "no")
    assert "PrivateDevices" not in service, "it hides the GPUs"
    assert "MemoryDenyWriteExecute" not in service, "kernels are compiled while they run"
    assert service["ExecStart"].split()[1:3] == ["serve", "--config"]
    assert str(UNIT.relative_to(ROOT)) == survival.UNIT


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/weir/bin/sidecar", sys.executable))
    asked = subprocess.run(  # fixed words
        [str(shutil.which("systemd-analyze")), "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, "", "")
