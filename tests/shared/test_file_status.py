"""Reload status of the active policy."""

from __future__ import annotations

from gateway.shared.files.file_status import FileStatus

FIRST = FileStatus(digest="a", loaded_at="t0", file="f")


def test_what_fails_is_remembered_until_the_file_is_good() -> None:
    failed = FIRST.failed("line 1", "t1").failed("line 2", "t2")
    assert (failed.version, failed.digest, failed.error, failed.error_at, failed.failures) == (
        1,
        "a",
        "line 2",
        "t1",
        2,
    )
    assert failed.mended() == FileStatus(digest="a", loaded_at="t0", file="f", failures=2)
    assert failed.applied("b", "t3") == FileStatus(
        version=2, digest="b", loaded_at="t3", file="f", reloads=1, failures=2
    )
