"""Checkpoints: each component goes on where another left off, older by the time that has passed, and by any clock."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import checkpoint
from gateway.core.admission import limits
from gateway.core.admission.bookings import Bookings, fingerprint
from gateway.core.admission.deadline import Drain
from gateway.core.admission.limit_bookings import HORIZON
from gateway.core.admission.limits import LimitBook
from gateway.core.admission.model_traffic import ModelTraffic
from gateway.core.checkpoint import (
    GROUP,
    VERSION,
    Checkpoint,
    CheckpointError,
    SavedBreaker,
    SavedBucket,
    SavedCosts,
    SavedEngine,
    SavedLimitPlace,
    SavedLimits,
    decoded,
    encoded,
)
from gateway.core.engines.breaker import BreakerState, CircuitBreaker, Ending
from gateway.core.engines.engine import Engine
from gateway.core.engines.speed import TPOT_ANSWERS
from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Breaker, TrafficClass
from gateway.core.request.cost import CostModel
from gateway.core.request.outcome import Refused
from gateway.shared.vllm.answers import EngineSample
from tests.calls import a_call
from tests.examples import examples

POLICY = Policy()
AGO = 3.0  # seconds between a checkpoint and its use
BEFORE, AFTER = 1000.0, 50.0  # of one decider's clock, and of the next one's at the same moment
EMPTY = Checkpoint(7, [], SavedCosts(), SavedLimits(), [])


def through(saved: Any) -> Any:
    """As the next decider reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(saved), type=type(saved))


# -- the whole --------------------------------------------------------------------------------------------------------


