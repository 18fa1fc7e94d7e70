"""Budget of money that a cluster's gateways share, in a real Valkey: leaders die, and the store comes back empty."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from loadtest.processes import until
from tests.biller import COST, HIGHEST, Biller, spend
from tests.cluster.site import Machine, Site, site

pytestmark = pytest.mark.slow

DAY = 2.0
MOST = int(DAY * 1_000_000 * 0.8)  # micro-units that the one tenant may cost
LEAD = 16 * HIGHEST  # by which a mark may be ahead of what is spent


class Shared:
    """Three machines, one store, one provider."""

    def __init__(self, made: Site, biller: Biller) -> None:
        self.site, self.biller = made, biller
        for number in range(1, 4):
            folder = made.folder / f"machine-{number}"
            folder.mkdir()
            made.machine(policy=biller.policy(folder, DAY))
        leader = made.leader()
        rest = {each.member for each in made.others(leader)}
        assert until(lambda: set(leader.cluster().get("candidates", ())) == rest, 60.0) is not None, leader.output

    def kill(self) -> None:
        """End every process of the leading machine at once."""
        self._end(self.site.leader())

    def _end(self, machine: Machine) -> None:
        machine.signal(signal.SIGKILL)
        machine.gateway.child.kill()
        self.site.machines.remove(machine)

    def kill_and_empty(self) -> None:
        """The same, and empty the store before another can lead, however long this takes: the others stand still."""
        leader = self.site.leader()
        others = self.site.others(leader)
        for other in others:
            other.signal(signal.SIGSTOP)
        try:
            self._end(leader)
            self.empty()
        finally:
            for other in others:
                other.signal(signal.SIGCONT)

    def led_by_another(self) -> Machine:
        """Stop every process of the leading machine, until another leads. Return the machine that is stopped."""
        stopped = self.site.leader()
        stopped.signal(signal.SIGSTOP)
        self.site.machines.remove(stopped)
        self.site.leader()
        return stopped

    def empty(self) -> None:
        redis.Redis(port=self.site.store.port).flushall()

    def urls(self) -> list[str]:
        return [machine.gateway.url for machine in self.site.machines]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    with Biller().running() as biller, site(tmp_path) as made:
        yield Shared(made, biller)


def spent_to_the_end(shared: Shared) -> None:
    shared.site.leader()
    spend(*shared.urls())
    assert shared.biller.billed <= MOST


def test_leaders_that_are_killed_share_one_budget(shared: Shared) -> None:
    for _ in range(2):
        spend(*shared.urls(), calls=24)
        shared.kill()
        shared.site.leader()
    spent_to_the_end(shared)
    assert shared.biller.billed >= MOST - 2 * LEAD - COST, "a kill loses one lead at most"


def test_a_store_that_is_emptied_under_a_leader_forgets_no_money(shared: Shared) -> None:
    spend(*shared.urls(), calls=24)
    shared.empty()
    spend(*shared.urls(), calls=24)
    spent_to_the_end(shared)
    assert shared.biller.billed >= MOST - LEAD


def test_a_store_that_is_emptied_as_its_leader_dies_lets_nothing_more_out(shared: Shared) -> None:
    spend(*shared.urls(), calls=24)
    before = shared.biller.billed
    shared.kill_and_empty()
    shared.site.leader().says("their budgets of this day and month count as spent")
    spent_to_the_end(shared)
    assert shared.biller.billed == before
    shared.kill()
    shared.site.leader()
    spent_to_the_end(shared)
    assert shared.biller.billed == before, "the next leader knows it from the store"


def returns(shared: Shared, stopped: Machine) -> None:
    stopped.signal(signal.SIGCONT)
    shared.site.machines.append(stopped)


def test_a_former_leader_that_returns_alone_to_an_emptied_store_lets_nothing_more_out(shared: Shared) -> None:
    spend(*shared.urls(), calls=24)
    stopped = shared.led_by_another()
    try:
        spend(*shared.urls(), calls=40)
        before = shared.biller.billed
        for machine in shared.site.machines:
            machine.gateway.child.kill()
        shared.site.machines.clear()
        shared.empty()
    finally:
        returns(shared, stopped)
    stopped.says("their budgets of this day and month count as spent")
    spent_to_the_end(shared)
    assert shared.biller.billed == before, "what the dead have spent is known to nobody"
