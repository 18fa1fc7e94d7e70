"""Transition table of a client connection."""

from __future__ import annotations

import pytest

from gateway.relay.wire.states import ANSWER, BODY, CLOSED, HEAD, LINGER, TRANSITIONS, after


def test_a_connection_that_has_ended_serves_nothing_more() -> None:
    for state in (LINGER, CLOSED):
        assert set(TRANSITIONS[state].values()) == {CLOSED}


@pytest.mark.parametrize("state", TRANSITIONS)
def test_every_state_may_lose_its_client(state: int) -> None:
    assert {TRANSITIONS[state][event] for event in ("close", "reset", "lost")} == {CLOSED}


def test_a_column_has_what_the_table_has() -> None:
    assert dict(after("call")) == {HEAD: ANSWER, BODY: ANSWER}
    with pytest.raises(KeyError):
        after("answer")[HEAD]
