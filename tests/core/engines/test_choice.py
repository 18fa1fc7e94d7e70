"""Choice of an engine (load balancing), with its reasons."""

from __future__ import annotations

import math
import random

import pytest

from gateway.core.engines.breaker import BreakerState, Ending
from gateway.core.engines.choice import (
    LOOKED_AT,
    SCAN_AT_MOST,
    Choice,
    cached_tokens,
    choose,
    least_ttft,
    newness,
    predicted_ttft,
    usable_of,
)
from gateway.core.engines.engine import Engine
from gateway.core.engines.ledger import FLOW
from gateway.core.engines.speed import PREFILL_RATE
from gateway.core.policy.policy import Policy, Routing
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.call import Call
from tests.calls import a_call

POLICY = Policy()
NOW = 1000.0


def engine(id: str, held: int = 0, up_since: float = 0.0) -> Engine:
    made = Engine(id, f"http://{id}", POLICY, capacity=100_000)
    made.check(True, up_since - 100.0)
    if held:
        made.hold(held, held, NOW)
    return made


def call(prompt: int = 1000, prefix: tuple[int, ...] = ()) -> Call:
    return a_call(arrived=NOW, deadline=NOW + 60, prefix=prefix, prompt_tokens=prompt)


def chosen(engines: list[Engine], made: Call | None = None, exclude: frozenset[str] = frozenset()) -> Choice | None:
    return choose(engines, made or call(), NOW, routing=Routing(), rng=random.Random(5), exclude=exclude)


def id_of(choice: Choice | None) -> str | None:
    return choice.engine.id if choice else None


def test_the_least_loaded_of_equals() -> None:
    assert id_of(chosen([engine("a", 5000), engine("b", 200), engine("c", 9000)])) == "b"


def test_an_engine_without_headroom_is_not_chosen_for_the_class_that_leaves_it() -> None:
    reading, free = engine("reading", 10_000), engine("free")
    policy = Policy(classes={"default": TrafficClass(), "batch": TrafficClass(headroom=0.5)})
    for each in (reading, free):
        each.apply(policy)
    batch = a_call(class_name="batch", arrived=NOW, deadline=NOW + 60)
    free.hold(20_000, 0, NOW)
    assert id_of(chosen([reading, free], batch)) == "free", "all its prompts are read"
    free.hold(40_000, 0, NOW)
    assert chosen([reading, free], batch) is None
    assert id_of(chosen([reading, free])) is not None


def test_a_cached_prefix_wins_while_it_is_worth_more_than_the_queue() -> None:
    prefix = tuple(range(20))
    for queued, winner in ((0, "warm"), (500, "warm"), (3000, "cold")):
        warm, cold = engine("warm"), engine("cold")
        warm.remember(prefix, 1000, NOW - 1)
        if queued:
            warm.hold(queued, queued, NOW)
        choice = chosen([warm, cold], call(1000, prefix))
        assert id_of(choice) == winner, queued


def test_a_long_prompt_goes_where_fewer_calls_wait_while_it_is_read() -> None:
    crowded, other = engine("crowded"), engine("other")
    for _ in range(20):
        crowded.hold(100, 0, NOW - 100.0)
    other.hold(300, 300, NOW - 100.0)
    for prompt, winner in ((100, "crowded"), (1000, "other")):
        assert id_of(chosen([crowded, other], call(prompt))) == winner, prompt


def test_a_cached_prefix_is_worth_more_where_caches_turn_over_whichever_engine_it_is() -> None:
    prefix = tuple(range(20))
    for turning, winner in ((None, "cold"), ("warm", "warm"), ("cold", "warm")):
        engines = {id: engine(id) for id in ("warm", "cold")}
        engines["warm"].remember(prefix, 1000, NOW - 1)
        engines["warm"].hold(1500, 1500, NOW - 100.0)
        for _ in range(10 if turning else 0):
            engines[turning or ""].hold(10_000, 0, NOW - 1.0).release()
        assert id_of(chosen(list(engines.values()), call(1000, prefix))) == winner, turning


def test_the_flow_of_tokens_falls_with_time() -> None:
    e = engine("a")
    for _ in range(10):
        e.hold(10_000, 0, NOW - 1.0).release()
    assert e.ledger.flow(NOW) == pytest.approx(100_000 / math.exp(1.0 / FLOW))
    e.hold(10_000, 0, NOW - 5000.0).release()
    assert e.ledger.flow(NOW) == pytest.approx(100_000 / math.exp(1.0 / FLOW)), "sent by an earlier decider, long ago"


