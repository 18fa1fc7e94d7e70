"""Paged KV cache of the simulated engine: counts, references, eviction order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.engine.blocks import Blocks
from loadtest.engine.sequence import BLOCK, Sequence
from tests.examples import examples


def filled(blocks: Blocks, hashes: list[int]) -> Sequence:
    """A sequence that has computed, and published, exactly the blocks of `hashes`."""
    sequence = Sequence(len(hashes) * BLOCK, 1, hashes=hashes)
    found, _ = blocks.hits(hashes, len(hashes))
    blocks.share(sequence, found)
    blocks.take(len(hashes) - found)
    blocks.publish(sequence, len(hashes))
    return sequence


def test_one_block_is_set_aside() -> None:
    assert Blocks(10).available == 9
    with pytest.raises(ValueError, match="at least 2"):
        Blocks(1)


def test_a_released_prefix_is_found_again_and_counts_as_free() -> None:
    blocks = Blocks(10)
    first = filled(blocks, [1, 2, 3])
    assert (blocks.used, blocks.usage) == (3, 3 / 9)
    blocks.give_back(first, 3)
    assert (blocks.used, blocks.available, blocks.free) == (0, 9, 6)
    assert blocks.hits([1, 2, 3, 4], 4) == (3, 3)
    assert blocks.hits([1, 2, 3, 4], 2) == (2, 2)
    assert blocks.hits([1, 9, 3], 3) == (1, 1)


def test_references_are_counted() -> None:
    blocks = Blocks(10)
    one, two, three = (filled(blocks, [1, 2]) for _ in range(3))
    assert (blocks.references(1), blocks.used) == (3, 2)
    blocks.give_back(two, 2)
    blocks.give_back(one, 2)
    assert (blocks.references(1), blocks.used) == (1, 2)
    blocks.give_back(three, 2)
    assert (blocks.references(1), blocks.used, blocks.idle) == (0, 0, 2)


def test_the_oldest_release_is_evicted_first_and_of_one_sequence_the_tail() -> None:
    blocks = Blocks(7)
    old, new = filled(blocks, [1, 2, 3]), filled(blocks, [11, 12, 13])
    blocks.give_back(old, 3)
    blocks.give_back(new, 3)
    blocks.take(2)
    assert blocks.hits([1, 2, 3], 3) == (1, 1)
    assert blocks.hits([11, 12, 13], 3) == (3, 3)
    blocks.take(2)
    assert blocks.hits([1, 2, 3], 3) == (0, 0)
    assert blocks.hits([11, 12, 13], 3) == (2, 2)


def test_use_makes_recent() -> None:
    blocks = Blocks(5)
    for hashes in ([1, 2], [3, 4], [1, 2]):
        blocks.give_back(filled(blocks, hashes), 2)
    blocks.take(2)
    assert blocks.hits([1, 2], 2) == (2, 2)
    assert blocks.hits([3, 4], 2) == (0, 0)


def test_what_is_referred_to_is_not_evicted() -> None:
    blocks = Blocks(5)
    filled(blocks, [1, 2])
    blocks.take(2)
    assert (blocks.available, blocks.hits([1, 2], 2)) == (0, (2, 0))


def test_a_block_computed_twice_at_the_same_time_is_cached_once() -> None:
    blocks = Blocks(10)
    one, two = Sequence(32, 1, hashes=[1, 2]), Sequence(32, 1, hashes=[1, 2])
    blocks.take(4)
    blocks.publish(one, 2)
    blocks.publish(two, 2)
    assert ([run.hashes for run in one.held], two.held, blocks.used) == ([[1, 2]], [], 4)
    blocks.give_back(two, 2)
    assert (blocks.used, blocks.free) == (2, 7)
    blocks.give_back(one, 2)
    assert (blocks.used, blocks.available, blocks.idle) == (0, 9, 2)


def test_reset_waits_for_the_last_reference() -> None:
    blocks = Blocks(10)
    sequence = filled(blocks, [1, 2])
    assert not blocks.reset()
    blocks.give_back(sequence, 2)
    assert blocks.reset()
    assert (blocks.free, blocks.hits([1], 1)) == (9, (0, 0))


def test_without_caching_nothing_is_found() -> None:
    blocks = Blocks(10, caching=False)
    blocks.give_back(filled(blocks, [1, 2]), 2)
    assert (blocks.free, blocks.hits([1], 1)) == (9, (0, 0))


class EachBlock:
    """The same cache, one block at a time: what `Blocks` must come to, whatever runs it keeps them in."""

    def __init__(self, usable: int) -> None:
        self.free = usable
        self.references: dict[int, int] = {}  # of cached blocks
        self.idle: dict[int, None] = {}  # oldest release first
        self.parents: dict[int, int] = {}

    def hits(self, hashes: list[int]) -> tuple[int, int]:
        found = next((at for at, block in enumerate(hashes) if block not in self.references), len(hashes))
        return found, sum(block in self.idle for block in hashes[:found])

    def start(self, hashes: list[int]) -> list[int]:
        held = hashes[: self.hits(hashes)[0]]
        for block in held:
            self.references[block] += 1
            self.idle.pop(block, None)
        return held

    def take(self, count: int) -> None:
        self.free -= count
        while self.free < 0:
            gone = next(iter(self.idle))
            del self.idle[gone], self.references[gone]
            self.free += 1

    def publish(self, held: list[int], hashes: list[int], done: int) -> None:
        for before, block in list(zip([0, *hashes], hashes, strict=False))[done:]:
            self.parents[block] = before
            if block not in self.references:
                self.references[block] = 1
                held.append(block)

    def give_back(self, held: list[int], count: int) -> None:
        self.free += count - len(held)
        for block in reversed(held):
            self.references[block] -= 1
            if not self.references[block]:
                self.idle[block] = None

    @property
    def torn(self) -> bool:
        """Whether a block is cached whose beginning is not: two computed that at once, and one has lost it since."""
        return any(self.parents[block] and self.parents[block] not in self.references for block in self.references)


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32))
def test_runs_come_to_what_each_block_by_itself_would(seed: int) -> None:
    rng = random.Random(seed)
    blocks, plain = Blocks(41), EachBlock(40)
    texts = [[hash(tuple(text[:end])) for end in range(1, len(text) + 1)]
             for text in ([rng.randrange(2) for _ in range(rng.randrange(1, 13))] for _ in range(8))]  # fmt: skip
    under_way: list[tuple[Sequence, list[int], list[int]]] = []
    for _ in range(150):
        if rng.random() < 0.4:
            hashes = rng.choice(texts)
            assert blocks.hits(hashes, len(hashes)) == plain.hits(hashes)
            found, idle = plain.hits(hashes)
            if len(hashes) - found <= blocks.available - idle:
                sequence = Sequence(len(hashes) * BLOCK, 1, hashes=hashes)
                blocks.share(sequence, found)
                under_way.append((sequence, hashes, plain.start(hashes)))
                blocks.take(len(hashes) - found)
                plain.take(len(hashes) - found)
        elif under_way:
            sequence, hashes, held = under_way[rng.randrange(len(under_way))]
            read = rng.randrange(len(hashes) + 1)
            plain.publish(held, hashes[:read], sequence.published)
            blocks.publish(sequence, read)
            if rng.random() < 0.4:
                under_way.remove((sequence, hashes, held))
                blocks.give_back(sequence, len(hashes))
                plain.give_back(held, len(hashes))
        if plain.torn:
            break  # then it is one block more or less
        assert (blocks.free, blocks.idle) == (plain.free, len(plain.idle))
        assert all(blocks.references(block) == plain.references.get(block, 0) for text in texts for block in text)
    for sequence, hashes, _ in under_way:
        blocks.give_back(sequence, len(hashes))
    assert blocks.used == 0
