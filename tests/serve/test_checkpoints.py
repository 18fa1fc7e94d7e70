"""Soft state over the death of a decider and over upgrades, with real processes: what was learned and taken stays."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.processes import until
from tests.e2e.children import Call
from tests.serve.test_processes import POLICY, Processes, processes, state
from tests.serve.test_upgrades import World, world

pytestmark = pytest.mark.slow

LIMITED = POLICY + "limits: {per_tenant: {requests: {rate: 12/h, burst: 12}}}\n"
CALLS = 12


def used_up(made: Processes | World) -> None:
    """Take all that the limit allows, in streams of which the gateway learns how fast the engine is."""
    calls = [Call(made.gateway.url, stream=True, max_tokens=64) for _ in range(CALLS)]
    assert [call.read()[0] for call in calls] == [200] * CALLS
    assert refused(made)
    assert until(made.gateway.idle, 60.0) is not None, "then the last stream has taught it too"


def refused(made: Processes | World) -> bool:
    return Call(made.gateway.url, stream=False).read()[0] == 429


def learned(made: Processes | World) -> dict[str, Any]:
    (engine,) = made.gateway.fleet()["engines"]
    return {name: engine[name] for name in ("prefill_rate", "tpot_s")}


def drain(made: Processes | World) -> None:
    """Take the engine out, as an operator does."""
    (engine,) = made.gateway.fleet()["engines"]
    httpx.post(f"{made.gateway.control}/engines/{engine['id']}/drain", timeout=60.0).raise_for_status()


def drained(made: Processes | World) -> bool:
    (engine,) = made.gateway.fleet()["engines"]
    return bool(engine["draining"])


def saved(made: Processes) -> None:
    """Wait until the decider has saved all of that: its file is of later than now, twice."""
    (folder,) = {Path(line.split()[-1]).parent for line in open_sockets(made)}
    file = folder / "state"
    for _ in range(2):
        seen = file.stat().st_mtime_ns if file.exists() else 0
        Call(made.gateway.url, stream=False).read()  # else nothing has changed, and nothing is saved
        assert until(lambda: file.exists() and file.stat().st_mtime_ns > seen, 60.0) is not None  # noqa: B023 # at once


def open_sockets(made: Processes) -> list[str]:
    """The decider's socket for relays, from the kernel."""
    inodes = set()
    for each in Path(f"/proc/{made.pid('decider')}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is closed just now
            inodes.add(os.readlink(each).removeprefix("socket:[").removesuffix("]"))
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if line.endswith("/decider") and line.split()[6] in inodes]


def test_a_decider_that_is_killed_leaves_levels_and_rates_to_the_next(tmp_path: Path) -> None:
    with processes(tmp_path, policy=LIMITED) as made:
        fresh = learned(made)
        used_up(made)
        drain(made)
        saved(made)
        before, pid = learned(made), made.pid("decider")
        assert before["tpot_s"] != fresh["tpot_s"]
        os.kill(pid, signal.SIGKILL)
        made.replaced("decider", pid)
        assert learned(made) == before
        assert refused(made)
        assert drained(made)


def test_a_state_that_cannot_be_read_is_told_and_left_out(tmp_path: Path) -> None:
    with processes(tmp_path, policy=LIMITED) as made:
        used_up(made)
        saved(made)
        (folder,) = {Path(line.split()[-1]).parent for line in open_sockets(made)}
        parent, pid = made.pid("parent"), made.pid("decider")
        os.kill(parent, signal.SIGSTOP)  # it starts no other before there is this file
        os.kill(pid, signal.SIGSTOP)  # it writes no other
        assert until(lambda: state(pid) == "T", 60.0) is not None
        (folder / "state").write_bytes(b"no such thing")
        os.kill(parent, signal.SIGCONT)
        made.replaced("decider", pid)
        assert not refused(made)
        made.gateway.child.says("what the decider before has learned is left out: it is no checkpoint")


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_an_upgrade_hands_levels_and_rates_over(tmp_path: Path, words: tuple[str, ...]) -> None:
    with world(tmp_path, *words, policy=LIMITED + "timeouts: {drain: 20s}\n") as made:
        used_up(made)
        drain(made)
        before = learned(made)
        assert made.signalled() is not None, made.output()
        assert learned(made) == before
        assert refused(made)
        assert drained(made)
