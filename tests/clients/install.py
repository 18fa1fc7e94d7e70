"""Installs the packages that docs/clients.md names, each in the version pinned here, outside the tree.

`make clients` runs this, then the tests. They land in ${XDG_CACHE_HOME:-~/.cache}/weir/clients: a virtual environment
`python/` from requirements.txt, and `node/` from package.json and its lock file. A second run installs what changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
NODE_FILES = (HERE / "package.json", HERE / "package-lock.json")


def folder() -> Path:
    """Where everything lies."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "weir" / "clients"


def python_program() -> Path:
    return folder() / "python" / "bin" / "python"


def node_folder() -> Path:
    return folder() / "node"


def node_program() -> str:
    """The program `node`, empty where there is none."""
    return shutil.which("node") or ""


def missing() -> str:
    """Why the clients cannot be run here, empty where they can."""
    if not node_program():
        return "node is not installed (apt-get install nodejs npm)"
    for source, copy in _copies():
        if not copy.is_file() or copy.read_bytes() != source.read_bytes():
            return f"the clients of {source.name} are absent or out of date"
    return ""


def versions() -> dict[tuple[str, str], str]:
    """The pinned version of each package, by language and name."""
    pins = re.findall(r"^([\w.-]+)==(\S+)", REQUIREMENTS.read_text(), re.MULTILINE)
    packages = json.loads(NODE_FILES[0].read_text())["dependencies"]
    return {("python", name): pin for name, pin in pins} | {("node", name): pin for name, pin in packages.items()}


def _copies() -> list[tuple[Path, Path]]:
    """Each pinned list with its copy, which is made last: so an interrupted run is taken up again."""
    return [(REQUIREMENTS, folder() / "python.txt"), *((file, folder() / f"done-{file.name}") for file in NODE_FILES)]


def main() -> int:
    npm = shutil.which("npm")
    if not node_program() or npm is None:
        print("clients: node and npm are not installed: apt-get install nodejs npm", file=sys.stderr)
        return 2
    if missing():
        node_folder().mkdir(parents=True, exist_ok=True)
        if not python_program().is_file():
            venv.create(folder() / "python", with_pip=True)
        # Every package is in the list: the resolver is not run, which takes it minutes.
        pip = [str(python_program()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--requirement", str(REQUIREMENTS)], check=True, timeout=900)
        for file in NODE_FILES:
            shutil.copy(file, node_folder())
        # Not `npm ci`: npm 11 refuses a lock file without packages for other platforms, which not every registry has.
        argv = [npm, "install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts"]
        subprocess.run(argv, check=True, cwd=node_folder(), timeout=600)
        for source, copy in _copies():
            shutil.copy(source, copy)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
