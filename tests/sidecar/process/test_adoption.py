"""Adoption of an earlier sidecar's engines: orphans, and process ids that belong to others by now."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from loadtest.processes import until
from sidecar.core.engine_records import ProcessRecord
from sidecar.process import process_family
from sidecar.process.process import Process
from sidecar.process.process_family import NotOurs, end_orphans, handle_for
from tests.sidecar.nothing_left import ADDRESS, gone, nothing_left, python, sidecar_name, spawn

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

WITHIN = 60.0  # seconds that anything may take on a busy machine
# A leader, a child in a session of its own, and one in the leader's that has lost its marker; ten minutes at most.
FORKS = """
import os, signal, sys, time
def say(words): os.write(1, words.encode() + bytes([10]))  # in one piece: three write at a time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(f"child {os.getpid()}")
elif os.fork() == 0:
    say(f"unmarked {os.getpid()}")
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], {})
for _ in range(12000):
    say("beat")
    time.sleep(0.05)
"""
# A sidecar that starts an engine, tells its record and ends.
SPAWNER = """
import asyncio, sys
from pathlib import Path
import msgspec
from tests.sidecar.nothing_left import spawn
async def main():
    process = spawn(sys.argv[1], Path(sys.argv[2]), engine=sys.argv[3])
    print(msgspec.json.encode(process.record).decode())
