"""Circuit breaker of one engine: its state table, the failures that open it, and the calls that count."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.engines.breaker import (
    UNCOUNTED,
    BreakerState,
    CircuitBreaker,
    Ending,
    IllegalTransition,
    ending_of,
    errors_of,
    next_state,
    panicked,
)
from gateway.core.policy.traffic import Breaker
from gateway.core.recent_calls import RecentCalls

CLOSED, OPEN, HALF_OPEN = BreakerState
SUCCESS, FAILURE, NEUTRAL = Ending
POLICY = Breaker()  # 5 in a row, > 50 % of >= 20 in 10 s, open 5 s up to 60 s, 3 probes
LEGAL = {
    (CLOSED, "trip"): OPEN,
    (OPEN, "elapse"): HALF_OPEN,
    (HALF_OPEN, "recover"): CLOSED,
    (HALF_OPEN, "relapse"): OPEN,
}


def call(breaker: CircuitBreaker, ending: Ending, now: float) -> None:
    """A call that takes no time."""
    assert breaker.allows(now)
    breaker.ended(breaker.sent(now), ending, now)


def tripped(policy: Breaker = POLICY, now: float = 100.0) -> CircuitBreaker:
    breaker = CircuitBreaker(policy)
    for _ in range(policy.failures):
        call(breaker, FAILURE, now)
    assert breaker.state is OPEN
    return breaker


def half_open(policy: Breaker = POLICY, now: float = 100.0) -> CircuitBreaker:
    breaker = tripped(policy, now - policy.open_for)
    assert breaker.allows(now)
    breaker.advance(now)
    assert breaker.state is HALF_OPEN
    return breaker


def everything(breaker: CircuitBreaker) -> dict[str, Any]:
    state = {name: getattr(breaker, name) for name in vars(breaker)}
    rate = state.pop("rate")
    return state | {"transitions": dict(breaker.transitions), "rate": (rate.calls, rate.marked)}


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", BreakerState)
@pytest.mark.parametrize("event", ["trip", "elapse", "recover", "relapse", "no such event"])
def test_what_is_not_in_the_table_raises_and_changes_nothing(state: BreakerState, event: str) -> None:
    breaker = {CLOSED: CircuitBreaker, OPEN: tripped, HALF_OPEN: half_open}[state](POLICY)
    before = everything(breaker)
    if (state, event) in LEGAL:
        breaker._move(event, 500.0)
        assert (breaker.state, breaker.since) == (LEGAL[state, event], 500.0)
        assert next_state(state, event) is breaker.state
    else:
        with pytest.raises(IllegalTransition, match=f"'{event}' in state {state.value}"):
            breaker._move(event, 500.0)
        assert everything(breaker) == before


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (200, SUCCESS), (204, SUCCESS), (307, SUCCESS), (400, SUCCESS), (404, SUCCESS), (422, SUCCESS),
        (429, NEUTRAL), (501, NEUTRAL), (503, NEUTRAL),
        (500, FAILURE), (502, FAILURE), (504, FAILURE), (599, FAILURE), (999, FAILURE), (None, FAILURE),
    ],
)  # fmt: skip
def test_what_a_status_says_of_its_engine(status: int | None, expected: Ending) -> None:
    assert ending_of(status) is expected


@pytest.mark.parametrize(
    ("open_", "total", "expected"),
    [(0, 0, False), (1, 1, True), (1, 2, False), (2, 3, True), (2, 4, False), (1, 9, False)],
)
def test_panic_is_more_than_half_of_the_fleet(open_: int, total: int, expected: bool) -> None:
    assert panicked(open_, total) is expected


# -- what trips it ----------------------------------------------------------------------------------------------------


def test_failures_in_a_row_trip_it() -> None:
    breaker = CircuitBreaker(POLICY)
    for _ in range(4):
        call(breaker, FAILURE, 100.0)
    assert (breaker.state, breaker.failures) == (CLOSED, 4)
    call(breaker, FAILURE, 101.0)
    assert (breaker.state, breaker.since) == (OPEN, 101.0)
    assert breaker.transitions == {"closed": 0, "open": 1, "half_open": 0}
    assert not breaker.allows(101.0)


def test_a_success_ends_the_row_and_a_neutral_ending_does_not() -> None:
    breaker = CircuitBreaker(POLICY)
    for ending in (*[FAILURE] * 4, SUCCESS, *[FAILURE] * 4, NEUTRAL, NEUTRAL):
        call(breaker, ending, 100.0)
    assert (breaker.state, breaker.failures) == (CLOSED, 4)
    call(breaker, FAILURE, 100.0)
    assert breaker.state is OPEN


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        ("sfff" * 4 + "sff", CLOSED),  # 19 calls are too few to tell
        ("sfff" * 4 + "sfff", OPEN),
        ("sf" * 40, CLOSED),  # exactly the share
        ("sf" * 40 + "f", OPEN),
        ("sfffn" * 4 + "sffn", CLOSED),  # neutral endings are no calls
        ("s" * 30 + "ffff" + "sffff" * 5, CLOSED),
        ("s" * 30 + "ffff" + "sffff" * 20, OPEN),
    ],
)
def test_a_share_of_enough_calls_trips_it(endings: str, expected: BreakerState) -> None:
    breaker = CircuitBreaker(POLICY)
    for letter in endings:
        if breaker.state is CLOSED:
            call(breaker, {"s": SUCCESS, "f": FAILURE, "n": NEUTRAL}[letter], 100.0)
    assert breaker.state is expected


def test_what_has_left_the_window_is_forgotten() -> None:
    breaker = CircuitBreaker(POLICY)
    for letter in "sfff" * 4 + "sff":
        call(breaker, SUCCESS if letter == "s" else FAILURE, 100.0)
    call(breaker, SUCCESS, 109.9)
    call(breaker, SUCCESS, 110.0)
    call(breaker, FAILURE, 110.0)
    assert breaker.state is CLOSED


def test_the_window_slides_by_a_tenth() -> None:
    rate = RecentCalls()
    for second in range(50, 60):
        rate.count(second + 0.5)
        if second % 2 == 0:
            rate.mark()
    assert (rate.calls, rate.marked) == (10, 5)
    rate.advance(60.0)
    assert (rate.calls, rate.marked) == (9, 4)
    rate.count(63.2)
    rate.mark()
    assert (rate.calls, rate.marked) == (7, 4)
    rate.advance(72.9)
    assert (rate.calls, rate.marked) == (1, 1)
    rate.advance(73.0)
    assert (rate.calls, rate.marked) == (0, 0)
    for second in range(80, 90):
        rate.count(second + 0.5)
        rate.mark()
    rate.advance(1000.0)
    assert (rate.calls, rate.marked) == (0, 0), "after any silence"


# -- how it comes back ------------------------------------------------------------------------------------------------


def test_open_for_twice_as_long_each_time_up_to_a_bound_and_from_the_start_after_closing() -> None:
    now = 100.0
    breaker = tripped(now=now)
    for seconds in (5, 10, 20, 40, 60, 60, 60):
        assert breaker.probe_at == now + seconds
        assert not breaker.allows(now + seconds - 0.01)
        assert breaker.state is OPEN
        now += seconds
        assert breaker.allows(now)
        assert (breaker.state, breaker.allows(now)) == (OPEN, True), "to ask moves nothing"
        breaker.advance(now)
        assert (breaker.state, breaker.since) == (HALF_OPEN, now)
        call(breaker, FAILURE, now)
    assert breaker.reopened == 7
    now += 60
    for _ in range(3):
        call(breaker, SUCCESS, now)
    assert (breaker.state, breaker.reopened) == (CLOSED, 0)
    for _ in range(5):
        call(breaker, FAILURE, now)
    assert breaker.probe_at == now + 5


def test_an_engine_that_is_dead_for_days_overflows_nothing() -> None:
    breaker = tripped(Breaker(open_for=86_400.0))
    breaker.reopened = 10_000
    assert breaker.probe_at == 100.0 + 12 * 86_400


def test_one_probe_at_a_time_and_three_good_ones_close_it() -> None:
    breaker = half_open()
    for good in range(3):
        assert (breaker.state, breaker.probes) == (HALF_OPEN, good)
        token = breaker.sent(100.0)
        assert not breaker.allows(101.0)
        assert breaker.sent(101.0) == UNCOUNTED
        breaker.ended(UNCOUNTED, SUCCESS, 101.0)
        assert not breaker.allows(101.0), "the place is the probe's own"
        breaker.ended(token, SUCCESS, 102.0)
        assert breaker.allows(102.0)
    assert (breaker.state, breaker.since) == (CLOSED, 102.0)
    assert breaker.transitions == {"closed": 1, "open": 1, "half_open": 1}


def test_a_relapse_forgets_the_good_probes_and_the_one_under_way() -> None:
    breaker = half_open()
    call(breaker, SUCCESS, 100.0)
    call(breaker, SUCCESS, 100.0)
    answering = breaker.sent(100.0)
    breaker.first_byte(answering)
    waiting = breaker.sent(100.0)
    breaker.ended(answering, FAILURE, 101.0)
    assert breaker.state is OPEN
    for _ in range(2):
        call(breaker, SUCCESS, 111.0)
        breaker.ended(waiting, SUCCESS, 111.0)
    assert (breaker.state, breaker.probes) == (HALF_OPEN, 2)


def test_closing_forgets_what_tripped_it() -> None:
    policy = Breaker(failures=100)
    breaker = CircuitBreaker(policy)
    for _ in range(20):
        call(breaker, FAILURE, 100.0)
    assert breaker.state is OPEN
    for _ in range(3):
        call(breaker, SUCCESS, 105.0)
    for _ in range(19):
        call(breaker, FAILURE, 105.0)
    assert breaker.state is CLOSED


def test_a_cancelled_probe_gives_its_place_back_and_proves_nothing() -> None:
    breaker = half_open()
    call(breaker, SUCCESS, 100.0)
    for _ in range(9):
        call(breaker, NEUTRAL, 100.0)
    assert (breaker.state, breaker.probes) == (HALF_OPEN, 1)
    assert breaker.allows(100.0)


def test_a_probe_whose_answer_is_being_written_lets_the_next_one_go_and_still_counts() -> None:
    breaker = half_open()
    first = breaker.sent(100.0)
    breaker.first_byte(first)
    second = breaker.sent(101.0)
    assert second != UNCOUNTED
    breaker.first_byte(first)
    assert not breaker.allows(101.0), "the place is the second one's now"
    breaker.ended(first, SUCCESS, 130.0)
    assert breaker.probes == 1
    assert not breaker.allows(130.0)
    breaker.ended(second, FAILURE, 131.0)
    assert breaker.state is OPEN


def test_a_probe_that_says_nothing_loses_its_place_in_the_end_and_may_still_prove_the_engine_well() -> None:
    breaker = half_open()
    silent = breaker.sent(100.0)
    assert not breaker.allows(159.9)
    assert breaker.allows(160.0)
    second = breaker.sent(160.0)
    assert not breaker.allows(160.0)
    breaker.ended(silent, SUCCESS, 170.0)
    assert breaker.probes == 1
    assert not breaker.allows(170.0), "the place is the second one's"
    breaker.ended(second, SUCCESS, 171.0)
    assert breaker.probes == 2


def test_calls_from_before_a_change_mean_nothing() -> None:
    breaker = CircuitBreaker(POLICY)
    old = [breaker.sent(99.0) for _ in range(20)]
    for _ in range(5):
        call(breaker, FAILURE, 100.0)
    before = everything(breaker)
    for ending in Ending:
        breaker.ended(old.pop(), ending, 101.0)
    assert everything(breaker) == before, "open"
    assert breaker.allows(105.0)
    probe = breaker.sent(105.0)
    before = everything(breaker)
    for ending in Ending:
        breaker.first_byte(old[0])
        breaker.ended(old.pop(), ending, 106.0)
    assert everything(breaker) == before, "half open"
    for _ in range(3):
        breaker.ended(probe, SUCCESS, 107.0)
        probe = breaker.sent(107.0)
    assert breaker.state is CLOSED
    before = everything(breaker)
    for token in old:
        breaker.ended(token, FAILURE, 108.0)
    assert everything(breaker) == before, "closed: five timeouts of the old days do not open it again"


def test_in_a_panic_calls_ride_along_uncounted() -> None:
    breaker = tripped()
    before = everything(breaker)
    token = breaker.sent(101.0)
    assert token == UNCOUNTED
    for ending in Ending:
        breaker.ended(token, ending, 102.0)
    breaker.first_byte(token)
    assert everything(breaker) == before
    assert breaker.sent(105.0) != UNCOUNTED, "its time is up: this one is the probe, though nobody asked allows()"
    assert breaker.state is HALF_OPEN


# -- reload -----------------------------------------------------------------------------------------------------------


def test_a_new_policy_keeps_the_state_and_rules_at_once() -> None:
    breaker = tripped(now=100.0)
    assert not breaker.allows(102.0)
    breaker.policy = Breaker(open_for=2.0)
    assert breaker.allows(102.0)
    for _ in range(3):
        call(breaker, SUCCESS, 102.0)
    assert breaker.state is CLOSED
    breaker.policy = Breaker(failures=1)
    call(breaker, FAILURE, 102.0)
    assert breaker.state is OPEN


def test_the_share_of_failures_of_several_engines() -> None:
    breakers = [CircuitBreaker(Breaker(failures=100)) for _ in range(2)]
    assert errors_of(breakers) is None
    for index in range(10):
        assert errors_of(breakers) is None
        breaker = breakers[index % 2]
        breaker.ended(breaker.sent(100.0), Ending.FAILURE if index < 3 else Ending.SUCCESS, 100.0)
    for now, errors in ((100.0, 0.3), (109.9, 0.3), (110.0, None)):
        for breaker in breakers:
            breaker.advance(now)
        assert errors_of(breakers) == errors


def test_an_engine_that_is_stalled_gets_probes_alone_and_one_that_gets_none_stays_so() -> None:
    breaker = CircuitBreaker(Breaker())
    breaker.stalled(0.0)
    assert (breaker.state, breaker.reopened) == (OPEN, 0)
    at = breaker.probe_at
    breaker.stalled(at - 1.0)
    assert (breaker.probe_at, breaker.transitions["open"]) == (at, 1)
    breaker.advance(at)
    breaker.stalled(at)
    assert (breaker.state, breaker.reopened) == (OPEN, 1)


def test_it_has_been_broken_since_the_first_failure_of_the_row_that_tripped_it() -> None:
    breaker = CircuitBreaker(POLICY)
    for number in range(POLICY.failures):
        call(breaker, FAILURE, 100.0 + number)
    assert (breaker.state, breaker.broken_at) == (OPEN, 100.0)
    breaker.advance(breaker.probe_at)
    call(breaker, FAILURE, breaker.since)
    assert (breaker.state, breaker.broken_at) == (OPEN, 100.0), "a relapse is the same outage"
    stalled = CircuitBreaker(POLICY)
    stalled.stalled(50.0)
    assert stalled.broken_at == 50.0
