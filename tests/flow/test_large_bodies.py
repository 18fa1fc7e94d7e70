"""Pacing of large bodies that are refused, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from gateway.core.request.outcome import Outcome, Refused
from gateway.relay.large_bodies import LARGE, RATE, LargeBodies
from loadtest.simulate import vtime

WRONG = Refused(Outcome.BAD_REQUEST, "wrong")


class Here(Executor):
    """Does everything at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Refused as refused:
            done.set_exception(refused)
        return done


def run(scenario: Callable[[LargeBodies, asyncio.AbstractEventLoop], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        large = LargeBodies(Here(), loop.time)
        await scenario(large, loop)
        await asyncio.sleep(60.0)
        assert len(large) == 0

    vtime.run(main())


def refuse() -> None:
    raise WRONG


def test_bodies_that_are_taken_wait_for_nothing() -> None:
    async def scenario(large: LargeBodies, loop: asyncio.AbstractEventLoop) -> None:
        assert [await large.parsed("a", lambda: 7) for _ in range(3)] == [7, 7, 7]
        assert loop.time() == 0.0
        assert len(large) == 0

    run(scenario)


def test_the_next_large_body_of_an_owner_waits_for_what_the_refused_one_is_worth() -> None:
    async def scenario(large: LargeBodies, loop: asyncio.AbstractEventLoop) -> None:
        with pytest.raises(Refused):
            await large.parsed("a", refuse)
        large.refused("a", RATE * 2)
        assert await large.parsed("b", loop.time) == 0.0
        assert await large.parsed("a", loop.time) == 2.0
        assert await large.parsed("a", loop.time) == 2.0

    run(scenario)


def test_more_connections_do_not_help() -> None:
    async def scenario(large: LargeBodies, loop: asyncio.AbstractEventLoop) -> None:
        at: list[float] = []

        async def send() -> None:
            try:
                await large.parsed("a", refuse)
            except Refused:
                at.append(loop.time())
                large.refused("a", RATE)

        await asyncio.gather(*(send() for _ in range(5)))
        assert at == [0.0, 1.0, 2.0, 3.0, 4.0]

    run(scenario)


def test_small_bodies_that_are_refused_cost_nothing() -> None:
    async def scenario(large: LargeBodies, loop: asyncio.AbstractEventLoop) -> None:
        large.refused("a", LARGE)
        assert len(large) == 0

    run(scenario)


def test_many_refusals_at_once_are_one_pause() -> None:
    """Bodies that were refused before they were parsed cost no parser's time, so they do not add up."""

    async def scenario(large: LargeBodies, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(100):
            large.refused("a", RATE)
        assert await large.parsed("a", loop.time) == 1.0

    run(scenario)


def test_who_leaves_while_he_waits_lets_the_next_one_in() -> None:
    async def scenario(large: LargeBodies, loop: asyncio.AbstractEventLoop) -> None:
        large.refused("a", RATE * 4)
        first = asyncio.create_task(large.parsed("a", loop.time))
        second = asyncio.create_task(large.parsed("a", loop.time))
        await asyncio.sleep(1.0)
        first.cancel()
        assert await second == 4.0
        assert first.cancelled()

    run(scenario)
