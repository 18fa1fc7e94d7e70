"""Ledger of host memory: never more than there is, whatever the order of bookings and ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sidecar.core.host_memory import HostMemory

BOUND = 100
NAMES = st.sampled_from("abcd")
SIZES = st.integers(0, 120)


def test_what_is_booked_is_not_there_for_another_until_it_is_given_up() -> None:
    host = HostMemory(BOUND)
    assert host.book("a", 60)
    assert not host.book("b", 50)
    assert (host.held("a"), host.held("b"), host.total) == (60, 0, 60)
    host.cancel("a")
    assert host.book("b", 50)


def test_what_was_taken_stays_until_the_engine_ends() -> None:
    host = HostMemory(BOUND)
    assert host.book("a", 60)
    assert host.take("a", 70)
    host.cancel("a")  # the sleep is over
    assert (host.taken("a"), host.total) == (70, 70)
    assert host.book("a", 60), "its copies are there already"
    host.cancel("a")
    assert host.total == 70
    host.release("a")
    assert (host.total, host.held("a"), host.taken("a")) == (0, 0, 0)


def test_what_takes_more_than_there_is_keeps_no_more_than_was_booked() -> None:
    host = HostMemory(BOUND)
    host.book("b", 50)
    host.book("a", 40)
    assert not host.take("a", 51)
    assert host.total == 90
    assert host.take("b", 60)


def test_an_engine_that_is_taken_over_has_what_it_has() -> None:
    host = HostMemory(BOUND)
    host.adopt("a", 120)
    host.adopt("b", 0)
    assert (host.total, host.taken("b")) == (120, 0)
    assert not host.fits("b", 1)
    assert host.fits("a", 120)


class Evictions(RuleBasedStateMachine):
    """Sleeps of several GPUs in any order; each is decided, carried out or given up, and engines end at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HostMemory(BOUND)
        self.under_way: set[str] = set()
        self.living: set[str] = set()

    @rule(name=NAMES, size=SIZES)
    def decides(self, name: str, size: int) -> None:
        if name not in self.under_way and self.host.book(name, size):
            self.under_way.add(name)
            self.living.add(name)

    @rule(name=NAMES, size=SIZES)
    def sleeps(self, name: str, size: int) -> None:
        if name in self.under_way:
            if not self.host.take(name, size):
                self.host.release(name)  # it is ended
                self.living.discard(name)
            self.host.cancel(name)
            self.under_way.discard(name)

    @rule(name=NAMES)
    def is_given_up(self, name: str) -> None:
        if name in self.under_way:
            before = self.host.taken(name)
            self.host.cancel(name)
            self.under_way.discard(name)
            assert self.host.held(name) == before

    @rule(name=NAMES)
    def ends(self, name: str) -> None:
        self.host.release(name)
        self.under_way.discard(name)
        self.living.discard(name)

    @invariant()
    def within_the_bound(self) -> None:
        assert self.host.total <= BOUND

    @invariant()
    def nobody_has_any_who_does_not_live(self) -> None:
        assert all(name in self.living or not self.host.held(name) for name in "abcd")


TestEvictions = Evictions.TestCase


@given(st.lists(st.tuples(NAMES, SIZES)))
def test_what_fits_can_be_booked(wanted: list[tuple[str, int]]) -> None:
    host = HostMemory(BOUND)
    for name, size in wanted:
        fits = host.fits(name, size)
        assert host.book(name, size) is fits
        assert host.held(name) == size or not fits
