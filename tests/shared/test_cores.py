"""Cores of a process: no more than its affinity and its container's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.cli.serve import cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("100000 100000\n", 1),
        ("50000 100000\n", 1),
        ("199999 100000\n", 1),
        ("200000 100000\n", min(ALL, 2)),
        ("99900000 100000\n", ALL),
        ("max 100000\n", ALL),
        ("", ALL),
        (None, ALL),
    ],
)
def test_a_quota_bounds_the_cores(quota: str | None, expected: int, tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    assert cores(file) == expected


def test_affinity_bounds_them(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores(tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, before)
