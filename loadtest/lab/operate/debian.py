"""Programs of Debian packages, unpacked outside the tree: nobody need be root, and nothing of the machine changes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


class NoPackage(Exception):
    """The packages cannot be got; the message says why."""


def unpack(packages: Sequence[str], folder: Path) -> None:
    """Get the packages and unpack them into `folder`. Raises NoPackage."""
    lists = folder / "lists"  # its own, so that nobody need be root
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    apt = ["apt-get", "-o", f"Dir::State::Lists={lists}"]
    try:
        subprocess.run([*apt, "update"], check=True, capture_output=True)
        subprocess.run([*apt, "download", *packages], cwd=folder, check=True, capture_output=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder], check=True, capture_output=True)
            package.unlink()
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoPackage(str(error)) from error
