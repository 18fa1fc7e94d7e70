"""Evidence of a start's progress: its lines, what its processes read and write, their CPU time, its GPUs, its download.

/proc and folders are looked at in a thread, one look at a time, each bounded: a look that hangs costs one thread, and
is no progress.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from gateway.shared.threads import begin_in_thread
from sidecar.core.profile import Profile
from sidecar.core.start_progress import Look, StartProgress
from sidecar.process.process import Process
from sidecar.sizing.model_files import cache_folder, hub_folder
from sidecar.sizing.speculation import draft_model

LOOK_WITHIN = 10.0  # seconds for one look
MOST_FILES = 20_000  # of one folder that are looked at
MOST_LINES = 500  # of one reading that are judged, the last ones
LINE_MOST = 4000  # bytes of a line that is being written


class StartEvidence:
    """Evidence of one engine's start, for `progress`. The engine's output is heard from here to `close`.
    `gpu_bytes`: returns the most bytes that the engine has held of a GPU so far. `folders`: download_folders."""

    def __init__(
        self,
        process: Process,
        progress: StartProgress,
        clock: Callable[[], float],
        gpu_bytes: Callable[[], int] = lambda: 0,
        folders: Sequence[Path] = (),
    ) -> None:
        self._process = process
        self._folders = folders
        self._progress = progress
        self._clock = clock
        self._gpu_bytes = gpu_bytes
        self._rest = b""
        self._looking: concurrent.futures.Future[Look] | None = None
        self._hear("\n".join(process.output.ring.lines()).encode() + b"\n")
        process.output.heard = self._hear

    def close(self) -> None:
        """Nothing is heard any more."""
        self._process.output.heard = None

    def _hear(self, data: bytes) -> None:
        now = self._clock()
        *whole, rest = re.split(rb"[\r\n]+", self._rest + data)
        for line in whole[-MOST_LINES:]:
            self._progress.wrote(line.decode(errors="replace"), now)
        self._rest = rest[:LINE_MOST]
        self._progress.wrote(self._rest.decode(errors="replace"), now, whole=False)  # a progress bar ends no line

    async def look(self) -> None:
        """Look once from outside, and record the reading. A look that takes longer than LOOK_WITHIN seconds finds
        nothing."""
        if self._looking is None:
            self._looking = begin_in_thread(partial(_look, self._process, self._folders), (OSError,))
        asked = asyncio.wrap_future(self._looking)
        try:
            async with asyncio.timeout(LOOK_WITHIN):
                found = await asyncio.shield(asked)
        except TimeoutError:
            return  # the next look waits for the same thread
        except OSError:
            self._looking = None
            return
        self._looking = None
        self._progress.looked(msgspec.structs.replace(found, gpu=self._gpu_bytes()), self._clock())


def _look(process: Process, folders: Sequence[Path]) -> Look:
    cpu, moved = process.usage()
    return Look(cpu=cpu, moved=moved, stored=sum(map(bytes_in, folders)))


def bytes_in(folder: Path) -> int:
    """Bytes and blocks of the files in a folder, as many as are looked at; links are not followed. A file counts for
    its length and for what the disk has of it, since a download may reserve its length at once."""
    found, left, waiting = 0, MOST_FILES, [str(folder)]
    while waiting and left > 0:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                        continue
                    seen = entry.stat(follow_symlinks=False)
                    found += seen.st_size + 512 * seen.st_blocks
        except OSError:  # it is gone, or never was
            continue
    return found


def download_folders(profile: Profile, folder: Path, environment: Mapping[str, str]) -> list[Path]:
    """The folders that a hub's model and its draft model are downloaded to, by whichever process, as the engine's
    `environment` and flags say; none for a model on this machine. `folder`: what names in the profile are relative
    to."""
    draft = draft_model(profile.flags)
    named = [profile.model_path, *(() if draft is None else draft[:1])]
    models = [model for model in named if not os.path.exists(folder / model)]  # Path.exists may raise
    downloads = profile.flags.get("download-dir")
    caches = [cache_folder(environment), *([] if downloads is None else [folder / str(downloads)])]
    found = [hub_folder(model, cache) for model in models for cache in caches]
    return [each for each in found if each is not None]
