"""Copies: the place that one may take, the GPUs it goes to, and who it makes way for."""

from __future__ import annotations

import math

import pytest

from sidecar.core.inventory import SLEEPS_AFTER, SPARED, STAYS, Resident
from sidecar.core.lifecycle import RUNNING, SLEEPING, STARTING, Lifecycle, Pending, State
from sidecar.core.model_state import ModelState
from sidecar.core.placement import as_resident, as_targets
from sidecar.core.plan import Infeasible
from sidecar.core.profile import Profile, Sleep
from tests.sidecar.core.test_plan import NAP, NOW, decide, gpus, model, started, want, woken

START, DRAIN, SLEEP, WAKE, STOP = Pending
RELOAD = 10.0  # seconds: of test_plan's models
BOUND = SPARED + RELOAD


def a_copy(need: float = 20, **kinds: object) -> object:
    return want(need, "m-2", model="m", copy=True, **kinds)


def first(claim: float = 20, *on: int, **kinds: object) -> Resident:
    """The engine that serves the copy's model, and is full."""
    return model("m", claim, 0.0, *on, model="m", ref_count=9, **kinds)


def evicts(*residents: Resident, need: float = 20) -> bool:
    """Whether a copy on the second GPU takes the place of these."""
    plan = decide(a_copy(need), [first(20, 0), *residents], gpus(24, 24))  # type: ignore[arg-type] # a Target
    assert isinstance(plan, Infeasible) or plan == started(1, stop=("other",), name="m-2")
    return not isinstance(plan, Infeasible)


@pytest.mark.parametrize(("idle", "makes_way"), [(BOUND + 0.1, True), (BOUND - 0.1, False), (math.inf, True)])
def test_a_model_keeps_its_place_for_some_seconds_and_the_time_to_have_it_back(idle: float, makes_way: bool) -> None:
    assert evicts(model("other", 20, idle, 1, model="o")) is makes_way


@pytest.mark.parametrize(("third_last", "makes_way"), [(3 * BOUND + 0.1, True), (3 * BOUND - 0.1, False)])
def test_a_model_that_is_used_again_and_again_keeps_its_place(third_last: float, makes_way: bool) -> None:
    other = model("other", 20, BOUND + 1, 1, model="o", warmth=NOW - third_last)
    assert evicts(other) is makes_way


def test_one_that_has_just_become_ready_keeps_its_place_though_nobody_used_it_yet() -> None:
    assert not evicts(model("other", 20, math.inf, 1, model="o", since=NOW - BOUND + 1))
    assert evicts(model("other", 20, math.inf, 1, model="o", since=NOW - BOUND - 1))


def test_starving_means_nothing_to_a_copy() -> None:
    hot = [first(20, 0), model("other", 20, 1.0, 1, model="o")]
    assert isinstance(decide(a_copy(waiting=1000.0), hot, gpus(24, 24)), Infeasible)  # type: ignore[arg-type]
    assert not isinstance(decide(want(20, waiting=1000.0), hot, gpus(24, 24)), Infeasible)


def test_engines_of_its_own_model_never_make_way() -> None:
    idle = model("m", 20, 1000.0, model="m")
    assert isinstance(decide(a_copy(), [idle], gpus(24)), Infeasible)  # type: ignore[arg-type]


def test_it_starts_on_a_gpu_apart_even_if_a_cold_model_has_to_go() -> None:
    residents = [first(10, 0), model("cold", 20, 1000.0, 1, model="c")]
    plan = decide(a_copy(10), residents, gpus(24, 24))  # type: ignore[arg-type]
    assert plan == started(1, stop=("cold",), name="m-2")


def test_beside_its_twin_where_there_is_no_other_place() -> None:
    warm = [first(10, 0), model("warm", 20, 1.0, 1, model="w")]
    assert decide(a_copy(10), warm, gpus(24, 24)) == started(0, name="m-2")  # type: ignore[arg-type]


