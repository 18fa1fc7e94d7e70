"""Ledger of KV-cache tokens on an engine, and its corrections."""

from __future__ import annotations

import math

import msgspec
import pytest

from gateway.core.engines.breaker import BreakerState, Ending
from gateway.core.engines.choice import newness, predicted_ttft
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.speed import (
    FASTEST,
    MOST_SPREAD,
    PACE,
    PREFILL_RATE,
    RATE_TOKENS,
    TPOT,
    TPOT_ANSWERS,
    TPOT_TOKENS,
)
from gateway.core.engines.transfers import Transfers
from gateway.core.engines.trouble import Trouble
from gateway.core.policy.policy import Budget, EngineEntry, Policy
from gateway.core.policy.traffic import Breaker, TrafficClass
from gateway.shared.vllm.answers import EngineSample, ModelCard, SleepState

POLICY = Policy()


def engine(capacity: int | None = 1000, **settings: int) -> Engine:
    made = Engine("e", "http://127.0.0.1:1", POLICY, capacity=capacity, **settings)
    made.check(True, 0.0)
    return made


def sample(
    running: int = 0, waiting: int = 0, kv_usage: float = 0.0, preemptions: int = 0, **more: int
) -> EngineSample:
    return EngineSample(running=running, waiting=waiting, kv_usage=kv_usage, preemptions_total=preemptions, **more)


@pytest.mark.parametrize("state", ["weights_offloaded", "discard_all", "paused"])
def test_one_that_says_it_sleeps_is_out_at_once_unless_it_drains(state: SleepState) -> None:
    e = engine()
    e.sampled(EngineSample(running=0, waiting=0, kv_usage=0.0, sleep_state="awake"), 1.0)
    assert e.health.up
    asleep = EngineSample(running=0, waiting=0, kv_usage=0.0, sleep_state=state)
    e.draining = True
    e.sampled(asleep, 2.0)
    assert e.health.up
    e.draining = False
    e.sampled(asleep, 3.0)
    assert not e.health.up
    assert e.health.trouble == Trouble("asleep", f"it says that it sleeps ({state})", 3.0)


def test_a_hold_is_given_back_once() -> None:
    e = engine()
    hold = e.hold(300, 100, 0.0)
    assert (e.ledger.held, e.ledger.in_flight, e.prefills.queued) == (300, 1, 100)
    hold.first_byte(0.5, teach=True)
    hold.first_byte(0.6, teach=True)
    assert e.prefills.queued == 0
    hold.release()
    hold.release()
    assert (e.ledger.held, e.ledger.in_flight, e.prefills.queued) == (0, 0, 0)


def test_one_that_is_found_ready_is_in_at_once_and_what_it_failed_is_over_unless_calls_are_there() -> None:
    e = engine()
    e.down()
    failed = e.breaker
    hold = e.hold(300, 100, 0.0)
    e.ready(5.0)
    assert e.health.up
    assert e.breaker is failed, "its calls are counted there when they end"
    hold.release()
    e.ready(6.0)
    assert e.breaker is not failed


def test_a_hold_released_before_the_first_byte_leaves_the_prefill_queue() -> None:
    e = engine()
    e.hold(300, 100, 0.0).release()
    assert e.prefills.queued == 0


def test_a_prompt_whose_first_byte_tells_nothing_counts_as_read_when_predicted() -> None:
    e = engine(100_000)
    late, early, ended = (e.hold(100, 100, 0.0) for _ in range(3))
    for hold in (ended, early, late):
        e.prefills.expect(hold, 1.0 if hold is not late else 2.0)
    ended.release()
    assert e.prefills.ahead(0.5) == 200
    assert e.prefills.ahead(1.0) == 100
    rate = e.speed.prefill_rate
    for _ in range(8):
        e.hold(100, 100, 0.0).first_byte(9.0, teach=False)
    assert e.speed.prefill_rate == rate
    assert e.prefills.ahead(2.0) == 0


def test_prompts_that_the_engine_has_begun_count_as_read_whatever_was_predicted() -> None:
    e = engine(100_000)
    for at in (0.0, 0.0, 0.0, 0.0, 9.99):
        e.prefills.expect(e.hold(100, 100, at), 60.0)
    assert e.prefills.ahead(10.0) == 500
    e.sampled(sample(running=3, waiting=1), 10.0)
    assert e.prefills.ahead(10.0) == 300, "one waits, the one before it is being read, and one was sent just now"
    e.sampled(sample(running=5), 10.5)
    assert e.prefills.ahead(10.5) == 100, "nobody says that the last one is read"
    e.sampled(sample(), 11.0)
    assert e.prefills.ahead(11.0) == 100


def test_promises_stay_within_the_budget() -> None:
    e = engine()
    assert e.ledger.budget == 800
    e.hold(500, 1, 0.0)
    assert e.ledger.fits(300)
    assert e.ledger.fits(420), "the last to start may go beyond the budget"
    assert not e.ledger.fits(421)
    e.hold(300, 1, 0.0)
    assert not e.ledger.fits(1)


