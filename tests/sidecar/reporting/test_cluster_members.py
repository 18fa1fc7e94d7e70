"""Members of a cluster that a sidecar reports to: by what gateways tell, as a table and over real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.shared import protocol
from gateway.shared.protocol import MAX_MEMBERS, ClusterMember
from sidecar.core.addresses import Address
from sidecar.core.config import RelaySettings
from sidecar.reporting import gateway_link
from sidecar.reporting.reporter import following
from tests.sidecar.parts import opened
from tests.sidecar.reporting.test_reporter import BOOT, TOKEN, reporting, reports, until
from tests.sidecar.scripted import Scripted, answer, play

ANYWHERE = Address("0.0.0.0", 8003)  # noqa: S104
A, B, C = (ClusterMember(name=f"{name}:1", control=f"http://10.0.0.{n}:8001") for n, name in enumerate("abc", 1))
LOCAL = ClusterMember(name="d:1", control="http://127.0.0.1:8001")
SECURE = ClusterMember(name="e:1", control="https://10.0.0.5:8001")


class Known(msgspec.Struct):
    """As much of a GatewayLink as is asked."""

    url: str
    configured: bool
    taken: bool
    member: str
    members: tuple[ClusterMember, ...]


def known(url: str, *members: ClusterMember, member: str = "", configured: bool = True, taken: bool = True) -> Any:
    return Known(url, configured, taken, member, members)


def learned(member: ClusterMember, *members: ClusterMember, taken: bool = True) -> Any:
    return known(member.control, *members, member=member.name, configured=False, taken=taken)


OF_A = known(A.control, A, B, member="a:1")
GONE_A = known(A.control, member="a:1", taken=False)


@pytest.mark.parametrize(
    ("gateways", "relay", "join", "leave"),
    [
        ([known(A.control)], True, [], []),
        ([OF_A], True, [B], []),
        ([OF_A, learned(B, A, B)], True, [], []),
        ([known(A.control, A, B)], True, [B], []),  # a member whose own name is not known is known by its address
        ([known("http://127.0.0.1:8001", A, B, member="a:1")], True, [B], []),  # by another address, it is no other
        ([GONE_A, learned(B, A, B)], True, [], []),  # it is the file's, and stays
        ([GONE_A, learned(B, taken=False)], True, [], []),  # nobody tells: all are tried on
        ([OF_A, learned(C, taken=False)], True, [B], [C.control]),  # it has left the cluster
        ([OF_A, learned(C)], True, [B], []),  # it is about to leave, and still takes reports
        ([known("http://127.0.0.1:8001", A, member="a:1"), learned(A, A)], True, [], [A.control]),  # known already
        ([OF_A], False, [], []),  # without a relay no other machine reaches this one
        ([known(A.control, LOCAL, member="a:1")], True, [], []),  # a port of this machine, by the word of another
        ([known(LOCAL.control, LOCAL, ClusterMember(name="f:1", control="http://127.0.0.1:9001"), member="d:1")],
         False, [ClusterMember(name="f:1", control="http://127.0.0.1:9001")], []),
        ([known(SECURE.control, SECURE, B, member="e:1")], True, [], []),  # the token in the clear
        ([known(A.control, SECURE, member="a:1")], True, [SECURE], []),
    ],
)  # fmt: skip
def test_following(gateways: list[Any], relay: bool, join: list[ClusterMember], leave: list[str]) -> None:
    assert following(gateways, relay=relay) == (join, leave)


def test_no_more_are_followed_than_a_cluster_may_have() -> None:
    def of(first: int) -> tuple[ClusterMember, ...]:
        return tuple(
            ClusterMember(name=f"{n}:1", control=f"http://10.1.0.{n}:8001") for n in range(first, first + MAX_MEMBERS)
        )

    join, _ = following([known(A.control, *of(1)), known(B.control, *of(101))], relay=True)
    assert len(join) == MAX_MEMBERS
    full = [learned(member) for member in join]
    assert following([known(A.control, *of(1)), known(B.control, *of(101)), *full], relay=True)[0] == []


def test_a_token_that_crosses_the_network_in_the_clear_is_told(tmp_path: Path) -> None:
    lines: list[str] = []

    async def scene() -> None:
        member = ClusterMember(name="b:1", control="http://0.0.0.0:1")  # not certainly this machine, and yet it is
        async with Scripted(cluster("a:1", member)) as first, opened(tmp_path) as manager:
            told = reporting(manager, first.origin, lines=lines, relay=RelaySettings(listen=ANYWHERE))
            await until(lambda: len(told.gateways()) == 2)
            await told.aclose()

    play(scene)
    assert [line for line in lines if "crosses the network to http://0.0.0.0:1," in line]


def cluster(me: str, *members: ClusterMember) -> bytes:
    told = protocol.DemandReport(gateway="g", boot=BOOT, sequence=1, member=me, members=members)
    return answer(protocol.encode(told), 200, b"connection: close")


def test_whoever_is_named_is_reported_to_also_when_who_named_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_link, "EVERY", 0.05)
    monkeypatch.setattr(gateway_link, "FIRST_PAUSE", 0.02)
    lines: list[str] = []

    async def scene() -> None:
        async with Scripted() as first, Scripted() as second, opened(tmp_path) as manager:
            members = [
                ClusterMember(name=name, control=each.origin) for name, each in (("a:1", first), ("b:1", second))
            ]
            first.rest, second.rest = cluster("a:1", *members), cluster("b:1", *members)
            told = reporting(manager, first.origin, lines=lines)
            await until(lambda: len(second.asked) > 2)
            assert second.headers["authorization"] == f"Bearer {TOKEN}"
            assert [each.url for each in told.gateways()] == [first.origin, second.origin], "each once"
            first.rest = answer(b"", 503)
            await until(lambda: told.gateways()[0].taken is False)
            seen = len(second.asked)
            await until(lambda: len(second.asked) > seen + 2)
            numbers = [report.sequence for report in reports(second)]
            assert numbers == sorted(set(numbers))
            first.rest, second.rest = cluster("a:1", members[0]), answer(b"", 503)
            await until(lambda: len(told.gateways()) == 1)
            await told.aclose()

    play(scene)
    assert [line for line in lines if "no longer" in line]


@pytest.mark.parametrize(
    "member",
    [
        {"name": "b:1", "control": "http://127.0.0.1:0"},
        {"name": "b:1", "control": "http://127.0.0.1:70000"},
        {"name": "b:1", "control": "http://127.0.0.1:8001/path"},
        {"name": "b:1", "control": "http://user@127.0.0.1:8001"},
        {"name": "b:1", "control": "http://127.0.0.1:8001\n"},
        {"name": "b:1", "control": "unix:/run/x"},
        {"name": "", "control": "http://127.0.0.1:8001"},
        {"name": "b:1"},
    ],
)
def test_an_answer_with_a_member_that_is_none_is_refused(member: dict[str, Any]) -> None:
    told = {"gateway": "g", "boot": "b", "sequence": 1, "members": [member]}
    with pytest.raises(protocol.ProtocolError):
        protocol.demand_report(msgspec.json.encode(told))


def test_an_answer_with_too_many_members_is_refused() -> None:
    member = {"name": "b:1", "control": "http://127.0.0.1:8001"}
    for number, taken in ((MAX_MEMBERS, True), (MAX_MEMBERS + 1, False)):
        told = msgspec.json.encode({"gateway": "g", "boot": "b", "sequence": 1, "members": [member] * number})
        if taken:
            assert len(protocol.demand_report(told).members) == number
        else:
            with pytest.raises(protocol.ProtocolError):
                protocol.demand_report(told)
