"""Membership over restarts of a member's decider: what the next process of it must know is kept."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import cast

import pytest

from gateway.frames.entrance import Token
from gateway.serve.cluster.control_ports import control_url, members_of
from gateway.serve.cluster.membership import Membership
from gateway.serve.cluster.store import MemberRecord, Store
from gateway.shared.protocol import MAX_MEMBERS, ClusterMember


def membership(left: Path) -> Membership:
    return Membership(
        "a:1",
        "life",
        cast("Store", None),
        Token("prod", "sixteen-characters-or-more"),
        left,
        lambda: 100.0,
        trust=None,
        name=None,
        changed=lambda: None,
        say=lambda _: None,
    )


@pytest.mark.parametrize(("until", "kept"), [(-math.inf, 0.0), (101.5, 101.5)])
def test_the_next_process_knows_the_epoch_and_the_word_given(tmp_path: Path, until: float, kept: float) -> None:
    first = membership(tmp_path / "cluster.json")
    assert first.election.vouched_until > 100.0, "what an earlier machine's life has promised is not known"
    first.election.known, first.election.vouched_until = 3, until
    first.election.roster = frozenset({"a:1", "b:1"})
    first.news()
    again = membership(tmp_path / "cluster.json").election
    assert (again.known, again.vouched_until, again.roster) == (3, kept, {"a:1", "b:1"})


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
