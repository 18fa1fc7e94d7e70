"""Properties of the placement plan, against every subset of residents on every set of GPUs.

The second half of the file is another way to say what a plan should be: slow, by trying everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, combinations
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sidecar.core.gpus import GPU
from sidecar.core.inventory import PlanSettings, Resident, Target
from sidecar.core.lifecycle import Pending, State
from sidecar.core.plan import COME_BACK, Infeasible, Plan, plan

STOPPED, STARTING, RUNNING, SLEEPING, ERROR = State
START, DRAIN, SLEEP, WAKE, STOP = Pending
NOW = 1000.0
MANY = settings()
SOME = {
    count: [some for size in range(1, count + 1) for some in combinations(range(count), size)] for count in (1, 2, 3)
}
PLACES = {
    STOPPED: (START,),
    STARTING: (START, STOP),
    RUNNING: (DRAIN, SLEEP, STOP),
    SLEEPING: (WAKE, STOP),
    ERROR: (STOP,),
}


class Case(NamedTuple):
    target: Target
    residents: tuple[Resident, ...]
    devices: tuple[GPU, ...]
    settings: PlanSettings

    def decide(self) -> Plan | Infeasible:
        return plan(self.target, self.residents, self.devices, NOW, self.settings)

    @property
    def own(self) -> Resident | None:
        return next((r for r in self.residents if r.profile == self.target.profile), None)

    @property
    def others(self) -> tuple[Resident, ...]:
        return tuple(r for r in self.residents if r is not self.own)

    @property
    def starved(self) -> bool:
        return NOW - self.target.since >= self.settings.max_starvation

    def hot(self, resident: Resident) -> bool:
        lately = NOW - resident.last_used < self.settings.hot * seconds_to_have_it_back(resident)
        return lately and resident.last_used > self.target.last_used

    def idle(self) -> list[Resident]:
        """Who may be evicted, were it not for when they were used."""
        return [r for r in self.others if not (r.ref_count or r.pinned or r.pending or r.state is STARTING)]

    def evictable(self, hot: bool) -> list[Resident]:
        return [r for r in self.idle() if hot or not self.hot(r)]


class Picks:
    """Choices out of drawn bytes, one each: drawing them one by one takes most of a test's time."""

    def __init__(self, drawn: bytes) -> None:
        self._drawn = iter(drawn)

    def of(self, *options: Any) -> Any:
        return options[next(self._drawn) % len(options)]


