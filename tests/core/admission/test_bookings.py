"""Bookings of calls that were told to come back."""

from __future__ import annotations

import math
import random

import pytest

from gateway.core.admission import bookings as module
from gateway.core.admission.bookings import EARLY, HORIZON, LATE, SHOWS, SHOWS_WEIGHT, Booking, Bookings, fingerprint
from gateway.core.request.call import Call
from tests.calls import a_call


def call(name: str = "a", at: float = 0.0, tokens: int = 100, tenant: str = "t", model: str = "m") -> Call:
    return a_call(body=name.encode(), arrived=at, deadline=at + 60.0, prompt_tokens=tokens, tenant=tenant, model=model)


def claimed(places: Bookings, one: Call, now: float) -> Booking | None:
    """The place that a call has come for; it is used up."""
    place = places.due(one, now)
    assert places.due(one, now) is place, "to ask uses up nothing"
    if place is not None:
        places.claim(one)
    return place


def test_a_call_is_known_by_what_a_retry_repeats() -> None:
    assert fingerprint(call(at=1.0, tokens=5)) == fingerprint(call(at=9.0, tokens=7))
    others = [call("b"), call(tenant="u"), call(model="n")]
    assert fingerprint(call()) not in {fingerprint(other) for other in others}


def test_a_place_comes_true_once_and_keeps_the_first_arrival() -> None:
    places = Bookings()
    assert claimed(places, call(), 0.0) is None
    assert places.book(call(at=1.0), 5.0, 1.0) == 5.0
    assert len(places) == 1
    assert claimed(places, call("other", at=6.0), 6.0) is None
    place = claimed(places, call(at=6.1), 6.1)
    assert place is not None
    assert (place.since, place.deadline, place.due, place.lapses) == (1.0, 61.0, 6.0, 6.0 + LATE)
    assert len(places) == 0
    assert claimed(places, call(at=6.2), 6.2) is None
    assert places.ahead(6.2) == 0.0


def test_who_comes_too_early_keeps_the_place_and_is_told_what_is_left() -> None:
    places = Bookings()
    places.book(call(), 5.0, 0.0)
    assert claimed(places, call(at=5.0 - EARLY - 0.01), 5.0 - EARLY - 0.01) is None
    assert places.book(call(at=2.0), 30.0, 2.0) == 3.0, "a longer queue since then is not its concern"
    assert len(places) == 1
    assert places.book(call(at=6.0), 30.0, 6.0) == 0.0
    assert claimed(places, call(at=5.0 - EARLY), 5.0 - EARLY) is not None


def test_a_place_lapses() -> None:
    places = Bookings()
    places.book(call(), 5.0, 0.0)
    late = 5.0 + LATE
    assert claimed(places, call(at=late), late) is None
    places.advance(late)
    assert (len(places), places.ahead(late)) == (0, 0.0)
    places.book(call(), 5.0, 0.0)
    assert places.book(call(at=late), 7.0, late) == 7.0, "a new one, and only one"
    assert len(places) == 1
    assert places.ahead(late + 1.0) == pytest.approx(100 * places.shows)


def test_booked_work_counts_by_when_it_is_due_and_by_how_many_come_back() -> None:
    places = Bookings()
    for number, wait in enumerate((1.5, 2.5, 30.0)):
        places.book(call(str(number)), wait, 0.0)
    assert places.ahead(0.0) == 300 * SHOWS
    assert places.ahead(0.0, math.inf) == 300 * SHOWS
    assert places.ahead(0.0, 2.0) == 200 * SHOWS, "to the second"
    assert places.ahead(0.0, 1.0) == 100 * SHOWS
    assert places.ahead(0.0, 0.0) == 0.0
    assert claimed(places, call("0"), 2.0) is not None
    shows = SHOWS + SHOWS_WEIGHT * (1.0 - SHOWS)
    assert places.shows == pytest.approx(shows)
    assert places.ahead(2.0) == pytest.approx(200 * shows)
    assert places.ahead(10.0) == pytest.approx(200 * shows), "as of when time was last told"
    places.advance(10.0)
    assert places.ahead(10.0) == pytest.approx(100 * places.shows)
    assert places.shows == pytest.approx(shows * (1 - SHOWS_WEIGHT)), "the second did not come"


def test_there_is_no_place_beyond_the_horizon_or_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Bookings()
    assert places.book(call(), HORIZON + 0.1, 0.0) is None
    assert places.book(call(), HORIZON, 0.0) == HORIZON
    monkeypatch.setattr(module, "MOST", 1)
    assert places.book(call("b"), 1.0, 0.0) is None
    assert places.book(call(), 1.0, 0.0) == HORIZON, "who has one keeps it"


def test_whatever_happens_the_sums_are_those_of_the_places_there_are() -> None:
    rng = random.Random(4)
    places, now, shown = Bookings(), 0.0, 0
    for _ in range(5000):
        now += rng.expovariate(20.0)
        one = call(str(rng.randrange(60)), now, rng.randint(1, 500))
        if rng.random() < 0.5:
            places.book(one, rng.uniform(0.0, 70.0), now)
        elif rng.random() < 0.8:
            shown += claimed(places, one, now) is not None
        else:
            places.advance(now)
        left = places._bookings.values()
        assert places._tokens == sum(place.tokens for place in left)
        assert sum(places._due.values()) == places._tokens
        assert 0.0 < places.shows < 1.0
    assert shown > 50
    places.advance(now + 1000.0)
    assert places.ahead(now + 1000.0) == 0.0
    assert (len(places), places._due) == (0, {})
