"""Traffic of one model: predicted waits, bookings, time to first token, and mode."""

from __future__ import annotations

import math

import pytest

from gateway.core.admission.bookings import SHARE, SHOWS, SOON
from gateway.core.admission.mode import Mode, Signals
from gateway.core.admission.model_traffic import STEP_EVERY, ModelTraffic
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.engines.breaker import Ending
from gateway.core.engines.engine import Engine
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import ModeRule, Modes, Threshold, TrafficClass
from gateway.core.quantile import SORT_EVERY
from gateway.core.request.call import Call
from gateway.shared.vllm.answers import EngineSample
from tests.calls import a_call

POLICY = Policy(
    classes={"interactive": TrafficClass(weight=3, ttft=2.0), "default": TrafficClass(weight=1)},
    modes=Modes(tight=ModeRule(enter=Threshold(kv=0.8), leave=Threshold(kv=0.5), dwell=1.0, refuse=("default",))),
)


def call(class_name: str = "default", tokens: int = 100, ttft: float = math.inf, body: bytes = b"") -> Call:
    return a_call(class_name=class_name, prompt_tokens=tokens, ttft_by=ttft, body=body)


def draining(rate: int = 100, shares: tuple[tuple[str, int], ...] = (("default", 100),)) -> ModelTraffic:
    """So many tokens per second came back lately, by class; nothing is held."""
    traffic = ModelTraffic(POLICY, 0.0)
    for name, tokens in shares:
        traffic.drain.taken(tokens)
        traffic.drain.returned(name, tokens, 1.0, 1.0)
    assert traffic.drain.rate(1.0) == rate
    return traffic


def engine(kv: float, waiting: int = 0, now: float = 0.0) -> Engine:
    made = Engine("e", "http://e", POLICY, capacity=1000)
    made.check(True, now)
    made.sampled(EngineSample(running=0, waiting=waiting, kv_usage=kv, preemptions_total=0), now)
    return made


# -- waits ------------------------------------------------------------------------------------------------------------


def test_a_wait_is_the_work_ahead_and_ones_own_over_the_drain() -> None:
    traffic, queues = draining(), Queues(POLICY.classes)
    assert traffic.wait(queues, call(), 1.0) == pytest.approx(1.0)
    assert traffic.wait(queues, call(), 1.0, spare=40) == pytest.approx(0.6), "what there is room for is not waited for"
    assert traffic.wait(queues, call(), 1.0, spare=400) == 0.0
    for _ in range(3):
        queues.push(Ticket(call(), 1.0))
    assert traffic.wait(queues, call(), 1.0) == pytest.approx(4.0)


def test_the_longer_of_two_ways_to_see_it() -> None:
    """By the queues' order an interactive call is soon done; by what its class gets it would be as well. A default call
    with one interactive call before it gets a quarter by weight, though little waits."""
    traffic, queues = draining(200, (("default", 1), ("interactive", 199))), Queues(POLICY.classes)
    queues.push(Ticket(call("interactive"), 1.0))
    assert traffic.wait(queues, call("default"), 1.0) == pytest.approx(100 / (200 * 0.25))
    assert traffic.wait(queues, call("interactive"), 1.0) == pytest.approx(200 / 200)


