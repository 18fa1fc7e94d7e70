"""Evidence of a start's progress: its lines, what its processes read and write, their CPU time, its GPUs, its download.

An engine is polled from the start of its process until it serves. There are no fixed pauses: a question that fails is
repeated, soon at first, every second at last. The deadline moves with the start's progress (`core.start_progress`): the
duration of a start depends on model, disk and compilation, but a start that works goes on. A process that has ended is
given up at once.

/proc and folders are looked at in a thread, one look at a time, each bounded: a look that hangs costs one thread, and
is no progress.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from gateway.shared.threads import begin_in_thread
from sidecar.core.profile import Profile
from sidecar.core.start_progress import Look, StartProgress
from sidecar.process.engine_api import ApiError, EngineApi
from sidecar.process.process import Process
from sidecar.sizing.extras import draft_model
from sidecar.sizing.model_files import cache_folder, hub_folder

LOOK_WITHIN = 10.0  # seconds for one look
MOST_FILES = 20_000  # of one folder that are looked at, and folders in it
MOST_LINES = 500  # of one reading that are judged, the last ones
LINE_MOST = 4000  # bytes of a line that is being written


class StartEvidence(msgspec.Struct):
    """Evidence of one engine's start, for `progress`. The engine's output is heard from here to `close`."""

    process: Process
    progress: StartProgress
    clock: Callable[[], float]
    gpu_bytes: Callable[[], int] = lambda: 0  # returns the most bytes that the engine has held of a GPU so far
    folders: Sequence[Path] = ()  # download_folders
    _rest: bytes = b""
    _looking: concurrent.futures.Future[Look] | None = None

    def __post_init__(self) -> None:
        self._hear("\n".join(self.process.output.ring.lines()).encode() + b"\n")
        self.process.output.heard = self._hear

    def close(self) -> None:
        """Nothing is heard any more."""
        self.process.output.heard = None

    def _hear(self, data: bytes) -> None:
        now = self.clock()
        *whole, rest = re.split(rb"[\r\n]+", self._rest + data)
        for line in whole[-MOST_LINES:]:
            self.progress.wrote(line.decode(errors="replace"), now)
        self._rest = rest[:LINE_MOST]
        self.progress.wrote(self._rest.decode(errors="replace"), now, whole=False)  # a progress bar ends no line

    async def look(self) -> None:
        """Look once from outside, and record the reading. A look that takes longer than LOOK_WITHIN seconds finds
        nothing."""
        if self._looking is None:
            self._looking = begin_in_thread(partial(_look, self.process, self.folders), (OSError,))
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
        self.progress.looked(msgspec.structs.replace(found, gpu=self.gpu_bytes()), self.clock())


def _look(process: Process, folders: Sequence[Path]) -> Look:
    cpu, moved = process.usage()
    return Look(cpu=cpu, moved=moved, stored=sum(map(bytes_in, folders)))


def bytes_in(folder: Path) -> int:
    """Bytes and blocks of the files in a folder, as many as are looked at; links are not followed. A file counts for
    its length and for what the disk has of it, since a download may reserve its length at once."""
    found, left, waiting = 0, MOST_FILES, [str(folder)]
    while waiting and left:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:  # it is gone, or never was
            for entry in islice(entries, left):
                left -= 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                    continue
                with contextlib.suppress(OSError):  # it is gone
                    seen = entry.stat(follow_symlinks=False)
                    found += seen.st_size + 512 * seen.st_blocks
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


# -- readiness --------------------------------------------------------------------------------------------------------

FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0  # seconds between two questions
LOOK_EVERY = 10.0  # seconds between two looks from outside, or a quarter of a shorter stall


async def ready(
    api: EngineApi,
    progress: StartProgress,
    limit: float | None,
    clock: Callable[[], float],
    *,
    dead: Awaitable[object],
    look: Callable[[], Awaitable[None]],
    prompt: str = "hello",
    requests: int = 1,
) -> None:
    """Until the engine is healthy, serves its name and has answered `requests` warm-up requests.

    `progress` is told of what happens here, and by `look` of what can be seen from outside, every few seconds and once
    more before the start is given up. `dead` is over when the process is; a future is left as it is. Raises ApiError:
    `timeout` when `progress` says so or after `limit` seconds in all, `lost` as soon as `dead` is over, and whatever
    fails of the warm-up. The message says what was waited for, and the last progress.
    """
    began = clock()
    latest = math.inf if limit is None else began + limit
    end_of_it = asyncio.ensure_future(dead)
    steps = asyncio.ensure_future(_steps(api, progress, clock, prompt, requests))
    looks = asyncio.ensure_future(_looks(look, min(LOOK_EVERY, progress.stall / 4)))
    try:
        while not steps.done():
            if end_of_it.done():
                raise ApiError("lost", f"the process ended before it was ready: {progress.awaits}")
            end = min(progress.ends_at, latest)
            if clock() >= end:
                if clock() < latest:
                    await look()
                if steps.done() or end < min(progress.ends_at, latest):
                    continue
                now = clock()
                raise ApiError(
                    "timeout", f"not ready after {now - began:.1f} s, {progress.words(now)}: {progress.awaits}"
                )
            await asyncio.wait((steps, end_of_it), timeout=end - clock(), return_when=asyncio.FIRST_COMPLETED)
        steps.result()
    finally:
        ours = [steps, looks] if end_of_it is dead else [steps, looks, end_of_it]
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)


async def _looks(look: Callable[[], Awaitable[None]], every: float) -> None:
    while True:
        await look()
        await asyncio.sleep(every)


async def _steps(
    api: EngineApi, progress: StartProgress, clock: Callable[[], float], prompt: str, requests: int
) -> None:
    async def serves() -> None:
        names = await api.models()
        if api.served_name not in names:
            raise ApiError("status", f"/v1/models: it serves {list(names)[:5]}, not {api.served_name!r}")

    for check, what in ((api.health, "it is healthy"), (serves, "it serves its name")):
        pause = FIRST_PAUSE
        while True:
            try:
                await check()
                break
            except ApiError as error:
                progress.awaits = str(error)
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, LAST_PAUSE)
        progress.reached(what, clock())
    for number in range(requests):
        progress.awaits = f"warm-up request {number + 1} of {requests} is not answered"
        await api.warm_up(prompt, 1)
        progress.reached(f"it has answered warm-up request {number + 1}", clock())
