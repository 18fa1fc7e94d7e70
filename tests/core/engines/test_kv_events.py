"""Prefix-cache events of an engine: every shape vLLM has sent, and the cache contents that follow."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.engines import cache_age as module
from gateway.core.engines.cache_age import LATEST, CacheAge
from gateway.core.engines.engine import Engine
from gateway.core.policy.policy import Policy
from gateway.shared.vllm.kv_events import EventsError, address_fault, events_from
from tests.examples import examples

encode = msgspec.msgpack.encode


def stored(*hashes: int | bytes, size: int = 16, **more: Any) -> dict[str, Any]:
    """BlockStored as vLLM 0.32 sends it; `more` replaces fields."""
    fields = {"parent_block_hash": None, "token_ids": [7] * 16 * len(hashes), "lora_id": None, "medium": "GPU"}
    return {"type": "BlockStored", "block_hashes": hashes, "block_size": size} | fields | {"lora_name": None} | more


def removed(*hashes: int | bytes, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} | more


CLEARED = {"type": "AllBlocksCleared"}


class Wire:
    """A CacheAge and the connection before it: numbers each message."""

    def __init__(self) -> None:
        self.cache_age = CacheAge()
        self.cache_age.link(True)
        self.number = 0

    def send(self, now: float, *events: Any, skip: int = 0) -> CacheAge:
        self.number += skip
        self.cache_age.take((b"", self.number.to_bytes(8), encode([1700000000.5, events, 0])), now)
        self.number += 1
        return self.cache_age

    def turn_over(self, start: float, now: float, first: int = 1000) -> None:
        """LATEST blocks are stored, one a second from `start` on, and evicted at `now`."""
        blocks = range(first, first + LATEST)
        for second, block in enumerate(blocks):
            self.send(start + second, stored(block))
        self.send(now, *[removed(block) for block in blocks])


# -- the wire ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "kinds"),
    [
        # 0.9 and 0.10
        ([["BlockStored", [1, 2], None, [5] * 32, 16, None], ["BlockRemoved", [1]], ["AllBlocksCleared"]], "src"),
        # 0.11: a medium; hashes may be SHA-256; 0.14 and later: a LoRA's name, extra keys
        ([["BlockStored", [b"h" * 32], b"p" * 32, [5] * 16, 16, 3, "GPU"], ["BlockRemoved", [b"h" * 32], "GPU"]], "sr"),
        ([["BlockStored", [1 << 63], 9, [5] * 16, 16, None, "GPU", "lora", [["lora", 1]]]], "s"),
        # up to 0.23: the group and its kind; what comes after that is nothing to us
        ([["BlockStored", [1], 9, [5] * 16, 16, None, "GPU", None, [None], 0, "full_attention", None, "x", 1]], "s"),
        ([["BlockRemoved", [1], "GPU", 0, "LOCAL", None]], "r"),
        # from 0.24 on
        ([stored(1, 2), removed(1), CLEARED], "src"),
        ([stored(1, extra_keys=[None], group_idx=0, kv_cache_spec_kind="full_attention", session_id="s")], "s"),
        ([removed(1, group_idx=0, remaining_copy_counts=[1])], "r"),
        # kinds that nobody knows
        ([["BlockMoved", 1], {"type": "BlockMoved", "to": 2}, removed(1), ["BlockMoved"]], "r"),
        ([], ""),
    ],
)
def test_every_shape_is_read(events: list[Any], kinds: str) -> None:
    for batch in ([1.5, events, 0], [1.5, events], {"ts": 1.5, "events": events, "data_parallel_rank": 0}):
        found = events_from(encode(batch))
        names = {"BlockStored": "s", "BlockRemoved": "r"}
        assert "".join(names.get(type(event).__name__, "c") for event in found) == kinds


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode(None),
        encode([1.5]),
        encode({"events": []}),
        encode([1.5, [5]]),
        encode([1.5, [[]]]),
        encode([1.5, [{"no": "type"}]]),
        encode([1.5, [removed("text")]]),
        encode([1.5, [removed(1 << 63, -1, 1.5)]]),
        encode([1.5, [["BlockStored", [1], None, []]]]),
        encode([1.5, [stored(1, size=0)]]),
        encode([1.5, [stored(1, size=1 << 40)]]),
        encode([1.5, [removed(1)]])[:-1],
        b"\x91" * 100_000,
    ],
)
def test_what_is_broken_is_refused_as_a_whole(payload: bytes) -> None:
    with pytest.raises(EventsError):
        events_from(payload)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tcp://h:1", None),
        ("tcp://[::1]:65535", None),
        ("tcp://h:0", "a port from 1 to 65535"),
        ("tcp://h:65536", "a port from 1 to 65535"),
        ("ipc:///" + "x" * 106, None),
        ("ipc:///" + "x" * 107, "a path of at most 107 bytes"),
    ],
)
def test_addresses(url: str, expected: str | None) -> None:
    assert address_fault(url) == expected


# -- the cut ----------------------------------------------------------------------------------------------------------


def test_while_nothing_is_evicted_nothing_is_cut() -> None:
    cache_age = Wire().send(100.0, stored(1, 2, 3))
    assert (cache_age.cut, cache_age.cached) == (-math.inf, 3)


def test_what_was_used_before_an_evicted_block_was_stored_is_gone() -> None:
    wire = Wire()
    wire.turn_over(100.0, 130.0)
    assert (wire.cache_age.cut, wire.cache_age.cached) == (100.0, 0)
    wire.turn_over(200.0, 230.0)
    assert wire.cache_age.cut == 200.0


def test_a_few_evictions_out_of_turn_say_nothing() -> None:
    wire = Wire()
    wire.turn_over(100.0, 130.0)
    wire.send(500.0, *[stored(block) for block in range(1, LATEST)])
    wire.send(501.0, *[removed(block) for block in range(1, LATEST)])
    assert wire.cache_age.cut <= 100.0 + LATEST


def test_of_two_copies_the_older_one_goes_first() -> None:
    wire = Wire()
    copies = range(1, 2 * LATEST)
    wire.send(10.0, *[stored(block) for block in copies])
    wire.send(90.0, *[stored(block) for block in copies])
    wire.send(91.0, *[removed(block) for block in copies])
    assert wire.cache_age.cut == 10.0
    wire.send(92.0, *[removed(block) for block in copies])
    assert wire.cache_age.cut == 10.0


def test_a_cleared_cache_has_nothing_of_before() -> None:
    wire = Wire()
    wire.send(100.0, stored(1, 2, 3))
    cache_age = wire.send(150.0, CLEARED)
    assert (cache_age.cut, cache_age.cached) == (150.0, 0)
    wire.send(151.0, removed(1))
    assert cache_age.cut == 150.0


@pytest.mark.parametrize(
    "young",
    [
        {"kv_cache_spec_kind": "sliding_window"},
        {"kv_cache_spec_kind": "mamba", "group_idx": 1},
        {"medium": "CPU"},
        {"size": 8},  # the tail of a prompt in a model of large blocks, until the block is full
    ],
)
def test_blocks_that_are_given_up_early_do_not_count(young: dict[str, Any]) -> None:
    wire = Wire()
    wire.send(10.0, stored(1))
    wire.send(100.0, *[stored(block, **young) for block in range(2, 100)])
    gone = {name: value for name, value in young.items() if name in ("medium", "group_idx")}
    wire.send(101.0, *[removed(block, **gone) for block in range(2, 100)])
    assert (wire.cache_age.cut, wire.cache_age.cached) == (-math.inf, 1)


def test_a_block_that_is_kept_elsewhere_too_is_not_gone() -> None:
    cache_age = Wire().send(10.0, stored(1), removed(1, medium="CPU"))
    assert cache_age.cached == 1


def test_groups_have_blocks_of_their_own() -> None:
    cache_age = Wire().send(10.0, stored(1, group_idx=0), stored(1, group_idx=1), removed(1, group_idx=1))
    assert cache_age.cached == 1


def test_larger_blocks_put_an_end_to_smaller_ones() -> None:
    cache_age = Wire().send(10.0, stored(1, 2, size=16), stored(3, size=544))
    assert cache_age.cached == 1


def test_hashes_may_be_bytes() -> None:
    cache_age = Wire().send(10.0, stored(b"a" * 32, b"b" * 32, b""), removed(b"b" * 32))
    assert cache_age.cached == 2


def test_of_a_large_cache_a_sample_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCKS_TRACKED", 1000)
    wire = Wire()
    multiplier = 0x9E3779B97F4A7C15  # spreads 0, 1, 2... over 64 bits
    blocks = [number * multiplier % (1 << 64) for number in range(20_000)]
    for second in range(200):
        wire.send(float(second), stored(*blocks[second * 100 : second * 100 + 100]))
        assert len(wire.cache_age.stored) <= 1000
    assert wire.cache_age.cached == pytest.approx(20_000, rel=0.15)
    wire.send(300.0, *[removed(block) for block in blocks[:10_000]])
    assert wire.cache_age.cut == pytest.approx(100.0, abs=10.0)
    assert wire.cache_age.cached == pytest.approx(10_000, rel=0.15)


# -- the connection ---------------------------------------------------------------------------------------------------


def test_before_the_first_message_and_without_a_connection_it_is_not_live() -> None:
    wire = Wire()
    cache_age = wire.cache_age
    assert not cache_age.live
    wire.send(100.0, stored(1))
    assert cache_age.live
    cache_age.link(False)
    assert not cache_age.live
    cache_age.link(True)
    assert not cache_age.live, "nobody knows yet what was missed"
    wire.send(5_000.0, stored(2))
    assert (cache_age.live, cache_age.cached) == (True, 2), "nothing was"


def test_messages_that_were_under_way_do_not_make_a_connection() -> None:
    wire = Wire()
    wire.cache_age.link(False)
    assert not wire.send(1.0, stored(1)).live


def test_a_gap_ends_what_was_known_but_not_what_is_gone() -> None:
    wire = Wire()
    wire.turn_over(100.0, 130.0)
    cache_age = wire.send(1_000.0, stored(1), skip=1)
    assert (cache_age.cut, cache_age.cached) == (100.0, 1)


def test_a_new_process_has_an_empty_cache() -> None:
    wire = Wire()
    wire.send(100.0, stored(1, size=32), skip=7)
    wire.number = 0
    cache_age = wire.send(200.0, stored(2))
    assert (cache_age.cut, cache_age.cached) == (200.0, 1)


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ((), "expected 3"),
        ((b"", b"\0" * 8), "expected 3"),
        ((b"", b"\0" * 8, b"", b""), "expected 3"),
        ((b"", b"\0" * 7, encode([1.0, []])), "a sequence number of 7 bytes, expected 8"),
        ((b"", b"\0" * 7 + b"\1", b"\xc1"), "events that cannot be read"),
    ],
)
def test_a_message_that_cannot_be_read_is_a_gap(frames: tuple[bytes, ...], problem: str) -> None:
    wire = Wire()
    cache_age = wire.send(100.0, stored(1))
    cache_age.take(frames, 200.0)
    assert problem in cache_age.problem
    assert (cache_age.cut, cache_age.cached) == (-math.inf, 0)
    wire.number = 2
    assert wire.send(300.0, stored(2)).problem == ""
    assert cache_age.cached == 1


def test_its_state_can_be_read() -> None:
    wire = Wire()
    assert not wire.cache_age.live, "it is linked, and no message has come"
    age = wire.send(2.0, stored(1))
    assert (age.live, age.cached) == (True, 1)
    wire.cache_age.link(False)
    assert not wire.cache_age.live


# -- laws -------------------------------------------------------------------------------------------------------------

TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9) | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "events"]),
    lambda tree: st.lists(tree, max_size=6) | st.dictionaries(st.sampled_from(["type", "ts", "events", "x"]), tree),
    max_leaves=20,
)  # fmt: skip
PAYLOADS = st.binary(max_size=60) | TREES.map(encode) | TREES.map(lambda tree: encode([1.0, [tree, removed(1)]]))


@given(st.lists(st.tuples(st.binary(max_size=9), PAYLOADS), max_size=6))
@settings(max_examples=examples(200))
def test_nothing_an_engine_sends_can_do_harm(messages: list[tuple[bytes, bytes]]) -> None:
    cache_age = CacheAge()
    cache_age.link(True)
    for now, (number, payload) in enumerate(messages):
        cut = cache_age.cut
        cache_age.take((b"", number, payload), float(now))
        assert cut <= cache_age.cut <= now


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=200), st.integers(2, 20))
@settings(max_examples=examples(100))
def test_of_a_cache_that_evicts_the_oldest_release_what_is_there_is_believed_in(
    calls: list[tuple[int, int]], room: int
) -> None:
    """A model of such a cache: a call a second, whose blocks are released at once, its tail first."""
    wire, cached, used = Wire(), dict[int, None](), dict[int, float]()
    for now, (prompt, length) in enumerate(calls):
        blocks = [prompt * 8 + at for at in range(length)]
        new = [block for block in blocks if block not in cached]
        for block in blocks:
            cached.pop(block, None)
        evicted = list(cached)[: max(0, len(cached) + len(blocks) - 8 * room)]
        for block in evicted:
            del cached[block]
        cached |= dict.fromkeys(reversed(blocks))
        used |= dict.fromkeys(blocks, float(now))
        wire.send(float(now), *map(removed, evicted), *([stored(*new)] if new else []))
        assert all(used[block] >= wire.cache_age.cut for block in cached)
    assert wire.cache_age.cached == len(cached)


# -- the engine -------------------------------------------------------------------------------------------------------


def test_an_engines_events_correct_what_it_is_believed_to_have_cached() -> None:
    engine = Engine("e", "http://127.0.0.1:1", Policy())
    engine.remember((1, 2), 300, 50.0)
    wire = Wire()
    engine.cache.age = wire.cache_age
    wire.send(10.0, stored(1))
    assert engine.cache.leading((1, 2)) == 2
    wire.send(60.0, CLEARED)
    assert engine.cache.leading((1, 2)) == 0
    engine.remember((1, 2), 300, 70.0)
    assert engine.cache.leading((1, 2)) == 2
