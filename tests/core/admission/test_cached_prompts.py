"""Cached prompts in dispatch, in virtual time: who waits for a full engine, who passes, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.call import Call
from gateway.decider.model_waits import LOOK_AGAIN
from loadtest.simulate import vtime
from tests.calls import a_call
from tests.flow.test_dispatch import World

POLICY = Policy(classes={"default": TrafficClass(ttft=None, deadline=600.0)})
ROOT = (1, 2, 3, 4, 5, 6, 7, 8)


class Conversations(World):
    """Two engines of 100,000 tokens, of which 80,000 may be promised, and which read 10,000 a second."""

    def __init__(self, policy: Policy = POLICY) -> None:
        super().__init__(engines=2, capacity=100_000, policy=policy)

    def turn(self, *prefix: int, tokens: int = 40_000, **more: Any) -> Call:
        now = self.loop.time()
        return a_call(
            prefix=prefix,
            prompt_tokens=tokens,
            arrived=now,
            deadline=now + 600.0,
            request_id=f"r{prefix}",
            stream=True,
            **more,
        )

    async def read(self, call: Call, seconds: float = 1.0) -> str:
        """The call is granted, gets its first byte at once and ends after so many seconds."""
        with await self.dispatch.ask(call) as grant:
            grant.first_byte(self.loop.time())
            await asyncio.sleep(seconds)
            grant.finished(self.loop.time(), call.prompt_tokens, 10, None)
            return grant.engine.id


def virtual(scenario: Callable[[Conversations], Awaitable[None]]) -> None:
    async def main() -> None:
        made = Conversations()
        await scenario(made)
        made.idle()

    vtime.run(main())


def test_a_call_waits_for_the_engine_that_has_its_prompt_and_others_pass_it() -> None:
    async def scenario(made: Conversations) -> None:
        home = await made.read(made.turn(*ROOT))
        rest = made.engine(0 if home == "e0" else 1)
        hold = rest.hold(60_000, 0, made.loop.time() - 60.0, "default")  # by another gateway, as it were
        back = asyncio.create_task(made.read(made.turn(*ROOT, 9)))
        await asyncio.sleep(0)
        other = asyncio.create_task(made.read(made.turn(50, tokens=1000)))
        await asyncio.sleep(0.1)
        assert len(made.dispatch.queues["m"]) == 1, "the turn waits, and the other has passed it"
        hold.release()
        await asyncio.sleep(LOOK_AGAIN + 0.01)
        assert not made.dispatch.queues["m"], "nobody else looked at the queue meanwhile"
        assert await back == home
        await other

    virtual(scenario)


def test_it_goes_elsewhere_after_the_time_that_it_would_have_been_spared() -> None:
    async def scenario(made: Conversations) -> None:
        home = await made.read(made.turn(*ROOT))
        full = made.engine(0 if home == "e0" else 1)
        hold = full.hold(60_000, 0, made.loop.time() - 60.0, "default")
        began = made.loop.time()
        assert await made.read(made.turn(*ROOT, 9), 0.0) != home
        assert 3.0 < made.loop.time() - began < 4.0 + LOOK_AGAIN, "not quite 4 s of reading"
        hold.release()

    virtual(scenario)


def test_it_waits_no_longer_once_its_tenant_was_served_less_than_another_by_all_that_fits() -> None:
    async def scenario(made: Conversations) -> None:
        home = await made.read(made.turn(*ROOT))
        full = made.engine(0 if home == "e0" else 1)
        hold = full.hold(60_000, 0, made.loop.time() - 60.0, "default")  # by another gateway, as it were
        back = asyncio.create_task(made.read(made.turn(*ROOT, 9), 0.0))
        await asyncio.sleep(0)
        for number in range(5):
            assert len(made.dispatch.queues["m"]) == 1, f"{number} calls of the other tenant have passed it"
            assert await made.read(made.turn(50 + number, tokens=40_000, tenant="other"), 0.1) != home
        await made.read(made.turn(60, tokens=1000, tenant="other"), 0.1)
        assert await back != home
        assert made.loop.time() < 2.0, "not for the time that it may wait"
        hold.release()

    virtual(scenario)


def test_one_that_goes_in_the_turn_of_another_that_has_passed_it_leaves_no_timer() -> None:
    async def scenario(made: Conversations) -> None:
        home = await made.read(made.turn(*ROOT))
        full = made.engine(0 if home == "e0" else 1)
        hold = full.hold(92_000, 60_000, made.loop.time(), "default")
        call = made.turn(*ROOT, 9)
        call.deadline = made.loop.time() + 10.0  # 4 s of reading elsewhere are in time, twice 5 s are not
        back = asyncio.create_task(made.read(call, 0.0))
        await asyncio.sleep(0)
        assert made.dispatch.queues["m"]
        passing = made.turn(50, tokens=10_000)
        passing.stream = False  # nothing waits for what it has to read
        assert await made.read(passing, 0.1) != home
        assert await back != home
        hold.release()

    virtual(scenario)


def test_one_that_leaves_while_it_is_set_aside_leaves_nothing() -> None:
    async def scenario(made: Conversations) -> None:
        home = await made.read(made.turn(*ROOT))
        full = made.engine(0 if home == "e0" else 1)
        hold = full.hold(60_000, 0, made.loop.time() - 60.0, "default")
        back = asyncio.create_task(made.read(made.turn(*ROOT, 9)))
        await asyncio.sleep(0.1)
        back.cancel()
        await asyncio.gather(back, return_exceptions=True)
        hold.release()

    virtual(scenario)


def test_a_call_that_has_waited_half_of_its_time_for_its_engine_goes_where_room_is_and_holds_nobody_up() -> None:
    async def scenario(made: Conversations) -> None:
        home = await made.read(made.turn(*ROOT))
        full = made.engine(0 if home == "e0" else 1)
        hold = full.hold(60_000, 0, made.loop.time() - 60.0, "default")
        call = made.turn(*ROOT, 9)
        call.deadline = made.loop.time() + 10.5
        began = made.loop.time()
        assert await made.read(call, 0.0) != home
        assert 0.5 < made.loop.time() - began < 3.0, "before the 4 s that it would have waited"
        hold.release()

    virtual(scenario)