@pytest.mark.parametrize(
    ("kv_target", "output", "budget", "last"),
    [
        (0.8, 0, 927, 960),  # prompts alone: no more than modes allow
        (0.8, 50, 864, 960),  # an eighth of 400 is output
        (0.8, 100, 800, 920),  # a quarter
        (0.8, 400, 800, 920),
        (0.5, 0, 580, 667),
        (0.9, 0, 930, 1000),
        (0.97, 0, 970, 1000),
    ],
)
def test_the_budget_is_larger_where_less_of_what_is_held_is_output(
    kv_target: float, output: int, budget: int, last: int
) -> None:
    e = engine()
    e.apply(Policy(budget=Budget(kv_target=kv_target)))
    hold = e.hold(400, 0, 0.0, output=output)
    assert (e.ledger.budget, e.ledger.ceiling) == (budget, last)
    assert e.ledger.fits(last - 400)
    assert not e.ledger.fits(last - 399)
    hold.release()
    assert e.ledger.output_held == 0
    assert e.ledger.budget == round(1000 * kv_target)


def test_what_is_in_reserve_leaves_nothing_beyond_the_budget() -> None:
    e = engine()
    e.apply(RESERVED)
    e.hold(200, 1, 0.0, "default")
    room = 800 - 200 - 400  # of it half is interactive's
    assert e.ledger.fits(room, "default")
    assert not e.ledger.fits(room + 1, "default")
    assert e.ledger.fits(600, "interactive")
    assert not e.ledger.fits(601, "interactive")


def test_an_idle_engine_takes_what_a_trimmed_budget_would_refuse_for_ever() -> None:
    e = engine()
    e.ledger.trim = 0.5
    assert e.ledger.budget == 400
    assert e.ledger.fits(920)
    assert not e.ledger.fits(921)
    e.hold(1, 1, 0.0)
    assert e.ledger.fits(459)
    assert not e.ledger.fits(460)


def test_what_is_measured_above_the_ledger_counts_and_falls_with_the_next_sample() -> None:
    e = engine()
    hold = e.hold(200, 1, 0.0)
    e.sampled(sample(running=3, kv_usage=0.6), 1.0)
    assert (e.ledger.excess, e.ledger.load) == (400, 600)
    hold.release()
    assert e.ledger.load == 400, "a release frees room at once, whatever the gauge says until the next poll"
    e.sampled(sample(), 1.5)
    assert e.ledger.load == 0


def test_a_stale_sample_corrects_nothing() -> None:
    e = engine()
    e.sampled(sample(running=3, kv_usage=0.6), 1.0)
    e.advance(2.0)
    assert e.ledger.excess == 600
    e.advance(1.0 + 3 * POLICY.fleet.poll + 0.01)
    assert e.ledger.excess == 0


def test_capacity_is_learned_unless_the_policy_gives_it() -> None:
    learned, fixed = engine(None), engine(1000)
    for e in (learned, fixed):
        e.sampled(sample(capacity_tokens=5000), 1.0)
    assert (learned.ledger.capacity, fixed.ledger.capacity) == (5000, 1000)


def test_trim_rises_only_while_tokens_bind_and_kv_is_low() -> None:
    e = engine()
    e.sampled(sample(kv_usage=0.3), 1.0)
    assert e.ledger.trim == 1.0, "not in use: does not grow"
    e.hold(800, 1, 1.0)
    assert not e.ledger.fits(1)
    e.sampled(sample(kv_usage=0.3), 1.5)
    assert e.ledger.trim == 1.0, "a question presses nothing"
    e.ledger.press(1)
    e.sampled(sample(kv_usage=0.3), 2.5)
    assert e.ledger.trim == pytest.approx(1.35)
    for at in range(3, 400):
        e.ledger.press(10**9)
        e.sampled(sample(kv_usage=0.3), float(at))
    assert e.ledger.trim <= 4.0


@pytest.mark.parametrize(
    ("bad", "falls"),
    [
        (sample(kv_usage=0.96), True),
        (sample(kv_usage=0.5, preemptions=1), True),
        (sample(running=9, waiting=3, kv_usage=0.8), True),
        (sample(running=9, waiting=3, kv_usage=0.3), False),
        (sample(kv_usage=0.94), False),
    ],
)
def test_trim_falls_when_kv_runs_over(bad: EngineSample, falls: bool) -> None:
    e = engine()
    e.sampled(sample(), 0.5)
    e.sampled(bad, 1.0)
    assert e.ledger.trim == (pytest.approx(0.9) if falls else 1.0)
    for at in range(2, 100):
        e.sampled(sample(kv_usage=0.99), float(at))
    assert e.ledger.trim == 0.5


@pytest.mark.parametrize(("preemptions", "least"), [(0, 0.95 * 800 / 970), (1, 0.95 * 800 / 1000)])
def test_trim_falls_no_further_than_what_the_holds_of_now_turn_into(preemptions: int, least: float) -> None:
    e = engine()
    e.hold(800, 1, 0.0)
    e.sampled(sample(), 0.5)
    for at in range(1, 20):
        e.sampled(sample(running=4, kv_usage=0.97, preemptions=at * preemptions), float(at))
    assert e.ledger.trim == pytest.approx(least)


