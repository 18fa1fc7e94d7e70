"""Units for systemd: its own tools find no mistake in them, and little that an intruder could do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "deploy/systemd"
UNITS = sorted(FOLDER.glob("*.service"))
SOCKETS = sorted(FOLDER.glob("*.socket"))
EXPOSED = {"weir-gateway.service": 2.0}  # at most, of 10


def systemd_analyze(*arguments: object) -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze on this machine")
    ran = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("unit", [*UNITS, *SOCKETS], ids=lambda unit: unit.name)
def test_systemd_finds_no_mistake_but_that_nothing_is_installed_here(unit: Path) -> None:
    told = systemd_analyze("verify", "--man=no", unit).splitlines()
    assert [line for line in told if unit.name in line and "is not executable" not in line] == []


@pytest.mark.parametrize("name", EXPOSED)
def test_the_exposure_of_a_service_is_low(name: str) -> None:
    told = systemd_analyze("security", "--offline=true", FOLDER / name)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", told)
    assert found is not None, told
    assert float(found[1]) <= EXPOSED[name]


def test_no_two_services_have_one_folder() -> None:
    """systemd.exec(5): what is in it changes hands at each start. Both may be on one machine."""
    given = re.compile(r"^(\w+Directory)=(\w\S*)$", re.MULTILINE)
    folders = [each for unit in UNITS for each in given.findall(unit.read_text()) if each[0] != "WorkingDirectory"]
    assert sorted(set(folders)) == sorted(folders)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_keys_can_be_kept_for_its_user(unit: Path) -> None:
    """Nothing in /etc can be given to a dynamic user before it runs: it would read what everybody may read."""
    text = unit.read_text()
    user = re.search(r"^User=(\S+)$", text, re.MULTILINE)
    assert user is not None
    assert "DynamicUser=yes" not in text
    assert re.search(rf"^#   useradd --system .*/nologin .*\b{user[1]}\b", text, re.MULTILINE)


def test_a_gateway_has_the_user_of_its_machines_sidecar() -> None:
    """Engines' sockets are in a folder that no other user may enter."""
    assert {tuple(re.findall(r"^(?:User|Group)=(\S+)$", unit.read_text(), re.MULTILINE)) for unit in UNITS} == {
        ("weir", "weir")
    }


def test_no_unit_takes_away_the_shared_memory_of_engines() -> None:
    """systemd.exec(5): RemoveIPC= removes all of its user's once no unit of that user runs. Engines outlive theirs."""
    assert [unit.name for unit in UNITS if "\nRemoveIPC=yes\n" in unit.read_text()] == []


def test_the_log_of_the_service_is_rotated() -> None:
    """The gateway opens the file anew by itself, which is its user's: logrotate makes none."""
    rotated = (FOLDER.parent / "logrotate/weir").read_text()
    log = re.search(r"--log (\S+)", (FOLDER / "weir-gateway.service").read_text())
    assert log is not None
    assert f"\n{log[1]} {{\n" in rotated
    assert "\n    nocreate\n" in rotated
    program = shutil.which("logrotate")
    if program is not None:
        ran = subprocess.run([program, "--debug", FOLDER.parent / "logrotate/weir"], capture_output=True, check=False)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_it_waits_for_the_end_of_a_drain(unit: Path) -> None:
    """The policy's default drain is 60 s."""
    found = re.search(r"^TimeoutStopSec=(\d+)s?$", unit.read_text(), re.MULTILINE)
    assert found is not None
    assert int(found[1]) > 60
