"""Pumped streams of a real gateway: ten thousand of them, clients that leave and an engine that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from gateway import native
from loadtest.clients.stub import StubLoad
from loadtest.processes import Child, Gateway, free_port, get, until

STREAMS, AT_ONCE, EVENTS = 10_000, 200, 6
GROWTH = 9 * 1024  # KiB that ten thousand streams may leave; the control port's records of the last calls take 6,300


def _memory(pid: int) -> int:
    """Resident KiB of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def _begun(port: int, number: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Long streams of which some events have come, so that the pump has them."""
    ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
    for _, writer in ends:
        writer.write(StubLoad(1, 1, 10_000).request)
    for reader, _ in ends:
        for _ in range(8):
            await reader.readuntil(b"\n\n")
    return ends


async def _cut_short(port: int, number: int) -> None:
    """Leave streams in their middle."""
    for _, writer in await _begun(port, number):
        writer.transport.abort()


async def _engine_killed(port: int, number: int, engine: Child) -> list[bytes]:
    """The rest of each stream after its engine was killed."""
    ends = await _begun(port, number)
    engine.signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        rests = [await reader.read() for reader, _ in ends]
    for _, writer in ends:
        writer.close()
    return rests


@pytest.mark.slow
@pytest.mark.skipif(native.Pump is None, reason="the pump is not built: no C compiler")
def test_streams_leave_no_descriptor_and_no_memory_however_they_end(tmp_path: Path) -> None:
    port = free_port()
    engine = Child("stub", [sys.executable, "-m", "loadtest.clients.stub", str(port)], tmp_path / "engine")
    with engine, Gateway(tmp_path / "log", "--engine", f"http://127.0.0.1:{port}", "--log", "none") as gateway:
        listen, pid = int(gateway.url.rpartition(":")[2]), gateway.child.pid
        assert json.loads(get(f"{gateway.control}/processes")[1])["pump"] == "on"
        descriptors = _descriptors(pid)
        asyncio.run(StubLoad(AT_ONCE, AT_ONCE, EVENTS).run(listen))
        asyncio.run(_cut_short(listen, AT_ONCE))
        memory = _memory(pid)
        result = asyncio.run(StubLoad(STREAMS, AT_ONCE, EVENTS).run(listen))
        assert (result.finished, result.errors, result.events) == (STREAMS, 0, STREAMS * EVENTS)
        asyncio.run(_cut_short(listen, AT_ONCE))
        rests = asyncio.run(_engine_killed(listen, 50, engine))
        assert [rest.count(b'"error"') for rest in rests] == [1] * 50
        # A look at the control port is a connection too.
        assert until(lambda: gateway.idle() and _descriptors(pid) <= descriptors + 1, 60.0) is not None
        assert _memory(pid) < memory + GROWTH
