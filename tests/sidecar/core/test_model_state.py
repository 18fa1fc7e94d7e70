"""State of a profile's model, and what follows for the plan and for callers."""

from __future__ import annotations

import math

import pytest

from gateway.shared.files.units import GIB
from sidecar.core.inventory import Size
from sidecar.core.lifecycle import FIRST_REST, MOST_FAILURES, Event
from sidecar.core.model_state import PAUSE, WAITED, ModelState
from sidecar.core.placement import as_resident, as_targets
from sidecar.core.plan import Infeasible, Plan, PutToSleep
from sidecar.core.profile import Profile, Sleep
from sidecar.core.step_times import EVICTION, LOAD, OVERDUE, WAKES, StartClock

STARTED: tuple[Event, ...] = ("start", "launched", "ready")
ASLEEP: tuple[Event, ...] = (*STARTED, "sleep", "slept")
SLEEPS = Sleep()


def entry(
    *events: Event,
    sleep: Sleep | None = SLEEPS,
    stop_after: float | None = None,
    pin: bool = False,
    at: float = 0.0,
    level: int = 0,
) -> ModelState:
    """One that has had these events, all at the time 0, and is sized."""
    made = ModelState("m", Profile(model_path="/m", sleep=sleep, stop_after=stop_after, pin=pin), at)
    made.sized = True
    for event in events:
        made.lifecycle.step(event, at)
    made.level = level  # type: ignore[assignment] # 0, 1 or 2
    return made


# -- wanted and used --------------------------------------------------------------------------------------------------


def test_calls_that_wait_want_it_until_nobody_says_so_any_more() -> None:
    made = entry()
    made.want(10.0)
    made.want(12.0)
    assert made.wanted_since == 10.0
    assert made.wanted(12.0 + WAITED)
    assert not made.wanted(12.1 + WAITED)
    made.advance(12.1 + WAITED)
    assert made.wanted_since is None


def test_who_says_it_once_is_believed_for_longer() -> None:
    made = entry()
    made.want(0.0, ordered=True)
    made.want(1.0)  # a call that waits does not shorten it
    assert made.wanted(made.max_starvation + LOAD)
    assert not made.wanted(made.max_starvation + LOAD + 1.0)


def test_asking_whether_it_is_wanted_changes_nothing() -> None:
    made = entry()
    made.want(0.0)
    assert not made.wanted(WAITED + 1.0)
    assert made.starts_at(WAITED + 1.0) is None
    assert made.wanted(WAITED)
    made.advance(WAITED)
    assert made.wanted(WAITED)
    made.advance(WAITED + 1.0)
    assert not made.wanted(WAITED)


def test_a_wish_outlasts_its_time_while_the_model_is_on_its_way() -> None:
    made = entry()
    made.want(0.0)
    made.lifecycle.step("start", 0.0)
    made.advance(WAITED + 1.0)
    assert made.wanted_since == 0.0


def test_a_pinned_model_is_always_wanted_unless_it_was_stopped_by_hand() -> None:
    made = entry(pin=True)
    assert made.wanted(0.0)
    made.stopped_by_hand = True
    assert not made.wanted(0.0)


def test_what_is_off_is_wanted_by_nobody_and_does_not_come_back_by_itself() -> None:
    made = entry(pin=True)
    made.off = True
    made.want(0.0, ordered=True)
    assert made.wanted_since is None
    assert not made.wanted(0.0)
    failing = failed(1)
    assert failing.starts_at(1000.0) is not None
    failing.off = True
    assert failing.starts_at(1000.0) is None


def test_it_starves_once_it_was_wanted_for_long_enough() -> None:
    made = entry()
    assert not made.starved(1000.0)
    made.want(10.0)
    assert not made.starved(9.9 + made.max_starvation)
    assert made.starved(10.0 + made.max_starvation)


