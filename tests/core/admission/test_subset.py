"""Calls that may go to some engines only: which they get, who passes them, and when nobody is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from loadtest.simulate import vtime
from tests.calls import a_call
from tests.flow.test_dispatch import World

ANY = TrafficClass(ttft=None, deadline=600.0)
POLICY = Policy(classes={"default": ANY, "other": ANY}, service_tiers={})
LARGE, REST = 91_000, 10_000  # tokens: beside the one there is no room for the other, which is not large


class Subsets(World):
    """Two engines of 100,000 tokens, that take prompts of up to 92,000."""

    def __init__(self) -> None:
        super().__init__(engines=2, capacity=100_000, policy=POLICY)

    def asked(self, *ids: str, tokens: int = 1000, class_name: str = "default") -> Call:
        now = self.loop.time()
        call = a_call(prompt_tokens=tokens, arrived=now, deadline=now + 600.0, class_name=class_name)
        call.subset = frozenset(ids)
        return call

    async def run(self, call: Call, seconds: float = 0.0) -> str:
        with await self.dispatch.ask(call) as grant:
            await asyncio.sleep(seconds)
            return grant.engine.id


def virtual(scenario: Callable[[Subsets], Awaitable[Any]]) -> None:
    async def main() -> None:
        made = Subsets()
        await scenario(made)
        made.idle()

    vtime.run(main())


def test_a_call_gets_only_an_engine_of_its_subset() -> None:
    async def scenario(made: Subsets) -> None:
        for id in ("e0", "e1") * 10:
            assert await made.run(made.asked(id)) == id

    virtual(scenario)


def test_others_pass_a_call_whose_subset_is_full() -> None:
    async def scenario(made: Subsets) -> None:
        first = asyncio.create_task(made.run(made.asked("e0", tokens=LARGE, class_name="other"), 5.0))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(made.run(made.asked("e0", tokens=REST), 1.0))
        await asyncio.sleep(0.1)
        assert await made.run(made.asked("e0", "e1", tokens=REST, class_name="other")) == "e1"
        assert made.loop.time() < 5.0
        assert not second.done()
        assert [await first, await second] == ["e0", "e0"]

    virtual(scenario)


@pytest.mark.parametrize("subset", [(), ("elsewhere",)])
def test_without_an_engine_in_it_the_call_is_refused(subset: tuple[str, ...]) -> None:
    async def scenario(made: Subsets) -> None:
        with pytest.raises(Refused, match="No engine that serves") as refused:
            await made.run(made.asked(*subset))
        assert refused.value.outcome is Outcome.NO_ENGINE

    virtual(scenario)


def test_a_call_that_waits_is_refused_once_its_subset_is_down() -> None:
    async def scenario(made: Subsets) -> None:
        first = asyncio.create_task(made.run(made.asked("e0", tokens=LARGE), 5.0))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(made.run(made.asked("e0", tokens=LARGE)))
        await asyncio.sleep(0.1)
        made.engine(0).draining = True
        made.dispatch.changed(made.engine(0))
        with pytest.raises(Refused, match="No engine that serves") as refused:
            await second
        assert refused.value.outcome is Outcome.NO_ENGINE
        await first

    virtual(scenario)


def test_others_pass_a_call_that_only_an_engine_which_is_gone_could_hold() -> None:
    async def scenario(made: Subsets) -> None:
        made.engine(0).ledger.capacity = 2_000_000  # so that the call is not `large`
        made.engine(0).down()
        huge = a_call(prompt_tokens=150_000, arrived=made.loop.time(), deadline=made.loop.time() + 600.0)
        waits = asyncio.create_task(made.run(huge))
        await asyncio.sleep(0.1)
        small = a_call(prompt_tokens=1000, arrived=made.loop.time(), deadline=made.loop.time() + 600.0)
        assert await made.run(small) == "e1"
        assert made.loop.time() < 1.0
        with pytest.raises(Refused, match=r"of 2: 1 down"):
            await waits
        assert 300.0 < made.loop.time() < 302.0

    virtual(scenario)
