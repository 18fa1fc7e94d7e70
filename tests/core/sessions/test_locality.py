"""Locality of sessions: who waits for its engine, who leaves room for others, and who goes before its turn."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from gateway.core.engines.choice import Choice, leaves
from gateway.core.engines.fleet import Engine
from gateway.core.engines.turnover import REMEMBERED, Turnover
from gateway.core.policy.policy import Policy, Routing
from gateway.core.policy.sessions import SessionsPolicy
from gateway.core.request.call import Call
from gateway.core.sessions.locality import Aside, choose_for_session, seconds_ahead
from gateway.core.sessions.memory import SessionMemory
from tests.calls import a_call

NOW = 100.0
SESSIONS = SessionsPolicy(head_start=4.0)
PREFIX = tuple(range(100))


def an_engine(id: str, *, held: int = 0, slots: int = 256, knows: bool = False) -> Engine:
    made = Engine(id, f"http://{id}", Policy(sessions=SESSIONS), capacity=100_000, max_concurrency=slots)
    made.health(True, 0.0)
    if held:
        made.hold(held, 0, NOW)
    if knows:
        made.remember(PREFIX, NOW - 1.0)
    return made


def a_turn(tokens: int = 40_000, **fields: Any) -> Call:
    return a_call(prefix=PREFIX, prompt_tokens=tokens, arrived=NOW, deadline=NOW + 600.0, **fields)


def decided(engines: list[Engine], call: Call | None = None, sessions: SessionMemory | None = None, **more: Any) -> str:
    found = choose_for_session(
        SessionMemory(SESSIONS) if sessions is None else sessions, engines, call or a_turn(), NOW,
        routing=Routing(), rng=random.Random(1), **more,
    )  # fmt: skip
    return found.engine.id if isinstance(found, Choice) else "aside" if isinstance(found, Aside) else "no room"


def test_a_call_waits_for_the_engine_that_knows_it_by_what_reading_anew_would_take() -> None:
    engines = [an_engine("home", held=60_000, knows=True), an_engine("other")]
    assert decided(engines) == "aside"  # 40,000 tokens at 10,000 a second, four times
    assert decided(engines, waited=15.8) == "aside"
    assert decided(engines, waited=16.0) == "other"
    short = SessionMemory(SessionsPolicy(head_start=4.0, most_ahead=5.0))
    assert decided(engines, sessions=short, waited=4.9) == "aside"
    assert decided(engines, sessions=short, waited=5.0) == "other"
    assert decided(engines, a_turn(800)) == "home"
    assert decided([an_engine("home", held=1, slots=1, knows=True), an_engine("other")], a_turn(8000)) == "other"


@pytest.mark.parametrize("limit", ["ttft_by", "deadline"])
def test_it_does_not_wait_until_it_would_be_too_late_anywhere(limit: str) -> None:
    engines = [an_engine("home", held=60_000, knows=True), an_engine("other")]
    reading = 40_000 / 10_000
    in_time = structs.replace(a_turn(), **{limit: NOW + 2.0 * reading + 2.0})
    late = structs.replace(a_turn(), **{limit: NOW + 2.0 * reading + 0.5})
    assert (decided(engines, in_time), decided(engines, late)) == ("aside", "other")


def test_a_stranger_does_not_leave_room_until_it_would_be_too_late() -> None:
    sessions = SessionMemory(SESSIONS)
    for prefix in ((1,), (1, 2)):
        mine = a_call(prefix=prefix, tenant="t")
        sessions.arrive(mine, NOW)
        sessions.ended(mine, "a", 50_000, NOW)
    engine, late = an_engine("a", held=20_000), structs.replace(a_turn(31_000), ttft_by=NOW + 4.0)
    assert decided([engine], a_turn(31_000), sessions) == "aside"
    assert decided([engine], late, sessions) == "a"


def test_an_engine_that_knows_a_call_is_not_passed_over_for_its_load() -> None:
    engines = [an_engine("home", held=30_000, knows=True), an_engine("other")]
    assert decided(engines) == "home"
    assert decided([an_engine("home", held=30_000), an_engine("other")]) == "other"


def test_a_stranger_leaves_room_for_sessions_that_are_expected() -> None:
    sessions = SessionMemory(SESSIONS)
    for prefix in ((1,), (1, 2)):
        mine = a_call(prefix=prefix, tenant="t")
        sessions.arrive(mine, NOW)
        sessions.ended(mine, "a", 50_000, NOW)
    engine = an_engine("a", held=20_000)
    assert decided([engine], a_turn(30_000), sessions) == "a"
    assert decided([engine], a_turn(31_000), sessions) == "aside"
    assert decided([engine, an_engine("b")], a_turn(31_000), sessions) == "b"
    patience = 4.0 * 31_000 / 10_000
    assert decided([engine], a_turn(31_000), sessions, waited=patience) == "a"
    assert decided([engine], a_turn(90_000), sessions) == "no room"
    assert decided([engine], a_turn(90_000), sessions, waited=1000.0) == "no room"
    assert leaves(engine, 90_000, 0), "nobody is expected: the ledger alone decides"


def test_calls_go_before_their_turn_by_what_a_cache_saves() -> None:
    engines, sessions = [an_engine("home", knows=True)], SessionMemory(SESSIONS)
    saved = 40_000 * 100 / 101 / 10_000
    assert seconds_ahead(sessions, engines, a_turn(), NOW) == pytest.approx(4.0 * saved, rel=0.01)
    assert seconds_ahead(sessions, [an_engine("other")], a_turn(), NOW) == 0.0
    sessions.policy = SessionsPolicy(most_ahead=3.0)
    assert seconds_ahead(sessions, engines, a_turn(), NOW) == 3.0
    sessions.policy = SessionsPolicy(order="arrival")
    assert seconds_ahead(sessions, engines, a_turn(), NOW) == 0.0


def test_sessions_that_were_served_more_go_later() -> None:
    sessions = SessionMemory(SessionsPolicy(order="least_served", head_start=4.0, most_ahead=10.0))
    engines = [an_engine("a")]
    call = a_turn(session=5)
    assert seconds_ahead(sessions, engines, call, NOW) == 0.0
    sessions.arrive(call, NOW)
    sessions.ended(call, "a", 20_000, NOW)
    assert seconds_ahead(sessions, engines, call, NOW) == -8.0
    sessions.ended(call, "a", 20_000, NOW)
    assert seconds_ahead(sessions, engines, call, NOW) == -10.0


def test_what_was_used_is_trusted_until_as_much_was_read_since() -> None:
    turnover = Turnover()
    assert turnover.trusted_since(100, 5.0) == 5.0
    for at in (10.0, 20.0, 30.0):
        turnover.allocated(100, at)
    assert turnover.trusted_since(300, 5.0) == 5.0
    assert turnover.trusted_since(200, 5.0) == 20.0
    assert turnover.trusted_since(150, 5.0) == 30.0
    assert turnover.trusted_since(0, 5.0) == turnover.trusted_since(-9, 5.0) == 30.0
    for number in range(2 * REMEMBERED):
        turnover.allocated(1, 100.0 + number)
    assert turnover.trusted_since(10, 5.0) == 100.0 + 2 * REMEMBERED - 10


def test_an_engine_believes_its_cache_by_its_turnover() -> None:
    engine = an_engine("a", knows=True)
    assert engine.cached_blocks(PREFIX, NOW) == 100
    assert engine.turnover is not None
    engine.turnover.allocated(60_000, NOW)
    engine.turnover.allocated(60_000, NOW + 1.0)
    assert engine.cached_blocks(PREFIX, NOW + 1.0) == 0
    engine.forget_cache()
    assert engine.turnover.total == 0
    engine.apply(Policy())
    assert engine.turnover is None
    assert not engine.evicts
