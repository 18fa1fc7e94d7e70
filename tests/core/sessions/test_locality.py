"""Locality of sessions: who waits for its engine, who leaves room for others, and who goes before its turn."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from gateway.core.engines.choice import Choice
from gateway.core.engines.fleet import Engine
from gateway.core.policy.policy import Policy, Routing
from gateway.core.policy.sessions import SessionsPolicy
from gateway.core.request.call import Call
from gateway.core.sessions.locality import MOST_AHEAD, Aside, choose_for_session, seconds_ahead
from gateway.core.sessions.memory import SessionMemory
from tests.calls import a_call

NOW = 100.0
SESSIONS = SessionsPolicy()
PREFIX = tuple(range(100))


def an_engine(id: str, *, held: int = 0, slots: int = 256, knows: bool = False) -> Engine:
    made = Engine(id, f"http://{id}", Policy(sessions=SESSIONS), capacity=100_000, max_concurrency=slots)
    made.health(True, 0.0)
    if held:
        made.hold(held, 0, NOW)
    if knows:
        made.remember(PREFIX, 40_000, NOW - 1.0)
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
    assert decided(engines) == "aside"  # 40,000 tokens at 10,000 a second, ten times
    assert decided(engines, waited=39.5) == "aside"
    assert decided(engines, waited=40.0) == "other"
    long = a_turn(70_000)
    assert decided(engines, long, waited=59.9) == "aside"
    assert decided(engines, long, waited=60.0) == "other", "never longer than a minute"
    assert decided(engines, a_turn(800)) == "home"
    assert decided([an_engine("home", held=1, slots=1, knows=True), an_engine("other")], a_turn(8000)) == "other"


@pytest.mark.parametrize("limit", ["ttft_by", "deadline"])
def test_it_does_not_wait_until_it_would_be_too_late_anywhere(limit: str) -> None:
    engines = [an_engine("home", held=60_000, knows=True), an_engine("other")]
    reading = 40_000 / 10_000
    in_time = structs.replace(a_turn(), **{limit: NOW + 2.0 * reading + 2.0})
    late = structs.replace(a_turn(), **{limit: NOW + 2.0 * reading + 0.5})
    assert (decided(engines, in_time), decided(engines, late)) == ("aside", "other")


def kept_on(engine: str, tokens: int) -> SessionMemory:
    """Sessions that keep so many tokens on the engine."""
    sessions = SessionMemory(SESSIONS)
    for prefix in ((1,), (1, 2)):
        mine = a_call(prefix=prefix, tenant="t")
        sessions.arrive(mine, NOW)
        sessions.ended(mine, engine, tokens, NOW)
    return sessions


def test_a_stranger_does_not_leave_room_until_it_would_be_too_late() -> None:
    engine, late = an_engine("a", held=20_000), structs.replace(a_turn(31_000), ttft_by=NOW + 4.0)
    assert decided([engine], a_turn(31_000), kept_on("a", 50_000)) == "aside"
    assert decided([engine], late, kept_on("a", 50_000)) == "a"


def test_an_engine_that_knows_a_call_is_not_passed_over_for_its_load() -> None:
    engines = [an_engine("home", held=30_000, knows=True), an_engine("other")]
    assert decided(engines) == "home"
    assert decided([an_engine("home", held=30_000), an_engine("other")]) == "other"


def test_a_stranger_leaves_room_for_sessions_that_are_expected_and_for_what_they_grow_by() -> None:
    sessions, engine = kept_on("a", 40_000), an_engine("a", held=20_000)
    call, more = a_turn(15_000), a_turn(15_001)
    assert decided([engine], call, sessions) == "a"
    assert decided([engine], more, sessions) == "aside"
    assert decided([engine, an_engine("b")], more, sessions) == "b"
    assert decided([engine], more, sessions, waited=10.0 * more.cost / 10_000) == "a"
    assert decided([engine], a_turn(90_000), sessions) == "no room"
    assert decided([engine], a_turn(90_000), sessions, waited=1000.0) == "no room"


def test_a_stranger_may_have_all_of_an_engine_that_nobody_uses() -> None:
    nobody = SessionMemory(SESSIONS)
    assert decided([an_engine("a")], a_turn(80_000), nobody) == "a"
    assert decided([an_engine("a", held=1)], a_turn(75_000), nobody) == "aside"
    assert decided([an_engine("a")], a_turn(75_000), kept_on("a", 1)) == "aside"


def test_a_session_that_has_lost_its_cache_waits_longer_than_a_stranger() -> None:
    sessions, engine = SessionMemory(SESSIONS), an_engine("a", held=70_000)
    first, again = a_call(prefix=(1,), prompt_tokens=10_000), a_turn(10_000)
    first.arrived, first.deadline = NOW, NOW + 600.0
    again.prefix = (1, 2)
    for call in (first, again):
        sessions.arrive(call, NOW)
    assert decided([engine], a_turn(10_000), sessions, waited=11.0) == "a"
    assert decided([engine], again, sessions, waited=11.0) == "aside"
    assert decided([engine], again, sessions, waited=MOST_AHEAD) == "a"


def test_calls_go_before_their_turn_by_what_a_cache_saves() -> None:
    engines, sessions = [an_engine("home", knows=True)], SessionMemory(SESSIONS)
    saved = 40_000 * 100 / 101 / 10_000
    assert seconds_ahead(sessions, engines, a_turn(), NOW) == pytest.approx(10.0 * saved, rel=0.01)
    assert seconds_ahead(sessions, [an_engine("other")], a_turn(), NOW) == 0.0
    engines[0].remember(PREFIX, 80_000, NOW - 1.0)
    assert seconds_ahead(sessions, engines, a_turn(80_000), NOW) == MOST_AHEAD
