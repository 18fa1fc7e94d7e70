"""Saving of a decider's checkpoints, each second in which something has changed, and going on from one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from gateway.core.checkpoint import CheckpointError
from gateway.decider.checkpoint import Checkpoints
from gateway.shared.lines import say
from gateway.shared.tasks import cancel, lasting

EVERY = 1.0  # seconds between two
SHARE = 0.02  # of this process's time that they may take: a large one is taken less often


class Saving(msgspec.Struct, eq=False):
    """Saving of checkpoints. `take` makes one; `changes` counts what may have changed it (0: no change). `save` stores
    it for the next decider, and raises OSError if it cannot; the first failure is reported."""

    _take: Callable[[], bytes]
    _changes: Callable[[], int]
    _save: Callable[[bytes], Awaitable[None]]
    _saved: int = 0  # changes that the last one has
    _failing: bool = False  # since the last that was kept
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Save from now on."""
        self._task = lasting("the saving of what this decider has learned", self._keep)

    async def aclose(self) -> None:
        await cancel(self._task)

    async def _keep(self) -> None:
        while True:
            began, changes = time.perf_counter(), self._changes()
            took = 0.0
            if changes not in (0, self._saved):
                state = self._take()
                took = time.perf_counter() - began
                await self._try(state, changes)
            await asyncio.sleep(max(EVERY, took / SHARE))

    async def _try(self, state: bytes, changes: int) -> None:
        try:
            await self._save(state)
        except OSError as error:
            if not self._failing:
                self._failing = True
                say(f"what this decider has learned cannot be saved: {error}: if it dies, the next begins anew")
        else:
            self._saved, self._failing = changes, False


def go_on_from(checkpoints: Checkpoints, state: bytes, passed: float) -> None:
    """Restore a checkpoint of `passed` seconds ago, if there is one. An unreadable checkpoint changes nothing."""
    if not state:
        return
    try:
        checkpoints.restore(state, passed)
    except CheckpointError as error:
        say(f"what the decider before has learned is left out: {error}: rates, estimates and limits begin anew")