def test_rates_that_differ_by_chance_count_as_equal() -> None:
    for rate, winner in ((20_000.0, "shorter"), (15_000.0, "faster"), (PREFILL_RATE, "shorter")):
        faster, shorter = engine("faster", 1200), engine("shorter", 1000)
        faster.speed.prefill_rate, shorter.speed.prefill_rate = 25_000.0, rate
        choice = chosen([faster, shorter])
        assert choice is not None
        assert choice.engine.id == winner, rate
        assert choice.ttft == predicted_ttft(choice.engine, 1000, NOW), "a prediction is by its own rate"


def test_cached_tokens_never_claim_the_whole_prompt() -> None:
    e = engine("a")
    e.remember((1, 2, 3), 800, NOW)
    assert cached_tokens(e, call(800, (1, 2, 3))) == 600
    assert cached_tokens(e, call(800, (1, 9, 3))) == 200
    assert cached_tokens(e, call(800)) == 0


def test_down_draining_and_full_engines_are_not_chosen() -> None:
    down, draining, full = engine("down"), engine("draining"), engine("full", 91_500)
    down.down()
    draining.draining = True
    assert chosen([down, draining, full]) is None
    read = engine("open")
    read.hold(70_000, 1, NOW)
    assert id_of(chosen([down, draining, full, read])) == "open"


def test_an_engine_with_half_a_second_of_prompts_to_read_is_left_until_it_has_read_them() -> None:
    slow, fast = engine("slow"), engine("fast")
    slow.speed.prefill_rate, fast.speed.prefill_rate = 1000.0, 20_000.0
    holds = [each.hold(2048, 2048, NOW) for each in (slow, fast)]
    assert slow.takes(1000, ""), "one step may wait, however slow the engine is"
    holds += [slow.hold(1, 1, NOW), fast.hold(7952, 7952, NOW)]
    assert not slow.takes(1000, "")
    assert fast.takes(1000, "")
    holds.append(fast.hold(1, 1, NOW))
    assert chosen([slow, fast]) is None
    fast.prefills.expect(holds[1], NOW + 60.0)
    assert id_of(chosen([slow, fast])) == "fast", "nothing tells in time when a whole answer's prompt is read"
    assert not slow.takes(1000, "")
    holds[0].first_byte(NOW, teach=False)
    assert slow.takes(1000, "")


def test_a_call_goes_behind_other_prompts_where_its_own_is_cached_if_that_is_sooner_than_to_read_it_anew() -> None:
    prefix = tuple(range(100))
    home, other = engine("home", 12_000), engine("other")
    home.remember(prefix, 40_000, NOW)
    assert not home.takes(1000, "")
    turn, short = call(40_000, prefix), call(5000, prefix)
    assert id_of(chosen([home, other], turn)) == "home", "12,000 tokens are ahead there, and 40,000 are to be read here"
    assert id_of(chosen([home, other], short)) == "other", "5,000 are to be read here"
    assert id_of(chosen([home, other], call(40_000))) == "other", "it has no block"
    assert id_of(chosen([home, other], call(40_000, (*prefix[:40], *range(200, 260))))) == "other", "less than half"
    assert chosen([home, engine("other", 12_000)], turn) is None, "it waits where none has room, in the classes' order"
    home.hold(60_000, 0, NOW)
    assert id_of(chosen([home, other], turn)) == "other", "the ledger has no room"


def test_an_engine_that_failed_this_call_is_used_again_only_where_no_other_is_up() -> None:
    a, b = engine("a"), engine("b", 4000)
    assert id_of(chosen([a, b], exclude=frozenset("a"))) == "b"
    b.down()
    assert id_of(chosen([a, b], exclude=frozenset("a"))) == "a"
    c = engine("c", 91_900)
    assert chosen([a, c], exclude=frozenset("a")) is None, "another is up but full: wait for it"


