"""The paged cache: counts, references, eviction order."""

from __future__ import annotations

import pytest

from loadtest.engine.blocks import Blocks
from loadtest.engine.sequence import BLOCK, Sequence


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
    assert (blocks.references(1), blocks.used, len(blocks.idle), blocks.extra) == (0, 0, 2, {})


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
    assert (one.held, two.held, blocks.used) == ([1, 2], [], 4)
    blocks.give_back(two, 2)
    assert (blocks.used, blocks.free) == (2, 7)
    blocks.give_back(one, 2)
    assert (blocks.used, blocks.available, len(blocks.idle)) == (0, 9, 2)


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
