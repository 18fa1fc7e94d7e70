"""Processes of a soak test, and their chaos: kills, reloads of the policy, engines that fail for a while."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from loadtest.lab.figures.runs import PROFILE
from loadtest.processes import Child, Gateway

BLOCKS = 1024  # KV blocks of each: few calls at a time, so that two cores are enough for all of it
RELOADS, KILLS, FAULTS = 2.0, 30.0, 7.0  # seconds between two
DOWN, FAULTY = 3.0, 3.0  # seconds
POLICY = "version: 1\nlogging: {calls: 100%%}\nclasses:\n" + "\n".join((
    "  interactive: {weight: 8, ttft: 2s, deadline: 60s, max_queue: %d}",
    "  default: {weight: 4, ttft: 10s, deadline: 5m, max_queue: 512}",
    "  batch: {weight: 1, deadline: 1h, max_queue: 4096}",
))  # fmt: skip
SICK: tuple[dict[str, float], ...] = (
    {"errors": 0.2, "status": 503}, {"die_before_headers": 0.2}, {"slow": 3.0}, {"die_mid_stream": 0.1},
    {"truncate": 0.1}, {"error_mid_stream": 0.1}, {"garbage": 0.1}, {"errors": 0.2, "status": 429},
)  # fmt: skip


class Met(msgspec.Struct, frozen=True):
    """Something that befell an engine, from when to when, in seconds of the run."""

    what: str
    engine: str
    since: float
    until: float


class SoakSite:
    """The processes, and what befalls them."""

    def __init__(self, folder: Path, engines: int, seed: int) -> None:
        self.met: list[Met] = []
        self._folder = folder
        self._seed = seed
        self._started = 0
        self._children = [self._engine(number, 0) for number in range(engines)]
        self.urls = [child.line(r"^ready (http://\S+)", 30.0) for child in self._children]
        self.file = folder / "policy.yaml"
        self.save(256)
        words = [word for url in self.urls for word in ("--engine", url)]
        self.log = folder / "calls.log"
        self.gateway = Gateway(folder / "gateway", *words, "--policy", str(self.file), "--log", str(self.log))

    def _engine(self, number: int, port: int) -> Child:
        self._started += 1
        argv = [sys.executable, "-m", "loadtest.engine", "--port", str(port), "--profile", PROFILE, "--seed",
                str(self._seed * 100 + self._started), "--num-gpu-blocks", str(BLOCKS)]  # fmt: skip
        return Child(f"engine-{number}", argv, self._folder / f"engine-{number}-{self._started}")

    def save(self, queue: int) -> None:
        """A policy; one with a mistake where there is no room in the queue at all."""
        self.file.write_text(POLICY % queue if queue else POLICY % 1 + "\nno_such_field: 1\n")

    def close(self) -> None:
        self.gateway.child.stop()
        for child in self._children:
            child.kill()

    async def kills(self) -> None:
        """SIGKILL for one engine after the other, which is back on its port after a moment."""
        for number in cycle(range(len(self.urls))):
            await asyncio.sleep(KILLS - DOWN)
            self._met("killed", number, DOWN)
            self._children[number].kill()
            await asyncio.sleep(DOWN)
            self._children[number] = self._engine(number, urlsplit(self.urls[number]).port or 0)

    async def reloads(self) -> None:
        """Policies that differ a little, and every third with a mistake."""
        for queue in cycle((255, 0, 256)):
            await asyncio.sleep(RELOADS)
            self.save(queue)

    async def faults(self) -> None:
        """Engines that fail for some seconds, each in turn and in every way in turn."""
        for number, sick in zip(cycle(reversed(range(len(self.urls)))), cycle(SICK), strict=False):
            await asyncio.sleep(FAULTS - FAULTY)
            if await asyncio.to_thread(_post, self.urls[number], sick):  # else it is dead just now
                self._met(next(iter(sick)), number, FAULTY)
                await asyncio.sleep(FAULTY)
                await asyncio.to_thread(_post, self.urls[number], {})

    def _met(self, what: str, number: int, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        self.met.append(Met(what, self.urls[number].partition("://")[2], now, now + seconds))

    def state(self) -> tuple[int, int]:
        """Open descriptors and resident memory (KiB) of the gateway."""
        process = Path(f"/proc/{self.gateway.child.process.pid}")
        own = next(int(line.split()[1]) for line in (process / "status").read_text().splitlines() if "VmRSS" in line)
        return len(list((process / "fd").iterdir())), own

    def records(self) -> dict[str, dict[str, Any]]:
        """The log's lines by request id."""
        return {line["request_id"]: line for line in map(json.loads, self.log.read_text().splitlines())}

    def settled(self) -> bool:
        """Whether nothing is held, and all that was counted is in the log."""
        return self.gateway.idle() and self.gateway.total("weir_requests_total") == self.log.read_bytes().count(b"\n")


def _post(url: str, faults: dict[str, float]) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5.0)
    try:
        connection.request("POST", "/_faults", json.dumps(faults), {"content-type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
