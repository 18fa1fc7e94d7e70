"""Unix sockets that a sidecar may name: those in a folder that a sidecar of this user has made for its engines."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gateway.decider.report_intake import socket_refusal
from gateway.shared.protocol import SOCKETS_MARK


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path.resolve() / "engines"
    made.mkdir(mode=0o700)
    (made / SOCKETS_MARK).touch()
    return made


def test_a_folder_that_a_sidecar_has_made_is_good_whether_its_sockets_are_there_or_not(folder: Path) -> None:
    assert socket_refusal(f"{folder}/m.sock") == ""
    folder.chmod(0o750)
    assert socket_refusal(f"{folder}/m.sock") == "", "a group that the gateway is in may reach them"


@pytest.mark.parametrize("path", ["/run/docker.sock", "/proc/self/fd/1", "/var/run/dbus/system_bus_socket", "/x.sock"])
def test_other_programs_sockets_are_refused(path: str) -> None:
    assert socket_refusal(path)


@pytest.mark.parametrize("mode", [0o701, 0o704, 0o702, 0o720, 0o755, 0o777])
def test_a_folder_where_others_may_do_something_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert socket_refusal(f"{folder}/m.sock").startswith("its folder is open to other users")


def test_a_folder_without_the_mark_is_refused(folder: Path) -> None:
    (folder / SOCKETS_MARK).unlink()
    assert socket_refusal(f"{folder}/m.sock").endswith(f"{SOCKETS_MARK} is not there")
    (folder / SOCKETS_MARK).symlink_to("/etc/hostname")
    assert socket_refusal(f"{folder}/m.sock")


def test_a_path_that_leads_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    (folder / "sub").mkdir()
    for path in (
        f"{tmp_path.resolve()}/link/m.sock",
        f"{folder}/sub/../m.sock",
        f"{folder}//m.sock",
        f"{folder}/./m.sock",
    ):
        assert socket_refusal(path).startswith("its path is not a plain one"), path


def test_a_folder_that_the_gateways_user_may_not_enter_is_told_as_that(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path | str) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("gateway.decider.report_intake.os.lstat", closed)
    expected = "its folder is closed to the gateway's user: run gateway and sidecar as one user"
    assert socket_refusal(f"{folder}/m.sock") == expected


def test_another_users_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def strangers(path: Path | str) -> os.stat_result:
        seen = list(os.stat(path))
        seen[stat.ST_UID] = os.geteuid() + 1
        return os.stat_result(seen)

    monkeypatch.setattr("gateway.decider.report_intake.os.lstat", strangers)
    assert socket_refusal(f"{folder}/m.sock") == "its folder belongs to another user than the gateway's"
