"""Staging of a pull: what is there is not asked for again, and what is wrong does not stay."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.pull.listing import Digest, Listing, SourceFile
from sidecar.pull.source import Pieces
from sidecar.pull.staging import BadContent, Staging

DATA = bytes(range(256)) * 100
FILE = SourceFile(name="a/b.bin", size=len(DATA), digest=Digest("sha256", hashlib.sha256(DATA).hexdigest()))


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    found = Staging(tmp_path / "m")
    found.open(Listing(source="s", files=(FILE,)))
    yield found
    found.close()


def asked_from(staging: Staging, came: list[int]) -> list[int]:
    """Where the source was asked to begin, while the file was taken."""
    asked = []

    def read(start: int) -> Pieces:
        asked.append(start)
        yield DATA[start:]

    staging.take(FILE, read, came.append)
    return asked


@pytest.mark.parametrize(("there", "asked"), [(0, [0]), (1000, [1000]), (len(DATA), [])])
def test_what_is_there_is_not_asked_for_again(staging: Staging, there: int, asked: list[int]) -> None:
    """All of it: it was killed between the last byte and the rename."""
    (staging.folder / "part").write_bytes(DATA[:there])
    came: list[int] = []
    assert asked_from(staging, came) == asked
    assert sum(came) == len(DATA) - there
    staging.finish(replace=False)
    assert (staging.target / "a" / "b.bin").read_bytes() == DATA


def test_what_is_longer_than_the_file_is_begun_anew(staging: Staging) -> None:
    (staging.folder / "part").write_bytes(DATA + b"x")
    assert asked_from(staging, []) == [0]


def test_wrong_bytes_from_before_do_not_stay(staging: Staging) -> None:
    (staging.folder / "part").write_bytes(b"x" * len(DATA))
    with pytest.raises(BadContent, match="another checksum"):
        asked_from(staging, [])
    assert asked_from(staging, []) == [0]
