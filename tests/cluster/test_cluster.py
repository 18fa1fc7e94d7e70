"""`cluster:` with real processes and a real Valkey: machines die, hang and are cut off, and the store fails.

Two gateways over one engine, on ports of loopback. Each is a machine: a parent, a decider and two relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gateway.core.cluster.election import TTL
from loadtest.processes import free_port, get, until
from tests.busy_callers import BusyCallers
from tests.cluster.proxy import Mode, Proxy
from tests.cluster.site import Machine, Site, known, site
from tests.e2e.children import Call

pytestmark = pytest.mark.slow


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Site]:
    """Two machines, one of which leads."""
    with site(tmp_path) as made:
        for _ in range(2):
            made.machine()
        known(made)
        yield made


def store_heard(machine: Machine) -> float:
    """Seconds since the store has answered this machine last; 0.0 where it does not say."""
    return float(machine.cluster().get("store_heard_s") or 0.0)


def call(machine: Machine, calls: int = 1) -> None:
    """Calls, each of which must end well."""

    async def main() -> None:
        async with BusyCallers(machine.gateway.url, 2) as load:
            await load.more(calls)
        assert set(load.ended) == {"ok"}, load.ended

    asyncio.run(main())


def took_over(left: Machine) -> None:
    """Wait until `left` grants."""
    assert until(left.grants, 60.0) is not None, left.output


def test_calls_of_every_machine_are_decided_by_one(tmp_path: Path) -> None:
    with site(tmp_path) as made:
        for _ in range(2):
            made.machine(hashes=False)
        known(made)
        _decided_by_one(made)


def _decided_by_one(two: Site) -> None:
    leader = two.leader()
    (other,) = two.others(leader)
    for machine in two.machines:
        call(machine, 6)
    assert other.cluster()["leader"] == leader.member
    held = [each["held_tokens"] for each in leader.gateway.fleet()["engines"]]
    assert until(leader.gateway.idle, 60.0) is not None, held
    assert f"cluster prod: this gateway leads in epoch {leader.cluster()['epoch']}" in _readyz(leader)
    assert f"cluster prod: {leader.member} leads" in _readyz(other)
    assert "talk in the clear" in leader.output
    # Each machine counts the calls of its own relays. One that is held up tells its totals with a later question.
    totals = [partial(machine.gateway.total, "weir_requests_total") for machine in two.machines]
    assert until(lambda: all(total() >= 6 for total in totals), 60.0) is not None


def _readyz(machine: Machine) -> str:
    return get(f"{machine.gateway.control}/readyz")[1].decode()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_leads_when_the_leaders_machine_dies_or_hangs(two: Site, number: signal.Signals) -> None:
    leader = two.leader()
    (other,) = two.others(leader)
    ended, epoch = {}, leader.cluster()["epoch"]

    async def main() -> None:
        async with BusyCallers(other.gateway.url, 8) as load:
            await load.more(10)
            leader.signal(number)
            await asyncio.to_thread(took_over, other)
            await load.more(20)
        ended.update(load.ended)

    asyncio.run(main())
    assert set(ended) == {"ok"}, ended
    assert other.cluster()["epoch"] > epoch
    if number == signal.SIGSTOP:
        leader.signal(signal.SIGCONT)  # it finds that its term is over
        assert until(lambda: leader.cluster().get("leader") == other.member, 60.0) is not None, leader.output
        assert not leader.grants()
        call(leader)
    assert until(other.gateway.idle, 60.0) is not None, other.gateway.fleet()


def test_the_same_machine_leads_on_when_its_decider_is_killed(proxied: tuple[Site, list[Proxy]]) -> None:
    """Nobody else is elected while its next decider starts, which a busy machine may take longer for than a term."""
    made, proxies = proxied
    leader = made.leader()
    (other,) = made.others(leader)
    ended, epoch = {}, leader.cluster()["epoch"]

    async def main() -> None:
        async with (
            BusyCallers(other.gateway.url, 4, streams=4, fresh=0) as far,
            BusyCallers(leader.gateway.url, 4, streams=4, fresh=0) as near,
        ):
            for load in (far, near):
                await load.more(10)
            proxies[made.machines.index(other)].mode = "refuses"
            os.kill(_pid(leader, "decider"), signal.SIGKILL)
            leads = lambda: leader.cluster().get("epoch", 0) > epoch and leader.grants()  # noqa: E731
            assert await asyncio.to_thread(until, leads, 60.0) is not None, leader.output
            proxies[made.machines.index(other)].mode = "passes"
            for load in (far, near):
                await load.more(10)
        ended.update(far.ended + near.ended)

    asyncio.run(main())
    assert set(ended) == {"ok"}, ended
    assert leader.cluster()["leader"] == leader.member, leader.output
    assert "was not let in" not in leader.output


def _pid(machine: Machine, role: str) -> int:
    import json  # noqa: PLC0415

    found = json.loads(get(f"{machine.gateway.control}/processes")[1])["processes"]
    return int(next(each["pid"] for each in found if each["role"] == role))


def test_a_member_that_is_told_to_end_hands_leadership_over(two: Site) -> None:
    leader = two.leader()
    (other,) = two.others(leader)
    assert leader.gateway.child.stop(60.0) == 0, leader.output
    took_over(other)
    call(other)


def test_what_waits_at_another_machine_is_not_refused_by_a_leader_that_is_told_to_end(tmp_path: Path) -> None:
    async def main(leader: Machine, other: Machine) -> Counter[str]:
        async with BusyCallers(other.gateway.url, 6) as load:
            await load.more(6)
            leader.gateway.child.process.terminate()
            await asyncio.to_thread(took_over, other)
            await load.more(6)
        return load.ended

    with site(tmp_path) as made:
        for _ in range(2):
            made.machine(policy="classes: {default: {max_concurrency: 1, ttft: 60s}}\n")
        known(made)
        leader = made.leader()
        assert set(asyncio.run(main(leader, *made.others(leader)))) == {"ok"}


def test_what_a_member_that_drains_still_streams_is_known_to_the_next_leader(two: Site) -> None:
    leader = two.leader()
    (other,) = two.others(leader)
    two.engine.faults(slow=10.0)  # a minute for the answer, so that the next leader finds it
    stream = Call(leader.gateway.url, stream=True, max_tokens=800)
    assert stream.socket.recv(1, socket.MSG_PEEK), "it has begun"
    leader.gateway.child.process.terminate()
    took_over(other)
    engines = other.gateway.fleet()["engines"]
    assert leader.gateway.child.alive, "one relay has ended, the other has the stream"
    assert [each["in_flight"] for each in engines] == [1], "before anything else is granted"
    two.engine.faults()
    call(other)
    status, body = stream.read()
    assert (status, body[-14:]) == (200, b"data: [DONE]\n\n"), body[-200:]
    assert leader.gateway.child.process.wait(60.0) == 0, leader.output
    assert until(other.gateway.idle, 60.0) is not None


def test_the_leader_goes_on_while_the_store_is_down_and_is_not_doubled_when_it_is_back(two: Site) -> None:
    leader = two.leader()
    epoch = leader.cluster()["epoch"]
    two.store.child.signal(signal.SIGSTOP)
    for machine in two.machines:
        machine.says("cluster: the store does not answer")

    def missed() -> bool:
        assert not any(each.grants() for each in two.others(leader))
        return min(map(store_heard, two.machines)) > 2 * TTL  # longer than anything that was promised before

    assert until(missed, 60.0) is not None, leader.output
    assert two.leader() is leader
    for machine in two.machines:
        call(machine)
    assert "the store does not answer" in _readyz(leader)
    two.store.child.signal(signal.SIGCONT)
    for machine in two.machines:
        machine.says("cluster: the store answers again")
    assert leader.cluster()["epoch"] == epoch
    call(leader)


def test_a_store_that_is_emptied_changes_nothing(two: Site) -> None:
    import redis  # noqa: PLC0415

    leader = two.leader()
    epoch = leader.cluster()["epoch"]
    for _ in range(5):
        redis.Redis(port=two.store.port).flushall()
        time.sleep(0.3)
        assert two.leader() is leader
    assert leader.cluster()["epoch"] == epoch
    call(leader)


def test_garbage_in_place_of_all_that_the_store_has_changes_nothing(two: Site) -> None:
    import redis  # noqa: PLC0415

    leader, store = two.leader(), redis.Redis(port=two.store.port)
    epoch = leader.cluster()["epoch"]
    for name in ("token", "term", "roster", "leader", *(f"member:{each.member}" for each in two.machines)):
        store.set(f"weir:{{prod}}:{name}", "garbage")
    # Longer than anything that was promised before.
    missed = lambda: min(map(store_heard, two.machines)) > 2 * TTL  # noqa: E731
    assert until(missed, 60.0) is not None, leader.output
    assert two.leader() is leader
    call(leader)
    store.flushall()
    for machine in two.machines:
        machine.says("cluster: the store answers again")
    assert two.leader() is leader
    assert leader.cluster()["epoch"] == epoch


def test_a_leader_that_alone_is_cut_off_from_the_store_stops_before_another_begins(
    proxied: tuple[Site, list[Proxy]],
) -> None:
    made, proxies = proxied
    leader = made.leader()
    (other,) = made.others(leader)
    proxies[made.machines.index(leader)].mode = "drops"
    took_over(other)
    assert not leader.grants()
    call(other)
    proxies[made.machines.index(leader)].mode = "passes"
    assert until(lambda: leader.cluster().get("leader") == other.member, 60.0) is not None, leader.output
    call(leader)


def test_a_store_that_answers_nonsense_is_told_and_nothing_changes(proxied: tuple[Site, list[Proxy]]) -> None:
    made, proxies = proxied
    leader = made.leader()
    epoch = leader.cluster()["epoch"]
    for proxy in proxies:
        proxy.mode = "nonsense"
    for machine in made.machines:
        machine.says("cluster: the store does not answer")
    # Longer than anything that was promised before.
    missed = lambda: min(map(store_heard, made.machines)) > 2 * TTL  # noqa: E731
    assert until(missed, 60.0) is not None, leader.output
    assert made.leader() is leader
    assert leader.cluster()["epoch"] == epoch
    call(leader)


def test_a_member_with_another_token_is_told_and_changes_nothing(two: Site) -> None:
    leader = two.leader()
    stranger = two.machine(shown="another-token-of-another-cluster", ready=False)
    stranger.says("another cluster named 'prod' is in this store")
    assert two.leader() is leader
    assert stranger.member not in leader.cluster()["members"]


def test_a_member_with_another_token_is_told_though_the_store_did_not_answer_before(tmp_path: Path) -> None:
    with site(tmp_path) as made, contextlib.closing(Proxy(made.store.port)) as proxy:
        made.machine()
        made.leader()
        proxy.mode = "nonsense"
        stranger = made.machine(f"valkey://127.0.0.1:{proxy.port}/0", shown="another-token-of-another", ready=False)
        stranger.says("cluster: the store does not answer")
        proxy.mode = "passes"
        stranger.says("another cluster named 'prod' is in this store")


def test_a_leader_that_nobody_can_reach_is_named_by_those_who_try(tmp_path: Path) -> None:
    with site(tmp_path) as made:
        leader = made.machine(more=f", listen: '127.0.0.1:{free_port()}'")
        made.leader()
        leader.says("this gateway does not reach itself at")
        other = made.machine(ready=False)
        other.says(f"cluster: {leader.member} leads, and cannot be reached from here")
        call(leader)
        assert made.leader() is leader


@pytest.mark.parametrize(
    "bytes_", [b"\x40\x00\x00\x00" * 8, b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x03\xdc\x00\x01"]
)
def test_garbage_at_the_entrance_is_one_line(two: Site, bytes_: bytes) -> None:
    leader = two.leader()
    host, _, port = leader.member.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(bytes_)
        connection.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    leader.says("cluster: 127.0.0.1 was not let in: ")
    call(leader)


@pytest.mark.parametrize("mode", ["refuses", "resets"])
def test_a_store_behind_something_that_accepts_and_closes_ends_no_membership(
    proxied: tuple[Site, list[Proxy]], mode: Mode
) -> None:
    """As a balancer does it that has lost the store."""
    made, proxies = proxied
    for proxy in proxies:
        proxy.mode = mode
    missed = lambda: min(map(store_heard, made.machines)) > 2 * TTL  # noqa: E731
    assert until(missed, 60.0) is not None, [each.cluster() for each in made.machines]
    for proxy in proxies:
        proxy.mode = "passes"
    heard = lambda: max(map(store_heard, made.machines)) < 1.0  # noqa: E731
    assert until(heard, 60.0) is not None, "\n".join(each.output for each in made.machines)
    leader = made.leader()
    (other,) = made.others(leader)
    leader.signal(signal.SIGKILL)
    took_over(other)
    call(other)