def test_any_engine_of_a_model_goes_apart_from_its_twins_where_that_costs_nobody_more() -> None:
    asleep = model("m", 10, 100.0, 0, model="m", state=SLEEPING, **NAP)
    assert decide(want(10, "m-2", model="m"), [asleep], gpus(24, 24)) == started(1, name="m-2")
    assert decide(want(10, "other", model="o"), [asleep], gpus(24, 24)) == started(0, name="other"), "best fit"
    full = [asleep, model("other", 20, 1000.0, 1, model="o")]
    assert decide(want(10, "m-2", model="m"), full, gpus(24, 24)) == started(0, name="m-2"), "evicting costs more"


def test_it_wakes_where_it_sleeps() -> None:
    asleep = model("m-2", 20, 1000.0, 1, model="m", state=SLEEPING, **NAP)
    assert decide(a_copy(), [first(20, 0), asleep], gpus(24, 24)) == woken(1, name="m-2")  # type: ignore[arg-type]


@pytest.mark.parametrize(("awake", "makes_way"), [(STAYS - 1, False), (STAYS + 1, True)])
def test_a_copy_makes_way_for_a_model_without_an_engine_once_it_was_awake_for_a_while(
    awake: float, makes_way: bool
) -> None:
    """It is used all the time, so it would be hot otherwise."""
    copy = model("m-2", 20, 0.0, model="m", copy=True, since=NOW - awake, load_seconds=1000.0)
    plan = decide(want(20, "new", model="n"), [copy], gpus(24))
    assert plan == started(stop=("m-2",)) if makes_way else isinstance(plan, Infeasible)


# -- its state --------------------------------------------------------------------------------------------------------


def entry(state: State = RUNNING, **kinds: object) -> ModelState:
    made = ModelState("m-2", Profile(**{"model_path": "/m", "served_name": "m"} | kinds), 0.0)  # type: ignore[arg-type]
    made.lifecycle = Lifecycle(0.0, state)
    made.copy = True
    return made


@pytest.mark.parametrize(
    ("kinds", "step"),
    [
        ({}, (SLEEPS_AFTER, "sleep")),
        ({"sleep": Sleep(after=20.0)}, (20.0, "sleep")),
        ({"sleep": Sleep(after=900.0)}, (SLEEPS_AFTER, "sleep")),
        ({"stop_after": 30.0}, (30.0, "stop")),
        ({"stop_after": 900.0}, (SLEEPS_AFTER, "sleep")),
        ({"sleep": None}, None),
        ({"sleep": None, "stop_after": 30.0}, (30.0, "stop")),
        ({"pin": True}, None),
    ],
)
def test_an_idle_copy_sleeps_by_itself(kinds: dict[str, object], step: tuple[float, str] | None) -> None:
    assert entry(**kinds).idle_step() == step


def test_the_one_that_is_no_copy_stays_awake() -> None:
    only = entry()
    only.copy = False
    assert only.idle_step() is None


def test_what_somebody_orders_is_no_copy_until_it_runs_or_is_forgotten() -> None:
    wanted = entry(State.STOPPED)
    assert wanted.copy_only
    wanted.want(0.0)
    assert wanted.copy_only
    wanted.want(0.0, ordered=True)
    assert not wanted.copy_only
    wanted.advance(1000.0)
    assert wanted.copy_only
    assert not entry(pin=True).copy_only


def test_the_plan_is_told_of_model_and_copy() -> None:
    resident = as_resident(entry(), 10.0, 0, 0)
    (target, plain) = (as_targets(entry(), 10.0, {0: 24}, copy=copy)[0][1] for copy in (True, False))
    assert (resident.model, resident.copy, resident.since) == ("m", True, 0.0)
    assert (target.model, target.copy, plain.copy) == ("m", True, False)
    assert as_resident(entry(pin=True), 10.0, 0, 0).copy is False
    assert entry(STARTING).idle_step() is None