def test_slots_are_learned_from_the_engines_own_queue() -> None:
    e = engine(100_000)
    most = e.ledger.slots
    e.sampled(sample(running=4, waiting=9), 0.5)
    e.sampled(sample(running=8, waiting=5), 1.0)
    assert e.ledger.slots == most, "more have begun: they waited to be read"
    e.sampled(sample(running=8, waiting=5), 1.0)
    assert e.ledger.slots == 10, "running + 2 that may wait in it"
    for _ in range(10):
        e.hold(10, 1, 1.0)
    assert not e.ledger.fits(10)
    e.ledger.press(10)
    e.sampled(sample(running=8, waiting=2), 1.5)
    assert e.ledger.slots == 10, "a backlog within the bound changes nothing"
    assert not e.ledger.fits(10)
    e.ledger.press(10)
    e.sampled(sample(running=10, waiting=0, kv_usage=0.1), 2.0)
    assert e.ledger.slots == 11, "full and no queue: probe one above"
    e.sampled(sample(running=10, waiting=0, kv_usage=0.1), 2.5)
    assert e.ledger.slots == 11, "not in use: does not grow"


def test_what_was_just_sent_is_no_queue() -> None:
    """It waits for the step that is under way, in any engine, and the faster it is the more do."""
    e = engine(100_000)
    most = e.ledger.slots
    for at in range(10):
        e.hold(10, 1, 1.0 + at / 100.0)  # a step is 0.03 s
    e.sampled(sample(running=4, waiting=6), 1.1)
    assert e.ledger.slots == most, "six of two steps"
    for at in (1.2, 1.25):
        e.sampled(sample(running=4, waiting=6), at)
    assert e.ledger.slots == 6, "two steps later they still wait"
    for _ in range(4):
        e.hold(10, 1, 1.3)
    e.sampled(sample(running=2, waiting=4), 1.3)
    assert e.ledger.slots == 7, "all four of two steps: a full bound without a queue grows"
    for at in (1.4, 1.45):
        e.sampled(sample(running=2, waiting=4), at)
    assert e.ledger.slots == 5, "four ran, but for a fiftieth"
    assert not e.ledger.fits(10)
    e.ledger.press(10)
    e.sampled(sample(running=4, waiting=0, kv_usage=0.1), 1.5)
    for _ in range(3):
        assert not e.ledger.fits(10)
        e.ledger.press(10)
        e.sampled(sample(running=4, waiting=0, kv_usage=0.1), 1.6)
    assert e.ledger.slots == 9


def test_a_queue_for_prompts_to_be_read_is_no_want_of_places() -> None:
    e = engine(100_000)
    e.sampled(sample(running=60), 1.0)
    for at in (1.5, 1.75):
        e.sampled(sample(running=40, waiting=8), at)
    assert e.ledger.slots == 59, "as many as ran before, less a fiftieth each time, + 2 that may wait in it"
    for tick in range(100):
        e.sampled(sample(running=40, waiting=8), 2.0 + tick / 2)
    assert e.ledger.slots == 42, "an engine that is another one now: nothing holds for ever"


def test_what_waits_for_its_adapter_or_for_kv_blocks_shows_no_want_of_places() -> None:
    e = engine(100_000)
    most = e.ledger.slots
    for at in (0.5, 1.0, 1.5):
        e.sampled(sample(running=8, waiting=5, deferred=5, kv_usage=0.8), at)
    assert (e.ledger.slots, e.ledger.trim) == (most, 1.0)
    e.ledger.pressed_slots = True
    e.sampled(sample(running=8, waiting=5, deferred=5), 2.0)
    assert e.ledger.slots > most


def test_slots_grow_fast_only_until_a_queue_was_seen() -> None:
    """A fifth at a time beyond what it was full with would be a queue inside the engine again and again."""
    e = engine(1_000_000)
    places, steps = 290, []
    for _ in range(4):
        holds = [e.hold(1, 1, 0.0) for _ in range(e.ledger.slots)]
        before, running = e.ledger.slots, min(places, e.ledger.slots)
        for _ in range(2):
            e.ledger.press(1)
            e.sampled(sample(running=running, waiting=before - running, kv_usage=0.1), 1.0)
        steps.append(e.ledger.slots - before)
        for hold in holds:
            hold.release()
    assert steps == [44, -8, 0, 0]


def test_the_emptier_the_cache_the_faster_slots_grow() -> None:
    for kv_usage, grown in ((0.0, 51), (0.4, 25), (0.6, 12), (0.79, 1), (0.8, 0)):
        e = engine(1_000_000)
        e.ledger.pressed_slots = True
        e.sampled(sample(running=256, kv_usage=kv_usage), 1.0)
        assert e.ledger.slots - 256 == grown, kv_usage


def test_a_queue_for_blocks_is_no_want_of_places() -> None:
    """An H100 with 1,024 places ran 228 long calls, and was taken for full by such a queue."""
    e = engine(100_000)
    for at in range(10):
        e.sampled(sample(running=228 - at, waiting=18, kv_usage=0.99), float(at))
    assert e.ledger.slots == 256


def test_more_places_than_a_queue_has_shown() -> None:
    e = engine(100_000)
    for at in (0.5, 1.0):
        e.sampled(sample(running=100, waiting=9, kv_usage=0.4), at)
    assert (e.ledger.slots, e.adaptation.full_at) == (102, 102)
    e.ledger.pressed_slots = True
    e.sampled(sample(running=100, kv_usage=0.4), 1.5)
    assert (e.ledger.slots, e.adaptation.full_at) == (103, 102)
    e.ledger.pressed_slots = True
    e.sampled(sample(running=103, kv_usage=0.4), 2.0)
    assert (e.ledger.slots, e.adaptation.full_at) == (113, None)


