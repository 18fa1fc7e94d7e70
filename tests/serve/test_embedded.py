"""Embedded fleet: engines that start together, and end however the gateway ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gateway.serve import embedded
from gateway.serve.embedded import Embedded, EmbeddedFleet, parse_embedded
from loadtest.processes import Gateway, answers, until

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them


def stat(pid: str) -> tuple[str, int]:
    """State and parent of a process; `Z` for one that has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "Z", 0
    return state, int(parent)


def running(pid: int) -> bool:
    return stat(str(pid))[0] != "Z"


def children(pid: int) -> list[int]:
    return [int(name) for name in filter(str.isdigit, os.listdir("/proc")) if stat(name)[1] == pid]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sim", EmbeddedFleet(2, "h100-8b")),
        ("sim:1", EmbeddedFleet(1, "h100-8b")),
        ("sim:64:cpu-tiny", EmbeddedFleet(64, "cpu-tiny")),
        ("sim:1:", None),
        ("sim:-1", None),
        ("simple", None),
        ("http://sim:1", None),
    ],
)
def test_what_is_asked_for(text: str, expected: EmbeddedFleet | None) -> None:
    assert parse_embedded(text) == expected


def test_engines_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_WITHIN", 0.5)

    async def main() -> None:
        fleet, others = Embedded(), children(os.getpid())
        urls = await fleet.start(EmbeddedFleet(2, "cpu-tiny"))
        pids = [pid for pid in children(os.getpid()) if pid not in others]
        try:
            assert len(set(urls)) == len(pids) == 2
            assert all([await asyncio.to_thread(answers, f"{url}/health") for url in urls])
            os.kill(pids[0], signal.SIGSTOP)  # one that does not listen is ended too
        finally:
            await fleet.stop()
        assert not any(running(pid) for pid in pids)
        assert fleet.urls == []

    asyncio.run(main())


def test_one_that_does_not_come_up_is_told_and_leaves_none() -> None:
    async def main() -> None:
        fleet, others = Embedded(), set(children(os.getpid()))
        with pytest.raises(RuntimeError, match=r"the simulated engine \(abacus\) did not start: exit code"):
            await fleet.start(EmbeddedFleet(2, "abacus"))
        await fleet.stop()
        async with asyncio.timeout(10):
            while set(children(os.getpid())) - others:
                await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_engines_end_with_the_gateway_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    with Gateway(tmp_path / "log", "--engine", "sim:2:cpu-tiny") as gateway:
        engines = children(gateway.child.pid)
        assert len(engines) == 2
        os.kill(gateway.child.pid, number)
        assert gateway.child.process.wait(10) == (-number if number == signal.SIGKILL else 0)
        assert until(lambda: not any(map(running, engines)), 10.0) is not None
