"""Evidence of a start's progress: the lines of its engine, what its processes read and write, their CPU time, its GPUs.

/proc is looked at in a thread, one look at a time, each bounded: a look that hangs costs one thread, and is no
progress.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
from collections.abc import Callable

from gateway.shared.threads import begin_in_thread
from sidecar.core.start_progress import Look, StartProgress
from sidecar.process.process import Process

LOOK_WITHIN = 10.0  # seconds for one look
MOST_LINES = 500  # of one reading that are judged, the last ones
LINE_MOST = 4000  # bytes of a line that is being written


class StartEvidence:
    """Evidence of one engine's start, for `progress`. The engine's output is heard from here to `close`.
    `gpu_bytes`: returns the most bytes that the engine has held of a GPU so far."""

    def __init__(
        self,
        process: Process,
        progress: StartProgress,
        clock: Callable[[], float],
        gpu_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._process = process
        self._progress = progress
        self._clock = clock
        self._gpu_bytes = gpu_bytes
        self._rest = b""
        self._looking: concurrent.futures.Future[tuple[float, dict[int, int]]] | None = None
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
            self._looking = begin_in_thread(self._process.usage, (OSError,))
        asked = asyncio.wrap_future(self._looking)
        try:
            async with asyncio.timeout(LOOK_WITHIN):
                cpu, moved = await asyncio.shield(asked)
        except TimeoutError:
            return  # the next look waits for the same thread
        except OSError:
            self._looking = None
            return
        self._looking = None
        self._progress.looked(Look(cpu=cpu, moved=moved, gpu=self._gpu_bytes()), self._clock())
