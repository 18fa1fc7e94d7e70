"""Estimate of an engine's prefix cache: what it believes in, in which order it forgets, and what corrects it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.engines.cache_age import CacheAge
from gateway.core.engines.prefix_cache import BLOCK_TOKENS, BLOCKS_AT_MOST, LEAST_SHARE, TELLS, PrefixCache
from tests.examples import examples

BLOCK = int(BLOCK_TOKENS)


def used(cache: PrefixCache, prefix: tuple[int, ...], now: float, capacity: int) -> None:
    """A prompt whose blocks have the usual size."""
    cache.use(prefix, BLOCK * (len(prefix) + 1), capacity, now)


def test_leading_blocks_count_up_to_the_first_that_is_not_cached() -> None:
    cache = PrefixCache()
    used(cache, (1, 2, 3), 10.0, 10_000)
    assert cache.leading((1, 2, 3, 4)) == 3
    assert cache.leading((1, 9, 3)) == 1
    assert cache.leading((2, 3)) == 2
    cache.age = CacheAge()
    assert cache.leading((1,)) == 1
    cache.age.cut = 10.1
    assert cache.leading((1,)) == 0, "used too long ago, by the engine's own events"


def test_the_least_recent_prompt_goes_first_and_of_one_prompt_its_end() -> None:
    cache, room = PrefixCache(), 6 * BLOCK
    used(cache, (1, 2, 3), 1.0, room)
    used(cache, (4, 5, 6), 2.0, room)
    used(cache, (7,), 3.0, room)
    assert [cache.leading(prefix) for prefix in ((1, 2, 3), (4, 5, 6), (7,))] == [2, 3, 1]
    used(cache, (1,), 4.0, room)
    used(cache, (8, 9), 5.0, room)
    assert [cache.leading(prefix) for prefix in ((1, 2), (4, 5, 6), (8, 9))] == [1, 2, 2], "1 was used again"


def test_blocks_are_as_large_as_prompts_show() -> None:
    cache = PrefixCache()
    for _ in range(200):
        cache.use((1, 2, 3), 4 * 50, 10_000, 1.0)
    assert cache.block_tokens == pytest.approx(50.0, rel=0.01)
    cache.use(tuple(range(100, 400)), 301 * 50, 10_000, 2.0)
    assert len(cache.blocks) == pytest.approx(200, abs=2)


def test_no_engine_has_more_blocks_than_are_tracked() -> None:
    cache = PrefixCache()
    used(cache, tuple(range(BLOCKS_AT_MOST + 5)), 1.0, 10**12)
    assert 0.99 * BLOCKS_AT_MOST < len(cache.blocks) <= BLOCKS_AT_MOST


def test_answers_correct_what_is_believed_to_be_ours() -> None:
    cache, room = PrefixCache(), 100 * BLOCK
    cache.told(10 * TELLS, 0)
    assert cache.share == pytest.approx(0.9)
    used(cache, tuple(range(100)), 1.0, room)
    assert len(cache.blocks) == 90
    for _ in range(10):
        cache.told(10 * TELLS, 9 * TELLS)
    assert cache.share == 1.0, "never more than there is"
    for _ in range(100):
        cache.told(TELLS, 0)
    assert cache.share == LEAST_SHARE
    for _ in range(300):
        cache.told(0, 10 * TELLS)
    assert cache.share == 1.0, "so little was believed in that nothing was expected any more, and all was there"
    cache = PrefixCache()
    cache.told(TELLS - 1, 0)
    assert cache.share == 1.0, "few tokens teach nothing"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=200), st.integers(1, 40))
@settings(max_examples=examples(100))
def test_of_a_cache_that_nobody_else_uses_it_believes_in_what_is_there(calls: list[tuple[int, int]], room: int) -> None:
    """Beside a model of vLLM's cache: a call's blocks are released at its end, its tail first."""
    cache, model = PrefixCache(), dict[int, None]()
    for now, (prompt, length) in enumerate(calls):
        prefix = tuple(prompt * 8 + at for at in range(length))
        used(cache, prefix, float(now), room * BLOCK)
        for block in reversed(prefix):
            model.pop(block, None)
            model[block] = None
        for block in list(model)[: max(0, len(model) - room)]:
            del model[block]
        assert list(cache.blocks) == list(model)
