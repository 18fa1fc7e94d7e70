"""Folders of simulated GPUs (sidecar.gpus.simulated)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def lay_out(folder: Path, sizes: Sequence[int]) -> None:
    """Make `folder` one of GPUs of these many bytes. Claims and faults that are in it already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, size in enumerate(sizes):
        (folder / f"GPU-{index}.total").write_text(str(size))
