"""One policy, worked out."""

from __future__ import annotations

import pytest

from gateway.core.call import CallSettings
from gateway.core.policy import Body, Policy, Routing, TrustedProxies
from gateway.core.policy_traffic import Deadlines, TrafficClass
from gateway.core.snapshot import Snapshot, call_settings


def test_the_default_policy_is_the_parsers_default() -> None:
    assert call_settings(Policy()) == CallSettings()


def test_what_the_parser_needs_is_taken_from_the_policy() -> None:
    policy = Policy(
        classes={"fast": TrafficClass(deadline=5.0), "default": TrafficClass(deadline=7.0)},
        service_tiers={"priority": "fast"},
        body=Body(max_messages=3, max_n=2, media="any", media_hosts=("pictures.example",)),
        routing=Routing(block=128),
    )
    found = call_settings(policy)
    assert found.class_deadlines == {"fast": 5.0, "default": 7.0}
    assert found.service_tiers == {"priority": "fast"}
    assert (found.max_messages, found.max_n, found.media, found.block) == (3, 2, "any", 128)
    assert found.media_hosts == frozenset({"pictures.example"})


@pytest.mark.parametrize(("on_deadline", "within"), [("cancel", True), ("finish", False)])
def test_a_snapshot(on_deadline: str, within: bool) -> None:
    policy = Policy(deadlines=Deadlines(on_deadline=on_deadline))  # type: ignore[arg-type] # of a parametrized Literal
    snapshot = Snapshot(policy)
    assert snapshot.policy is policy
    assert snapshot.order == tuple(policy.classes)
    assert snapshot.within_deadline is within


def test_a_policy_that_only_looks_right_has_none() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        Snapshot(Policy(trusted_proxies=TrustedProxies(addresses=("nonsense",))))
