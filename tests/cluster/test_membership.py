"""Membership over restarts of a member's decider: what the next process of it must know is kept."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from gateway.core.cluster.election import Leader, StoreView, Turn
from gateway.decider.relays.elsewhere import process_of
from gateway.frames.entrance import ClusterToken, VoteRequest
from gateway.serve.cluster.membership import Membership, begun
from gateway.serve.cluster.store import Machines, MemberRecord, Store, control_url, members_of
from gateway.shared.protocol import MAX_MEMBERS, ClusterMember


def membership(
    left: Path, changed: Callable[[], None] = lambda: None, say: Callable[[str], None] = lambda _: None
) -> Membership:
    return Membership(
        "a:1",
        "life",
        cast("Store", None),
        ClusterToken("prod", ("sixteen-characters-or-more",)),
        left,
        lambda: 100.0,
        begun("a:1", left, 100.0),
        trust=None,
        name=None,
        changed=changed,
        say=say,
    )


@pytest.mark.parametrize(("until", "kept"), [(-math.inf, 0.0), (101.5, 101.5)])
def test_the_next_process_knows_the_epoch_and_the_vote_given(tmp_path: Path, until: float, kept: float) -> None:
    first = membership(tmp_path / "cluster.json")
    assert first.election.voted_until > 100.0, "what an earlier machine's life has promised is not known"
    first.election.token.epoch, first.election.voted_until = 3, until
    first.election.roster = frozenset({"a:1", "b:1"})
    first.news()
    again = membership(tmp_path / "cluster.json").election
    assert (again.known, again.voted_until, again.roster) == (3, kept, {"a:1", "b:1"})


@pytest.mark.parametrize(
    ("bound", "advertise", "secure", "url"),
    [
        ("127.0.0.1", "127.0.0.1:8010", False, "http://127.0.0.1:{}"),
        ("127.0.0.1", "10.0.0.11:8010", False, ""),
        ("0.0.0.0", "10.0.0.11:8010", False, "http://10.0.0.11:{}"),  # noqa: S104
        ("0.0.0.0", "a.example:8010", True, "https://a.example:{}"),  # noqa: S104
        ("0.0.0.0", "[fd00::1]:8010", False, "http://[fd00::1]:{}"),  # noqa: S104
    ],
)
def test_sidecars_are_told_a_control_port_that_other_machines_reach(
    bound: str, advertise: str, secure: bool, url: str
) -> None:
    with socket.create_server((bound, 0)) as control:
        assert control_url(control, advertise, secure=secure) == url.format(control.getsockname()[1])


def test_a_unix_socket_is_no_control_port_for_sidecars(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "control.sock"))
        assert control_url(control, "10.0.0.11:8010", secure=False) == ""


def test_what_the_store_has_is_told_as_far_as_it_is_an_address() -> None:
    records = {
        "a:1": MemberRecord("1", 2, "http://a:8001"),
        "b:1": MemberRecord("1", 2),
        "c:1": MemberRecord("1", 2, "ftp://c:8001"),
    }
    assert members_of(records) == (ClusterMember(name="a:1", control="http://a:8001"),)
    many = {f"m{number}:1": MemberRecord("1", 2, "http://a:8001") for number in range(MAX_MEMBERS + 4)}
    assert len(members_of(many)) == MAX_MEMBERS


def test_relays_of_another_machine_are_those_that_its_record_has() -> None:
    records = {"a:1": MemberRecord("1", 2), "b:1": MemberRecord("1", 2, numbers=(2, 3, 4)), "c:1": MemberRecord("1", 2)}
    machines = Machines(lambda: records)
    a, b = machines.relays_of(["a:1"]), machines.relays_of(["b:1", "gone:1"])
    assert (len(a), len(b)) == (2, 3)
    assert all(map(machines.has, (*a.values(), *b.values())))
    assert machines.has(process_of(machines.place("b:1", "1"), 5)), "it is newer than the record"
    records["b:1"] = MemberRecord("1", 2, numbers=(3, 4))  # one of those it took over has ended
    assert [machines.has(each) for each in b.values()] == [False, True, True]
    records["b:1"] = MemberRecord("1", 2, numbers=())  # all have, and none comes after them
    assert not any(map(machines.has, b.values()))
    records["a:1"] = MemberRecord("2", 2)  # started anew
    assert not any(map(machines.has, a.values()))


def test_the_next_gateway_of_a_member_knows_what_this_one_does(tmp_path: Path) -> None:
    old, new = membership(tmp_path / "old.json"), membership(tmp_path / "new.json")
    old.election.token.epoch, old.election.voted_until, old.election.roster = 7, 101.0, frozenset({"a:1", "b:1"})
    new.restore(old.hand_over())
    assert (new.election.known, new.election.voted_until, new.election.roster) == (7, 101.0, {"a:1", "b:1"})
    assert old.election.turn(200.0).candidacy == 0, "and it stands for no election"


def test_a_disk_that_takes_nothing_ends_no_membership_and_leaves_no_old_promise(tmp_path: Path) -> None:
    left, changes, said = tmp_path / "cluster.json", [], list[str]()
    member = membership(left, changed=lambda: changes.append(1), say=said.append)
    member.news()
    left.with_suffix(".new").mkdir()  # in place of a full disk: the file cannot be written
    member.election.token.epoch = 7
    member.news()
    member.news()
    assert (len(changes), len(said), left.exists()) == (3, 1, False), "who leads is heard, and told once"
    assert membership(left).election.voted_until > 100.0, "the next process waits until any promise is over"
    left.with_suffix(".new").rmdir()
    member.news()
    assert membership(left).election.known == 7
    assert said[-1] == f"cluster: {left} is written again"


def test_a_vote_that_the_next_process_would_not_know_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, ask = tmp_path / "cluster.json", VoteRequest("b:1", 9)
    member = membership(left)
    member.news()
    member.election.lost_store = True

    def read_only(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", read_only)
        disk.setattr(Path, "unlink", read_only)
        assert not member.vote(ask)
    assert member.vote(ask)
    assert membership(left).election.voted_until == member.election.voted_until


class ScriptedStore:
    """Names these leaders in turn, and keeps the turns that it is asked."""

    def __init__(self, *leaders: Leader | None) -> None:
        self.leaders = iter(leaders)
        self.turns: list[Turn] = []

    async def turn(self, turn: Turn) -> tuple[StoreView, dict[str, MemberRecord]]:
        self.turns.append(turn)
        both = frozenset({"a:1", "b:1"})
        return StoreView(leader=next(self.leaders), members=both, roster=both, clock=100.0), {}


@pytest.mark.parametrize("next_one", [Leader("a:1", 4), Leader("c:1", 4), None])
def test_a_leader_that_was_not_reached_costs_a_member_its_place_no_longer_than_it_leads(
    tmp_path: Path, next_one: Leader | None
) -> None:
    """Else the next leader is no member of its own cluster: whoever leads after it does not wait for what it holds."""
    store, now, said = ScriptedStore(Leader("b:1", 3), Leader("b:1", 3), *[next_one] * 3), [100.0], list[str]()
    tries = Leader("b:1", 3), Leader("a:1", 4)  # a try to reach the leader before may fail as this member has won

    async def main() -> None:
        for _ in range(5):
            await member._turn(now[0])
            member.unreached("nobody answers there") if member.election.leader in tries else None
            now[0] += 2.5

    member = msgspec.structs.replace(
        membership(tmp_path / "cluster.json", say=said.append), _store=cast("Store", store), _clock=lambda: now[0]
    )
    member.election.voted_until = -math.inf
    asyncio.run(main())
    assert [each.present for each in store.turns] == [True, False, False, True, True], said


def test_a_record_of_a_later_version_is_read() -> None:
    told = b'{"life":"1","relays":2,"to_come":[1]}'
    assert msgspec.json.decode(told, type=MemberRecord) == MemberRecord("1", 2)
