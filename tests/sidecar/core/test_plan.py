"""Placement plan by examples: the models that make room, asleep or stopped, the GPUs, and refusals."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from sidecar.core.gpus import GPU
from sidecar.core.inventory import PlanSettings, Resident, Target
from sidecar.core.lifecycle import Pending, State
from sidecar.core.plan import Infeasible, PlacementOption, Plan, PutToSleep, plan, sets_of_gpus

STOPPED, STARTING, RUNNING, SLEEPING, ERROR = State
START, DRAIN, SLEEP, WAKE, STOP = Pending
GIB = 1 << 30
NOW = 10_000.0
SETTINGS = PlanSettings(host_memory=64 * GIB)
NAP = {"sleep_levels": (1, 2), "wake_seconds": (3.0, 6.0), "residue": 1, "host_bytes": 5}  # of a model that may sleep


def gpus(*totals: float, used: float = 0, **kinds: Any) -> list[GPU]:
    """GPUs of so many GiB, of which others than our residents use `used`."""
    return [
        GPU(index=index, total=int(total * GIB), free=int((total - used) * GIB), **kinds)
        for index, total in enumerate(totals)
    ]


def model(name: str, claim: float, idle: float = 3600.0, /, *on: int, state: State = RUNNING, **kinds: Any) -> Resident:
    """A resident of `claim` GiB on GPU 0 or those named, last used `idle` seconds ago; it loads in 10 s."""
    for field in ("residue", "unseen", "host_bytes", "host_held"):
        kinds[field] = int(kinds.get(field, 0) * GIB)
    settings = {"load_seconds": 10.0, "last_used": NOW - idle} | kinds
    return Resident(profile=name, state=state, gpus=on or (0,), claim=int(claim * GIB), **settings)


def want(need: float, name: str = "new", waiting: float = 0.0, **kinds: Any) -> Target:
    return Target(profile=name, need=int(need * GIB), since=NOW - waiting, **kinds)


def decide(
    target: Target, residents: list[Resident], devices: list[GPU], settings: PlanSettings = SETTINGS
) -> Plan | Infeasible:
    """The plan, with what the residents use taken off `free`."""
    used = {device.index: sum(r.held - r.unseen for r in residents if device.index in r.gpus) for device in devices}
    real = [msgspec.structs.replace(device, free=device.free - used[device.index]) for device in devices]
    return plan(target, residents, real, NOW, settings)


def started(*on: int, stop: tuple[str, ...] = (), sleep: tuple[tuple[str, int], ...] = (), name: str = "new") -> Plan:
    naps = tuple(PutToSleep(profile, level) for profile, level in sleep)
    return Plan(start=name, gpus=on or (0,), stop=stop, sleep=naps)


def woken(*on: int, stop: tuple[str, ...] = (), name: str = "new") -> Plan:
    return Plan(wake=name, gpus=on or (0,), stop=stop)


# -- one GPU of 24 GiB ------------------------------------------------------------------------------------------------

SCENARIOS = {
    # Enough is free: nobody is evicted.
    "an empty GPU": (want(24), [], started()),
    "one byte too many": (want(24 + 1 / GIB), [], None),
    "room beside another": (want(14), [model("a", 10)], started()),
    "room beside a busy one": (want(14), [model("a", 10, ref_count=3)], started()),
    # Too little is free: idle ones make way, the least recently used first, and no more of them than it takes.
    "the least recently used": (want(8), [model("a", 12, 600), model("b", 10, 300)], started(stop=("a",))),
    "in whatever order": (want(8), [model("b", 10, 300), model("a", 12, 600)], started(stop=("a",))),
    "as many as it takes": (
        want(20), [model("c", 4, 400), model("a", 10, 600), model("b", 10, 500)], started(stop=("a", "b")),
    ),
    "what LRU took for nothing is spared": (
        want(8), [model("tiny", 2, 900), model("a", 12, 600), model("b", 10, 300)], started(stop=("a",)),
    ),
    "and of those the hottest first": (
        want(11), [model("a", 6, 900), model("b", 6, 800), model("c", 8, 700)], started(stop=("a", "b")),
    ),
    "never used is the coldest": (want(8), [model("a", 12, math.inf), model("b", 12)], started(stop=("a",))),
    "equals by name": (want(8), [model("b", 12), model("a", 12)], started(stop=("a",))),
    "the colder is busy": (want(8), [model("a", 12, 600, ref_count=1), model("b", 10, 300)], started(stop=("b",))),
    "the colder is pinned": (want(8), [model("a", 12, 600, pinned=True), model("b", 10, 300)], started(stop=("b",))),
    "the colder is being drained": (
        want(8), [model("a", 12, 600, pending=DRAIN), model("b", 10, 300)], started(stop=("b",)),
    ),
    "one in ERROR holds its claim until it is stopped": (
        want(20), [model("a", 12, state=ERROR)], started(stop=("a",)),
    ),
    # Every byte that is held counts, whoever holds it.
    "what sleeps holds its residue": (want(23.5), [model("a", 12, state=SLEEPING, residue=1)], started(stop=("a",))),
    "and no more": (want(23), [model("a", 12, state=SLEEPING, residue=1)], started()),
    "what wakes holds its claim": (
        want(14), [model("a", 12, state=SLEEPING, residue=1, pending=WAKE, unseen=11)], None,
    ),
    "what starts holds its claim": (want(14), [model("a", 12, state=STARTING, pending=START, unseen=12)], None),
    "so does what is about to start": (want(14), [model("a", 12, state=STOPPED, pending=START, unseen=12)], None),
    "starting by whatever state": (want(14), [model("a", 12, state=STARTING)], None),
    "what is being stopped holds its claim": (want(14), [model("a", 12, pending=STOP)], None),
    "what is stopped holds nothing": (want(24), [model("a", 12, state=STOPPED)], started()),
    "other residents do not help": (want(20), [model("a", 8), model("b", 8, pinned=True)], None),
    # Asleep rather than stopped, where that is the quicker way back and leaves room.
    "put to sleep": (want(20), [model("a", 12, **NAP)], started(sleep=(("a", 1),))),
    "level 2 is all it may": (want(20), [model("a", 12, **NAP | {"sleep_levels": (2,)})], started(sleep=(("a", 2),))),
    "host memory is short": (want(20), [model("a", 12, **NAP | {"host_bytes": 65})], started(sleep=(("a", 2),))),
    "host memory is taken": (
        want(19),
        [model("z", 12, state=SLEEPING, residue=1, level=1, host_held=60), model("a", 12, **NAP)],
        started(sleep=(("a", 2),)),
    ),
    "level 1 wakes slower than a start": (
        want(20), [model("a", 12, **NAP | {"wake_seconds": (10.0, 6.0)})], started(sleep=(("a", 2),)),
    ),
    "so do both": (want(20), [model("a", 12, **NAP | {"wake_seconds": (10.0, 10.0)})], started(stop=("a",))),
    "it cannot sleep": (want(20), [model("a", 12, **NAP | {"sleep_levels": ()})], started(stop=("a",))),
    "its residue is in the way": (want(23.5), [model("a", 12, **NAP)], started(stop=("a",))),
    "it sleeps already, and its residue is in the way": (
        want(24), [model("a", 12, state=SLEEPING, **NAP)], started(stop=("a",)),
    ),
    "in ERROR nobody sleeps": (want(20), [model("a", 12, state=ERROR, **NAP)], started(stop=("a",))),
    "room for one residue: the hotter's": (
        want(23), [model("a", 12, 900, **NAP), model("b", 12, 800, **NAP)], started(sleep=(("b", 1),), stop=("a",)),
    ),
    "room for both, colder ones first": (
        want(22), [model("b", 12, 800, **NAP), model("a", 12, 900, **NAP)], started(sleep=(("a", 1), ("b", 1))),
    ),
    "it has what it needs of host memory already": (
        want(20),
        [model("z", 12, state=SLEEPING, residue=1, level=1, host_held=59), model("a", 12, **NAP | {"host_held": 4})],
        started(sleep=(("a", 1),)),
    ),
    "level 1 is all it may": (want(20), [model("a", 12, **NAP | {"sleep_levels": (1,)})], started(sleep=(("a", 1),))),
    "level 1 is all it may, and host memory is short": (
        want(20),
        [model("a", 12, **NAP | {"sleep_levels": (1,), "host_bytes": 65})],
        started(stop=("a",)),
    ),
    "host memory for one": (
        want(22),
        [model("a", 12, 900, **NAP | {"host_bytes": 40}), model("b", 12, 800, **NAP | {"host_bytes": 40})],
        started(sleep=(("a", 2), ("b", 1))),
    ),
    # The target is there already.
    "it runs": (want(8), [model("new", 8)], Plan(gpus=(0,))),
    "it sleeps": (want(8), [model("new", 8, state=SLEEPING, residue=1)], woken()),
    "its residue is part of its claim": (
        want(8), [model("new", 8, state=SLEEPING, residue=1), model("a", 16, ref_count=1)], woken(),
    ),
    "it sleeps, and another makes way": (
        want(8), [model("new", 8, state=SLEEPING, residue=1), model("a", 20)], woken(stop=("a",)),
    ),
    "it is in ERROR, and what it holds is its own": (
        want(20), [model("new", 20, state=ERROR)], started(stop=("new",)),
    ),
    "it is in ERROR, and another makes way first": (
        want(20), [model("new", 10, state=ERROR, pinned=True), model("a", 10)], started(stop=("a", "new")),
    ),
    "it is stopped": (want(20), [model("new", 20, state=STOPPED)], started()),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_one_gpu(name: str) -> None:
    target, residents, expected = SCENARIOS[name]
    decision = decide(target, residents, gpus(24))
    if expected is None:
        assert isinstance(decision, Infeasible)
    else:
        assert decision == expected


def test_free_is_what_nvml_and_the_ledger_both_say() -> None:
    assert decide(want(20), [], gpus(24, used=4)) == started()
    assert isinstance(decide(want(20), [], gpus(24, used=5)), Infeasible)
    starting = model("a", 10, state=STARTING, pending=START, unseen=7)
    assert decide(want(10), [starting], gpus(24, used=4)) == started()
    assert isinstance(decide(want(11), [starting], gpus(24, used=4)), Infeasible), "the 7 GiB it will yet take count"
    assert decide(want(10), [model("b", 14)], gpus(24, used=4)) == started(stop=("b",))


# -- when, and in what order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("idle", "warm", "waiting", "evicts"),
    [
        (99.9, math.inf, 0.0, False),  # it loads in 10 s: for 100 s after its last use it stays
        (100.0, math.inf, 0.0, True),
        (50.0, 40.0, 0.0, True),  # for one that was used later than itself it makes way
        (50.0, 50.0, 0.0, True),
        (50.0, 50.1, 0.0, False),
        (50.0, math.inf, 59.9, False),
        (50.0, math.inf, 60.0, True),  # max_starvation
        (0.0, math.inf, 3600.0, True),
    ],
)
def test_what_was_used_lately_does_not_make_way_for_a_colder_one(
    idle: float, warm: float, waiting: float, evicts: bool
) -> None:
    decision = decide(want(20, waiting=waiting, last_used=NOW - warm), [model("a", 12, idle)], gpus(24))
    assert (decision == started(stop=("a",))) is evicts


def test_one_that_starved_still_spares_the_hot_where_it_can() -> None:
    residents = [model("hot", 20, 50.0), model("cold", 20, 150.0, 1)]
    assert decide(want(10, waiting=999), residents, gpus(24, 24)) == started(1, stop=("cold",))
    residents = [model("hot", 12, 50.0), model("cold", 12, 150.0)]
    assert decide(want(12, waiting=999), residents, gpus(24)) == started(stop=("cold",))
    assert decide(want(24, waiting=999), residents, gpus(24)) == started(stop=("cold", "hot"))
    residents = [model("hot", 20, 50.0), model("cold", 10, 150.0, 1), model("colder", 10, 160.0, 1)]
    assert decide(want(24, waiting=999), residents, gpus(24, 24)) == started(1, stop=("colder", "cold"))


@pytest.mark.parametrize(
    ("kinds", "seconds"),
    [
        ({}, 10.0),
        ({"sleep_levels": (1, 2), "wake_seconds": (3.0, 6.0)}, 3.0),
        ({"sleep_levels": (2,), "wake_seconds": (3.0, 6.0)}, 6.0),
        ({"sleep_levels": (1, 2), "wake_seconds": (30.0, 60.0)}, 10.0),
        ({"sleep_levels": (1, 2), "wake_seconds": (3.0, 6.0), "state": SLEEPING}, 10.0),
        ({"load_seconds": 0.0}, 0.1),
    ],
)
def test_seconds_to_have_it_back(kinds: dict[str, Any], seconds: float) -> None:
    assert model("a", 12, **kinds).reload_seconds == seconds


# -- several GPUs -----------------------------------------------------------------------------------------------------

FOUR = gpus(24, 24, 24, 24)
PLACES = {
    "best fit": (want(8), [model("a", 10), model("b", 14, 1, 1), model("c", 20, 1, 2)], started(1)),
    "the first of equals": (want(8), [], started(0)),
    "the profile's GPUs": (want(8, gpus=(2, 3)), [model("a", 10, 1, 3)], started(3)),
    "two at once": (want(20, tensor_parallel=2), [model("a", 8, 1, 1)], started(0, 2)),
    "the tightest two": (
        want(8, tensor_parallel=2), [model("a", 4, 1, 1), model("b", 10, 1, 3)], started(1, 3),
    ),
    "all of them": (want(24, tensor_parallel=4), [], started(0, 1, 2, 3)),
    "all or none": (want(24, tensor_parallel=4), [model("a", 1, 1, 2, ref_count=1)], None),
    "more than there are": (want(1, tensor_parallel=5), [], None),
    "no eviction before the best fit": (
        want(20), [model("a", 6), model("b", 8, 1, 1), model("c", 24, 1, 2)], started(3),
    ),
    "the coldest on whatever GPU": (
        want(20), [model("a", 20, 700), model("b", 20, 900, 1), model("c", 20, 800, 2), model("d", 20, 600, 3)],
        started(1, stop=("b",)),
    ),
    "one victim rather than two": (
        want(20, gpus=(0, 1)), [model("a", 10, 900), model("b", 10, 800), model("c", 20, 700, 1)],
        started(1, stop=("c",)),
    ),
    "two of which the hotter is the colder": (
        want(20, gpus=(0, 1)),
        [model("a", 10, 900), model("d", 10, 600), model("b", 10, 850, 1), model("c", 10, 700, 1)],
        started(1, stop=("b", "c")),
    ),
    "a victim on several GPUs frees them all": (
        want(20, tensor_parallel=2), [model("wide", 20, 900, 1, 2), model("a", 20, 1, 0, ref_count=1),
                                      model("b", 20, 1, 3, ref_count=1)],
        started(1, 2, stop=("wide",)),
    ),
    "a wide one goes for a narrow one": (
        want(20, gpus=(1,)), [model("wide", 20, 900, 1, 2)], started(1, stop=("wide",)),
    ),
    "a pair with one victim": (
        want(20, tensor_parallel=2, gpus=(0, 1, 2)),
        [model("a", 20, 900, 0), model("b", 20, 800, 1), model("c", 20, 700, 2, ref_count=1)],
        started(0, 1, stop=("a", "b")),
    ),
    "an empty GPU is part of the pair": (
        want(20, tensor_parallel=2), [model("a", 20, 700), model("b", 20, 800, 1), model("c", 20, 900, 2)],
        started(2, 3, stop=("c",)),
    ),
    "a residue beside the set is nobody's matter": (
        want(24, gpus=(0,)), [model("wide", 20, 900, 0, 1, **NAP)], started(0, stop=("wide",)),
    ),
    "it wakes where it sleeps, though others are empty": (
        want(20), [model("new", 20, 1, 1, state=SLEEPING, residue=1), model("a", 20, 900, 1)], woken(1, stop=("a",)),
    ),
    "it starts elsewhere when it cannot wake": (
        want(20), [model("new", 20, 1, 1, state=SLEEPING, residue=1), model("a", 20, 900, 1, ref_count=1)],
        started(0, stop=("new",)),
    ),
    "it waits for a moment to wake where it sleeps": (
        want(20), [model("new", 20, 900, 1, state=SLEEPING, residue=1, level=1, wake_seconds=(1.0, 2.0)),
                   model("a", 20, 95, 1)],
        None,
    ),
    "it does not wait for longer than a start elsewhere": (
        want(20), [model("new", 20, 900, 1, state=SLEEPING, residue=1, level=1, wake_seconds=(1.0, 2.0)),
                   model("a", 20, 90, 1)],
        started(0, stop=("new",)),
    ),
    "it does not wait for what time alone does not bring": (
        want(20), [model("new", 20, 900, 1, state=SLEEPING, residue=1, level=1, wake_seconds=(1.0, 2.0)),
                   model("a", 20, 95, 1, pinned=True)],
        started(0, stop=("new",)),
    ),
    "it waits for calls to end that have not lasted for long": (
        want(20), [model("new", 20, 900, 1, state=SLEEPING, residue=1, level=1, wake_seconds=(1.0, 2.0)),
                   model("a", 20, 900, 1, ref_count=2, busy_for=8.9)],
        None,
    ),
    "it does not wait for calls that have lasted as long as a start takes": (
        want(20), [model("new", 20, 900, 1, state=SLEEPING, residue=1, level=1, wake_seconds=(1.0, 2.0)),
                   model("a", 20, 900, 1, ref_count=2, busy_for=9.0)],
        started(0, stop=("new",)),
    ),
    "it waits for calls though it has starved": (
        want(20, waiting=999.0),
        [model("new", 20, 900, 1, state=SLEEPING, residue=1, level=1, wake_seconds=(1.0, 2.0)),
         model("a", 20, 0, 1, ref_count=2, busy_for=1.0)],
        None,
    ),
    "it does not wait for what is being changed": (
        want(20), [model("new", 20, 900, 1, state=SLEEPING, residue=1, level=1, wake_seconds=(1.0, 2.0)),
                   model("a", 20, 900, 1, pending=DRAIN)],
        started(0, stop=("new",)),
    ),
    "a wide one wakes on all its GPUs": (
        want(20, tensor_parallel=2),
        [model("new", 20, 1, 1, 3, state=SLEEPING, residue=1), model("a", 20, 900, 3)],
        woken(1, 3, stop=("a",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_on_four_gpus(name: str) -> None:
    target, residents, expected = PLACES[name]
    decision = decide(target, residents, FOUR)
    if expected is None:
        assert isinstance(decision, Infeasible)
    else:
        assert decision == expected


def test_one_that_waits_for_calls_says_until_when_and_that_it_need_not() -> None:
    asleep = model("new", 20, 900, 1, state=SLEEPING, residue=1, level=1, wake_seconds=(1.0, 2.0))
    why = "new is back sooner where it sleeps, once others there have no calls and cool"
    for idle, lasted, after in ((900, 3.0, 3.0), (96, 3.0, 4.0), (96, 5.0, 5.0)):
        decision = decide(want(20), [asleep, model("a", 20, idle, 1, ref_count=1, busy_for=lasted)], gpus(24, 24))
        assert decision == Infeasible(why, NOW + after, waits=True)


def test_of_equal_victims_the_best_fit() -> None:
    assert decide(want(20), [model("wide", 24, 900, 0, 1, 2)], gpus(40, 24, 32)) == started(1, stop=("wide",))


def test_sixteen_gpus_have_few_sets_that_are_worth_a_look() -> None:
    eight = tuple(range(8))
    assert decide(want(70, tensor_parallel=8), [], gpus(*[80] * 16)) == started(*eight)
    halves = [model("warm", 70, 60, *eight), model("cold", 70, 900, *range(8, 16))]
    assert decide(want(70, tensor_parallel=8), halves, gpus(*[80] * 16)) == started(*range(8, 16), stop=("cold",))
    each = [model(f"m{on}", 60, 60.0 * (1 + on), on) for on in range(16)]
    coldest = tuple(f"m{on}" for on in range(15, 7, -1))
    assert decide(want(70, tensor_parallel=8), each, gpus(*[80] * 16)) == started(*range(8, 16), stop=coldest)
    for residents, most in (([], 1), (halves, 9), (each[:3], 8), (each, 200)):
        room = {gpu: (20 if any(gpu in r.gpus for r in residents) else 80) * GIB for gpu in range(16)}
        sets = list(sets_of_gpus(PlacementOption(wakes=False, need=70 * GIB, size=8, room=room), residents))
        assert 0 < len(sets) <= most
        assert len(set(sets)) == len(sets)


def test_quarantined_gpus_are_given_nothing() -> None:
    sick = gpus(24, refused="not back") + gpus(24, 24)[1:]
    assert decide(want(8), [model("a", 10, 1)], sick) == started(1)
    asleep = model("new", 20, 1, state=SLEEPING, residue=1)
    assert decide(want(20), [asleep], sick) == started(1, stop=("new",)), "it cannot wake there"
    assert isinstance(decide(want(20, gpus=(0,)), [asleep], sick), Infeasible)


def test_a_gpu_that_is_gone_is_no_gpu() -> None:
    assert decide(want(20), [model("a", 20, 900, 7), model("new", 20, 1, 7, state=SLEEPING)], gpus(24)) == started(
        0, stop=("new",)
    )


# -- why not, and when to come back -----------------------------------------------------------------------------------

NEEDS = "new needs 20.0 GiB of a GPU, and "
REASONS = {
    "busy": (
        want(20), [model("a", 12, ref_count=3), model("b", 2)], gpus(24),
        NEEDS + "cannot have it before calls or changes of a have ended", NOW + 5,
    ),
    "changing": (
        want(20), [model("b", 12, state=STARTING, pending=START), model("a", 8, pending=SLEEP)], gpus(24),
        NEEDS + "cannot have it before calls or changes of a, b have ended", NOW + 5,
    ),
    "hot for 70 s more": (
        want(20), [model("a", 12, 30)], gpus(24),
        NEEDS + "it is too soon after the last use of a to evict for a colder model", NOW + 60,
    ),
    "cool soon": (
        want(20, waiting=5.0), [model("a", 12, 60), model("b", 12, 80)], gpus(24, 24)[:1],
        NEEDS + "it is too soon after the last use of a, b to evict for a colder model", NOW + 40,
    ),
    "the first that is enough": (
        want(12, waiting=5.0), [model("a", 12, 60), model("b", 12, 80)], gpus(24),
        NEEDS.replace("20", "12") + "it is too soon after the last use of a, b to evict for a colder model", NOW + 20,
    ),
    "pinned": (
        want(20), [model("a", 12, pinned=True, ref_count=1), model("b", 12)], gpus(24),
        NEEDS + "there is none beside what is pinned: unpin a, or allow other GPUs", None,
    ),
    "others": (
        want(20), [model("a", 12)], gpus(24, used=8), NEEDS + "other processes hold too much of them", NOW + 5,
    ),
    "quarantine of two, told in any order": (
        want(20), [], (gpus(24, refused="not back") + gpus(24, 24, refused="not back")[1:])[::-1],
        NEEDS + "of those it may use, these are in quarantine: 0, 1", NOW + 5,
    ),
    "quarantine": (
        want(20, gpus=(0,)), [], gpus(24, refused="not back") + gpus(24, 24)[1:],
        NEEDS + "of those it may use, these are in quarantine: 0", NOW + 5,
    ),
    "too large": (want(20), [], gpus(16, 16), NEEDS + "may use only 0 that are so large", None),
    "too wide": (
        want(20, tensor_parallel=4, gpus=(0, 1)), [], gpus(24, 24, 24, 24),
        "new needs 20.0 GiB of each of 4 GPUs, and may use only 2 that are so large", None,
    ),
    "starting": (
        want(20), [model("new", 20, state=STARTING, pending=START)], gpus(24),
        "new is starting and has a start pending", NOW + 5,
    ),
    "being stopped": (
        want(20), [model("new", 20, pending=STOP)], gpus(24), "new is running and has a stop pending", NOW + 5,
    ),
    "starting, by its state": (
        want(20), [model("new", 20, state=STARTING)], gpus(24), "new is starting and has a start pending", NOW + 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_why_not_and_when_to_come_back(name: str) -> None:
    target, residents, devices, why, retry_at = REASONS[name]
    assert decide(target, residents, devices) == Infeasible(why, retry_at)


def test_who_is_not_in_the_way_is_not_named() -> None:
    residents = [
        model("a", 12, ref_count=1), model("far", 12, 1, 1, ref_count=1), model("none", 12, state=STOPPED, ref_count=1),
    ]  # fmt: skip
    decision = decide(want(20, gpus=(0,)), residents, gpus(24, 24))
    assert isinstance(decision, Infeasible)
    assert decision.why == NEEDS + "cannot have it before calls or changes of a have ended"
