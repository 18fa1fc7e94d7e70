"""Preparation of the console's tests: Chromium must be there, and axe-core is fetched into the user's cache.

`make test-console` runs this, then the tests. axe-core comes from npm and lies outside the tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

AXE_VERSION = "4.14.1"
NAMES = ("chromium", "chromium-browser", "google-chrome")


def folder() -> Path:
    """Where axe-core lies."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "weir" / "console"


def axe_file() -> Path:
    """The script, which may not be there."""
    return folder() / "node_modules" / "axe-core" / "axe.min.js"


def chromium() -> str | None:
    """The browser's path, None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def main() -> int:
    if chromium() is None:
        print("console: Chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 2
    if not axe_file().is_file():
        npm = shutil.which("npm")
        if npm is None:
            print("console: npm is not installed, and axe-core comes from it: apt-get install npm", file=sys.stderr)
            return 2
        folder().mkdir(parents=True, exist_ok=True)
        argv = [npm, "install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts", f"axe-core@{AXE_VERSION}"]
        subprocess.run(argv, check=True, cwd=folder(), timeout=120)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
