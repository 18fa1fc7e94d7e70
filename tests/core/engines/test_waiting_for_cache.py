"""Calls that wait for the full engine that has their prompt, although another has room."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from gateway.core.engines.choice import SCAN_AT_MOST, choose, worth_waiting
from gateway.core.engines.engine import Engine
from gateway.core.policy.policy import Policy, Routing
from gateway.core.request.call import Call
from tests.calls import a_call

NOW = 100.0
PREFIX = tuple(range(100))


def an_engine(id: str, *, held: int = 0, slots: int = 256, cached: bool = False) -> Engine:
    """An engine of 100,000 tokens, of which 80,000 may be promised, that reads 10,000 a second."""
    made = Engine(id, f"http://{id}", Policy(), capacity=100_000, max_concurrency=slots)
    made.check(True, 0.0)
    if held:
        made.hold(held, 0, NOW)
    if cached:
        made.remember(PREFIX, 40_000, NOW - 1.0)
    return made


def a_turn(tokens: int = 40_000, **fields: Any) -> Call:
    return a_call(prefix=PREFIX, prompt_tokens=tokens, arrived=NOW, deadline=NOW + 600.0, **fields)


def decided(engines: list[Engine], call: Call | None = None, waited: float = 0.0, failed: str = "") -> str:
    call = call or a_turn()
    found = choose(engines, call, NOW, routing=Routing(), rng=random.Random(1), exclude=frozenset([failed]))
    if found is None:
        return "no room"
    return "aside" if worth_waiting(call, found, NOW, waited) else found.engine.id


def test_a_call_waits_for_the_engine_that_has_its_prompt_by_what_reading_anew_would_take() -> None:
    engines = [an_engine("home", held=60_000, cached=True), an_engine("other")]
    assert decided(engines) == "aside"  # nearly 40,000 tokens at 10,000 a second
    assert decided(engines, waited=3.8) == "aside"
    assert decided(engines, waited=4.0) == "other"
    assert decided(engines, a_turn(800)) == "home", "it has room for that"
    full = [an_engine("home", held=1, slots=1, cached=True), an_engine("other")]
    assert decided(full, a_turn(8000)) == "aside"
    assert decided(full, a_turn(400)) == "other", "what it would be spared is not worth a wait"


def test_a_call_waits_no_longer_than_the_engine_with_room_would_read() -> None:
    slow, fast = an_engine("home", held=60_000, cached=True), an_engine("other")
    slow.speed.prefill_rate, fast.speed.prefill_rate = 1000.0, 40_000.0
    assert decided([slow, fast], waited=0.5) == "aside", "of 40,000 tokens it has all but 400"
    assert decided([slow, fast], waited=1.0) == "other", "it has read them by then, and the slow one 400"


def test_no_call_waits_where_no_engine_has_its_prompt_or_none_has_room() -> None:
    assert decided([an_engine("full", held=60_000), an_engine("other")]) == "other"
    assert decided([an_engine("home", held=60_000, cached=True), an_engine("full", held=60_000)]) == "no room"
    assert decided([an_engine("home", held=60_000, cached=True), an_engine("other", cached=True)]) == "other"
    engines = [an_engine("home", held=60_000, cached=True), an_engine("other")]
    assert decided(engines, structs.replace(a_turn(), prefix=())) == "other", "its prompt has no block"


def test_no_call_waits_for_an_engine_that_has_room_and_too_much_to_read() -> None:
    home = an_engine("home", cached=True)
    home.hold(50_000, 50_000, NOW)
    assert decided([home, an_engine("other")], a_turn(8000)) == "other", "it is read there in 0.8 s, at home after 5"


def test_no_call_waits_for_an_engine_that_has_failed_it() -> None:
    engines = [an_engine("home", held=60_000, cached=True), an_engine("full", held=60_000), an_engine("other")]
    assert decided(engines) == "aside"
    assert decided(engines, failed="home") == "other"


@pytest.mark.parametrize(("others", "there"), [(SCAN_AT_MOST - 1, "aside"), (SCAN_AT_MOST, "other")])
def test_no_call_waits_in_a_fleet_that_is_sampled(others: int, there: str) -> None:
    """The next look would sample other engines: the call would have waited for nothing."""
    fleet = [an_engine("other") for _ in range(others)] + [an_engine("home", held=60_000, cached=True)]
    assert decided(fleet) == there


@pytest.mark.parametrize("limit", ["ttft_by", "deadline"])
def test_no_call_waits_until_its_first_token_would_be_too_late_anywhere(limit: str) -> None:
    engines = [an_engine("home", held=60_000, cached=True), an_engine("other")]
    reading = 40_000 / 10_000
    in_time = structs.replace(a_turn(), **{limit: NOW + 2.0 * reading + 2.0})
    late = structs.replace(a_turn(), **{limit: NOW + 2.0 * reading + 0.5})
    assert (decided(engines, in_time), decided(engines, late)) == ("aside", "other")
