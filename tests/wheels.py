"""The project's wheel, for tests of what is installed away from the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What is built of, and nothing of a build before.
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "*.so", "node_modules", "tests")


def pip(*words: str | Path) -> None:
    """Run pip, which may need the system's authorities: those of the tests trust nobody."""
    environment = dict(os.environ)
    if environment.get("SSL_CERT_DIR") == environment.get("TMPDIR"):
        environment.pop("SSL_CERT_DIR", None)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    subprocess.run(command, env=environment, check=True, timeout=400)


def tree(folder: Path) -> Path:
    """Copy the source tree into a new folder: setuptools builds in the tree, where another test may build too."""
    return Path(shutil.copytree(ROOT, folder, ignore=NOT_SOURCE))


def built(source: Path, folder: Path) -> Path:
    """Build the wheel of a source tree into a folder. Return the wheel's file."""
    pip("wheel", "--no-deps", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("weir_gateway-*.whl")
    return wheel