def test_an_engine_just_back_counts_as_slower_and_ramps_linearly() -> None:
    e = engine("a")
    e.health.back_at = NOW
    assert [newness(e, NOW + at, 30.0) for at in (-1.0, 0.0, 15.0, 30.0, 300.0)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert newness(e, NOW, 0.0) == 0.0


def test_an_engine_that_was_just_woken_gets_its_share_gradually_and_alone_all_of_it() -> None:
    new = engine("new")
    new.ready(NOW)
    for queued, winner in ((5_000, "old"), (15_000, "new")):
        old = engine("old", queued)
        assert id_of(chosen([new, old])) == winner, queued
    old = engine("old", 5_000)
    later = choose([new, old], call(), NOW + 29.0, routing=Routing(), rng=random.Random(5))
    assert id_of(later) == "new"
    alone = chosen([new])
    assert alone is not None
    assert alone.ttft == pytest.approx(new.speed.tpot + 0.1), "it is not predicted to be slower"


def test_a_large_fleet_is_sampled() -> None:
    engines = [engine(f"e{i}") for i in range(SCAN_AT_MOST * 3)]
    rng = random.Random(2)
    seen = {id_of(choose(engines, call(), NOW, routing=Routing(), rng=rng)) for _ in range(300)}
    assert len(seen) > SCAN_AT_MOST


def test_a_call_of_a_large_fleet_goes_where_its_prompt_is_cached_if_that_engine_is_among_those_it_may_have() -> None:
    engines, rng, prefix = [engine(f"e{i}") for i in range(SCAN_AT_MOST * 8)], random.Random(2), tuple(range(20))
    home = engines[77]
    home.remember(prefix, 10_000, NOW)

    def found(likely: list[Engine], among: list[Engine]) -> float:
        made = call(10_000, prefix)
        ids = [id_of(choose(among, made, NOW, routing=Routing(), rng=rng, likely=likely)) for _ in range(100)]
        return ids.count(home.id) / len(ids)

    assert found([home], engines) == 1.0
    assert found([engines[5], home], engines) == 1.0
    assert found([home], [each for each in engines if each is not home]) == 0.0, "a subset without it"
    assert found([], engines) < 0.5, "by chance"
    home.down()
    assert found([home], engines) == 0.0


def fail(engine: Engine, now: float = NOW) -> None:
    """As often as its breaker stands."""
    for _ in range(POLICY.breaker.failures):
        engine.breaker.ended(engine.breaker.sent(now), Ending.FAILURE, now)
    assert engine.breaker.state is BreakerState.OPEN


def test_usable_are_those_that_are_up_stay_and_whose_breaker_lets_a_call_through() -> None:
    a, b, c, d = (engine(id) for id in "abcd")
    assert usable_of([a, b, c, d], NOW) == [a, b, c, d]
    assert usable_of([], NOW) == []
    fail(a)
    b.draining = True
    assert usable_of([a, b, c, d], NOW) == [c, d]
    later = NOW + POLICY.breaker.open_for
    assert usable_of([a, b, c, d], later) == [a, c, d], "due for a probe"
    a.breaker.sent(later)
    assert usable_of([a, b, c, d], later) == [c, d], "its probe is on the way"


def test_with_more_than_half_open_breakers_are_ignored() -> None:
    fleet = [engine(id) for id in "abcd"]
    fail(fleet[0])
    fail(fleet[1])
    assert usable_of(fleet, NOW) == fleet[2:], "half is not more than half"
    fail(fleet[2])
    assert usable_of(fleet, NOW) == fleet
    fleet[3].down()
    assert usable_of(fleet, NOW) == fleet[:3], "but not those that are down"


def test_an_engine_whose_breaker_is_open_is_not_chosen() -> None:
    a, b, c = engine("a"), engine("b", 5000), engine("c", 5000)
    fail(a)
    assert id_of(chosen([a, b, c])) in ("b", "c")


def test_what_the_class_may_not_use_is_not_chosen() -> None:
    a, b = engine("a", 1000), engine("b", 4000)
    a.ledger._reserves = (("interactive", 0.99),)
    assert id_of(chosen([a, b])) == "b"


def test_several_gateways_take_the_better_of_two_drawn_at_random() -> None:
    fleet = [engine(f"e{number}", 1000 * number + 1) for number in range(4)]
    rng = random.Random(1)
    routing = Routing(gateways=2)
    seen = [id_of(choose(fleet, call(), NOW, routing=routing, rng=rng)) for _ in range(300)]
    assert set(seen) == {"e0", "e1", "e2"}, "the worst is never the better of two"
    assert seen.count("e0") == pytest.approx(150, abs=40), "in half of all pairs"


def test_least_ttft_is_of_the_engine_that_would_answer_first_were_there_room() -> None:
    slow, fast = engine("slow"), engine("fast", 91_900)
    slow.speed.prefill_rate, fast.speed.prefill_rate, fast.speed.tpot = 100.0, 1_000_000.0, 0.01
    ttft, reading, tpot = least_ttft([slow, fast], call(), NOW)
    assert ttft == pytest.approx(0.01 + (91_900 + 1000) / 1e6)
    assert (reading, tpot) == (0.001, 0.01)
    assert least_ttft([slow] * LOOKED_AT + [fast], call(), NOW)[1] == 10.0, "a few say enough"
    assert least_ttft([], call(), NOW) == (math.inf, 0.0, 0.0)
