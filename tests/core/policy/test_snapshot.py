"""Snapshot of a policy."""

from __future__ import annotations

import pytest

from gateway.core.policy.policy import BodyPolicy, Policy
from gateway.core.policy.snapshot import Snapshot, call_settings, largest_body
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.call import CallSettings
from gateway.core.request.routes import ROUTES


def test_the_default_policy_is_the_parsers_default() -> None:
    assert call_settings(Policy()) == CallSettings()


def test_what_the_parser_needs_is_taken_from_the_policy() -> None:
    policy = Policy(
        classes={"fast": TrafficClass(deadline=5.0), "default": TrafficClass(deadline=7.0)},
        service_tiers={"priority": "fast"},
        body=BodyPolicy(max=3 * 1024**2, max_n=2, media=("pictures.example",)),
    )
    found = call_settings(policy)
    assert found.class_deadlines == {"fast": 5.0, "default": 7.0}
    assert found.service_tiers == {"priority": "fast"}
    assert (found.max_messages, found.max_n, found.media) == (3072, 2, "data_urls_only")
    assert found.media_hosts == frozenset({"pictures.example"})


def test_a_snapshot() -> None:
    policy = Policy()
    snapshot = Snapshot(policy)
    assert snapshot.policy is policy
    assert snapshot.order == tuple(policy.classes)


def test_a_policy_that_only_looks_right_has_none() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        Snapshot(Policy(trusted_proxies=("nonsense",)))


@pytest.mark.parametrize(
    ("path", "media", "expected"),
    [
        (b"/v1/chat/completions", "data_urls_only", 9000),
        (b"/v1/chat/completions", "none", 2000),
        (b"/v1/completions", "any", 2000),
        (b"/v1/audio/translations", "none", 9000),
    ],
)
def test_the_largest_body_of_a_route(path: bytes, media: str, expected: int) -> None:
    policy = Policy(body=BodyPolicy(max=2000, max_media=9000, media=media))  # type: ignore[arg-type]  # one of its literals
    assert largest_body(policy, ROUTES[path]) == expected
    assert largest_body(policy) == 9000
    assert Snapshot(policy).small == 2000
    assert Snapshot(Policy()).small == 4096