def test_slots_of_the_policy_are_kept() -> None:
    e = engine(100_000, max_concurrency=4)
    e.sampled(sample(running=2, waiting=50), 1.0)
    assert e.ledger.slots == 4


def test_prefill_rate_is_the_median_of_the_last_first_bytes_less_a_step() -> None:
    e = engine(1_000_000)
    before = e.speed.prefill_rate
    for number in range(1, 8):
        e.speed.learn_first_byte(100, e.speed.tpot + 100 / (number * 100))
        assert e.speed.prefill_rate == before
    e.speed.learn_first_byte(100, e.speed.tpot + 100 / 800)
    assert e.speed.prefill_rate == pytest.approx(500)
    assert e.speed.ttft_spread == MOST_SPREAD, "the slowest of ten took five times as long"
    for number in range(72):
        e.speed.learn_first_byte(100, e.speed.tpot + (0.1 if number % 5 else 0.2))
    assert e.speed.ttft_spread == pytest.approx(2.0)


def test_what_was_ahead_of_a_first_byte_was_read_too() -> None:
    """Calls that come together on an engine of 1,000 tokens/s: each has its first byte when its turn comes, and what is
    predicted is what they have seen, not the queue counted twice."""
    e = engine(1_000_000_000)
    holds = [e.hold(100, 100, 0.0) for _ in range(8)]
    for number, hold in enumerate(holds, 1):
        hold.first_byte(e.speed.tpot + number * 0.1, teach=True)
    assert e.speed.prefill_rate == pytest.approx(1000, rel=0.001)
    for _ in range(8):
        e.hold(100, 100, 1.0)
    assert predicted_ttft(e, 100, 1.0) == pytest.approx(e.speed.tpot + 0.9, rel=0.001)


def test_health_takes_three_misses_out_and_two_hits_in() -> None:
    e = engine()
    assert e.health.up, "first contact"
    e.check(False, 1.0)
    e.check(False, 2.0)
    assert e.health.up
    e.check(True, 3.0)
    for at in (4.0, 5.0, 6.0):
        assert e.health.up
        e.check(False, at)
    assert not e.health.up
    e.check(True, 7.0)
    assert not e.health.up
    e.check(True, 8.0)
    assert e.health.up
    assert e.health.back_at == 8.0


def test_one_that_joins_a_serving_fleet_starts_slowly_and_those_of_the_start_at_once() -> None:
    fleet = Fleet()
    first, second, later = (Engine(id, "http://e", Policy()) for id in ("first", "second", "later"))
    fleet.add(first)
    fleet.add(second)
    first.check(True, 1.0)
    fleet.add(later)
    for each in (second, later):
        each.check(True, 2.0)
    assert all(each.health.up for each in fleet)
    slow = Policy().routing.slow_start
    assert [newness(each, 2.0, slow) for each in (second, later)] == [0.0, 1.0]


def stalling(e: Engine, since: float, until: float, *, running: int = 1, **totals: int) -> float | None:
    """Time at which the engine is taken out whose samples all say the same; None: it is not."""
    for half_seconds in range(int(2 * since), int(2 * until)):
        e.sampled(sample(running=running, **totals), half_seconds / 2)
        if not e.health.up:
            return half_seconds / 2
    return None


def test_one_that_reads_and_writes_no_token_while_a_call_waits_is_taken_out_with_the_reason() -> None:
    e = engine()
    assert stalling(e, 0.0, 100.0, prompt_tokens_total=7) is None, "nobody waits for it"
    hold = e.hold(100, 100, 100.0)
    at = stalling(e, 100.0, 200.0, prompt_tokens_total=7)
    assert at is not None
    assert 129.5 < at < 131.0
    assert (e.breaker.state, e.health.trouble and e.health.trouble.reason) == (BreakerState.OPEN, "stalled")
    assert e.health.failed_call == "it has read and written no token for 30 s, while a call waits for it"
    hold.release()
    e.check(True, at + 0.4)
    e.check(True, at + 0.8)
    assert e.health.up
    probe = e.hold(100, 100, at + 20.0)
    e.breaker.advance(at + 20.0)
    again = stalling(e, at + 20.0, at + 100.0, prompt_tokens_total=7)
    assert again is not None
    assert (e.breaker.state, e.breaker.reopened) == (BreakerState.OPEN, 1), "the probe met the same"
    probe.release()


def test_one_that_answers_a_slow_reader_or_reads_a_long_prompt_or_tells_no_totals_is_not_stalled() -> None:
    e = engine(capacity=10_000_000)
    hold = e.hold(100, 100, 0.0)
    assert stalling(e, 0.0, 100.0) is None, "its version has no totals"
    e.sampled(sample(running=1, prompt_tokens_total=100), 100.0)
    hold.first_byte(100.0, teach=False)
    assert stalling(e, 100.5, 200.0, prompt_tokens_total=100) is None, "all of the answer is on its way"
    idle = e.hold(100, 100, 200.0)
    assert stalling(e, 200.0, 300.0, running=0, prompt_tokens_total=100) is None, "whose call's end was not reported"
    idle.release()
    long = e.hold(1_000_000, int(20 * e.speed.prefill_rate), 300.0)
    assert stalling(e, 300.0, 388.0, prompt_tokens_total=100) is None
    assert stalling(e, 388.0, 400.0, prompt_tokens_total=100) is not None
    long.release()
    assert e.prefills.awaited == 0


