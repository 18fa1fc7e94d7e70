"""Belief in what an engine has cached, by the conversations that were there and by what is in use."""

from __future__ import annotations

from math import inf

import pytest

from gateway.core.engines.choice import Choice
from gateway.core.engines.fleet import Engine
from gateway.core.engines.lru import LruEstimate
from gateway.core.policy.policy import Policy
from gateway.core.policy.sessions import SessionsPolicy
from gateway.core.request.call import Call
from gateway.core.sessions.memory import SessionMemory
from gateway.shared.vllm.answers import EngineSample
from tests.calls import a_call

SESSIONS = SessionsPolicy()


def test_what_was_used_longest_ago_is_evicted_first_and_stays_so() -> None:
    lru = LruEstimate()
    assert lru.trusted_since(5.0) == 5.0
    for name, at in (("a", 10.0), ("b", 20.0), ("c", 30.0)):
        lru.leave(name, 100, at)
    lru.fit(300)
    assert (lru.tokens, lru.trusted_since(5.0)) == (300, 5.0)
    lru.fit(299)
    assert lru.tokens == 200
    assert 10.0 < lru.trusted_since(5.0) < 20.0
    lru.fit(1000)
    assert lru.cut == 10.0
    assert lru.use("a") == 0
    lru.leave("b", 150, 40.0)
    lru.fit(200)
    assert lru.cut == 30.0, "b was used again after c"
    assert lru.use("b") == 150
    lru.fit(0)
    assert (lru.tokens, lru.cut) == (0, 30.0)


def an_engine(id: str = "e") -> Engine:
    made = Engine(id, f"http://{id}", Policy(sessions=SESSIONS), capacity=1000)
    made.health(True, 0.0)
    return made


def used(engine: Engine, share: float, now: float) -> None:
    engine.sampled(EngineSample(running=0, waiting=0, kv_usage=share), now)


def served(made: SessionMemory, engine: Engine, call: Call, now: float, tokens: int, cached: int = 0) -> Call:
    """The call comes, is given the engine, and is answered."""
    made.arrive(call, now)
    made.granted(call, Choice(engine, 1, cached, 0.0))
    engine.remember(call.prefix, now)
    made.cached(call, engine, tokens, now)
    return call


def test_an_engine_believes_its_cache_by_what_its_samples_leave_room_for() -> None:
    made, engine = SessionMemory(SESSIONS), an_engine()
    one = served(made, engine, a_call(prefix=(1, 2)), 10.0, 400)
    two = served(made, engine, a_call(prefix=(3, 4)), 20.0, 400)
    used(engine, 0.2, 21.0)
    assert [engine.cached_blocks(call.prefix, 21.0) for call in (one, two)] == [2, 2]
    used(engine, 0.5, 22.0)
    used(engine, 0.0, 23.0)
    assert [engine.cached_blocks(call.prefix, 23.0) for call in (one, two)] == [0, 2]
    engine.forget_cache()
    assert engine.lru is not None
    assert (engine.lru.tokens, engine.lru.cut) == (0, -inf)
    engine.apply(Policy())
    assert engine.lru is None
    assert not engine.evicts


def test_without_samples_no_more_is_believed_cached_than_fits() -> None:
    made, engine = SessionMemory(SESSIONS), an_engine()
    for at in range(3):
        served(made, engine, a_call(prefix=(at,)), float(at), 400)
    assert engine.lru is not None
    assert engine.lru.cut == 0.0


def test_what_conversations_share_counts_for_the_first_of_them() -> None:
    made, engine, other = SessionMemory(SESSIONS), an_engine(), an_engine("other")
    assert engine.lru is not None
    assert other.lru is not None
    served(made, engine, a_call(prefix=(0, 1)), 1.0, 300)
    served(made, engine, a_call(prefix=(0, 2)), 2.0, 300, cached=100)
    assert engine.lru.tokens == 500
    served(made, engine, a_call(prefix=(0, 2, 3)), 3.0, 350, cached=290)
    assert engine.lru.tokens == 550, "what it had itself is not shared"
    served(made, other, a_call(prefix=(0, 2, 3, 4)), 4.0, 400)
    assert other.lru.tokens == 400
    served(made, engine, a_call(prefix=(0, 2, 3, 4, 5)), 5.0, 450, cached=350)
    assert engine.lru.tokens == 300 + 350, "of what is cached 250 are its own"


@pytest.mark.parametrize("waits", [False, True])
def test_what_an_engine_has_evicted_is_kept_no_longer(waits: bool) -> None:
    made, engine = SessionMemory(SESSIONS), an_engine()
    stranger = a_call(prefix=(9,))
    for conversation, at in ((1, 10.0), (2, 11.0)):
        served(made, engine, a_call(prefix=(conversation,)), at, 200)
        served(made, engine, a_call(prefix=(conversation, 10 * conversation)), at + 8.0, 200)
    if waits:
        made.arrive(a_call(prefix=(1, 10, 100)), 19.5)
    made.advance(20.0, [engine])
    assert made.spoken_for("e", 1000, stranger) == 400
    used(engine, 0.7, 20.0)
    made.advance(20.0)
    assert made.spoken_for("e", 1000, stranger) == 400
    made.advance(20.0, [an_engine("other"), engine])
    assert made.spoken_for("e", 1000, stranger) == 200
    used(engine, 1.0, 20.0)
    made.advance(20.0, [engine])
    assert made.spoken_for("e", 1000, stranger) == 0


def test_calls_without_a_conversation_leave_nothing() -> None:
    made, engine = SessionMemory(SESSIONS), an_engine()
    served(made, engine, a_call(prefix=()), 1.0, 400)
    assert engine.lru is not None
    assert engine.lru.tokens == 0
    plain = Engine("p", "http://p", Policy(), capacity=1000)
    served(made, plain, a_call(prefix=(1,)), 1.0, 400)
    served(made, plain, a_call(prefix=(1, 2)), 2.0, 400)
    made.advance(3.0, [plain])
    assert made.spoken_for("p", 1000, a_call(prefix=(9,))) == 400
