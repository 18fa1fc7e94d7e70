"""Bookings in rate limits, by example and under steady overload: a call that returns on time is admitted."""

from __future__ import annotations

import heapq
import random

import pytest

from gateway.core.admission import limit_bookings
from gateway.core.admission.limit_bookings import HORIZON, LATE, SHARE, SHOWS, WEIGHT, Booked, LimitBookings
from gateway.core.admission.limits import Charge, LimitBook
from gateway.core.policy.file import decode
from gateway.core.request.outcome import Refused

FOUR = "{per_tenant: {requests: {rate: 1/s, burst: 4}}}"


def book(limits: str) -> LimitBook:
    return LimitBook(decode(f"tenants: {{a: {{}}, b: {{}}}}\nlimits: {limits}\n".encode()))


def come(it: LimitBook, body: bytes, now: float, tenant: str = "a", tokens: int = 10) -> Charge | Refused:
    try:
        return it.charge(tenant, "default", "m", tokens, now, it.arrive(tenant, now, body), body)
    except Refused as refused:
        return refused


def used_up(limits: str) -> LimitBook:
    """A book whose burst of 4 calls is taken at 100 s."""
    it = book(limits)
    for number in range(4):
        assert isinstance(come(it, b"first %d" % number, 100.0), Charge)
    return it


def told(it: LimitBook, body: bytes, now: float, **more: int) -> float:
    refused = come(it, body, now, **more)
    assert isinstance(refused, Refused)
    assert refused.kept
    assert refused.retry_after is not None
    return refused.retry_after


def test_who_comes_back_when_told_goes_before_who_has_only_just_come() -> None:
    it = used_up(FOUR)
    assert told(it, b"2", 100.0) == pytest.approx(1.0, abs=1e-3)
    assert isinstance(come(it, b"3", 101.0), Refused), "there is room for one, and it is promised"
    assert isinstance(come(it, b"2", 101.001), Charge)
    assert isinstance(come(it, b"2", 101.002), Refused), "a place is for one call"


def test_a_place_is_of_its_own_tenant() -> None:
    it = used_up("{global: {requests: {rate: 1/s, burst: 4}}}")
    told(it, b"2", 100.0)
    assert isinstance(come(it, b"2", 101.0, tenant="b"), Refused)
    assert isinstance(come(it, b"2", 101.001), Charge)


def test_places_follow_each_other() -> None:
    it = used_up(FOUR)
    waits = [told(it, b"%d" % number, 100.0) for number in range(2, 6)]
    assert waits == pytest.approx([1.0, 2.5, 4.0, 5.5], abs=1e-3), "one in SHOWS / (rate x SHARE) seconds"


def test_equal_bodies_have_a_place_each() -> None:
    it = used_up(FOUR)
    waits = [told(it, b"same", 100.0) for _ in range(3)]
    assert waits == pytest.approx([1.0, 2.5, 4.0], abs=1e-3)
    for wait in waits:
        assert isinstance(come(it, b"same", 100.0 + wait), Charge)
    assert not it._bookings


def test_a_place_lapses() -> None:
    it = used_up(FOUR)
    wait = told(it, b"2", 100.0)
    assert isinstance(come(it, b"3", 100.0 + wait + LATE + 0.01), Charge)
    assert not it._bookings


def test_a_minute_is_promised_and_no_more() -> None:
    it = used_up(FOUR)
    kept = 0
    while True:
        refused = come(it, b"%d" % (kept + 1), 100.0)
        assert isinstance(refused, Refused)
        if not refused.kept:
            break
        kept += 1
    assert kept == int((HORIZON - 1.0) * SHARE / SHOWS) + 1
    assert refused.retry_after is not None
    assert refused.retry_after > HORIZON, "which is told with x-should-retry: false"


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_bookings, "MOST", 1)
    it = used_up(FOUR)
    told(it, b"1", 100.0)
    refused = come(it, b"2", 100.0)
    assert isinstance(refused, Refused)
    assert (refused.kept, refused.retry) == (False, False)


