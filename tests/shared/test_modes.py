"""Permissions of secret files, by mode."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.shared.files.modes import refused, refused_folder, unwise, unwise_folder


@pytest.mark.parametrize(
    ("mode", "secret", "refusal"),
    [
        (0o600, None, None),
        (0o400, None, None),
        (0o640, None, None),
        (0o644, "o-r", None),
        (0o660, "g-w", None),
        (0o666, "g-w", "o-w"),
        (0o602, None, "o-w"),
    ],
)
def test_modes(tmp_path: Path, mode: int, secret: str | None, refusal: str | None) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(mode)
    for found, expected in (
        (unwise(file), secret),
        (refused(file), refusal),
    ):
        assert found is None if expected is None else found is not None and found.endswith(f"chmod {expected} {file}")


def test_a_file_that_is_missing_or_no_file_is_not_reported(tmp_path: Path) -> None:
    assert unwise(tmp_path / "nowhere") is None
    with pytest.raises(FileNotFoundError):
        refused(tmp_path / "nowhere")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    assert (unwise(pipe), refused(pipe)) == (None, None)


def test_a_folder_that_is_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kept"
    assert (refused_folder(folder), unwise_folder(folder)) == (None, None)  # it is made
    assert "is not there, or is no folder" in str(refused_folder(folder / "deeper"))
    folder.mkdir(mode=0o770)
    assert (refused_folder(folder), unwise_folder(folder)) == (None, None)
    folder.chmod(0o777)
    assert refused_folder(folder) is None
    assert f"chmod o-w {folder}" in str(unwise_folder(folder))
    (tmp_path / "file").touch()
    assert "it is no folder" in str(refused_folder(tmp_path / "file"))
    assert "Not a directory" in str(refused_folder(tmp_path / "file/kept"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"may not write in {tmp_path}" in str(refused_folder(tmp_path / "other"))