def test_it_is_as_warm_as_its_last_use_but_two() -> None:
    made = entry()
    assert made.warmth == -math.inf
    for at in (10.0, 10.5, 11.0, 9.0):  # one call, told of again and again
        made.used(at)
    assert (made.last_used, made.idle_since, made.uses) == (11.0, 11.0, (11.0,))
    made.used(11.0 + PAUSE + 0.1)
    assert made.warmth == -math.inf
    made.used(20.0)
    assert made.warmth == 11.0
    made.used(30.0)
    assert made.warmth == 11.0 + PAUSE + 0.1


# -- by itself --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (entry(*STARTED), None),
        (entry(*STARTED, sleep=Sleep(after=30.0)), (30.0, "sleep")),
        (entry(*STARTED, sleep=Sleep(after=30.0), stop_after=90.0), (30.0, "sleep")),
        (entry(*ASLEEP, sleep=Sleep(after=30.0), stop_after=90.0), (90.0, "stop")),
        (entry(*ASLEEP, sleep=Sleep(after=30.0)), None),
        (entry(*STARTED, sleep=None, stop_after=90.0), (90.0, "stop")),
        (entry(*STARTED, "drain", stop_after=90.0), None),
        (entry(*STARTED, pin=True, stop_after=90.0), None),
        (entry(stop_after=90.0), None),
    ],
)
def test_when_it_goes_to_sleep_or_stops_by_itself(made: ModelState, expected: tuple[float, str] | None) -> None:
    assert made.idle_step() == expected


def test_what_is_wanted_starts_at_once_unless_it_is_on_its_way_or_not_sized() -> None:
    assert entry().starts_at(1.0) is None
    for events in ((), ASLEEP):
        made = entry(*events)
        made.want(1.0)
        assert made.starts_at(1.0) == 1.0
        made.sized = False
        assert made.starts_at(1.0) is None
    for events in (("start",), ("start", "launched"), STARTED, (*ASLEEP, "wake")):
        made = entry(*events)
        made.want(1.0)
        assert made.starts_at(1.0) is None


def failed(times: int = 1) -> ModelState:
    made = entry()
    for _ in range(times):
        for event in ("start", "launched", "failed"):
            made.lifecycle.step(event, 0.0)  # type: ignore[arg-type] # an Event each
    return made


def test_what_has_failed_starts_again_after_its_backoff_or_when_somebody_asks() -> None:
    assert failed().starts_at(0.0) == 10.0
    given_up = failed(MOST_FAILURES)
    assert given_up.starts_at(400.0) is None
    given_up.want(0.0)
    assert given_up.starts_at(0.0) == FIRST_REST
    given_up.asked = True
    assert given_up.starts_at(3.0) == 3.0


def test_one_that_rests_is_refused_to_calls_until_it_has_rested() -> None:
    made = failed(MOST_FAILURES)
    assert made.rests(FIRST_REST - 1.0)
    assert made.ready_in(FIRST_REST - 1.0, Plan()) is None
    assert not made.rests(FIRST_REST)
    assert made.ready_in(FIRST_REST, Plan(start="m")) == LOAD
    made.want(FIRST_REST)
    assert made.starts_at(FIRST_REST) == FIRST_REST


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_the_plan_sees_all_of_it() -> None:
    made = entry(*ASLEEP, sleep=Sleep(level=2), pin=True, level=2)
    made.size = Size(claim=11, residue=1, host=6, start_needs=12)
    made.gpus, made.busy = (0, 1), 2
    for at in (1.5, 4.0, 7.0):
        made.used(at)
    made.has_calls(8.0, 3)
    made.host_taken, made.host_booked = 3, 4
    seen = as_resident(made, 10.0, 3, 5)
    assert seen.busy_for == 2.0
    assert (seen.profile, seen.gpus, seen.claim, seen.residue, seen.unseen) == ("m", (0, 1), 11, 1, 5)
    assert (seen.ref_count, seen.pinned, seen.last_used, seen.warmth) == (5, True, 7.0, 1.5)
    assert (seen.sleep_levels, seen.level, seen.host_bytes, seen.host_held, seen.held) == ((), 2, 6, 4, 1)
    assert as_resident(entry(sleep=None), 0.0, 0, 0).sleep_levels == ()
    assert as_resident(entry(sleep=Sleep(level=2)), 0.0, 0, 0).sleep_levels == (2,)


