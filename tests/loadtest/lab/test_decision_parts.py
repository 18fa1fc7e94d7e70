"""Parts of a decision that callgrind counts: each call goes its whole way, in as few frames as calls come at once."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.lab.cost.decision_parts import PARTS, Decisions


@pytest.mark.parametrize(("at_once", "frames"), [(1, 16), (8, 2)])
def test_each_part_ends_its_calls_and_holds_nothing(at_once: int, frames: int) -> None:
    async def body() -> None:
        decisions = Decisions()
        await decisions.begin()
        (engine,) = decisions.gateway.fleet
        for name in PARTS:
            await (await decisions.part(name, 8, at_once))()
            assert engine.held == 0
            assert engine.prefixes or name == "loop"  # a prompt was read
        assert len(decisions.sent) == frames  # a question and an end
        (*_, replayed) = sorted(decisions.hub.sessions, key=lambda session: session.number)
        assert (replayed.number, replayed.calls, len(replayed._ended)) == (2, {}, 8)
        await decisions.aclose()

    asyncio.run(body())
