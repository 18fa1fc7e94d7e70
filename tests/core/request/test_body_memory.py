"""Memory budget of request bodies: grants, refusals, and the return of every byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request.body_memory import BodyLease, BodyMemory


def test_bytes_are_held_up_to_the_memory_and_up_to_an_owners_share() -> None:
    bodies = BodyMemory(1000, 0.5)
    first, second, third = BodyLease(bodies, "a"), BodyLease(bodies, "a"), BodyLease(bodies, "b")
    assert (first.resize(300), second.resize(200), second.resize(201)) == ("", "", "share")
    assert (second.size, bodies.held) == (200, 500)
    assert (third.resize(400), BodyLease(bodies, "c").resize(101)) == ("", "memory")
    assert bodies.refused == {"memory": 1, "share": 1}
    assert (bodies.held, third.size) == (900, 400)
    first.release()
    first.release()
    assert (first.size, bodies.held, second.resize(500)) == (0, 600, "")
    assert second.resize(10) == ""
    for each in (second, third):
        each.release()
    assert (bodies.held, bodies._owners) == (0, {}), "nothing is kept of an owner"


def test_less_memory_takes_nothing_back_and_lets_nothing_in() -> None:
    bodies = BodyMemory(1000, 1.0)
    held = BodyLease(bodies, "a")
    assert held.resize(900) == ""
    bodies.apply(500)
    assert (held.resize(901), held.resize(800), held.size) == ("memory", "", 800)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 600)), max_size=60))
def test_what_is_held_is_what_its_holders_hold(steps: list[tuple[int, int]]) -> None:
    bodies = BodyMemory(1000, 0.6)
    holders = [BodyLease(bodies, owner) for owner in "aabbcc"]
    for number, size in steps:
        before = holders[number].size
        full = holders[number].resize(size)
        assert holders[number].size == (before if full else size)
        assert bodies.held == sum(held.size for held in holders) <= 1000
        for owner in "abc":
            assert sum(held.size for held in holders if held.owner == owner) <= 600
    for held in holders:
        held.release()
    assert (bodies.held, bodies._owners) == (0, {})
