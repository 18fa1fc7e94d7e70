"""Folder of the stored files between processes: whose lock it is, and what may be deleted."""

from __future__ import annotations

import threading
from pathlib import Path

from gateway.batches.file_folder import FileFolder

FILES = 120


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

    clearing = threading.Thread(target=clear)
    clearing.start()
    try:
        for _ in range(FILES):
            with folder.begin("a") as file:
                file.write(b"abc")
                assert folder.keep("a", file) == 3
            assert folder.read("a", 0, 9) == b"abc"
    finally:
        over.set()
        clearing.join()