asyncio.run(main())
"""


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * WITHIN):
            await scenario()

    asyncio.run(bounded())


def left_by_another(log: Path, engine: str) -> ProcessRecord:
    """The record of an engine whose sidecar has ended, and which bears its mark."""
    done = subprocess.run(
        [sys.executable, "-c", SPAWNER, FORKS, str(log), engine], capture_output=True, timeout=WITHIN, check=True
    )
    record = msgspec.json.decode(done.stdout, type=ProcessRecord)
    # The kernel shows it a moment after the program runs.
    assert until(lambda: process_family.marker_of(record.pid) is not None, WITHIN) is not None
    return record


async def child_of(process: Process, what: str = "child") -> int:
    async with asyncio.timeout(WITHIN):
        while not (found := re.search(rf"{what} (\d+)", "\n".join(process.output.ring.lines()))):
            await asyncio.sleep(0.01)
    return int(found[1])


async def written(log: Path, *words: str) -> None:
    async with asyncio.timeout(WITHIN):
        while not all(word in log.read_text() for word in words):  # noqa: ASYNC240 # a small file
            await asyncio.sleep(0.01)


def ended(pid: int) -> bool:
    seen = process_family.look(pid)
    return seen is None or seen.ended


def forgotten(pid: int) -> None:
    """Until init has reaped a process, before our loop learns of its end: its number means nothing then."""
    assert until(lambda: process_family.look(pid) is None, WITHIN) is not None


@pytest.mark.parametrize(
    ("heir", "ends"),
    [
        pytest.param(True, "terminate", id="our child is terminated"),
        pytest.param(True, "leader killed", id="our child's leader is killed"),
        pytest.param(False, "terminate", id="init's child is terminated"),
        # init takes a second or two to reap
        pytest.param(False, "leader killed", id="init's child's leader is killed", marks=pytest.mark.slow),
    ],
)
def test_an_engine_is_adopted_after_its_sidecar_is_gone(tmp_path: Path, heir: bool, ends: str) -> None:
    async def scenario() -> None:
        name = sidecar_name()
        record = left_by_another(tmp_path / "log", f"{name}/engine")
        await written(tmp_path / "log", "child", "unmarked")
        process = Process.adopt(record)
        assert process.alive
        child, unmarked = await child_of(process), await child_of(process, "unmarked")
        async with asyncio.timeout(WITHIN):
            while process_family.marker_of(unmarked) is not None:
                await asyncio.sleep(0.01)
        assert {pid for _, pid, _ in process_family.orphans(name)} == {record.pid, child}
        process.output.ring.feed(b"\n" * 10_000)
        async with asyncio.timeout(WITHIN):
            while "beat" not in process.output.ring.lines():
                await asyncio.sleep(0.01)
        if ends == "terminate":
            assert await process.terminate(WITHIN) == (-15 if heir else None)
        else:
            os.kill(record.pid, signal.SIGKILL)
            if not heir:
                forgotten(record.pid)
            assert await process.wait() == (-9 if heir else None)
            await process.gone()
        assert process_family.orphans(name) == []
        assert all(ended(pid) for pid in (record.pid, child, unmarked))
        assert not heir or all(gone(pid) for pid in (record.pid, child, unmarked))
        with pytest.raises(NotOurs, match="has ended"):
            Process.adopt(record)

    with nothing_left(heir=heir):
        run(scenario)


def test_an_adopted_engine_is_left_running_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        record = left_by_another(tmp_path / "log", f"{sidecar_name()}/engine")
        await Process.adopt(record).leave()
        process = Process.adopt(record)
        await child_of(process)
        await process.terminate(WITHIN)

    with nothing_left():
        run(scenario)


def test_output_is_followed_where_the_file_has_been_moved_or_never_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        moved = left_by_another(tmp_path / "log", f"{sidecar_name()}/engine")
        (tmp_path / "log").rename(tmp_path / "elsewhere")
        (tmp_path / "log").write_text("another's\n")
        memory = left_by_another(tmp_path / "missing" / "log", f"{sidecar_name()}/engine")
        for record, path in ((moved, tmp_path / "elsewhere"), (memory, None)):
            process = Process.adopt(record)
            assert process.output.path == path
            await child_of(process)
            assert "another's" not in process.output.ring.lines()
            await process.terminate(WITHIN)

    with nothing_left():
        run(scenario)


def test_a_leader_of_a_group_without_the_mark_of_an_engine_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    try:
        seen = process_family.look(stranger.pid)
        assert seen is not None
        record = ProcessRecord(
            engine=f"{sidecar_name()}/m-1",
            pid=stranger.pid,
            started=seen.started,
            boot=process_family.boot_id(),
            log=str(tmp_path / "log"),
            address=ADDRESS,
        )
        with pytest.raises(NotOurs, match="does not bear the mark of an engine, so it is left alone"):
            handle_for(record)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"started": -1}, "is another process's by now"),
        ({"boot": "another"}, "the machine was started anew"),
        ({"engine": "box/another"}, "is another process's by now|does not bear the mark"),  # or it has only begun
    ],
)
def test_a_number_that_is_another_s_by_now_is_not_touched(tmp_path: Path, change: dict[str, object], why: str) -> None:
    async def scenario() -> None:
        process = spawn("import time; time.sleep(300)", tmp_path / "log")
        stranger = msgspec.structs.replace(process.record, **change)
        if "started" in change:
            stranger = msgspec.structs.replace(process.record, started=process.record.started - 1)
            assert not process_family.send(stranger.pid, stranger.started, signal.SIGKILL)
        with pytest.raises(NotOurs, match=why):
            Process.adopt(stranger)
        seen = process_family.look(stranger.pid)
        assert seen is not None
        assert not seen.ended
        assert process_family.send(process.record.pid, process.record.started, signal.SIGTERM)
        assert await process.gone() == -15
        assert not process_family.send(process.record.pid, process.record.started, signal.SIGTERM)

    with nothing_left():
        run(scenario)


def test_a_zombie_is_not_adopted(tmp_path: Path) -> None:
    with nothing_left(), subprocess.Popen(python(""), env={}) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        seen = process_family.look(child.pid)
        assert seen is not None
        record = ProcessRecord(
            engine="box/a",
            pid=child.pid,
            started=seen.started,
            boot=process_family.boot_id(),
            log=str(tmp_path),
            address=ADDRESS,
        )

        async def scenario() -> None:
            with pytest.raises(NotOurs, match="has ended"):
                Process.adopt(record)

        run(scenario)


def test_orphans_of_one_sidecar_are_ended_but_those_that_are_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        name = sidecar_name()
        records = [left_by_another(tmp_path / n.replace("/", "-"), f"{name}{n}") for n in ("/a", "/b", "0/a")]
        kept = Process.adopt(records[1])
        other = Process.adopt(records[2])
        await child_of(kept)
        await child_of(other)
        found = process_family.orphans(name)
        assert {engine for engine, _, _ in found} == {f"{name}/a", f"{name}/b"}
        assert {pid for _, pid, _ in found} >= {records[0].pid, records[1].pid}
        assert await end_orphans(name, keep={f"{name}/b"}, within=WITHIN) == ()
        assert {engine for engine, _, _ in process_family.orphans(name)} == {f"{name}/b"}
        assert kept.alive
        assert other.alive
        await kept.terminate(WITHIN)
        await other.terminate(WITHIN)

    with nothing_left(heir=False):
        run(scenario)
