"""Predicted waits, compared with the class's targets."""

from __future__ import annotations

import math
import random

import pytest

from gateway.core.admission.deadline import EVERY, LEAST_SHARE, WINDOW, Drain, TokenRate, service, too_late
from gateway.core.request.call import Call
from tests.calls import a_call


def call(deadline: float = 100.0, ttft_by: float = math.inf, output: int = 0, n: int = 1) -> Call:
    """One that holds ten times what it will probably write."""
    held, own = 10 * output * n, output
    return a_call(
        arrived=0.0, deadline=deadline, ttft_by=ttft_by, prompt_tokens=100, output_tokens=held, expected_tokens=own, n=n
    )


# -- the drain --------------------------------------------------------------------------------------------------------


def test_from_idleness_the_first_reading_is_what_was_seen() -> None:
    rate = TokenRate(10.0)
    assert rate.rate(10.0) == 0.0
    rate.tokens += 500
    assert rate.rate(10.0 + EVERY / 2) == 0.0, "too soon to say"
    assert rate.rate(10.5) == pytest.approx(1000.0)


def test_later_readings_are_averaged_with_weights_that_fall_by_e_in_a_window() -> None:
    rate = TokenRate(0.0)
    rate.tokens += 1000
    assert rate.rate(1.0) == 1000.0
    rate.advance(1.0)
    assert rate.rate(1.0 + WINDOW) == pytest.approx(1000.0 / math.e), "nothing came back"
    rate.advance(1.0 + WINDOW)
    for second in range(100):
        rate.tokens += 200
        rate.advance(2.0 + WINDOW + second)
    assert rate.rate(101.0 + WINDOW) == pytest.approx(200.0, rel=0.01)


def test_nothing_known_predicts_no_wait() -> None:
    drain = Drain(0.0)
    assert drain.rate(0.0) == 0.0
    assert drain.wait(1000.0, 0.0) == 0.0
    assert drain.rate_of("default", 0.5, {}, 0.0) == 0.0


def steady(seconds: int = 60, tokens: int = 100, lasted: float = 2.0, class_name: str = "default") -> Drain:
    """One hold of `tokens` begins and ends per second."""
    drain = Drain(0.0)
    for second in range(seconds):
        drain.taken(tokens)
        if second >= lasted:
            drain.returned(class_name, tokens, lasted, float(second))
            drain.advance(float(second))
    return drain


def test_in_a_steady_state_both_ways_to_see_the_rate_agree() -> None:
    drain = steady()
    assert drain.held == 200
    assert drain.rate(59.0) == pytest.approx(100.0, rel=0.05)
    assert drain.wait(500.0, 59.0) == pytest.approx(5.0, rel=0.05)


def test_after_idleness_what_is_held_tells_what_the_engines_can_do() -> None:
    drain = steady(20)
    drain.taken(800)  # a burst: ten times what came back lately
    assert drain.rate(20.0) == pytest.approx((800 + 200) / 2.0, rel=0.05), "Little: held over how long a hold lasts"


def test_a_hold_that_lasted_no_time_breaks_nothing() -> None:
    drain = Drain(0.0)
    drain.taken(10)
    drain.returned("default", 10, 0.0, 0.0)
    assert drain.rate(0.0) == 0.0
    assert drain.held == 0


@pytest.mark.parametrize(
    ("class_name", "fair", "share"),
    [
        ("default", 0.1, 1.0),  # it has had everything lately
        ("default", 2.0, 1.0),  # never more than all
        ("batch", 0.25, 0.25),  # nothing yet: what its weight gives it
        ("batch", 0.0, LEAST_SHARE),  # behind a strict class: not for ever
    ],
)
def test_a_class_gets_its_share_by_weight_or_what_it_has_had_lately(class_name: str, fair: float, share: float) -> None:
    drain = steady()
    assert drain.rate_of(class_name, fair, {}, 59.0) == pytest.approx(100.0 * share, rel=0.05)


