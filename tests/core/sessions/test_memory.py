"""Memory of sessions: which conversation a call goes on with, what is kept for it, and bounds for tenants."""

from __future__ import annotations

import pytest

from gateway.core.policy.sessions import SessionsPolicy
from gateway.core.request.call import Call
from gateway.core.sessions import memory
from gateway.core.sessions.memory import SessionMemory
from tests.calls import a_call

POLICY = SessionsPolicy(keep=10.0)


def a_turn(*prefix: int, tenant: str = "t", session: int = 0, tokens: int = 100) -> Call:
    return a_call(prefix=prefix, tenant=tenant, session=session, prompt_tokens=tokens, output_tokens=20)


def served(made: SessionMemory, call: Call, now: float, engine: str = "e", tokens: int = 120) -> Call:
    """The call comes, is granted at once, and ends."""
    made.arrive(call, now)
    made.granted(call)
    made.ended(call, engine, tokens, now)
    return call


def kept(made: SessionMemory, call: Call | None = None, engine: str = "e", share: int = 10_000) -> int:
    return made.spoken_for(engine, share, call or a_turn(99))


def test_a_growing_prefix_is_one_session() -> None:
    made = SessionMemory(POLICY)
    first = served(made, a_turn(1, 2), 0.0)
    second = served(made, a_turn(1, 2, 3, 4), 5.0)
    other = served(made, a_turn(1, 5), 5.0)
    assert first.session == second.session != other.session
    assert len(made) == 2


def test_sub_agents_share_the_session_that_they_name() -> None:
    made = SessionMemory(POLICY)
    agent, sub = served(made, a_turn(1, 2, session=7), 0.0), served(made, a_turn(1, 3, session=7), 1.0)
    more = served(made, a_turn(1, 3, 4), 2.0)
    assert agent.session == sub.session == more.session == 7
    assert len(made) == 2


def test_a_cache_is_kept_for_those_that_came_back_and_not_for_long() -> None:
    made = SessionMemory(POLICY)
    served(made, a_turn(1), 0.0)
    assert kept(made) == 0, "it has never come back"
    served(made, a_turn(1, 2), 1.0)
    assert kept(made) == 120
    assert kept(made, a_turn(1, 2)) == 0, "it is its own"
    assert kept(made, engine="other") == 0
    made.advance(10.9)
    assert kept(made) == 120
    made.advance(11.0)
    assert kept(made) == 0


def test_a_cache_is_kept_on_one_engine_though_calls_of_the_branch_end_on_two() -> None:
    made = SessionMemory(POLICY)
    served(made, a_turn(1), 0.0)
    one, two = a_turn(1, 2), a_turn(1, 2)
    for call in (one, two):
        made.arrive(call, 1.0)
        made.granted(call)
    made.ended(one, "e", 120, 2.0)
    assert kept(made) == 120
    made.ended(two, "other", 130, 3.0)
    assert (kept(made), kept(made, engine="other")) == (0, 130)


def test_a_cache_is_kept_while_its_next_call_waits() -> None:
    made = SessionMemory(POLICY)
    served(made, a_turn(1), 0.0)
    served(made, a_turn(1, 2), 1.0)
    waiting = a_turn(1, 2, 3)
    made.arrive(waiting, 2.0)
    made.advance(100.0)
    assert kept(made) == 120
    made.left(waiting)
    made.left(waiting)
    assert kept(made) == 0


def test_the_time_is_learned_and_has_a_bound() -> None:
    made = SessionMemory(SessionsPolicy(keep=10.0))
    for number in range(1, 40):
        served(made, a_turn(*range(number)), 2.0 * number)
    made.advance(2.0 * 39 + 1.9)
    assert kept(made) == 120
    made.advance(2.0 * 39 + 2.1)
    assert kept(made) == 0, "nine of ten come back within 2 s"


def test_nothing_is_kept_where_the_policy_says_so() -> None:
    made = SessionMemory(SessionsPolicy(keep=0.0))
    served(made, a_turn(1), 0.0)
    served(made, a_turn(1, 2), 1.0)
    assert kept(made) == 0


def test_of_another_tenant_no_more_than_an_even_share_is_kept() -> None:
    made = SessionMemory(SessionsPolicy())
    for number in range(50):
        served(made, a_turn(1000 + number, tenant="greedy"), 0.0)
        served(made, a_turn(1000 + number, 5000 + number, tenant="greedy"), 0.1)
    assert kept(made, a_turn(1, tenant="greedy"), share=1000) == 50 * 120
    assert kept(made, a_turn(1, tenant="modest"), share=1000) == 500
    served(made, a_turn(1, tenant="modest"), 1.0)
    served(made, a_turn(1, 2, tenant="modest"), 29.0)
    made.advance(40.0)
    assert kept(made, a_turn(9, tenant="modest")) == 120, "the greedy one's are over"


def test_a_tenant_loses_its_own_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "OF_TENANT", 4)
    made = SessionMemory(POLICY)
    mine = served(made, a_turn(1, tenant="modest"), 0.0)
    for number in range(1000):
        served(made, a_turn(1000 + number, tenant="greedy", session=number + 1), 0.0)
    assert len(made) == 5
    again = served(made, a_turn(1, 2, tenant="modest"), 1.0)
    assert again.session == mine.session


def test_all_tenants_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BRANCHES", 6)
    made = SessionMemory(POLICY)
    for tenant in "abcdefghij":
        for number in range(3):
            served(made, a_turn(number, tenant=tenant), 0.0)
    assert len(made) == 6
    assert len(made._tenants) <= 6


def test_equal_prompts_and_forgotten_calls_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "OF_TENANT", 1)
    made = SessionMemory(SessionsPolicy())
    short = a_turn()
    made.arrive(short, 0.0)
    made.granted(short)
    made.ended(short, "e", 5, 0.0)
    assert (len(made), short.session) == (0, 0)
    first, second = a_turn(1), a_turn(1)
    made.arrive(first, 0.0)
    made.arrive(second, 0.0)
    assert len(made) == 1
    made.arrive(a_turn(2), 0.0)  # the first two are forgotten
    made.ended(first, "e", 120, 1.0)
    made.left(second)
    assert (len(made), kept(made)) == (1, 0)


def test_kept_tokens_of_a_forgotten_branch_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "OF_TENANT", 1)
    made = SessionMemory(SessionsPolicy())
    served(made, a_turn(1), 0.0)
    served(made, a_turn(1, 2), 1.0)
    assert kept(made) == 120
    served(made, a_turn(7), 1.0)
    assert kept(made) == 0
    made.advance(1000.0)
