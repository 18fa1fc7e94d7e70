"""A replica of the store that is promoted: what was written last is lost, and maybe an election with it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from gateway.core.cluster.election import TTL
from loadtest.processes import free_port, until
from tests.beside import beside
from tests.busy_callers import BusyCallers
from tests.cluster.proxy import Proxy
from tests.cluster.site import Machine, Site, known, site
from tests.cluster.valkey import Valkey
from tests.e2e.children import SimEngine

pytestmark = pytest.mark.slow
SLOTS = 4  # of all calls
POLICY = f"classes: {{default: {{max_concurrency: {SLOTS}}}}}\n"
LEADER = "weir:{prod}:leader"


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[Site, list[Proxy], Valkey]]:
    """Two machines, one of which leads, each with a proxy of its own before the store; and the store's replica."""
    with site(tmp_path) as made, contextlib.ExitStack() as stack:
        proxies = [Proxy(made.store.port) for _ in range(2)]
        for proxy in proxies:
            stack.callback(proxy.close)
            made.machine(f"valkey://127.0.0.1:{proxy.port}/0", policy=POLICY)
        known(made)
        follows = ("--replicaof", "127.0.0.1", str(made.store.port))
        yield made, proxies, stack.enter_context(Valkey(tmp_path / "replica.log", free_port(), *follows))


@contextlib.contextmanager
def watched(engine: SimEngine, most: list[float]) -> Iterator[None]:
    """Note in `most` how many calls the engine runs, as often as it answers."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            most.append(engine.running())

    with beside(watch):
        try:
            yield
        finally:
            over.set()


def moved(leader: Machine, other: Machine, proxy: Proxy) -> None:
    """Leadership moves to the other machine."""
    proxy.mode = "drops"
    assert until(other.grants, 60.0) is not None, other.output
    proxy.mode = "passes"
    assert until(lambda: leader.cluster().get("leader") == other.member, 60.0) is not None, leader.output


@pytest.mark.parametrize("lost", ["its last renewals", "the election", "the election, its former leader's record kept"])
def test_a_replica_that_has_lost_what_was_written_last_doubles_no_leader(
    sites: tuple[Site, list[Proxy], Valkey], lost: str
) -> None:
    """Twice as many calls are open as may run; each is tried once. The machine that does not lead is the
    first to ask the new primary."""
    made, proxies, replica = sites
    leader = made.leader()
    (other,) = made.others(leader)
    copy, most, ended = redis.Redis(port=replica.port), list[float](), list[str]()
    assert until(lambda: bool(copy.exists(LEADER)), 60.0) is not None

    async def main() -> None:
        nonlocal leader, other
        async with (
            BusyCallers(made.machines[0].gateway.url, 4) as one,
            BusyCallers(made.machines[1].gateway.url, 4) as two,
        ):
            for load in (one, two):
                await load.more(8)
            await asyncio.to_thread(copy.replicaof, "NO", "ONE")
            if lost.endswith("kept"):
                copy.persist(LEADER)
            if lost != "its last renewals":
                await asyncio.to_thread(moved, leader, other, proxies[made.machines.index(leader)])
                leader, other = other, leader
            if not lost.endswith("kept"):
                await asyncio.to_thread(until, lambda: not copy.exists(LEADER), 60.0)
            for machine in (other, leader):
                proxies[made.machines.index(machine)].target = replica.port
            for machine in (other, leader):
                proxies[made.machines.index(machine)].cut()
            made.store.child.kill()
            heard = lambda: all(0.0 < _heard(each) < TTL / 2 for each in made.machines)  # noqa: E731
            assert await asyncio.to_thread(until, heard, 60.0) is not None, [each.output for each in made.machines]
            for load in (one, two):
                await load.more(40)
        ended.extend([*one.ended, *two.ended])

    with watched(made.engine, most):
        asyncio.run(main())
    assert set(ended) == {"ok"}, ended
    assert max(most) <= SLOTS
    assert sum(each.grants() for each in made.machines) == 1
    last = made.leader()
    assert until(last.gateway.idle, 60.0) is not None, last.gateway.fleet()


def _heard(machine: Machine) -> float:
    return float(machine.cluster().get("store_heard_s") or 0.0)