def test_what_is_encoded_is_read_again() -> None:
    assert decoded(encoded(EMPTY)) == EMPTY


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is no checkpoint"),
        (b"\xc1", "it is no checkpoint"),
        (b"\x91" * 100_000, "it is no checkpoint"),
        (encoded(EMPTY)[:-1], "it is no checkpoint"),
        (msgspec.msgpack.encode([VERSION, {}]), "it is no checkpoint"),
        (msgspec.msgpack.encode([VERSION, [7, [], [], [], [], 0]]), "it is no checkpoint"),
        (msgspec.msgpack.encode([VERSION + 1, []]), f"it is of version {VERSION + 1}, and this gateway reads version"),
        (bytes(checkpoint.MOST_BYTES + 1), "is the most"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_of_this_version_is_not_read(data: bytes, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        decoded(data)


@pytest.mark.parametrize("level", [-1.0, math.nan, math.inf])
def test_a_number_that_no_decider_has_is_not_read(level: float) -> None:
    state = Checkpoint(7, [], SavedCosts(), SavedLimits([SavedBucket(("requests", "a", "", ""), level)]), [])
    with pytest.raises(CheckpointError):
        decoded(encoded(state))


# -- engines ----------------------------------------------------------------------------------------------------------


def engine(slots: int | None = None) -> Engine:
    return Engine("e", "http://e", POLICY, capacity=10**6, max_concurrency=slots)


def test_an_engine_goes_on_with_what_was_learned_of_it() -> None:
    before, after = engine(), engine()
    for _ in range(16):
        before.speed.learn_first_byte(5000.0, 1.0)
    before.speed.learn_tpot(100, 2.0)
    before.speed.learn_pace(100, 2.0)
    for at, kv_usage in ((BEFORE - 2.0, 0.4), (BEFORE - 1.0, 0.4), (BEFORE, 1.0)):
        before.sampled(EngineSample(running=9, waiting=50, kv_usage=kv_usage, preemptions_total=0), at)
    before.drained = True
    after.restore(through(before.checkpoint(BEFORE, 0)), AFTER - AGO, prefixes=True)
    assert (after.drained, after.draining) == (True, True)
    for name in ("prefill_rate", "ttft_spread", "tpot", "pace"):
        found, fresh = getattr(after.speed, name), getattr(engine().speed, name)
        assert found == getattr(before.speed, name), name
        assert found != fresh or name == "ttft_spread", name
    after.speed.learn_tpot(100, 1.0)  # is not taken for the first
    assert after.speed.tpot == pytest.approx(0.02 + (0.01 - 0.02) / TPOT_ANSWERS)
    assert after.ledger.trim == before.ledger.trim != engine().ledger.trim
    assert after.ledger.slots == before.ledger.slots != engine().ledger.slots
    assert after.adaptation.full_at == before.adaptation.full_at is not None
    assert after.ledger.held == 0


def test_a_drain_that_was_lifted_where_another_machine_led_does_not_come_back() -> None:
    leads, led = engine(), engine()
    led.drained = led.draining = True
    led.restore(leads.checkpoint(BEFORE, 0), BEFORE, prefixes=False)
    assert (led.drained, led.draining) == (False, False)
    led.drained = led.draining = led.closed = True  # its sidecar puts it to sleep
    led.restore(leads.checkpoint(BEFORE, 0), BEFORE, prefixes=False)
    assert led.draining


def test_slots_that_the_policy_gives_are_not_replaced() -> None:
    after = engine(slots=4)
    after.restore(engine().checkpoint(BEFORE, 0), AFTER, prefixes=True)
    assert after.ledger.slots == 4
    assert engine().checkpoint(BEFORE, 9).full_at is None


@settings(max_examples=examples(30))
@given(
    reads=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3 * GROUP), max_size=6), most=st.integers(0, 300)
)
def test_the_blocks_that_were_read_last_are_cached_for_the_next_decider(reads: list[list[int]], most: int) -> None:
    before, after = engine(), engine()
    for number, blocks in enumerate(reads):
        before.remember(tuple(blocks), len(blocks), BEFORE - len(reads) + number)
    after.restore(through(before.checkpoint(BEFORE, most)), AFTER - AGO, prefixes=True)
    then, now = before.cache.blocks, after.cache.blocks
    newest = list(then)[-most:] if most else []
    assert list(now) == newest
    ages = [(BEFORE - then[block], AFTER - AGO - now[block]) for block in reversed(newest)]
    for number, (age, told) in enumerate(ages):  # never younger, and no older than the last of its group
        assert age <= told <= ages[min(len(ages) - 1, number // GROUP * GROUP + GROUP - 1)][0]


def test_what_an_engine_has_read_meanwhile_stays_and_is_the_newest() -> None:
    before, after, other = engine(), engine(), engine()
    before.remember((1, 2, 3), 500, BEFORE - 10.0)
    after.remember((4, 3), 400, AFTER - 100.0)
    after.remember((2,), 300, AFTER - 1.0)
    saved = before.checkpoint(BEFORE, 9)
    after.restore(saved, AFTER - AGO, prefixes=True)
    assert list(after.cache.blocks.items()) == [
        (4, AFTER - 100.0),
        (3, AFTER - AGO - 10.0),
        (1, AFTER - AGO - 10.0),
        (2, AFTER - 1.0),
    ]
    assert after.cache.leading((1, 2, 3, 5)) == 3
    other.restore(saved, AFTER, prefixes=False)
    assert other.cache.blocks == {}


@pytest.mark.parametrize("wrong", [(b"1234567", [1.0]), (b"12345678", []), (b"", [1.0]), (b"12345678", [-1.0])])
def test_blocks_without_their_ages_are_not_read(wrong: tuple[bytes, list[float]]) -> None:
    fields = msgspec.to_builtins(engine().checkpoint(BEFORE, 9))
    fields[SavedEngine.__struct_fields__.index("prefixes")] = wrong
    with pytest.raises(msgspec.ValidationError, match=r"\$\[9\]"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=SavedEngine)


def test_a_breaker_stays_open_for_what_is_left_of_its_time() -> None:
    before, after = CircuitBreaker(Breaker()), CircuitBreaker(Breaker())
    late = after.sent(AFTER)  # of before its restore
    for _ in range(Breaker().failures):
        before.ended(before.sent(BEFORE), Ending.FAILURE, BEFORE)
    saved = through(before.checkpoint(BEFORE + 1.0))
    after.restore(saved, AFTER - AGO)
    assert after.state is BreakerState.OPEN
    assert after.probe_at == AFTER - AGO - 1.0 + Breaker().open_for
    assert not after.allows(after.probe_at - 0.001)
    assert after.allows(after.probe_at)
    after.advance(after.probe_at)
    after.ended(late, Ending.FAILURE, after.probe_at)
    assert (after.state, after.reopened) == (BreakerState.HALF_OPEN, 0)


def test_a_breaker_that_never_moved_counts_its_failures_on() -> None:
    before, after = CircuitBreaker(Breaker()), CircuitBreaker(Breaker())
    for _ in range(Breaker().failures - 1):
        before.ended(before.sent(BEFORE), Ending.FAILURE, BEFORE)
    saved = before.checkpoint(BEFORE)
    assert saved == SavedBreaker("closed", None, Breaker().failures - 1, 0, 0)
    after.restore(saved, AFTER)
    assert after.since == -math.inf
    after.ended(after.sent(AFTER), Ending.FAILURE, AFTER)
    assert after.state is BreakerState.OPEN


# -- estimates --------------------------------------------------------------------------------------------------------


def test_estimates_go_on() -> None:
    before, after = CostModel(), CostModel()
    taught = a_call(ascii_bytes=4000, max_tokens=100)
    for _ in range(50):
        before.estimate(taught, None)
        before.learn(taught, 2000, 20)
    after.restore(through(before.checkpoint()))
    for model in (before, after):
        model.estimate(taught, None)
        assert taught.prompt_tokens == pytest.approx(2000, rel=0.05)
        assert taught.expected_tokens == 20
    assert after.checkpoint() == before.checkpoint()


def test_the_estimates_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.core.request.cost.MOST_ESTIMATES", 2)
    model = CostModel()
    for name in "abc":
        model.learn(a_call(model=name, ascii_bytes=400, asked=100), 100, 20)
    saved = model.checkpoint()
    assert [each.model for each in saved.prompts] == [each.model for each in saved.outputs] == ["b", "c"]


# -- limits -----------------------------------------------------------------------------------------------------------


def book(
    text: str = "{per_tenant: {requests: {rate: 1/s, burst: 10}, tokens: {rate: 100/s, burst: 1000}}}",
) -> LimitBook:
    return LimitBook(decode(f"tenants: {{a: {{}}, b: {{}}}}\nlimits: {text}\n".encode()))


def level(of: LimitBook, now: float, *key: str) -> float:
    return next((each.level_at(now) for each in of.buckets() if each.key == key), 0.0)


A_REQUESTS, A_TOKENS = ("requests", "a", "", ""), ("tokens", "a", "", "")


def handed(before: LimitBook, after: LimitBook, **more: Any) -> None:
    after.restore(through(before.checkpoint(BEFORE, **more)), AFTER - AGO, places=True)


def test_levels_go_on_less_what_has_drained_meanwhile() -> None:
    before, after = book(), book()
    for _ in range(8):
        before.charge("a", "default", "m", 100, BEFORE).keep()
    handed(before, after)
    assert level(after, AFTER, *A_REQUESTS) == 8 - AGO
    assert level(after, AFTER, *A_TOKENS) == 800 - AGO * 100
    assert level(after, AFTER, "requests", "b", "", "") == 0
    with pytest.raises(Refused):
        after.charge("a", "default", "m", 501, AFTER)


def test_what_a_restored_book_had_taken_itself_is_not_forgotten() -> None:
    before, after = book(), book()
    before.charge("a", "default", "m", 100, BEFORE).keep()
    after.charge("a", "default", "m", 900, AFTER).keep()
    handed(before, after)
    assert level(after, AFTER, *A_TOKENS) == 900


def test_calls_that_wait_are_charged_by_the_next_decider() -> None:
    before, after = book(), book()
    ran, waits, gone = (before.charge("a", "default", "m", 100, BEFORE) for _ in range(3))
    gone.refund()
    handed(before, after, waiting=[waits, gone])
    assert ran.live
    assert level(after, AFTER - AGO, *A_REQUESTS) == 1
    assert level(after, AFTER - AGO, *A_TOKENS) == 100
    # Of a limit that a reload has done away with nothing is left to take off.
    before.apply(decode(b"tenants: {a: {}}\n"), BEFORE)
    assert before.checkpoint(BEFORE, [waits]) == SavedLimits()


def test_a_place_that_was_promised_is_kept_by_the_next_decider() -> None:
    limit = "{per_tenant: {requests: {rate: 1/s, burst: 4}}}"
    before, after, forgetful = book(limit), book(limit), book(limit)
    for number in range(4):
        before.charge("a", "default", "m", 1, BEFORE, before.arrive("a", BEFORE, b"%d" % number), b"%d" % number)
    with pytest.raises(Refused) as told:
        before.arrive("a", BEFORE, b"waits")
    assert told.value.retry_after == pytest.approx(1.0, abs=1e-3)
    handed(before, after)
    due = AFTER - AGO + told.value.retry_after
    with pytest.raises(Refused):
        after.arrive("a", due, b"newcomer")
    after.arrive("a", due, b"waits")
    forgetful.restore(before.checkpoint(BEFORE), AFTER - AGO, places=False)
    forgetful.arrive("a", due, b"newcomer")


def test_limits_that_the_policy_has_no_more_are_left_out() -> None:
    before, after = book(), book("{global: {requests: {rate: 1/s, burst: 4}}}")
    before.charge("a", "default", "m", 100, BEFORE).keep()
    handed(before, after)
    assert [each for each in after.buckets() if each.level] == []
    place = SavedLimitPlace(1, 1.0, [(0, 1), (9, 1)])
    after.restore(SavedLimits([SavedBucket(A_REQUESTS, 1.0)], [place]), AFTER, places=True)
    assert after.checkpoint(AFTER) == SavedLimits()


def test_a_place_past_its_horizon_is_not_kept() -> None:
    after = book()
    place = SavedLimitPlace(1, HORIZON + 1.0, [(0, 1)])
    after.restore(SavedLimits([SavedBucket(A_REQUESTS, 1.0)], [place]), AFTER, places=True)
    assert after.checkpoint(AFTER).places == []


def test_of_too_many_levels_the_fullest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_BUCKETS", 1)
    it = book()
    it.charge("a", "default", "m", 100, BEFORE).keep()
    it.charge("b", "default", "m", 900, BEFORE).keep()
    assert [each.key for each in it.checkpoint(BEFORE).buckets] == [("tokens", "b", "", "")]
    with pytest.raises(Refused):
        it.charge("b", "default", "m", 900, BEFORE, None, b"waits")
    with pytest.raises(Refused):
        it.charge("a", "default", "m", 901, BEFORE, None, b"waits too")
    assert len(it.checkpoint(BEFORE).places) <= 1


# -- queues' places, and rates ----------------------------------------------------------------------------------------


def test_places_in_a_queue_keep_their_time_and_their_calls_first_arrival() -> None:
    before, after = Bookings(), Bookings()
    first, endless = (
        a_call(body=b"a", arrived=BEFORE - 1.0, deadline=BEFORE + 59.0),
        a_call(body=b"b", deadline=math.inf),
    )
    assert before.book(first, 5.0, BEFORE) == before.book(endless, 5.0, BEFORE) == 5.0
    saved = before.checkpoint(BEFORE, 9)
    assert [each.key for each in before.checkpoint(BEFORE, 1)] == [fingerprint(first)]
    after.restore(through(saved[0]) and saved, AFTER - AGO)
    after.restore(saved, AFTER)  # that of a call that has one stays
    assert len(after) == 2
    assert after.due(first, AFTER) is None
    booking = after.due(first, AFTER + 5.0 - AGO)
    assert booking is not None
    assert (booking.since, booking.deadline) == (AFTER - AGO - 1.0, AFTER - AGO + 59.0)
    assert after.ahead(AFTER) == before.ahead(BEFORE)


def test_a_drain_rate_goes_on_and_fades_as_time_passes() -> None:
    before, after, now = Drain(BEFORE - 1.0), Drain(0.0), BEFORE + 1.0
    before.taken(500)
    before.returned("default", 500, 2.0, BEFORE)
    before.advance(now)
    after.restore(through(before.checkpoint(now)), AFTER - AGO)
    assert after.rate(AFTER - AGO) == before.rate(now) == 250.0
    assert after.rate(AFTER) == pytest.approx(before.rate(now + AGO))
    assert after.rate(AFTER) < 250.0
    lately = after.rate_of("default", 0.0, {}, AFTER)
    assert lately == pytest.approx(before.rate_of("default", 0.0, {}, now + AGO))
    after.taken(100)  # Little's law, by the means
    assert after.rate(AFTER + 1000.0) == pytest.approx(50.0)


def test_traffic_keeps_places_of_classes_that_there_still_are() -> None:
    classes = {"default": TrafficClass(), "of_before": TrafficClass()}
    before = ModelTraffic(Policy(classes=classes), BEFORE)
    for name in classes:
        before.bookings[name].book(a_call(class_name=name), 5.0, BEFORE)
    saved = through(before.checkpoint("m", BEFORE, 9))
    assert saved.places.keys() == classes.keys()
    after, without = ModelTraffic(POLICY, AFTER), ModelTraffic(POLICY, AFTER)
    after.restore(saved, AFTER, places=True)
    without.restore(saved, AFTER, places=False)
    assert [len(after.bookings["default"]), len(without.bookings["default"])] == [1, 0]


def test_an_engines_part_is_small() -> None:
    assert len(msgspec.msgpack.encode(engine().checkpoint(BEFORE, 9))) < 100
    assert isinstance(through(engine().checkpoint(BEFORE, 9)), SavedEngine)