def resident(name: str, drawn: bytes, count: int) -> Resident:
    of = Picks(drawn).of
    state = of(*[RUNNING] * 6, SLEEPING, SLEEPING, SLEEPING, ERROR, STARTING, STOPPED)
    claim = of(*range(3, 15))
    return Resident(
        profile=name,
        state=state,
        gpus=of(*SOME[count], *[(index,) for index in range(count)] * 3),
        claim=claim,
        residue=of(0, 1, min(2, claim)),
        unseen=of(0, 0, 0, 0, 0, 1),
        ref_count=of(*[0] * 9, 2),
        busy_for=of(math.inf, 0.5, 4.0, 30.0),
        pinned=of(*[False] * 14, True),
        pending=of(*[None] * 9, *PLACES[state]),
        last_used=of(500.0, 300.0, -math.inf, 600.0, 700.0, 800.0, 880.0, 900.0, 920.0, 960.0, 990.0, NOW),
        load_seconds=of(10.0, 10.0, 0.0, 1.0, 5.0, 20.0),
        wake_seconds=of((1.0, 2.0), (1.0, 2.0), (1.0, 8.0), (8.0, 2.0), (9.0, 9.0)),
        sleep_levels=of((), (1, 2), (1, 2), (2,), (1,)),
        level=of(1, 2) if state is SLEEPING else 0,
        host_bytes=claim,
        host_held=of(0, 0, claim // 2, claim) if state in (RUNNING, SLEEPING) else 0,
    )


def case(drawn: bytes, others: list[bytes], with_own: bool) -> Case:
    of = Picks(drawn).of
    count = of(1, 2, 3)
    devices = []
    for index in range(count):
        total = of(16, 16, 24)
        free = total - of(*[0] * 12, 2, 4, 8, 16)
        devices.append(GPU(index=index, total=total, free=free, refused=of(*[""] * 19, "not back")))
    names = list("abcdef"[: len(others)])
    if with_own and of(False, False, False, True):
        names[-1] = "target"
    target = Target(
        profile="target",
        need=of(*range(4, 17), 20, 30),
        since=of(NOW, NOW - 30, NOW - 60, NOW - 90),
        tensor_parallel=of(1, *range(1, count + 1)),
        gpus=of(*[None] * 7, *SOME[count]),
        last_used=of(-math.inf, 870.0, 950.0),
    )
    rules = PlanSettings(host_memory=of(0, 5, 10, 20, 40))
    residents = tuple(resident(name, each, count) for name, each in zip(names, others, strict=True))
    return Case(target, residents, tuple(devices), rules)


def cases(most: int = 6, with_own: bool = True) -> st.SearchStrategy[Case]:
    """Up to three GPUs of 16 or 24 bytes, and some residents, perhaps with the target among them."""
    others = st.lists(st.binary(min_size=16, max_size=16), min_size=most // 3, max_size=most)
    return st.builds(case, st.binary(min_size=18, max_size=18), others, st.just(with_own))


def victims_of(case: Case, decided: Plan) -> list[Resident]:
    names = {nap.profile for nap in decided.sleep} | set(decided.stop) - {"target"}
    return [r for r in case.residents if r.profile in names]


def held(resident: Resident) -> int:
    if resident.state is STOPPED and resident.pending is None:
        return 0
    return resident.residue if resident.state is SLEEPING and resident.pending is not WAKE else resident.claim


def room(case: Case, gpu: int, gone: Iterable[Resident], asleep: Iterable[Resident] = ()) -> int:
    """What is left on a GPU when some residents are gone and some asleep."""
    device = next(d for d in case.devices if d.index == gpu)
    freed = sum(held(r) for r in gone if gpu in r.gpus) + sum(r.claim - r.residue for r in asleep if gpu in r.gpus)
    here = [r for r in case.residents if gpu in r.gpus]
    return min(device.free - sum(r.unseen for r in here), device.total - sum(held(r) for r in here)) + freed


def possible_sets(case: Case) -> Iterator[tuple[int, ...]]:
    allowed = [d.index for d in case.devices if case.target.gpus is None or d.index in case.target.gpus]
    usable = [d.index for d in case.devices if d.index in allowed and not d.refused]
    return combinations(usable, case.target.tensor_parallel)


def fits(case: Case, gpus: Iterable[int], gone: Iterable[Resident], asleep: Iterable[Resident] = ()) -> bool:
    """Whether the target can start on all of `gpus`; what it holds itself is gone by then."""
    gone = [*gone, *([case.own] if case.own is not None else [])]
    return all(room(case, gpu, gone, asleep) >= case.target.need for gpu in gpus)


def wakes(case: Case, gone: Iterable[Resident], asleep: Iterable[Resident] = ()) -> bool:
    """Whether the target can wake where it sleeps."""
    own = case.own
    healthy = {d.index for d in case.devices if not d.refused}
    if own is None or own.state is not SLEEPING or not healthy.issuperset(own.gpus):
        return False
    return all(room(case, gpu, gone, asleep) >= own.claim - own.residue for gpu in own.gpus)


def served(case: Case, decided: Plan, gone: Iterable[Resident], asleep: Iterable[Resident] = ()) -> bool:
    return wakes(case, gone, asleep) if decided.wake else fits(case, decided.gpus, gone, asleep)


def subsets(some: list[Resident]) -> Iterator[tuple[Resident, ...]]:
    return chain.from_iterable(combinations(some, count) for count in range(len(some) + 1))


def heat(case: Case, resident: Resident) -> tuple[float, str]:
    return resident.last_used, resident.profile


def seconds_to_have_it_back(resident: Resident) -> float:
    back = resident.load_seconds
    if resident.state is RUNNING:
        back = min(back, *(resident.wake_seconds[level - 1] for level in resident.sleep_levels), math.inf)
    return max(back, 0.1)


def there_to_serve(case: Case) -> bool:
    """The target is none that runs already or is about to."""
    return case.own is None or (case.own.pending is None and case.own.state in (STOPPED, SLEEPING, ERROR))


# -- what a plan never does -------------------------------------------------------------------------------------------


@MANY
@given(cases())
def test_nobody_busy_pinned_or_changing_is_evicted(case: Case) -> None:
    decided = case.decide()
    if isinstance(decided, Plan):
        touched = [*(nap.profile for nap in decided.sleep), *decided.stop]
        assert len(touched) == len(set(touched))
        for victim in victims_of(case, decided):
            assert not victim.ref_count
            assert not victim.pinned
            assert victim.pending is None
            assert victim.state in (RUNNING, SLEEPING, ERROR)
            assert case.starved or not case.hot(victim)


@MANY
@given(cases())
def test_no_gpu_is_ever_given_more_than_it_has(case: Case) -> None:
    decided = case.decide()
    if isinstance(decided, Infeasible) or not (decided.start or decided.wake):
        return
    naps = {nap.profile for nap in decided.sleep}
    asleep = [r for r in case.residents if r.profile in naps]
    stopped = [r for r in case.residents if r.profile in decided.stop]
    own = case.own
    for gpu in decided.gpus:
        device = next(d for d in case.devices if d.index == gpu)
        assert not device.refused
        here = [r for r in case.residents if gpu in r.gpus]
        freed = sum(held(r) for r in here if r in stopped) + sum(r.claim - r.residue for r in here if r in asleep)
        needs = own.claim - own.residue if decided.wake and own is not None else case.target.need
        assert sum(held(r) for r in here) - freed + needs <= device.total
        assert device.free - sum(r.unseen for r in here) + freed >= needs
    if decided.start:
        assert len(set(decided.gpus)) == case.target.tensor_parallel
        assert case.target.gpus is None or set(decided.gpus) <= set(case.target.gpus)
        there = own is not None and own.state is not STOPPED
        assert ("target" in decided.stop) == there, "what is left of it goes before it starts again"
    else:
        assert own is not None
        assert decided.gpus == own.gpus


@MANY
@given(cases())
def test_without_any_one_of_the_victims_it_would_not_fit(case: Case) -> None:
    decided = case.decide()
    if isinstance(decided, Plan) and (decided.start or decided.wake):
        victims = victims_of(case, decided)
        assert served(case, decided, victims)
        for spared in victims:
            assert not served(case, decided, [v for v in victims if v is not spared])


@MANY
@given(cases())
def test_on_its_gpus_the_hottest_are_spared_that_can_be(case: Case) -> None:
    """LRU, precisely: take any other choice among those that might be evicted, with which the target is served on the
    same GPUs. The hottest resident that one of the two choices evicts and the other spares is spared by the plan."""
    decided = case.decide()
    if isinstance(decided, Infeasible) or not (decided.start or decided.wake):
        return
    victims = set(victims_of(case, decided))
    cool = any(served(case, decided, other) for other in subsets(case.evictable(hot=False)))
    assert cool or case.starved
    for other in subsets(case.evictable(hot=not cool)):
        differ = victims ^ set(other)
        if differ and served(case, decided, other):
            assert max(differ, key=lambda r: heat(case, r)) not in victims


@MANY
@given(cases(most=5))
def test_it_is_infeasible_only_where_nothing_helps(case: Case) -> None:
    assume(there_to_serve(case))
    evictable = case.evictable(hot=case.starved)
    helps = any(
        wakes(case, gone) or any(fits(case, gpus, gone) for gpus in possible_sets(case)) for gone in subsets(evictable)
    )
    decided = case.decide()
    waits = helps and is_back_sooner_where_it_sleeps(case)
    assert isinstance(decided, Plan) == (helps and not waits)
    if isinstance(decided, Infeasible):
        assert decided.waits == waits


def is_back_sooner_where_it_sleeps(case: Case) -> bool:
    """The target cannot wake now; once others have cooled, or it starves, and their calls have ended, it can, before
    it could be started."""
    own = case.own
    if own is None or own.state is not SLEEPING:
        return False
    calls_may_end = [r for r in case.others if not (r.pinned or r.pending or r.state is STARTING)]
    frees = {r.profile: frees_at(case, r) for r in calls_may_end}
    for at in sorted({NOW, *frees.values()}):
        if NOW <= at < math.inf and wakes(case, [r for r in calls_may_end if at >= frees[r.profile]]):
            return at > NOW and at + own.wake_seconds[own.level - 1] < NOW + own.load_seconds
    return False


def frees_at(case: Case, resident: Resident) -> float:
    starves = case.target.since + case.settings.max_starvation
    calls = NOW + resident.busy_for if resident.ref_count else NOW
    return max(calls, min(starves, cools_at(case, resident)))


def cools_at(case: Case, resident: Resident) -> float:
    if resident.last_used <= case.target.last_used:
        return -math.inf
    return resident.last_used + case.settings.hot * seconds_to_have_it_back(resident)


def is_the_best_of_all(case: Case) -> None:
    """Fewest victims, then colder ones, then the best fit, then the first; each set with its hottest spared."""
    decided = case.decide()
    if isinstance(decided, Infeasible):
        return
    for hot in (False, True):
        order = sorted(case.evictable(hot), key=lambda r: heat(case, r))
        found = []
        for gpus in possible_sets(case):
            working = [set(gone) for gone in subsets(order) if fits(case, gpus, gone)]
            if working:
                spared = max([[r not in gone for r in reversed(order)] for gone in working])
                gone = [r for r, kept in zip(reversed(order), spared, strict=True) if not kept]
                over = sum(room(case, gpu, gone) - case.target.need for gpu in gpus)
                found.append((len(gone), [order.index(r) for r in gone], over, gpus, {r.profile for r in gone}))
        if found:
            *_, gpus, names = min(found, key=lambda each: each[:-1])
            assert decided.gpus == gpus
            assert {r.profile for r in victims_of(case, decided)} == names
            return
    pytest.fail("a plan where there is none")


@MANY
@given(cases(most=5, with_own=False))
def test_the_set_of_gpus_is_the_best_of_all(case: Case) -> None:
    is_the_best_of_all(case)


@pytest.mark.slow
@settings(max_examples=1000)
@given(cases(with_own=False))
def test_the_set_of_gpus_is_the_best_of_all_in_many_cases(case: Case) -> None:
    is_the_best_of_all(case)


@MANY
@given(cases())
def test_victims_sleep_where_they_can(case: Case) -> None:
    decided = case.decide()
    if isinstance(decided, Infeasible):
        return
    by_name = {r.profile: r for r in case.residents}
    asleep = [by_name[nap.profile] for nap in decided.sleep]
    for nap in decided.sleep:
        victim = by_name[nap.profile]
        assert victim.state is RUNNING
        assert nap.level in victim.sleep_levels
        assert victim.wake_seconds[nap.level - 1] < victim.load_seconds
    host = case.settings.host_memory - sum(r.host_held for r in case.residents)
    more = {r.profile: max(0, r.host_bytes - r.host_held) for r in case.residents}
    left = host - sum(more[nap.profile] for nap in decided.sleep if nap.level == 1)
    assert left >= min(0, host)
    for nap in decided.sleep:
        victim = by_name[nap.profile]
        if nap.level == 2 and 1 in victim.sleep_levels and victim.wake_seconds[0] < victim.load_seconds:
            assert left < more[victim.profile]
    stopped = [v for v in victims_of(case, decided) if v not in asleep]
    for victim in stopped:
        others = [v for v in stopped if v is not victim]
        if victim.state is RUNNING and 2 in victim.sleep_levels and victim.wake_seconds[1] < victim.load_seconds:
            assert not served(case, decided, others, [*asleep, victim])


# -- when to come back ------------------------------------------------------------------------------------------------


@MANY
@given(cases())
def test_who_comes_back_for_what_was_too_hot_gets_it_and_not_before(case: Case) -> None:
    assume(there_to_serve(case))
    decided = case.decide()
    helps = any(wakes(case, gone) or any(fits(case, gpus, gone) for gpus in possible_sets(case))
                for gone in [case.idle()])  # fmt: skip
    if isinstance(decided, Infeasible) and helps:
        at = decided.retry_at
        assert at is not None
        if decided.waits and any(r.ref_count for r in case.others):  # those may last longer than it is thought
            assert NOW < at < NOW + (0.0 if case.own is None else case.own.load_seconds)
            return
        assert NOW < at <= case.target.since + case.settings.max_starvation
        again = plan(case.target, case.residents, case.devices, at, case.settings)
        before = plan(case.target, case.residents, case.devices, math.nextafter(at, 0.0), case.settings)
        assert isinstance(again, Plan)
        assert isinstance(before, Infeasible)
    elif isinstance(decided, Infeasible):
        assert decided.retry_at in (None, NOW + COME_BACK)


@MANY
@given(cases())
def test_the_order_of_what_it_is_told_changes_nothing(case: Case) -> None:
    turned = Case(case.target, case.residents[::-1], case.devices[::-1], case.settings)
    assert case.decide() == case.decide() == turned.decide()


@MANY
@given(cases())
def test_as_many_bytes_more_everywhere_do_not_make_it_worse(case: Case) -> None:
    richer = tuple(
        msgspec.structs.replace(device, total=device.total + 5, free=device.free + 5) for device in case.devices
    )
    if isinstance(case.decide(), Plan):
        assert isinstance(plan(case.target, case.residents, richer, NOW, case.settings), Plan)


LAWS = [
    test_nobody_busy_pinned_or_changing_is_evicted,
    test_no_gpu_is_ever_given_more_than_it_has,
    test_without_any_one_of_the_victims_it_would_not_fit,
    test_on_its_gpus_the_hottest_are_spared_that_can_be,
    test_it_is_infeasible_only_where_nothing_helps,
    test_victims_sleep_where_they_can,
    test_who_comes_back_for_what_was_too_hot_gets_it_and_not_before,
    test_the_order_of_what_it_is_told_changes_nothing,
    test_as_many_bytes_more_everywhere_do_not_make_it_worse,
]


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=800)
@given(case=cases(most=5))
def test_in_many_cases(law: Any, case: Case) -> None:
    law.hypothesis.inner_test(case)
