"""Model routes: a conversation's member, and the model that serves a call when that cannot."""

from __future__ import annotations

import pytest

from gateway.core.admission.decision import Reason, Refuse
from gateway.core.policy.routes import ModelRoute, RouteMember, Until
from gateway.core.routes.prospect import Prospect, Readiness
from gateway.core.routes.resolution import Resolved, ordered, resolve

MEMBERS = (RouteMember(model="big", weight=95), RouteMember(model="new", weight=5))


def test_members_get_conversations_by_weight_and_keep_them() -> None:
    first = [ordered(MEMBERS, hash(("conversation", number)))[0].model for number in range(4000)]
    assert first == [ordered(MEMBERS, hash(("conversation", number)))[0].model for number in range(4000)]
    assert 140 <= first.count("new") <= 260, "5 % of 4,000 are 200, give or take four deviations"


def test_only_the_conversations_of_a_member_that_goes_move() -> None:
    three = (*MEMBERS, RouteMember(model="third", weight=50))
    for number in range(500):
        key = hash((number, "conversation"))
        before = [member.model for member in ordered(three, key)]
        assert [member.model for member in ordered(MEMBERS, key)] == [name for name in before if name != "third"]


NOW, WAITS, WAKES, BACK = (
    Prospect(speed) for speed in (Readiness.AT_ONCE, Readiness.IN_TIME, Readiness.WHEN_READY, Readiness.HELD)
)
BOOKED = Prospect(Readiness.NEVER, Refuse(reason=Reason.TOO_LATE))
GONE = Prospect(Readiness.NEVER, Refuse(reason=Reason.NO_ENGINE))
LEAVES = Prospect(Readiness.LEAVES)
ROUTE = ModelRoute(members=(RouteMember(model="a"), RouteMember(model="b")), fallback=("c", "d"))
FIRST, SECOND = [member.model for member in ordered(ROUTE.members, 1)]


@pytest.mark.parametrize(
    ("own", "other", "c", "d", "expected"),
    [
        (NOW, NOW, NOW, NOW, (FIRST, "member")),
        (WAITS, NOW, NOW, NOW, (SECOND, "moved")),
        (WAITS, WAITS, NOW, NOW, (FIRST, "member")),
        (WAKES, WAITS, NOW, NOW, (SECOND, "moved")),
        (WAKES, GONE, NOW, NOW, (FIRST, "member")),
        (BACK, GONE, WAITS, NOW, ("c", "fallback")),
        (GONE, GONE, GONE, WAKES, ("d", "fallback")),
        (BACK, GONE, GONE, BACK, (FIRST, "member")),
        (GONE, BOOKED, GONE, GONE, (SECOND, "moved")),
        (BOOKED, LEAVES, BOOKED, GONE, (SECOND, "moved")),
        (BACK, LEAVES, GONE, GONE, (SECOND, "moved")),
        (GONE, GONE, BOOKED, GONE, ("c", "fallback")),
        (GONE, GONE, GONE, GONE, (FIRST, "member")),
    ],
)
def test_the_model_that_serves_a_call(
    own: Prospect, other: Prospect, c: Prospect, d: Prospect, expected: tuple[str, str]
) -> None:
    asks = {FIRST: own, SECOND: other, "c": c, "d": d}.__getitem__
    assert resolve(ROUTE, 1, asks, permitted=lambda _: True, fallback=True) == Resolved(*expected)


def test_a_caller_that_wants_no_fallback_gets_none() -> None:
    asks = {"a": GONE, "b": GONE, "c": NOW, "d": NOW}.__getitem__
    assert resolve(ROUTE, 1, asks, permitted=lambda _: True, fallback=False) == Resolved(FIRST, "member")


def test_a_tenant_gets_only_what_it_may_use() -> None:
    asks = {"a": NOW, "b": NOW, "c": NOW, "d": NOW}.__getitem__
    for allowed in ("a", "b"):
        found = resolve(ROUTE, 1, asks, permitted=lambda model, only=allowed: model == only, fallback=True)
        assert found == Resolved(allowed, "member")
    assert resolve(ROUTE, 1, asks, permitted="d".__eq__, fallback=True) == Resolved("d", "fallback")
    assert resolve(ROUTE, 1, asks, permitted=lambda _: False, fallback=True) is None


def test_a_canary_gets_its_share_and_no_others() -> None:
    route = ModelRoute(
        members=(RouteMember(model="a"), RouteMember(model="new", until=Until(errors=0.1))), fallback=("c",)
    )
    busy = {"a": WAITS, "new": NOW, "c": NOW}.__getitem__
    found = {
        resolve(route, key, busy, permitted=lambda _: True, fallback=True)
        for key in range(50)
    }  # fmt: skip
    assert found == {Resolved("a", "member"), Resolved("new", "member")}
    full = {"a": NOW, "new": WAITS, "c": NOW}.__getitem__
    assert {resolve(route, key, full, permitted=lambda _: True, fallback=True) for key in range(50)} == {
        Resolved("a", "member"),
        Resolved("a", "moved"),
    }
    out = {resolve(route, key, busy, permitted=lambda _: True, fallback=True, out={"new"}) for key in range(50)}
    assert out == {Resolved("a", "member")}
