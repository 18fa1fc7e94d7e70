"""A sidecar as a child process of the gateway: one machine in one command.

It is a child as it would be on a machine of its own: it reports to the control port and starts engines when they are
asked for. It ends, its engines with it, when its standard input closes: no path of our own end, not even SIGKILL,
leaves one behind. Where it ends before, however, it is started again, and takes over the engines that it finds running.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.shared.tasks import lasting

READY_WITHIN = 30.0  # seconds
FIRST, LATEST = 0.5, 30.0  # seconds before one that has ended is started again: twice as many each time
IN_ORDER = 60.0  # seconds after which one that ends is started again as soon as the first time
COMMAND = (sys.executable, "-m", "sidecar.cli")


class SidecarProcess:
    """The child that runs the file `config`, with more `flags` and `environment`. `stop` gives it and its engines
    `stop_within` seconds to end. `say` takes a line for the operator whenever it has ended before."""

    def __init__(
        self,
        config: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        stop_within: float,
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self._say = say
        self._keeping: asyncio.Task[None] | None = None
        self._flags = flags
        self._environment = environment or {}
        self._stop_within = stop_within
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Back when it listens; from then on it lives until `stop`. Raises RuntimeError where it does not come to that;
        what it wrote says why."""
        await self._begin()
        self._keeping = lasting(f"the sidecar of {self.config}", self._keep)

    async def _keep(self) -> None:
        """Restart the sidecar whenever it has ended."""
        loop, pause = asyncio.get_running_loop(), FIRST
        while (child := self._child) is not None:
            began = loop.time()
            why = f"has ended with exit status {await child.wait()}"
            if loop.time() >= began + IN_ORDER:
                pause = FIRST
            self._say(f"the sidecar of {self.config} {why}; it is started again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LATEST)
            try:
                await self._begin()
                self._say(f"the sidecar of {self.config} runs again")
            except (OSError, RuntimeError) as error:
                self._say(str(error))

    async def _begin(self) -> None:
        """Start the sidecar, and wait until it listens. Raises RuntimeError, and OSError without a process."""
        self._child = await asyncio.create_subprocess_exec(
            *(*COMMAND, "serve", "--config", str(self.config), *self._flags, "--end-with-parent", "--end-engines"),
            env={**os.environ, **self._environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A session of its own: Ctrl-C in the terminal reaches the gateway, which drains before engines end.
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(self._announced(self._child), READY_WITHIN)
        except TimeoutError:
            self._child.kill()  # what says nothing may do nothing
            raise RuntimeError(f"the sidecar of {self.config} has said nothing for {READY_WITHIN:g} s") from None

    async def _announced(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None  # noqa: S101 # PIPE was asked for
        while not (await child.stdout.readline()).startswith(b"control API "):
            if child.stdout.at_eof():
                raise RuntimeError(f"the sidecar of {self.config} did not start: exit code {await child.wait()}")

    async def stop(self) -> None:
        """Stop the sidecar and its engines by closing its standard input, and engines that a failed one left."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None  # noqa: S101 # PIPE was asked for
            child.stdin.close()
            if await self._ended(child) not in (0, 2):  # 2: it has never run
                argv = (*COMMAND, "stop", "--all", "--config", str(self.config))
                await self._ended(await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL))

    async def _ended(self, child: asyncio.subprocess.Process) -> int:
        """Return the exit status; -9 for a process that had to be killed."""
        try:
            return await asyncio.wait_for(child.wait(), self._stop_within)
        except TimeoutError:
            child.kill()
            return await child.wait()