def test_calls_last_since_the_first_of_them_was_known_of() -> None:
    made = entry(*STARTED)
    for now, in_flight, busy, lasted in ((1.0, 2, 0, 0.0), (3.0, 1, 0, 2.0), (4.0, 0, 1, 3.0), (5.0, 0, 0, 0.0)):
        made.busy = busy
        made.has_calls(now, in_flight)
        assert as_resident(made, now, in_flight, 0).busy_for == lasted


def test_as_a_target_it_waits_since_it_was_wanted_and_needs_more_than_was_too_little() -> None:
    made = entry()
    made.size = Size(claim=11, start_needs=12)
    ((_, target),) = as_targets(made, 5.0, {0: 24})
    assert (target.need, target.since) == (12, 5.0)
    made.want(3.0)
    made.least_room = 20
    ((_, target),) = as_targets(made, 5.0, {0: 24})
    assert (target.need, target.since) == (21, 3.0)


def of_sizes(several: int = 1, gpus: tuple[int, ...] | None = None) -> ModelState:
    made = ModelState("m", Profile(model_path="/m", tensor_parallel=several, gpus=gpus), 0.0)
    made.sizes = {total: Size(claim=total // 2, start_needs=total // 2) for total in (24, 48)}
    made.size = made.sizes[24]
    return made


def test_it_is_a_target_for_gpus_of_each_size() -> None:
    totals = {0: 24, 1: 48, 2: 48, 3: 2}
    for several, gpus, expected in (
        (1, None, [(24, 12, (0,)), (48, 24, (1, 2))]),
        (2, None, [(24, 12, (0, 1, 2)), (48, 24, (1, 2))]),
        (1, (2, 3), [(24, 12, ()), (48, 24, (2,))]),
    ):
        found = as_targets(of_sizes(several, gpus), 0.0, totals)
        assert [(total, each.need, each.gpus) for total, each in found] == expected
    made = of_sizes()
    assert [(total, each.gpus) for total, each in as_targets(made, 0.0, {0: 24, 1: 24})] == [(0, None)]
    made.least_room = 20
    assert [each.need for _, each in as_targets(made, 0.0, totals)] == [21, 24]
    assert [each.need for _, each in as_targets(made, 0.0, totals, room=False)] == [12, 24]
    assert [each.need for _, each in as_targets(made, 0.0, {0: 24})] == [21]
    assert [each.need for _, each in as_targets(made, 0.0, {0: 24}, room=False)] == [12]


def test_its_size_is_that_of_the_gpus_where_it_is() -> None:
    made = of_sizes()
    made.place(Plan(gpus=(1,), total=48))
    assert (made.gpus, made.size.claim) == ((1,), 24)
    made.place(Plan(gpus=(0,)))
    assert (made.gpus, made.size.claim) == ((0,), 24), "one size of GPU is all there is"


def test_what_found_too_little_is_not_tried_there_again_unless_it_claims_otherwise_or_has_rested() -> None:
    made = failed()
    assert not made.tries_again(FIRST_REST - 1.0)
    assert made.tries_again(FIRST_REST)
    for name in ("taught", "asked"):
        made = failed()
        setattr(made, name, True)
        assert made.tries_again(0.0)


# -- times ------------------------------------------------------------------------------------------------------------


def test_a_start_under_way_is_foretold_by_the_stage_that_its_lines_reached() -> None:
    made = entry("start", "launched")
    made.starting = StartClock(0.0)
    made.starting.heard(["Starting to load model x...", "Model loading took 15 GiB"], 6.0)
    assert made.ready_in(8.0, None) == pytest.approx(18.0 + 5.0)  # two of 20 seconds to compile, then the graphs
    assert made.ready_in(1000.0, None) == pytest.approx(0.25 * 994.0 + 5.0)


# -- sleep ------------------------------------------------------------------------------------------------------------


def test_an_engine_whose_residue_has_doubled_is_stopped_instead_of_put_to_sleep() -> None:
    made = entry(*STARTED)
    made.fell_asleep(1, GIB)
    assert (made.level, made.size.residue, made.first_residue, made.sleep_levels()) == (1, GIB, GIB, (1, 2))
    made.fell_asleep(1, 2 * GIB - 1)
    assert made.sleep_levels() == (1, 2)
    made.fell_asleep(1, 2 * GIB)
    assert (made.first_residue, made.sleep_levels()) == (GIB, ())
    assert as_resident(made, 0.0, 0, 0).sleep_levels == ()
    made.gone()
    assert (made.gpus, made.level, made.sleep_levels()) == ((), 0, (1, 2))


def test_an_engine_pins_host_memory_at_its_first_sleep_at_level_1() -> None:
    made = entry(*STARTED)
    made.size = Size(claim=3 * GIB)
    assert not made.pins(1), "of no weights nothing is copied"
    made.size = Size(claim=3 * GIB, weights=GIB)
    assert [made.pins(level) for level in (1, 2, None)] == [True, False, False]
    made.fell_asleep(2, GIB // 4)
    assert made.pins(1), "level 2 has copied nothing"
    made.fell_asleep(1, GIB // 4)
    made.fell_asleep(2, GIB // 4)
    assert not made.pins(1), "vLLM keeps that memory pinned"
    made.gone()
    assert made.pins(1), "the next engine has pinned none"


def test_one_that_is_worn_is_back_by_a_start() -> None:
    made = entry(*STARTED, "drain")
    made.first_residue, made.size, made.times.seen.stop = GIB, Size(residue=2 * GIB, claim=3 * GIB), 4.0
    assert made.ready_in(0.0, None) == LOAD + 4.0


PLAN = Plan(sleep=(PutToSleep("a", 1),), stop=("b",), makes_room=5.0)


@pytest.mark.parametrize(
    ("made", "decision", "expected"),
    [
        (entry(*STARTED), None, 0.0),
        (entry("start", "launched"), None, LOAD - 7.0),
        (entry(*ASLEEP, "wake", level=1), None, 7.0 * OVERDUE),  # later than foreseen
        (entry(*STARTED, "drain"), None, EVICTION + WAKES[0]),
        (entry(*STARTED, "sleep", sleep=Sleep(level=2)), None, EVICTION + WAKES[1]),
        (entry(*STARTED, "drain", sleep=None), None, EVICTION + LOAD),
        (entry(*ASLEEP, "stop", level=1), None, EVICTION + LOAD),
        (entry(*ASLEEP, level=2), PLAN, WAKES[1] + 5.0),
        (entry(*ASLEEP, level=2), Plan(stop=("m",), start="m", makes_room=3.0), LOAD + 3.0),  # it moves
        (entry(), PLAN, LOAD + 5.0),
        (entry(), Plan(after=4.0), LOAD + 4.0),
        (failed(), Plan(), LOAD + 3.0),
        (entry(), Infeasible("no room", None), None),
        (failed(MOST_FAILURES), Plan(), None),
    ],
)
def test_seconds_until_it_could_serve(
    made: ModelState, decision: Plan | Infeasible | None, expected: float | None
) -> None:
    assert made.ready_in(7.0, decision) == (None if expected is None else pytest.approx(expected))


def test_what_is_unusable_or_withdrawn_by_hand_cannot_be_had() -> None:
    for what, value in (("unusable", "no such folder"), ("off", True)):
        made = entry()
        setattr(made, what, value)
        assert made.ready_in(0.0, Plan()) is None