def test_who_finds_no_room_at_its_place_is_given_another() -> None:
    it = book("{per_tenant: {tokens: 40/s}}")
    for number in range(4):
        charge = come(it, b"first %d" % number, 100.0)
        assert isinstance(charge, Charge)
    wait = told(it, b"2", 100.0)
    charge.settle(90, 100.5)  # it used more than was reserved: a debt
    again = told(it, b"2", 100.0 + wait)
    assert isinstance(come(it, b"2", 100.0 + wait + again), Charge)


def test_what_cannot_be_repeated_has_no_place() -> None:
    it = used_up(FOUR)
    with pytest.raises(Refused) as limited:
        it.charge("a", "default", "m", 1, 100.0)
    assert not limited.value.kept
    told(it, b"2", 100.0)
    with pytest.raises(Refused):
        it.charge("a", "default", "m", 1, 101.0)


def test_a_place_is_claimed_once_and_its_lapse_is_then_nothing() -> None:
    it, booked = LimitBookings(), Booked()
    assert it.book(7, 1.0, 0.0, [(booked, 5)])
    assert it.book(7, 1.0, 0.0, [(booked, 5)])
    assert it.due(7, 0.5) is None
    place = it.due(7, 1.0)
    assert place is not None
    it.claim(place)
    assert (booked.amount, len(it)) == (5, 2)
    assert booked.shows > SHOWS
    it.lapse(10.0)
    assert (booked.amount, len(it)) == (0, 0)
    assert booked.shows < SHOWS + (1.0 - SHOWS) * WEIGHT


@pytest.mark.parametrize(
    ("limit", "offered", "tokens"),
    [
        ("requests: 10/s", 15.0, 1),
        ("requests: 10/s", 40.0, 1),
        ("tokens: 1k/s", 20.0, 100),
        ("requests: {rate: 10/s, burst: 4}", 20.0, 1),
    ],
)
@pytest.mark.parametrize("obey", [1.0, 0.0])
def test_at_a_steady_overload_the_time_told_is_true_and_no_room_is_lost(
    limit: str, offered: float, tokens: int, obey: float
) -> None:
    it, rng, rate = book(f"{{per_tenant: {{{limit}}}}}"), random.Random(1), 10.0
    events, now = [], 0.0
    while now < 120.0:
        now += rng.expovariate(offered)
        events.append((now, len(events), False))
    back = let_in = done = 0
    while events:
        now, number, again = heapq.heappop(events)
        outcome = come(it, b"%d" % number, now, tokens=tokens)
        back += again
        if isinstance(outcome, Charge):
            outcome.settle(tokens, now)
            done += now < 120.0
            let_in += again
        elif outcome.kept and not again and rng.random() < obey:
            assert outcome.retry_after is not None
            heapq.heappush(events, (now + outcome.retry_after, number, True))
    assert done >= 0.9 * rate * 120.0
    assert let_in >= 0.97 * back
    assert (back > 0.3 * 120.0 * rate) is bool(obey)
    assert len(it._bookings) < 2 * offered * LATE + SHARE * rate * HORIZON


def test_a_burst_of_few_calls_promises_nothing() -> None:
    it = book("{per_tenant: {requests: 1/s}}")
    come(it, b"1", 100.0)
    refused = come(it, b"2", 100.0)
    assert isinstance(refused, Refused)
    assert (refused.kept, refused.retry, len(it._bookings)) == (False, True, 0)
    assert isinstance(come(it, b"3", 101.0), Charge)


def test_only_a_limit_that_refuses_books_a_place() -> None:
    it = book("{classes: {default: {requests: 100/s}}, per_tenant: {tokens: {rate: 10/s, burst: 40}}}")
    for number in range(4):
        assert isinstance(come(it, b"first %d" % number, 100.0), Charge)
    assert told(it, b"2", 100.0) == pytest.approx(1.0, abs=0.2)
    assert [bucket.key[0] for bucket in it._buckets.values() if bucket.booked is not None] == ["tokens"]
