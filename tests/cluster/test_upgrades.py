"""Upgrades in a cluster, with real processes: each machine's gateway is taken over in turn, and no client notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from loadtest.processes import get, until
from tests.busy_callers import BusyCallers
from tests.cluster.site import Machine, Site, known, site
from tests.serve.test_processes import runs

pytestmark = pytest.mark.slow
DRAIN = "timeouts: {drain: 20s}\n"


def parent(machine: Machine) -> int:
    """The process that an operator would signal."""
    found = json.loads(get(f"{machine.gateway.control}/processes")[1])["processes"]
    return int(found[0]["pid"])


def upgraded(machine: Machine) -> None:
    before = parent(machine)
    os.kill(before, signal.SIGUSR2)
    assert until(lambda: parent(machine) != before, 60.0) is not None, machine.output
    assert until(lambda: not runs(before), 60.0) is not None, machine.output


def together(made: Site) -> bool:
    """Whether one grants, and all are members."""
    views = [machine.cluster() for machine in made.machines]
    members = sorted(machine.member for machine in made.machines)
    return [bool(view.get("granting")) for view in views].count(True) == 1 and all(
        view.get("members") == members for view in views
    )


def test_members_are_upgraded_one_by_one_under_overload_and_nobody_notices(tmp_path: Path) -> None:
    async def main(made: Site) -> list[Counter[str]]:
        first, second = made.machines
        async with BusyCallers(first.gateway.url, 6) as one, BusyCallers(second.gateway.url, 6) as two:
            for clients in (one, two):
                await clients.more(8)
            for machine in (*made.others(made.leader()), made.leader()):
                await asyncio.to_thread(upgraded, machine)
                assert await asyncio.to_thread(until, lambda: together(made), 60.0) is not None, machine.output
                for clients in (one, two):
                    await clients.more(8)
        return [one.ended, two.ended]

    with site(tmp_path) as made:
        for _ in range(2):
            made.machine(policy=DRAIN)
        known(made)
        ended = asyncio.run(main(made))
        assert [set(each) for each in ended] == [{"ok"}, {"ok"}], (ended, [each.output for each in made.machines])
        assert until(made.leader().gateway.idle, 60.0) is not None
        for machine, each in zip(made.machines, ended, strict=True):
            counted = lambda m=machine: m.gateway.total("weir_requests_total")  # noqa: E731
            assert until(lambda c=counted, n=each["ok"]: c() == n, 60.0) is not None, (counted(), each)  # type: ignore[misc]


@pytest.mark.parametrize("after", [0.2, 0.6])
def test_a_successor_of_the_leader_whose_decider_is_killed_costs_no_call(tmp_path: Path, after: float) -> None:
    """While it starts or while it takes over: the old one goes on, or the successor starts another decider."""

    async def main(made: Site) -> Counter[str]:
        leader = made.leader()
        (other,) = made.others(leader)
        async with BusyCallers(other.gateway.url, 6) as clients:
            await clients.more(8)
            before = parent(leader)
            there = children(before)
            os.kill(before, signal.SIGUSR2)
            new = await asyncio.to_thread(_first_of, before, there)
            decider = await asyncio.to_thread(_first_of, new, frozenset())
            await asyncio.sleep(after)
            os.kill(decider, signal.SIGKILL)
            over = lambda: not Path(f"/proc/{new}").exists() or parent_or_none(leader) == new  # noqa: E731
            assert await asyncio.to_thread(until, over, 60.0) is not None, leader.output
            assert await asyncio.to_thread(until, lambda: together(made), 60.0) is not None, leader.output
            await clients.more(8)
        return clients.ended

    with site(tmp_path) as made:
        for _ in range(2):
            made.machine(policy=DRAIN)
        known(made)
        ended = asyncio.run(main(made))
        assert set(ended) == {"ok"}, ended
        assert until(made.leader().gateway.idle, 60.0) is not None


def children(pid: int) -> frozenset[int]:
    try:
        return frozenset(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()


def _first_of(pid: int, before: frozenset[int]) -> int:
    """The first child of a process that was not there before, waited for."""
    assert until(lambda: bool(children(pid) - before), 60.0, every=0.005) is not None
    return min(children(pid) - before)


def parent_or_none(machine: Machine) -> int | None:
    """The same, while somebody answers."""
    try:
        return parent(machine)
    except (OSError, ValueError):
        return None
