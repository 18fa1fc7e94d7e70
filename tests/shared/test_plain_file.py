"""Shell pipes, plain files, and all that only looks like one: opened, or refused at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.shared.files.plain_file import open_plain


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "not a plain file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a plain file"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: None, "No such file or directory"),
    ],
)
@pytest.mark.parametrize("pipes", [False, True])
def test_what_is_no_plain_file_is_refused_at_once(
    make: Callable[[Path], object], found: str, pipes: bool, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    make(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=found) as told:
        open_plain(path, pipes=pipes)
    assert told.value.filename == str(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_plain_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_plain(tmp_path / name) as file:
            assert file.read(2) == b"ab"


def test_a_shells_pipe_is_read_to_its_end_where_it_is_allowed() -> None:
    reading, writing = os.pipe()
    path = Path(f"/dev/fd/{reading}")
    with pytest.raises(OSError, match="not a plain file"):
        open_plain(path)
    with os.fdopen(writing, "wb") as into:
        later = threading.Timer(0.05, lambda: (into.write(b"late"), into.close()))
        later.start()
        with open_plain(path, pipes=True) as file:
            assert file.read() == b"late"
        later.join()
    os.close(reading)
