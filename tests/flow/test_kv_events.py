"""Eviction of a call's prefix: possible from the call's end, not from its first byte."""

from __future__ import annotations

import asyncio
import math

import pytest

from gateway.core.engines.cache_age import CacheAge
from tests.calls import a_call
from tests.flow.test_dispatch import World, virtual


@pytest.mark.parametrize("events", [True, False])
def test_what_a_call_has_read_was_used_until_its_end(events: bool) -> None:
    async def scenario(world: World) -> None:
        engine = world.engine()
        engine.cache.age = CacheAge() if events else None
        with await world.dispatch.ask(a_call(prefix=(1, 2), prompt_tokens=100)) as grant:
            await asyncio.sleep(1.0)
            grant.first_byte(world.loop.time())
            await asyncio.sleep(9.0)
        assert engine.cache.blocks == {1: 10.0, 2: 10.0}

    virtual(scenario)


def test_an_engine_that_is_gone_has_nothing() -> None:
    async def scenario(world: World) -> None:
        engine = world.engine()
        engine.cache.age = CacheAge()
        with await world.dispatch.ask(a_call(prefix=(1, 2), prompt_tokens=100)) as grant:
            grant.first_byte(world.loop.time() + 1.0)
            engine.down()
        assert engine.cache.blocks == {}

    virtual(scenario)


def test_what_a_call_has_not_read_is_not_remembered_at_its_end() -> None:
    async def scenario(world: World) -> None:
        engine = world.engine()
        engine.cache.age = CacheAge()
        with await world.dispatch.ask(a_call(prefix=(1, 2), prompt_tokens=100)):
            await asyncio.sleep(1.0)
        assert engine.cache.blocks == {}
        assert engine.cache.age.cut == -math.inf

    virtual(scenario)
