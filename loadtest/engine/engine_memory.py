"""Memory of one engine on simulated GPUs in each of its states, and its start, which takes as long as a real one.

Where no GPUs are simulated an engine holds nothing and needs no time to start, sleep or wake.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from loadtest.engine.faults import Faults, faults_of, told_of
from loadtest.engine.memory_stages import GIB, RESIDUE, held, start
from loadtest.engine.true_memory import TrueMemory
from loadtest.engine.vllm_lines import VLLM_LINES, line
from sidecar.core.gpus import GPUError
from sidecar.gpus.simulated import OutOfMemory, claim, free, total_of

PIECE, PIECE_EVERY = 64 * 1024, 0.05  # bytes of a download, and seconds between them
HANG_SAYS = 60.0  # seconds


class StartFailed(Exception):
    """The engine does not start; the message is what vLLM prints last."""


class GpuShare(msgspec.Struct, frozen=True, kw_only=True):
    """On which GPUs of which folder, and how much of each: vLLM's `--gpu-memory-utilization` and
    `--kv-cache-memory-bytes`."""

    folder: Path
    gpus: tuple[int, ...]
    utilization: float = 0.9
    cache: int | None = None


class Resident:
    """Memory of one engine with `weights` bytes on each GPU, for `sequences` at once. Raises ValueError where there is
    no such GPU."""

    def __init__(self, share: GpuShare, weights: int, sequences: int) -> None:
        self.weights = weights
        self._sequences = sequences
        self._share = share
        try:
            self._totals = {index: total_of(share.folder, index) for index in share.gpus}
        except GPUError as error:
            raise ValueError(str(error)) from None
        self._true: TrueMemory | None = None
        self._sleeps = 0

    def wanted(self, total: int) -> int:
        """Bytes of a GPU of `total` bytes that must be free before the engine starts, capped cache or not."""
        return int(total * self._share.utilization)

    def claim(self, total: int) -> int:
        """Bytes of a GPU of `total` bytes that the engine holds while it is awake."""
        cache = self._share.cache
        taken = self.wanted(total) if cache is None else min(self.wanted(total), RESIDUE + self.weights + cache)
        return taken if self._true is None else self._true.takes(taken)

    def hold(self, *, loaded: float, cache: bool) -> None:
        """Hold so much of the weights, and the KV cache or not. Raises OutOfMemory, and holds what it held."""
        self._hold(lambda total: held(self.weights, self.claim(total), loaded=loaded, cache=cache))

    def sleep(self) -> None:
        """Hold what it keeps asleep, which may be more with every sleep."""
        self._sleeps += 1
        true = self._true
        if true is None:
            self.hold(loaded=0.0, cache=False)
        else:
            self._hold(lambda total: min(self.claim(total), true.asleep(self._sleeps)))

    def release(self) -> None:
        """Hold nothing."""
        self._hold(lambda _: 0)

    def _hold(self, size: Callable[[int], int]) -> None:
        claim(self._share.folder, {index: size(total) for index, total in self._totals.items()})

    async def start(self, models: Sequence[str], speed: float, say: Callable[[str], None]) -> None:
        """Everything before it listens; back when it may. Raises StartFailed, or never comes back: by its faults."""
        faults = faults_of(self._share.folder, models[0])
        self._true = told_of(self._share.folder, models[0], "memory", TrueMemory)
        first = self.claim(next(iter(self._totals.values())))
        if faults.download:
            await _downloaded(Path(faults.download), faults.download_seconds)
        before: float | None = None
        for stage in start(self.weights, first):
            try:
                if stage.loaded is not None:
                    if before is None:
                        self._check_free(faults)
                    if stage.cache:
                        self._check_cache()
                    self.hold(loaded=stage.loaded, cache=stage.cache)
                if stage.loaded and faults.hang_loading:
                    await _hangs(say, busy=faults.hang_loading == "busy")
            except OutOfMemory as error:
                raise _failed(f"torch.OutOfMemoryError: {error}") from None
            before = stage.loaded
            await asyncio.sleep(stage.seconds / speed)
            say(stage.line)

    def _check_cache(self) -> None:
        """Whether what it really needs leaves room for its KV cache."""
        lacks = [
            self._true.for_cache(self._share.utilization, self._sequences, total)
            for total in self._totals.values()
            if self._true is not None
        ]
        for lack in filter(None, lacks):
            raise _failed(lack.line)

    def _check_free(self, faults: Faults) -> None:
        if faults.fail_start:
            raise _failed(faults.fail_start)
        for number, (index, total) in enumerate(self._totals.items()):
            left, wanted = free(self._share.folder, index), self.wanted(total)
            if left < wanted:
                sizes = {"free": left / GIB, "total": total / GIB, "desired": wanted / GIB}
                lacks = line("free_memory_too_low", 0, gpu=number, utilization=self._share.utilization, **sizes)
                raise _failed(lacks)


async def _downloaded(file: Path, seconds: float) -> None:
    """Write to a file, bit by bit, for so long."""
    clock = asyncio.get_running_loop().time
    ends = clock() + seconds
    with file.open("ab") as out:
        while clock() < ends:
            out.write(bytes(PIECE))
            out.flush()
            await asyncio.sleep(PIECE_EVERY)


async def _hangs(say: Callable[[str], None], *, busy: bool) -> NoReturn:
    """Never come back, and write vLLM's line about that every minute; `busy`: in a loop that burns a core."""
    said_at = -HANG_SAYS
    while True:
        if time.monotonic() >= said_at + HANG_SAYS:
            said_at = time.monotonic()
            say(VLLM_LINES.slow_or_hung)
        until = time.monotonic() + PIECE_EVERY
        while busy and time.monotonic() < until:
            pass
        await asyncio.sleep(0.0 if busy else PIECE_EVERY)  # for the signal that ends it


def _failed(why: str) -> StartFailed:
    return StartFailed(f"EngineCore failed to start.\n{why}\n{VLLM_LINES.follows}")
