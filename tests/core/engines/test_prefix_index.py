"""Index of the engines that read a prompt last: the longest known part counts, and memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.engines.choice import SCAN_AT_MOST
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import READERS, Fleet, PrefixIndex
from gateway.core.policy.policy import Policy
from tests.examples import examples


def test_the_longest_known_part_of_a_prompt_counts_and_of_its_readers_the_latest_first() -> None:
    index = PrefixIndex()
    assert index.readers((1, 2)) == ()
    index.note((1, 2, 3), "a")
    index.note((1, 2, 4, 5), "b")
    assert index.readers((1, 2, 3, 9, 10)) == ("a",)
    assert index.readers((1, 2, 4, 5)) == ("b",)
    assert index.readers((1, 2, 9)) == ("b", "a")
    assert index.readers((7, 8)) == ()
    assert index.readers(()) == ()
    index.note((1, 2, 3), "c")
    index.note((1, 2, 3), "c")
    assert (index.readers((1,)), index.readers((1, 2, 3))) == (("c", "b"), ("c", "a"))


def test_of_one_prompt_the_end_is_forgotten_first() -> None:
    index = PrefixIndex(most=4)
    index.note((1, 2, 3), "a")
    index.note((4, 5, 6), "b")
    assert len(index) == 4
    assert index.readers((1, 2, 3)) == ("a",)
    index.note((4, 5, 6), "b")
    index.note((7,), "c")
    assert (len(index), index.readers((1, 2, 3)), index.readers((4, 5, 6))) == (4, (), ("b",))


def prompts() -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Prompts that part at some block, as conversations do: a block stands for all before it."""

    def blocks(path: list[int]) -> Iterator[int]:
        found = 0
        for step in path:
            found = found * 3 + step + 1
            yield found

    return st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(lambda path: tuple(blocks(path))))


@settings(max_examples=examples(200))
@given(prompts(), st.integers(1, 30))
def test_it_finds_what_a_walk_from_the_end_finds(read: list[tuple[int, ...]], most: int) -> None:
    index = PrefixIndex(most)
    for number, prefix in enumerate(read):
        index.note(prefix, f"e{number % 3}")
        assert len(index) <= most
        for asked in read:
            deepest = next((block for block in reversed(asked) if index.readers((block,))), None)
            assert index.readers(asked) == (() if deepest is None else index.readers((deepest,)))
            assert len(index.readers(asked)) <= READERS


def test_only_a_large_fleet_notes_and_an_engine_that_is_gone_is_none() -> None:
    fleet, prefix = Fleet(), (1, 2)
    for number in range(SCAN_AT_MOST + 1):
        fleet.note_prefix(next(iter(fleet), Engine("e", "http://e", Policy())), prefix)
        assert fleet.likely(prefix) == []
        fleet.add(Engine(f"e{number}", f"http://e{number}", Policy()))
    fleet.note_prefix(fleet.engines["e7"], prefix)
    assert fleet.likely(prefix) == [fleet.engines["e7"]]
    fleet.remove("e7")
    assert fleet.likely(prefix) == []
