"""Room kept for sessions on an engine that has evicted what it was kept for."""

from __future__ import annotations

import pytest

from gateway.core.engines.fleet import Engine
from gateway.core.policy.policy import Policy
from gateway.core.policy.sessions import SessionsPolicy
from gateway.core.sessions.memory import SessionMemory
from tests.calls import a_call

SESSIONS = SessionsPolicy()


def an_engine(id: str = "e") -> Engine:
    made = Engine(id, f"http://{id}", Policy(sessions=SESSIONS), capacity=1000)
    made.health(True, 0.0)
    return made


def served(made: SessionMemory, engine: Engine, prefix: tuple[int, ...], now: float) -> None:
    """A call of 200 tokens comes, is given the engine, and is answered."""
    call = a_call(prefix=prefix)
    made.arrive(call, now)
    made.granted(call)
    engine.remember(call.prefix, 200, now)
    made.ended(call, engine.id, 200, now)


@pytest.mark.parametrize("waits", [False, True])
def test_what_an_engine_has_evicted_is_kept_no_longer(waits: bool) -> None:
    made, engine = SessionMemory(SESSIONS), an_engine()
    stranger = a_call(prefix=(9,))
    for conversation, at in ((1, 10.0), (2, 11.0)):
        served(made, engine, (conversation,), at)
        served(made, engine, (conversation, 10 * conversation), at + 8.0)
    if waits:
        made.arrive(a_call(prefix=(1, 10, 100)), 19.5)
    made.advance(20.0, [engine])
    assert made.spoken_for("e", 1000, stranger) == 400
    blocks = 200
    engine.remember(tuple(range(1000, 1000 + blocks)), 1000, 20.0)  # more than it can have cached
    made.advance(20.0)
    assert made.spoken_for("e", 1000, stranger) == 400
    made.advance(20.0, [an_engine("other"), engine])
    assert made.spoken_for("e", 1000, stranger) == 0


def test_calls_without_a_conversation_leave_nothing() -> None:
    made, engine = SessionMemory(SESSIONS), an_engine()
    served(made, engine, (), 1.0)
    assert not engine.prefixes.blocks
    assert made.spoken_for("e", 1000, a_call(prefix=(9,))) == 0
