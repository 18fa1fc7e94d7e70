"""Cluster of a gateway in `GET /status` and in `gateway status`."""

from __future__ import annotations

import re

import msgspec
import pytest

from gateway.cli.status import StatusView, table
from gateway.control.cluster import ClusterView
from tests.control.parts import Parts, play

VIEW = ClusterView(
    name="prod",
    member="10.0.0.2:8010",
    leader="10.0.0.1:8010",
    epoch=7,
    since_s=12.3,
    leads=False,
    granting=False,
    awaited=["10.0.0.2:8010"],
    members=["10.0.0.1:8010", "10.0.0.2:8010"],
    candidates=[],
    gone=["10.0.0.3:8010"],
    store_error=None,
    store_heard_s=0.2,
)


def shown(view: ClusterView | None) -> list[str]:
    """The lines of the status of a gateway that knows its cluster so."""
    found: list[str] = []

    async def scene(parts: Parts) -> None:
        body = (await parts.get("/status")).content
        found.extend(table(msgspec.json.decode(body, type=StatusView), "http://h:1").splitlines())

    play(scene, cluster=None if view is None else lambda: view)
    return found


def test_it_says_who_leads_who_is_there_and_who_is_silent() -> None:
    lines = shown(VIEW)
    at = lines.index("cluster prod: 10.0.0.1:8010 leads in epoch 7 for 12 s, and waits for what 10.0.0.2:8010 hold")
    assert lines[at + 1 : at + 5] == [
        "  10.0.0.1:8010   leads",
        "  10.0.0.2:8010   stands by, has not told what its calls hold, this gateway",
        "  10.0.0.3:8010   silent: forgotten 10 minutes after its last sign",
        "",
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"leader": None, "since_s": None}, "nobody leads"),
        ({"store_error": "no answer within 0.4 s", "leads": True}, "the store does not answer: no answer within"),
    ],
)
def test_what_is_wrong_is_told(changes: dict[str, object], told: str) -> None:
    assert told in "\n".join(shown(msgspec.structs.replace(VIEW, **changes)))


def test_a_gateway_that_is_alone_has_no_line_of_a_cluster() -> None:
    assert not [line for line in shown(None) if line.startswith("cluster")]


def test_how_long_ago_is_told_by_the_gateways_clock() -> None:
    """The machine that asks has another time."""
    headline = [{"level": "bad", "what": "x", "since": 40.0, "why": "", "change": ""}]
    numbers = {"calls": 0, "slots": 1, "held": 0, "budget": 1, "capacity": 1, "kv_usage": None}
    engine = {"name": "e", "state": "down", "since": 30.0, "models": [], **numbers}
    status = StatusView(at=52.0, gateway={"version": "1"}, policy={"file": None, "origin": ""}, headline=headline,
                        engines={"e": engine})  # fmt: skip
    told = table(status, "http://h:1")
    assert re.search(r"since .*, 12(\.0)? s ago", told), told
    assert re.search(r"since .*, 22(\.0)? s ago\)", told), told