@pytest.mark.parametrize(
    ("due_in", "until", "expected"),
    [
        ([], 99.0, 1.0),
        ([0.5], 99.0, 1.0 + SHOWS),
        ([2.4], 99.0, 1.0),  # after the newcomer has started
        ([0.5, 0.6, 2.4], 99.0, 1.0 + 3 * SHOWS),  # the first two make it wait long enough for the third
        ([0.5, 0.6, 2.4], 2.5, 1.0 + 2 * SHOWS),  # too late for the newcomer in any case
    ],
)
def test_booked_work_that_is_due_before_a_newcomer_starts_is_ahead_of_it(
    due_in: list[float], until: float, expected: float
) -> None:
    traffic, queues = draining(), Queues(POLICY.classes)
    for number, wait in enumerate(due_in):
        traffic.bookings["default"].book(call(body=b"%d" % number), wait, 1.0)
    assert traffic.wait(queues, call(), 1.0, until=until) == pytest.approx(expected)
    ticket = Ticket(call(), 1.0)
    queues.push(ticket)
    assert traffic.wait(queues, ticket.call, 1.0, ticket, until=10.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("offered", "expected"), [(50, 1.0), (95, 1.0 + SHOWS / 2), (100, 1.0 + SHOWS), (500, 1.0 + SHOWS)]
)
def test_newcomers_make_way_only_as_far_as_they_are_too_many_by_themselves(offered: int, expected: float) -> None:
    """The class drains 100 tokens a second. Refusing newcomers for those who come back, where there is room for both,
    would only have them come back too."""
    traffic, queues = draining(), Queues(POLICY.classes)
    traffic.bookings["default"].book(call(body=b"b"), 0.5, 1.0)
    traffic.offered(call(tokens=offered // 2), 0.0)
    traffic.offered(call(tokens=offered - offered // 2), 0.5)
    assert traffic.wait(queues, call(), 1.0, until=99.0) == pytest.approx(expected)


def test_what_a_class_was_offered_outlasts_a_reload() -> None:
    traffic = draining()
    traffic.offered(call(tokens=50), 0.0)
    traffic.apply(Policy(classes={"default": TrafficClass()}))
    traffic.offered(call(tokens=50), 0.5)
    queues = Queues(POLICY.classes)
    traffic.bookings["default"].book(call(body=b"b"), 0.5, 1.0)
    assert traffic.wait(queues, call(), 1.0, until=99.0) == pytest.approx(1.0 + SHOWS)


# -- places -----------------------------------------------------------------------------------------------------------


def test_a_place_is_due_when_its_class_has_drained_what_is_booked_at_half_its_pace() -> None:
    traffic, queues = draining(), Queues(POLICY.classes)
    first = traffic.book(queues, call(body=b"1"), 1.0)
    assert first == pytest.approx(100 / SHARE / 100)
    second = traffic.book(queues, call(body=b"2"), 1.0)
    assert second == pytest.approx((100 * SHOWS + 100) / SHARE / 100)


def test_a_place_is_not_due_before_what_waits_has_drained_and_never_at_once() -> None:
    traffic, queues = draining(), Queues(POLICY.classes)
    assert traffic.book(queues, call(tokens=10, body=b"1"), 1.0) == SOON
    for _ in range(8):
        queues.push(Ticket(call(), 1.0))
    assert traffic.book(queues, call(body=b"2"), 1.0) == pytest.approx(8.0)


def test_no_place_for_what_no_client_can_repeat() -> None:
    traffic, queues = draining(), Queues(POLICY.classes)
    merged = call(body=b"1")
    merged.merged = True
    assert traffic.book(queues, merged, 1.0) is None
    assert not len(traffic.bookings["default"])


def test_no_place_beyond_a_minute() -> None:
    traffic, queues = draining(), Queues(POLICY.classes)
    for _ in range(61):
        queues.push(Ticket(call(), 1.0))
    assert traffic.book(queues, call(), 1.0) is None


# -- the usual first token --------------------------------------------------------------------------------------------


def test_the_usual_time_to_first_token_is_of_a_class() -> None:
    traffic = ModelTraffic(POLICY, 0.0)
    for number in range(SORT_EVERY):
        assert traffic.usual_ttft("default", 0.9) is None
        traffic.first_byte(call(), float(number))
    assert traffic.usual_ttft("default", 0.9) == SORT_EVERY - 1.0
    assert traffic.usual_ttft("interactive", 0.9) is None
    traffic.first_byte(call("gone"), 1.0)
    assert traffic.usual_ttft("gone", 0.9) is None, "a reload has done away with it while the call ran"


def test_first_bytes_over_the_target_are_a_signal_of_the_mode() -> None:
    traffic = ModelTraffic(POLICY, 0.0)
    for _ in range(10):
        traffic.first_byte(call("interactive", ttft=2.0), 3.0)
        traffic.first_byte(call("default"), 30.0)  # has no target
    assert traffic.signals([], 5.0) == Signals(ttft=1.5)


# -- the mode ---------------------------------------------------------------------------------------------------------


def test_the_mode_is_judged_by_engines_that_may_be_used_and_not_too_often() -> None:
    traffic = ModelTraffic(POLICY, 0.0)
    pressed, idle, dead = engine(0.95), engine(0.75), engine(0.99)
    dead.down()
    assert traffic.step([pressed, idle, dead], 0.1)
    assert (traffic.state.mode, traffic.level, traffic.state.why) == (Mode.TIGHT, 1, "kv 0.85 >= 0.8")
    pressed.sampled(EngineSample(running=0, waiting=0, kv_usage=0.0, preemptions_total=0), 1.2)
    idle.sampled(EngineSample(running=0, waiting=0, kv_usage=0.0, preemptions_total=0), 1.2)
    assert not traffic.step([pressed, idle], 0.1 + STEP_EVERY / 2), "just now"
    assert traffic.step([pressed, idle], 1.3)
    assert traffic.level == 0


def test_stale_samples_and_none_say_nothing() -> None:
    traffic = ModelTraffic(POLICY, 0.0)
    unread = Engine("u", "http://u", POLICY)
    unread.check(True, 0.0)
    assert not traffic.step([engine(0.99), unread], 100.0)
    assert traffic.level == 0


def test_failed_calls_are_a_signal() -> None:
    traffic, bad = ModelTraffic(POLICY, 0.0), engine(0.1)
    for _ in range(5):
        bad.breaker.ended(bad.breaker.sent(0.0), Ending.SUCCESS, 0.0)
        bad.breaker.ended(bad.breaker.sent(0.0), Ending.FAILURE, 0.0)
    assert traffic.signals([bad], 0.1) == Signals(kv=0.1, waiting=0.0, errors=0.5)


def test_what_a_mode_refuses() -> None:
    traffic = ModelTraffic(POLICY, 0.0)
    assert traffic.refuses(call()) is None
    traffic.step([engine(0.9)], 0.1)
    assert traffic.refuses(call("interactive")) is None
    assert "mode tight refuses class 'default'" in str(traffic.refuses(call()))


# -- a reload ---------------------------------------------------------------------------------------------------------


def test_a_reload_changes_rules_and_classes_and_keeps_what_was_seen() -> None:
    traffic, queues = draining(), Queues(POLICY.classes)
    traffic.book(queues, call(body=b"1"), 1.0)
    traffic.step([engine(0.9)], 0.1)
    for number in range(SORT_EVERY):
        traffic.first_byte(call(), float(number))
    kept = traffic.bookings["default"]
    traffic.apply(Policy(classes={"default": TrafficClass(), "batch": TrafficClass()}))
    assert list(traffic.bookings) == ["default", "batch"]
    assert traffic.bookings["default"] is kept
    assert len(kept) == 1
    assert traffic.usual_ttft("default", 0.9) == SORT_EVERY - 1.0
    assert traffic.usual_ttft("interactive", 0.9) is None
    assert traffic.state.mode is Mode.TIGHT
    assert traffic.refuses(call("default")) is None, "the new tight mode refuses nobody"
