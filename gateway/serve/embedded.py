"""The embedded fleet of `--engine sim[:N[:PROFILE]]`: simulated vLLM engines as child processes.

Each child prints `ready URL` when it listens, and ends by itself when its standard input closes: no path of our own
end, not even SIGKILL, leaves one behind.
"""

from __future__ import annotations

import asyncio
import re
import sys

import msgspec

READY_WITHIN = 30.0  # seconds
STOP_WITHIN = 5.0
MOST = 64

_SPEC = re.compile(r"sim(?::(?P<count>[0-9]{1,3})(?::(?P<profile>.{1,4096}))?)?")


class EmbeddedFleet(msgspec.Struct, frozen=True):
    """`count` engines of one latency profile: its name, or its file."""

    count: int = 2
    profile: str = "h100-8b"


def parse_embedded(text: str) -> EmbeddedFleet | None:
    """`sim`, `sim:N` or `sim:N:PROFILE`; None if it is not of that form. Raises ValueError for a bad N."""
    match = _SPEC.fullmatch(text)
    if match is None:
        return None
    count = int(match["count"] or 2)
    if not 1 <= count <= MOST:
        raise ValueError(f"{text!r}: 1 to {MOST} simulated engines, not {count}")
    return EmbeddedFleet(count, match["profile"] or "h100-8b")


class Embedded:
    """The running children. `urls` after `start`; `stop` ends them and waits for it."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self._children: list[asyncio.subprocess.Process] = []

    async def start(self, fleet: EmbeddedFleet) -> list[str]:
        """Start `fleet.count` engines; their URLs. Raises RuntimeError if one does not come up."""
        started = await asyncio.gather(*(self._start(fleet, len(self.urls) + i) for i in range(fleet.count)))
        self.urls += started
        return started

    async def _start(self, fleet: EmbeddedFleet, seed: int) -> str:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtest.engine", "--port", "0", "--profile", fleet.profile),
            *("--seed", str(seed), "--die-with-parent"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A session of its own: Ctrl-C in the terminal reaches the gateway, which drains before they end.
            start_new_session=True,
        )
        self._children.append(child)
        assert child.stdout is not None  # noqa: S101 # PIPE was asked for
        try:
            line = await asyncio.wait_for(child.stdout.readline(), READY_WITHIN)
        except TimeoutError:
            line = b""
        word, _, url = line.decode().strip().partition(" ")
        if word != "ready":
            await self.stop()
            raise RuntimeError(f"the simulated engine ({fleet.profile}) did not start: exit code {child.returncode}")
        return url

    async def stop(self) -> None:
        for child in self._children:
            if child.returncode is None:
                child.terminate()
        for child in self._children:
            try:
                await asyncio.wait_for(child.wait(), STOP_WITHIN)
            except TimeoutError:
                child.kill()
                await child.wait()
        self._children.clear()
        self.urls.clear()