def test_one_whose_metrics_stand_still_is_not_stalled_while_it_answers() -> None:
    e = engine()
    hold = e.hold(100, 100, 0.0)
    for second in range(100):
        following = e.hold(100, 100, float(second))
        hold.first_byte(float(second), teach=False)
        hold.release()
        hold = following
        assert stalling(e, second, second + 1, prompt_tokens_total=7) is None
    assert stalling(e, 100.0, 140.0, prompt_tokens_total=7) is not None, "it answers no more"
    hold.release()


def test_an_old_sample_says_nothing_of_the_cache_any_more() -> None:
    e = engine()
    e.sampled(sample(kv_usage=0.95), 1.0)
    assert (e.ledger.watermark(), e.ledger.excess) == (0.95, 950)
    e.advance(2.5)
    assert (e.ledger.watermark(), e.ledger.excess) == (0.95, 950)
    e.advance(2.6)
    assert (e.ledger.watermark(), e.ledger.excess) == (0.0, 0)


def test_the_capacity_of_one_that_tells_none_is_that_of_the_policy_in_force() -> None:
    assumed, told, hinted = (engine(capacity=None) for _ in range(3))
    told.sampled(sample(capacity_tokens=5000), 1.0)
    hinted.expect_sizes(7000, None)
    fixed = engine(capacity=1000)
    for e in (assumed, told, hinted, fixed):
        e.apply(Policy(budget=Budget(capacity=20_000)))
    assert [e.ledger.capacity for e in (assumed, told, hinted, fixed)] == [20_000, 5000, 7000, 1000]


def test_the_places_of_one_that_teaches_none_are_those_of_the_policy_in_force() -> None:
    assumed, given, learned = (engine(capacity=None) for _ in range(3))
    given.go_by(EngineEntry(url="http://e", max_concurrency=2))
    learned.ledger.slots = 30
    for e in (assumed, given, learned):
        e.apply(Policy(budget=Budget(max_concurrency=4)))
    assert [e.ledger.slots for e in (assumed, given, learned)] == [4, 2, 30]
    given.go_by(EngineEntry(url="http://e"))
    assert given.ledger.slots == 4, "what its entry said is gone"


def test_low_rates_of_one_without_metrics_are_doubted_too() -> None:
    e = engine()
    e.health.unmeasured = "GET /metrics was answered 404"
    for _ in range(8):
        e.speed.learn_first_byte(1000, 100.0)
    assert e.speed.prefill_rate < 20.0
    for check in range(16):
        assert e.speed.prefill_rate < 20.0
        e.check(True, 2.0 * check)
    assert e.speed.prefill_rate == PREFILL_RATE


def test_samples_that_were_not_taken_are_no_silence() -> None:
    e = engine()
    hold = e.hold(100, 100, 0.0)
    e.sampled(sample(running=1, prompt_tokens_total=7), 0.0)
    e.sampled(sample(running=1, prompt_tokens_total=7), 40.0)
    assert e.health.up
    assert stalling(e, 40.5, 60.0, prompt_tokens_total=7) is None
    hold.release()


def test_down_forgets_the_cache() -> None:
    e = engine()
    e.remember((1, 2, 3), 500, 1.0)
    assert e.cache.leading((1, 2, 9)) == 2
    e.down()
    assert e.cache.leading((1, 2, 9)) == 0


def test_models_are_merged_with_the_longest_context() -> None:
    fleet = Fleet()
    for id, card in (("a", ModelCard(id="m", max_model_len=100)), ("b", ModelCard(id="m", max_model_len=200))):
        e = Engine(id, "http://127.0.0.1:1", POLICY)
        fleet.add(e)
        fleet.has_models(e, [card, ModelCard(id=f"only-{id}")])
    assert set(fleet.models) == {"m", "only-a", "only-b"}
    assert (fleet.context("m"), fleet.context("only-a"), fleet.context("none")) == (200, None, None)
    assert [e.id for e in fleet.serving("m")] == ["a", "b"]
    fleet.remove("b")
    assert [e.id for e in fleet.serving("m")] == ["a"]
    with pytest.raises(ValueError, match="used twice"):
        fleet.add(fleet.engines["a"])


def test_the_engines_of_a_model_stay_in_the_order_in_which_they_joined() -> None:
    fleet, card = Fleet(), ModelCard(id="m", max_model_len=100)
    for id in "abc":
        fleet.add(Engine(id, "http://127.0.0.1:1", POLICY))
    for id in "cab":
        fleet.has_models(fleet.engines[id], [card])
    assert [e.id for e in fleet.serving("m")] == ["a", "b", "c"]
    fleet.has_models(fleet.engines["a"], [])
    fleet.take_role(fleet.engines["c"], "kv", "prefill")
    assert ([e.id for e in fleet.serving("m")], [e.id for e in fleet.readers("m")]) == (["b", "c"], ["c"])
    fleet.has_models(fleet.engines["a"], [msgspec.structs.replace(card, max_model_len=300)])
    assert ([e.id for e in fleet.serving("m")], fleet.context("m")) == (["a", "b", "c"], 300)
    fleet.expect({"m": msgspec.structs.replace(card, max_model_len=900), "n": card})
    assert (fleet.context("m"), fleet.context("n")) == (300, 100), "what an engine tells counts before a promise"
    fleet.has_models(fleet.engines["a"], [])
    fleet.remove("b")
    assert (fleet.serving("m"), fleet.context("m")) == ((), 900)
    fleet.remove("c")
    assert (fleet.readers("m"), fleet.reads_apart) == ((), False)