def test_a_class_shares_what_those_leave_of_whom_nobody_waits_at_the_moment() -> None:
    """An interactive class that asks for half of all is served as it comes, and waits only now and then: in between a
    class with four fifths of the weight of those that wait does not get four fifths of everything."""
    drain = Drain(0.0)
    for second in range(1, 120):
        for name in ("interactive", "default"):
            drain.taken(50)
            drain.returned(name, 50, 1.0, float(second))
            drain.advance(float(second))
    assert drain.rate_of("default", 0.8, {"interactive": 2.0}, 119.0) == pytest.approx(50.0, rel=0.05)
    assert drain.rate_of("batch", 0.2, {"interactive": 8.0}, 119.0) == pytest.approx(10.0, rel=0.05)
    assert drain.rate_of("batch", 0.2, {}, 119.0) == pytest.approx(20.0, rel=0.05)


def test_a_class_has_its_turn_beside_those_who_have_had_everything_while_nobody_waited() -> None:
    drain = steady()  # of `default` alone
    assert drain.rate_of("interactive", 1.0, {"default": 0.5, "batch": 0.125}, 59.0) == pytest.approx(200 / 3, rel=0.05)
    assert drain.rate_of("interactive", 1.0, {"default": 0.0}, 59.0) == pytest.approx(100.0, rel=0.05), "it makes way"
    assert drain.rate_of("interactive", 1.0, {"default": math.inf}, 59.0) == pytest.approx(1.0, rel=0.05), "it does not"
    assert drain.rate_of("interactive", 0.0, {"default": 0.5}, 59.0) == pytest.approx(1.0, rel=0.05)


def test_the_wait_of_a_fifo_is_predicted_within_a_half_second_at_two() -> None:
    """Figures row: p95 of the absolute error <= 0.5 s where the wait is 2 s. Ten calls at a time, 100 tokens each."""
    rng = random.Random(3)
    drain, now, errors = Drain(0.0), 0.0, []
    ends = sorted((rng.uniform(0.0, 1.0), 1.0) for _ in range(10))
    for _ in ends:
        drain.taken(100)
    waiting: list[tuple[float, float]] = []  # (when it came, its predicted wait)
    for _ in range(600):
        now, lasted = ends.pop(0)
        drain.returned("default", 100, lasted, now)
        waiting.append((now, drain.wait(100.0 * len(waiting) + 100.0, now)))
        if len(waiting) > 20:  # 20 calls of 100 tokens wait behind 10 that run for about a second: 2 s
            came, predicted = waiting.pop(0)
            if now > 10.0:
                errors.append(abs(predicted - (now - came)))
        drain.taken(100)
        seconds = rng.uniform(0.8, 1.2)
        ends.append((now + seconds, seconds))
        ends.sort()
    assert sorted(errors)[int(len(errors) * 0.95)] <= 0.5


# -- promises ---------------------------------------------------------------------------------------------------------


def test_service_is_the_first_token_and_then_the_others_of_one_sequence() -> None:
    assert service(call(output=100), 0.5, 0.03) == pytest.approx(3.5)
    assert service(call(output=100, n=4), 0.5, 0.03) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("made", "start", "ttft", "reading", "late"),
    [
        (call(10.0, output=100), 6.9, 0.1, 0.0, False),  # 3 s of writing
        (call(10.0, output=100), 7.0, 0.1, 0.0, True),
        (call(ttft_by=2.0), 1.5, 0.39, 0.2, False),
        (call(ttft_by=2.0), 1.5, 0.41, 0.2, True),  # a twentieth of the target is for the way to the client
        (call(ttft_by=2.0), 1.8, 5.0, 4.95, False),  # nobody could have read it faster: only its waiting counts
        (call(ttft_by=2.0), 1.9, 5.2, 4.95, True),
        (call(ttft_by=2.0), 1.9, 1.1, 1.0, True),  # exactly half: it counts
        (call(4.0, ttft_by=2.0), 0.0, 5.0, 5.0, True),  # but the deadline is the deadline
    ],
)
def test_too_late(made: Call, start: float, ttft: float, reading: float, late: bool) -> None:
    assert too_late(made, start, ttft, reading, 0.03) is late
