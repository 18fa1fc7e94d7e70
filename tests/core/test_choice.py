"""Which engine, and why."""

from __future__ import annotations

import random

import pytest

from gateway.core.call import Call
from gateway.core.choice import SCAN_AT_MOST, Choice, cached_tokens, choose, predicted_ttft
from gateway.core.fleet import Engine
from gateway.core.policy import Policy, Routing
from tests.calls import a_call

POLICY = Policy()
NOW = 1000.0


def engine(id: str, held: int = 0, up_since: float = 0.0) -> Engine:
    made = Engine(id, f"http://{id}", POLICY, capacity=100_000)
    made.health(True, up_since - 100.0)
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


def test_a_cached_prefix_wins_while_it_is_worth_more_than_the_queue() -> None:
    prefix = tuple(range(20))
    for queued, winner in ((0, "warm"), (500, "warm"), (3000, "cold")):
        warm, cold = engine("warm"), engine("cold")
        warm.remember(prefix, NOW - 1)
        if queued:
            warm.hold(queued, queued, NOW)
        choice = chosen([warm, cold], call(1000, prefix))
        assert id_of(choice) == winner, queued


def test_affinity_can_be_turned_off() -> None:
    warm, cold = engine("warm", 100), engine("cold")
    warm.remember((1, 2), NOW)
    choice = choose([warm, cold], call(1000, (1, 2)), NOW, routing=Routing(affinity="none"), rng=random.Random(5))
    assert id_of(choice) == "cold"
    assert choice is not None
    assert choice.cached == 0


def test_the_imbalance_guard_passes_over_the_popular_engine() -> None:
    prefix = tuple(range(50))
    popular, others = engine("popular", 60_000), [engine(f"e{i}", 1000) for i in range(3)]
    popular.remember(prefix, NOW)
    popular.prefill_queued = 0
    assert id_of(chosen([popular, *others], call(1000, prefix))) != "popular"


def test_cached_tokens_never_claim_the_whole_prompt() -> None:
    e = engine("a")
    e.remember((1, 2, 3), NOW)
    assert cached_tokens(e, call(800, (1, 2, 3)), NOW) == 600
    assert cached_tokens(e, call(800, (1, 9, 3)), NOW) == 200
    assert cached_tokens(e, call(800), NOW) == 0


def test_down_draining_and_full_engines_are_not_chosen() -> None:
    down, draining, full = engine("down"), engine("draining"), engine("full", 79_500)
    down.down()
    draining.draining = True
    assert chosen([down, draining, full]) is None
    assert id_of(chosen([down, draining, full, engine("open", 70_000)])) == "open"


def test_an_engine_that_failed_this_call_is_used_again_only_where_no_other_is_up() -> None:
    a, b = engine("a"), engine("b", 50_000)
    assert id_of(chosen([a, b], exclude=frozenset("a"))) == "b"
    b.down()
    assert id_of(chosen([a, b], exclude=frozenset("a"))) == "a"
    c = engine("c", 79_900)
    assert chosen([a, c], exclude=frozenset("a")) is None, "another is up but full: wait for it"


def test_an_engine_just_back_counts_as_slower_and_ramps_linearly() -> None:
    e = engine("a")
    settled = predicted_ttft(e, 1000, NOW, 30.0)
    e.back_at = NOW
    assert predicted_ttft(e, 1000, NOW, 30.0) == pytest.approx(11 * settled)
    assert predicted_ttft(e, 1000, NOW + 15, 30.0) == pytest.approx(6 * settled)
    assert predicted_ttft(e, 1000, NOW + 30, 30.0) == pytest.approx(settled)


def test_a_large_fleet_is_sampled() -> None:
    engines = [engine(f"e{i}") for i in range(SCAN_AT_MOST * 3)]
    rng = random.Random(2)
    seen = {id_of(choose(engines, call(), NOW, routing=Routing(), rng=rng)) for _ in range(300)}
    assert len(seen) > SCAN_AT_MOST
