"""Folder of the stored files between processes: whose lock it is, and what may be deleted."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest

from gateway.batches.file_folder import FileFolder
from tests.beside import beside

FILES = 120
NOBODY = 65534


def test_one_at_a_time_works_the_batches(tmp_path: Path) -> None:
    one, other = FileFolder(tmp_path), FileFolder(tmp_path)
    assert one.claim.take()
    assert one.claim.take(), "it is claimed already"
    assert not other.claim.take()
    one.claim.leave()
    assert other.claim.take()
    assert not one.claim.take()
    other.claim.leave()


def test_what_is_written_is_not_cleared_and_what_was_left_is(tmp_path: Path) -> None:
    folder = FileFolder(tmp_path)
    written, left, kept = (folder.begin(name) for name in ("written", "left", "kept"))
    folder.keep("kept", kept)
    left.close()
    assert folder.loose(()) == ["left.part"]
    folder.clear(["written.part", "left.part", "kept", "absent"])
    assert {path.name for path in tmp_path.iterdir()} == {"written.part", "kept"}
    kept.close()
    assert folder.loose(()) == ["kept"]
    assert not folder.loose({"kept"}), "a file that is known"
    written.close()


def test_a_file_that_is_begun_while_another_clears_is_not_lost(tmp_path: Path) -> None:
    folder, over = FileFolder(tmp_path), threading.Event()

    def clear() -> None:
        while not over.is_set():
            folder.clear(["a.part"])  # it may be there, and not be locked yet

    with beside(clear):
        try:
            for _ in range(FILES):
                with folder.begin("a") as file:
                    file.write(b"abc")
                    assert folder.keep("a", file) == 3
                assert folder.read("a", 0, 9) == b"abc"
        finally:
            over.set()


def test_a_link_in_place_of_the_folder_or_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "files").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="link to elsewhere"):
        FileFolder(tmp_path / "files").make()
    folder = FileFolder(tmp_path / "own")
    folder.make()
    (tmp_path / "own/a.part").symlink_to(tmp_path / "theirs/a")
    with pytest.raises(OSError, match="symbolic links"):
        folder.begin("a")
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_file_goes_on_behind_what_counts(tmp_path: Path) -> None:
    """Wherever its writer was killed: before or after it had its name. One that has lost something stays so."""
    folder = FileFolder(tmp_path)
    for name, size, left in (("a.part", 2, b"12"), ("a", 2, b"12"), ("a", 4, b"123"), ("a.part", 0, b"")):
        (tmp_path / name).write_bytes(b"123")
        with folder.begin("a", size) as file:
            assert file.tell() == len(left)
            file.write(b"new")
            assert folder.keep("a", file) == len(left) + 3
        assert (tmp_path / "a").read_bytes() == left + b"new"
        folder.delete("a")


def test_a_file_that_this_user_may_not_read_is_left(tmp_path: Path) -> None:
    """As a backup may have left it: it keeps nothing else from being deleted."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o777)  # noqa: S103 # for a moment, of a folder that nobody knows
        for name in ("theirs", "left"):
            (Path(path) / name).touch(0o644)
        (Path(path) / "theirs").chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(NOBODY)
        try:
            folder = FileFolder(Path(path))
            assert folder.loose(()) == ["left"]
            folder.clear(["theirs", "left"])
            assert os.listdir(path) == ["theirs"]
        finally:
            os.seteuid(user)


def test_a_whole_file_has_its_name_also_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    replace = os.replace

    def renamed(old: Path, new: Path) -> None:
        replace(old, new)
        done.append("renamed")

    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")))
    folder = FileFolder(tmp_path)
    with folder.begin("a") as file:
        file.write(b"abc")
        assert folder.keep("a", file) == 3
    assert done == [f"{tmp_path}/a.part", "renamed", f"{tmp_path}"]
