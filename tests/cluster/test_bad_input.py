"""A cluster under what nobody wishes for: a slow store, clocks that are wrong, an address that nobody can reach.

Each is a line in the log, and changes nothing: the same machine leads in the same epoch, and calls are answered.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from gateway.core.cluster.election import TTL
from loadtest.processes import free_port, get, until
from tests.cluster.proxy import Proxy
from tests.cluster.site import Machine, Site, known, site
from tests.cluster.test_cluster import call, store_heard, took_over

pytestmark = pytest.mark.slow
HOUR = 3600.0
CLOCK = """\
import time

_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + {0}
time.time_ns = lambda: _time_ns() + {0} * 10**9
"""


def test_a_store_that_is_slow_for_all_is_told_and_nothing_changes(proxied: tuple[Site, list[Proxy]]) -> None:
    made, proxies = proxied
    leader = made.leader()
    epoch = leader.cluster()["epoch"]
    for delay in (0.5, 1.9, 5.0):
        for proxy in proxies:
            proxy.delay = delay
        # Longer than anything that was promised before.
        missed = lambda: min(map(store_heard, made.machines)) > 2 * TTL  # noqa: E731
        assert until(missed, 60.0) is not None, leader.output
        assert made.leader() is leader
        for machine in made.machines:
            machine.says("cluster: the store does not answer: no answer within 0.4 s")
            call(machine)
        for proxy in proxies:
            proxy.delay = 0.0
        there = lambda: max(map(store_heard, made.machines)) < 1.0  # noqa: E731
        assert until(there, 60.0) is not None, leader.output
        assert made.leader() is leader
    assert leader.cluster()["epoch"] == epoch


@pytest.mark.parametrize("delay", [0.3, 1.9])
def test_a_leader_whose_turns_come_too_late_is_followed(proxied: tuple[Site, list[Proxy]], delay: float) -> None:
    """By 0.3 s each turn would be in time on a connection that is there; a new one is asked who it is first."""
    made, proxies = proxied
    leader = made.leader()
    (other,) = made.others(leader)
    proxy = proxies[made.machines.index(leader)]
    proxy.delay = max(delay, 0.5)
    leader.says("cluster: the store does not answer")
    proxy.delay = delay
    took_over(other)  # the last of its turns that renewed its time was late too
    assert not leader.grants()
    call(other)
    proxy.delay = 0.0
    assert until(lambda: leader.cluster().get("leader") == other.member, 60.0) is not None, leader.output
    call(leader)


def test_no_clock_need_be_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine's clock is an hour late, the other's an hour early: a term, and a failover in both directions."""
    with site(tmp_path) as made:
        for number, off in enumerate((-HOUR, HOUR)):
            folder = tmp_path / f"clock-{number}"
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(CLOCK.format(int(off)))
            monkeypatch.setenv("PYTHONPATH", str(folder))
            assert abs(_started(made.machine()) - time.time() - off) < HOUR / 2, "it goes by that clock"
        monkeypatch.delenv("PYTHONPATH")
        known(made)
        leader = made.leader()
        (other,) = made.others(leader)
        for first, second in ((leader, other), (other, leader)):
            call(first)
            call(second)
            assert until(lambda m=first, n=second: m.cluster().get("candidates") == [n.member], 60.0) is not None  # type: ignore[misc]
            first.signal(signal.SIGSTOP)
            took_over(second)
            call(second)
            first.signal(signal.SIGCONT)
            obeys = lambda m=first, n=second: m.cluster().get("leader") == n.member  # noqa: E731 # type: ignore[misc]
            assert until(obeys, 60.0) is not None, first.output


def _started(machine: Machine) -> float:
    """When its decider was started, by its own clock."""
    found = json.loads(get(f"{machine.gateway.control}/processes")[1])["processes"]
    return float(next(each["started"] for each in found if each["role"] == "decider"))


def test_a_member_that_nobody_can_reach_says_so_itself_and_is_served(tmp_path: Path) -> None:
    with site(tmp_path) as made:
        leader = made.machine()
        epoch = made.leader().cluster()["epoch"]
        other = made.machine(more=f", listen: '127.0.0.1:{free_port()}'")
        other.says(f"this gateway does not reach itself at {other.member}, which it advertises")
        for machine in (leader, other):
            call(machine)
        assert made.leader() is leader
        assert leader.cluster()["epoch"] == epoch