def test_a_change_of_one_engine_costs_no_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands tells its models again and again, and comes and goes."""
    fleet, looks = Fleet(), list[Transfers]()

    def answers(transfers: Transfers) -> bool:
        looks.append(transfers)
        return True

    monkeypatch.setattr(Transfers, "answers", property(answers))
    for number in range(100):
        engine = Engine(f"e{number}", "http://127.0.0.1:1", POLICY)
        fleet.add(engine)
        fleet.has_models(engine, [ModelCard(id="m")])
        fleet.has_models(engine, [ModelCard(id="m")])
    fleet.remove("e0")
    assert len(fleet.serving("m")) == 99
    assert len(looks) <= 4 * 100


def test_the_policy_may_cut_an_engines_models() -> None:
    fleet = Fleet()
    e = Engine("a", "http://127.0.0.1:1", POLICY, models=["m"])
    fleet.add(e)
    fleet.has_models(e, [ModelCard(id="m"), ModelCard(id="other")])
    assert set(fleet.models) == {"m"}


def test_repr_states_the_state() -> None:
    e = engine()
    e.hold(300, 1, 0.0)
    assert repr(e) == "<Engine e up held=300/800 in_flight=1/256>"
    e.down()
    assert "down" in repr(e)


def test_the_card_with_the_longest_context_speaks_for_a_model_whichever_comes_first() -> None:
    fleet = Fleet()
    for id, context in (("a", 200), ("b", 100)):
        e = Engine(id, "http://127.0.0.1:1", POLICY)
        fleet.add(e)
        fleet.has_models(e, [ModelCard(id="m", max_model_len=context)])
    assert fleet.models["m"].max_model_len == 200


def test_what_telemetry_reports_reaches_the_engine() -> None:
    fleet = Fleet()
    e = Engine("e", "http://127.0.0.1:1", POLICY)
    fleet.add(e)
    e.check(True, 1.0)
    assert e.health.up
    told = sample(running=3, capacity_tokens=777)
    e.sampled(told, 2.0)
    assert (e.sample, e.sampled_at, e.ledger.capacity) == (told, 2.0, 777)


def test_a_low_rate_that_nobody_feeds_is_doubted_and_a_high_one_kept() -> None:
    slow, fast = engine(), engine()
    for each, seconds in ((slow, 1.0), (fast, 0.001)):
        for _ in range(8):
            each.speed.learn_first_byte(100, seconds)
    low, high = slow.speed.prefill_rate, fast.speed.prefill_rate
    sample = EngineSample(running=0, waiting=0, kv_usage=0.0, capacity_tokens=1000)
    for number in range(60):
        slow.sampled(sample, number * 0.5)
        fast.sampled(sample, number * 0.5)
    assert (slow.speed.prefill_rate, fast.speed.prefill_rate) == (low, high), "30 s have not passed"
    slow.sampled(sample, 30.5)
    fast.sampled(sample, 30.5)
    assert slow.speed.prefill_rate > low
    assert fast.speed.prefill_rate == high


def test_a_time_per_token_is_doubted_only_where_no_call_would_teach_it() -> None:
    """First bytes of whole answers teach no rate, and those of a slow engine come more than 30 s apart."""
    e = engine(100_000)
    still = sample(running=1)
    hold = e.hold(10, 1, 0.0)
    for _ in range(30):
        e.speed.learn_tpot(100, 25.0, timed=False)
    learned = e.speed.tpot
    for number in range(100):
        e.sampled(still, number * 0.5)
    assert e.speed.tpot == learned > 0.2
    hold.release()
    for number in range(60):
        e.sampled(still, 50.0 + number * 0.5)
    assert e.speed.tpot == learned
    e.sampled(still, 80.0)
    assert e.speed.tpot == TPOT, "it may keep every call away"


RESERVED = Policy(
    classes={
        "interactive": TrafficClass(reserve=0.5),
        "default": TrafficClass(reserve=0.25),
        "batch": TrafficClass(),
    }
)


def test_what_other_classes_have_in_reserve_and_do_not_use_is_kept() -> None:
    e = Engine("e", "http://e", RESERVED, capacity=1000)
    assert e.ledger.budget == 800
    assert e.ledger.fits(800, "batch"), "an idle engine keeps nothing back"
    e.hold(100, 1, 0.0, "batch")
    assert e.ledger.fits(100, "batch")
    assert not e.ledger.fits(101, "batch"), "400 and 200 are kept, together"
    assert e.ledger.fits(300, "default"), "its own reserve is its own"
    assert not e.ledger.fits(301, "default")
    assert e.ledger.fits(500, "interactive")
    assert not e.ledger.fits(501, "interactive")
    used = e.hold(300, 1, 0.0, "interactive")
    assert e.ledger.fits(100, "batch"), "what is used of a reserve need not be kept"
    assert not e.ledger.fits(101, "batch")
    used.release()
    assert not e.ledger.fits(101, "batch")


def test_places_in_the_batch_are_reserved_too() -> None:
    e = Engine("e", "http://e", RESERVED, capacity=100_000, max_concurrency=8)
    holds = []
    while e.ledger.fits(1, "batch"):
        holds.append(e.hold(1, 1, 0.0, "batch"))
    assert len(holds) == 2, "of 8 places 4 and 2 are kept"
    while e.ledger.fits(1, "default"):
        holds.append(e.hold(1, 1, 0.0, "default"))
    assert len(holds) == 4
    while e.ledger.fits(1, "interactive"):
        holds.append(e.hold(1, 1, 0.0, "interactive"))
    assert len(holds) == 8
    for hold in holds:
        hold.release()
    assert all(used == [0, 0] for used in e.ledger.used.values())


FILLER = Policy(classes={"default": TrafficClass(), "batch": TrafficClass(headroom=0.5)})


def test_a_class_with_headroom_leaves_others_room_to_grow_and_waits_until_all_is_read() -> None:
    e = Engine("e", "http://e", FILLER, capacity=1000)
    assert e.ledger.leaves_headroom(800, "batch", 0.0), "an idle engine takes anything"
    hold = e.hold(200, 50, 0.0, "default")
    assert not e.ledger.leaves_headroom(100, "batch", 0.0)
    assert e.ledger.leaves_headroom(600, "default", 0.0)
    hold.first_byte(0.1, teach=True)
    assert e.ledger.leaves_headroom(500, "batch", 0.2), "of 800, 200 are held, and 100 more may be"
    assert not e.ledger.leaves_headroom(501, "batch", 0.2)
    e.hold(400, 0, 0.3, "batch")
    assert e.ledger.leaves_headroom(100, "batch", 0.4), "nothing is left to its own class"


def test_headroom_is_over_the_most_that_others_held_lately() -> None:
    e = Engine("e", "http://e", FILLER, capacity=1000)
    wave = [e.hold(200, 0, 0.0, "default") for _ in range(2)]
    wave[0].release()
    assert not e.ledger.leaves_headroom(201, "batch", 0.0), "of 800, 400 are left to them, and 200 more"
    assert e.ledger.leaves_headroom(200, "batch", 0.0)
    e.hold(100, 0, 60.0, "batch")
    assert not e.ledger.leaves_headroom(400, "batch", 60.0)
    assert e.ledger.leaves_headroom(400, "batch", 240.0), "only what is held now counts: 200"
    assert not e.ledger.leaves_headroom(401, "batch", 240.0)


def test_headroom_is_of_places_too_where_their_number_is_known() -> None:
    e = Engine("e", "http://e", FILLER, capacity=100_000, max_concurrency=4)
    e.hold(1, 0, 0.0, "default")
    e.hold(1, 0, 0.0, "default")
    assert e.ledger.leaves_headroom(1, "batch", 0.0)
    e.hold(1, 0, 0.0, "batch")
    assert not e.ledger.leaves_headroom(1, "batch", 0.0)


def test_a_new_policy_changes_the_rules_and_keeps_what_is_held() -> None:
    e = engine()
    e.hold(300, 1, 0.0, "batch")
    e.apply(Policy(classes=RESERVED.classes, budget=Budget(kv_target=0.5), breaker=Breaker(failures=1)))
    assert (e.ledger.held, e.ledger.budget, e.breaker.policy.failures) == (300, 500, 1)
    assert e.ledger._reserves == (("interactive", 0.5), ("default", 0.25))


def test_what_the_policy_says_of_an_engine_and_what_it_says_no_longer() -> None:
    e = engine(capacity=None)
    entry = EngineEntry(url="http://e", max_concurrency=4, models=("m",), scheduling_policy="priority")
    e.go_by(entry)
    assert (e.ledger.slots, e.ledger.max_slots, e.only_models) == (4, 4, frozenset({"m"}))
    assert e.priorities
    e.sampled(sample(running=8, waiting=9, capacity_tokens=7000), 1.0)
    assert (e.ledger.capacity, e.ledger.slots) == (7000, 4), "what is fixed is not learned"
    e.go_by(EngineEntry(url="http://e"))
    assert (e.ledger.capacity, e.ledger.slots, e.ledger.max_slots, e.only_models) == (7000, 4, None, frozenset())
    assert not e.priorities
    for at in (2.0, 2.5):
        e.sampled(sample(running=8, waiting=9, capacity_tokens=7000), at)
    assert e.ledger.slots == 10, "learned from there"


def test_the_watermark_is_what_is_measured_or_what_holds_will_come_to() -> None:
    e = engine()
    assert e.ledger.watermark() == 0.0
    e.hold(400, 1, 0.0)
    assert e.ledger.watermark() == 0.4
    e.ledger.trim = 2.0
    assert e.ledger.watermark() == 0.2, "holds turn into half of what they say"
    e.sampled(sample(kv_usage=0.7), 1.0)
    assert e.ledger.watermark() == 0.7


def test_time_per_token_is_a_mean_over_answers_that_are_long_enough() -> None:
    e = engine()
    e.speed.learn_tpot(TPOT_TOKENS - 1, 100.0)
    assert e.speed.tpot == TPOT
    for answers in range(1, TPOT_ANSWERS + 1):  # the plain mean of faster ones at first: what was assumed says nothing
        e.speed.learn_tpot(100, (TPOT_ANSWERS - answers) / 10)
        assert e.speed.tpot == pytest.approx((2 * TPOT_ANSWERS - answers - 1) / 2000)
    e.speed.learn_tpot(100, 13.0)
    assert e.speed.tpot == pytest.approx(0.0045 + (0.13 - 0.0045) / TPOT_ANSWERS)
    for _ in range(200):
        e.speed.learn_tpot(100, -3.0)  # the first token was expected later than the last one came
    assert 0.0 <= e.speed.tpot < 1e-6
    slow = engine()
    slow.speed.learn_tpot(100, 13.0)
    assert slow.speed.tpot == pytest.approx(TPOT + (0.13 - TPOT) / TPOT_ANSWERS), "it may have much to do"


def test_an_answer_whose_writing_nobody_saw_begin_is_not_taken_for_the_first() -> None:
    e = engine()
    e.speed.learn_tpot(20, -0.1, timed=False)  # whole before its first token was expected: it was read faster
    e.speed.learn_tpot(100, 1.0, timed=False)
    e.speed.learn_tpot(100, 0.0)  # a stream that came all at once
    assert e.speed.tpot == pytest.approx(((TPOT * 0.9) * 0.9 + 0.001) * 0.9)
    e.speed.learn_tpot(100, 1.0)
    assert e.speed.tpot == 0.01


def test_the_pace_is_of_the_fastest_answers_of_late() -> None:
    e = engine()
    e.speed.learn_pace(TPOT_TOKENS - 1, 1.0)
    assert e.speed.pace == PACE
    e.speed.learn_pace(100, 4.0)
    assert e.speed.pace == 0.04, "the first that is known"
    e.speed.learn_pace(100, 2.0)
    assert e.speed.pace == 0.02
    e.speed.learn_pace(100, 4.0)
    assert 0.02 < e.speed.pace < 0.021
    e.speed.learn_pace(100, 0.0)
    assert e.speed.pace == TPOT / 4, "it came all at once"
    e.speed.tpot = 0.0
    e.speed.learn_pace(100, -1.0)
    assert e.speed.pace == FASTEST


def test_short_prompts_teach_no_rate() -> None:
    e = engine()
    for _ in range(64):
        e.speed.learn_first_byte(RATE_TOKENS - 1, 9.0)
    rate = e.speed.prefill_rate
    for _ in range(8):
        e.speed.learn_first_byte(RATE_TOKENS, 1.0 + e.speed.tpot)
    assert (rate, e.speed.prefill_rate) == (PREFILL_RATE, RATE_TOKENS)


def test_clients_are_told_a_name_and_never_an_address() -> None:
    fleet = Fleet()
    fleet.add(engine())
    assert [each.name for each in fleet] == ["engine-1"]


def test_an_outage_begins_with_the_first_sign_of_it_and_not_with_the_last_check() -> None:
    engine = Engine("e", "http://e:1", Policy())
    refused = Trouble("refused", "connection refused", 0.0)
    engine.check(False, 5.0, refused)
    assert engine.health.outage_at == 5.0, "one that has never answered"
    engine.check(True, 10.0)
    assert engine.health.outage_at == math.inf
    for at in (12.0, 12.4, 12.8, 13.2, 40.0):
        engine.check(False, at, refused)
    assert (engine.health.up, engine.health.outage_at) == (False, 12.0)
    engine.check(True, 41.0)
    assert engine.health.outage_at == 12.0, "one good check does not bring it back"
    engine.check(True, 41.4)
    assert (engine.health.up, engine.health.outage_at) == (True, math.inf)
    engine.down(Trouble("refused", "connection refused (a call)", 50.0))
    engine.check(False, 52.0, refused)
    assert engine.health.outage_at == 50.0, "a call that could not connect"
    engine.ready(60.0)
    assert engine.health.outage_at == math.inf


def test_calls_that_broke_off_before_the_first_bad_check_begin_the_outage() -> None:
    engine = Engine("e", "http://e:1", Policy())
    engine.check(True, 10.0)
    for at in (10.5, 10.6):
        engine.breaker.ended(engine.breaker.sent(at), Ending.FAILURE, at)
    engine.check(False, 12.0)
    assert engine.health.outage_at == 10.5
    engine.check(True, 13.0)
    engine.check(False, 15.0)
    assert engine.health.outage_at == 15.0, "a good check has come after those calls"


def test_an_engine_has_one_name_for_operators() -> None:
    fleet = Fleet()
    engine = Engine("10.0.0.1:8000", "http://10.0.0.1:8000", Policy())
    fleet.add(engine)
    assert (engine.label, engine.name) == ("10.0.0.1:8000", "engine-1"), "clients see no address"
    engine.go_by(EngineEntry(url="http://10.0.0.1:8000", name="left"))
    assert (engine.label, engine.name) == ("left", "left")
    assert fleet.named("left") is fleet.named("10.0.0.1:8000") is engine
    assert fleet.named("right") is None
