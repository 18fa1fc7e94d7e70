"""Source of a model's files that is a hub: huggingface.co, or a mirror of its API that HF_ENDPOINT names.

Downloads are huggingface_hub's, in a child process (`sidecar/pull/hub_child.py`). Functions raise PullError.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sidecar.pull.listing import Listing, PullError, Select, check_names

NO_HUB = "huggingface_hub is not installed here, which fetches from a hub: pip install 'WEIR.whl[hub]'"
REFUSALS = ("GatedRepoError", "RepositoryNotFoundError")  # a hub hides what a token may not see
HIDDEN = " HF_TOKEN has to be of an account that may read it and has accepted its terms."
EVERY = 1.0  # seconds between two looks at what has come
MAX_SAID = 64 * 1024 * 1024  # bytes of a listing
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
OWN = ".cache"  # the library's notes in a folder that it fills


def list_hub(model: str, revision: str, select: Select) -> Listing:
    """List the selected files of a model at one commit."""
    said = _child({"model": model, "revision": revision}, lambda: None)
    try:
        listing = msgspec.json.decode(said, type=Listing)
    except msgspec.MsgspecError as error:
        raise PullError(f"the hub's list of the files of {model} is none: {error}") from error
    names = [file.name for file in listing.files]
    check_names(names)
    selected = set(select(names))
    return msgspec.structs.replace(listing, files=tuple(file for file in listing.files if file.name in selected))


def fetch(model: str, listing: Listing, into: Path, bytes_here: Callable[[int], None]) -> None:
    """Fetch the files of a hub's listing, and compare their checksums. `bytes_here` gets what has come, every second.
    Whole files that are there already are not fetched again."""
    for part in into.rglob(f"{OWN}/**/*.incomplete"):  # of a pull that was killed
        part.unlink()
    names = [file.name for file in listing.files]
    task = {"model": model, "revision": listing.commit, "into": str(into), "names": names}
    before = -1
    while True:
        try:
            _child(task, lambda: bytes_here(_size(into)))
            break
        except PullError:
            whole = sum((into / name).exists() for name in names)
            if whole <= max(before, 0):  # without progress another try is in vain
                raise
            before = whole
    shutil.rmtree(into / OWN, ignore_errors=True)


def _size(folder: Path) -> int:
    """Bytes of all files below a folder; one that goes meanwhile counts nothing."""
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return size


def _child(task: dict[str, Any], each: Callable[[], None]) -> bytes:
    """Run a task in a child process, which ends with this call; what it printed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise PullError(NO_HUB)
    argv = [sys.executable, "-P", "-m", "sidecar.pull.hub_child"]
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        subprocess.Popen(  # noqa: S603 # our own module, without a shell
            argv, stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True, env={**os.environ, **QUIET}
        ) as child,
    ):
        try:
            assert child.stdin is not None  # noqa: S101 # a pipe was asked for
            child.stdin.write(msgspec.json.encode(task) + b"\n")
            child.stdin.flush()
            while True:
                try:
                    status = child.wait(EVERY)
                    break
                except subprocess.TimeoutExpired:
                    each()
        finally:
            child.kill()
        for file in (out, err):
            file.seek(0)
        if status == 0:
            return out.read(MAX_SAID)
        said = " ".join(err.read()[-2000:].decode(errors="replace").split())
        raise PullError(f"{said or f'the download ended with {status}'}{HIDDEN if said.startswith(REFUSALS) else ''}")
