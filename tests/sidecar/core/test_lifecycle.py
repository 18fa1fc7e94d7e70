"""Lifecycle of an engine: its state tables, counted failures, and the time of the next try."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from sidecar.core.lifecycle import (
    HEALTHY,
    MOST_FAILURES,
    MOST_TAUGHT,
    PENDING,
    TRANSITIONS,
    Event,
    IllegalTransition,
    Lifecycle,
    Pending,
    State,
    after,
    backoff,
    rest,
)

STOPPED, STARTING, RUNNING, SLEEPING, ERROR = State
START, DRAIN, SLEEP, WAKE, STOP = Pending
EVENTS: tuple[Event, ...] = get_args(Event)
ORDERS = ("start", "drain", "sleep", "wake", "stop", "cancel")

# Every legal step there is: state and pending, event, state and pending after it.
LEGAL = {
    (STOPPED, None, "start"): (STOPPED, START),
    (STOPPED, START, "cancel"): (STOPPED, None),
    (STOPPED, START, "launched"): (STARTING, START),
    (STARTING, START, "ready"): (RUNNING, None),
    (STARTING, START, "failed"): (ERROR, None),
    (STARTING, START, "out_of_memory"): (ERROR, None),
    (STARTING, START, "taught"): (ERROR, None),
    (STARTING, STOP, "taught"): (ERROR, STOP),
    (STARTING, START, "stop"): (STARTING, STOP),
    (STARTING, STOP, "ready"): (RUNNING, STOP),
    (STARTING, STOP, "failed"): (ERROR, STOP),
    (STARTING, STOP, "out_of_memory"): (ERROR, STOP),
    (STARTING, STOP, "stopped"): (STOPPED, None),
    (RUNNING, None, "drain"): (RUNNING, DRAIN),
    (RUNNING, None, "sleep"): (RUNNING, SLEEP),
    (RUNNING, None, "stop"): (RUNNING, STOP),
    (RUNNING, None, "slept"): (SLEEPING, None),
    (RUNNING, None, "failed"): (ERROR, None),
    (RUNNING, DRAIN, "cancel"): (RUNNING, None),
    (RUNNING, STOP, "cancel"): (RUNNING, None),
    (SLEEPING, STOP, "cancel"): (SLEEPING, None),
    (ERROR, STOP, "cancel"): (ERROR, None),
    (RUNNING, DRAIN, "sleep"): (RUNNING, SLEEP),
    (RUNNING, DRAIN, "stop"): (RUNNING, STOP),
    (RUNNING, DRAIN, "slept"): (SLEEPING, None),
    (RUNNING, DRAIN, "failed"): (ERROR, None),
    (RUNNING, SLEEP, "slept"): (SLEEPING, None),
    (RUNNING, SLEEP, "stop"): (RUNNING, STOP),
    (RUNNING, SLEEP, "failed"): (ERROR, None),
    (RUNNING, STOP, "slept"): (SLEEPING, STOP),
    (RUNNING, STOP, "failed"): (ERROR, STOP),
    (RUNNING, STOP, "stopped"): (STOPPED, None),
    (SLEEPING, None, "wake"): (SLEEPING, WAKE),
    (SLEEPING, WAKE, "cancel"): (SLEEPING, None),
    (SLEEPING, None, "stop"): (SLEEPING, STOP),
    (SLEEPING, None, "woken"): (RUNNING, None),
    (SLEEPING, None, "failed"): (ERROR, None),
    (SLEEPING, WAKE, "woken"): (RUNNING, None),
    (SLEEPING, WAKE, "stop"): (SLEEPING, STOP),
    (SLEEPING, WAKE, "failed"): (ERROR, None),
    (SLEEPING, WAKE, "out_of_memory"): (ERROR, None),
    (SLEEPING, STOP, "woken"): (RUNNING, STOP),
    (SLEEPING, STOP, "failed"): (ERROR, STOP),
    (SLEEPING, STOP, "out_of_memory"): (ERROR, STOP),
    (SLEEPING, STOP, "stopped"): (STOPPED, None),
    (ERROR, None, "start"): (ERROR, START),
    (ERROR, None, "stop"): (ERROR, STOP),
    (ERROR, START, "cancel"): (ERROR, None),
    (ERROR, START, "launched"): (STARTING, START),
    (ERROR, START, "stop"): (ERROR, STOP),
    (ERROR, STOP, "stopped"): (STOPPED, None),
}
REACHABLE = {(state, pending) for state, pending, _ in LEGAL} | set(LEGAL.values())


def at(state: State, pending: Pending | None = None) -> Lifecycle:
    life = Lifecycle(100.0, state)
    life.pending = pending
    return life


def stepped(*events: Event, now: float = 200.0) -> Lifecycle:
    life = Lifecycle(100.0)
    for event in events:
        life.step(event, now, "why" if event in ("failed", "out_of_memory", "taught") else "")
    return life


def everything(life: Lifecycle) -> dict[str, Any]:
    return {name: getattr(life, name) for name in vars(life)}


# -- the tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "pending"), sorted(REACHABLE, key=str), ids=lambda each: each.value if each else "nothing"
)
@pytest.mark.parametrize("event", [*EVENTS, "no such event"])
def test_what_is_not_in_the_tables_raises_and_changes_nothing(
    state: State, pending: Pending | None, event: Event
) -> None:
    life = at(state, pending)
    before = everything(life)
    expected = LEGAL.get((state, pending, event))
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"'{event}' in state {state.value}"):
            life.step(event, 500.0)
        assert everything(life) == before
    else:
        assert life.step(event, 500.0) is expected[0]
        assert (life.state, life.pending) == expected == after(state, pending, event)
        moved = state is not expected[0]
        assert life.since == (500.0 if moved else 100.0)


def test_no_way_leads_out_of_what_is_listed_here() -> None:
    seen, new = set(), {(STOPPED, None)}
    while new:
        seen |= new
        found = {LEGAL[state, pending, event] for state, pending in new for event in EVENTS
                 if (state, pending, event) in LEGAL}  # fmt: skip
        new = found - seen
    assert seen == REACHABLE
    assert all((STOPPED, None) in _from(place) for place in REACHABLE), "it can be stopped from anywhere"


def _from(place: tuple[State, Pending | None]) -> set[tuple[State, Pending | None]]:
    seen: set[tuple[State, Pending | None]] = set()
    new = {place}
    while new:
        seen |= new
        new = {found for (state, pending, _), found in LEGAL.items() if (state, pending) in new} - seen
    return seen


def test_an_order_changes_what_is_pending_and_a_fact_the_state() -> None:
    edges = [(state, event, found) for state, events in TRANSITIONS.items() for event, found in events.items()]
    assert {event for _, event, _ in edges} == set(EVENTS) == set(PENDING)
    for state, event, found in edges:
        assert (state is found) == (event in ORDERS)


def test_the_message_says_what_would_have_been_legal() -> None:
    with pytest.raises(IllegalTransition, match=r"^'wake' in state stopped: it has start, cancel, launched$"):
        at(STOPPED).step("wake", 1.0)
    with pytest.raises(IllegalTransition, match=r"^'stopped' in state running with nothing pending$"):
        at(RUNNING).step("stopped", 1.0)
    with pytest.raises(IllegalTransition, match=r"^'wake' in state sleeping with stop pending$"):
        at(SLEEPING, STOP).step("wake", 1.0)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "seconds"),
    [(0, 0.0), (1, 10.0), (2, 20.0), (3, 40.0), (4, 80.0), (5, 160.0), (6, 300.0), (7, 300.0), (1000, 300.0)],
)
def test_backoff_doubles_up_to_five_minutes(failures: int, seconds: float) -> None:
    assert backoff(failures) == seconds


def test_five_failures_in_a_row_and_it_waits_to_be_asked() -> None:
    life, waits = Lifecycle(0.0), []
    for now in (100.0, 200.0, 300.0, 400.0, 500.0):
        for event in ("start", "launched", "failed"):
            life.step(event, now, f"exit code 1 at {now:.0f}")
        waits.append(life.restart_at)
    assert waits == [110.0, 220.0, 340.0, 480.0, None]
    assert (life.failures, life.given_up, life.last_error) == (MOST_FAILURES, True, "exit code 1 at 500")
    life.step("start", 600.0)
    assert (life.failures, life.given_up) == (0, False), "asked again, it has all its tries again"
    life.step("launched", 600.0)
    life.step("failed", 610.0, "exit code 1")
    assert (life.failures, life.restart_at) == (1, 620.0)


@pytest.mark.parametrize(("rests", "seconds"), [(1, 300.0), (2, 600.0), (3, 1200.0), (4, 2400.0), (5, 3600.0)])
def test_a_rest_doubles_up_to_an_hour(rests: int, seconds: float) -> None:
    assert rest(rests) == seconds
    assert rest(rests + 10_000) == 3600.0


def test_after_its_tries_it_rests_and_longer_each_time() -> None:
    life, rests = Lifecycle(0.0), []
    for _ in range(2 * MOST_FAILURES):
        for event in ("start", "launched", "failed"):
            life.step(event, 1000.0)
        rests.append(life.rests_until)
    assert [until for until in rests if until is not None] == [1300.0, 1600.0]
    assert rests[MOST_FAILURES - 1] == 1300.0


def test_ready_is_not_yet_in_order() -> None:
    life = stepped("start", "launched", "failed", "start", "launched", "out_of_memory", "start", "launched")
    assert (life.failures, life.starved, life.last_error) == (1, 1, "why")
    life.step("ready", 300.0)
    assert (life.last_error, life.restart_at) == ("", None)
    life.step("failed", 299.0 + HEALTHY)
    assert (life.failures, life.starved) == (2, 1), "in a row with those before"
    for event in ("start", "launched", "ready"):
        life.step(event, 700.0)
    life.step("failed", 700.0 + HEALTHY)
    assert (life.failures, life.starved, life.rests) == (1, 0, 0)


def test_a_failure_while_running_or_asleep_counts() -> None:
    assert stepped("start", "launched", "ready", "failed").failures == 1
    assert stepped("start", "launched", "ready", "sleep", "slept", "failed").failures == 1


def test_out_of_memory_is_never_counted_against_the_model() -> None:
    life = stepped("start", "launched", "out_of_memory")
    assert (life.failures, life.starved, life.last_error) == (0, 1, "why")
    assert life.restart_at == 200.0, "once more, at once: another is evicted for it"
    for event in ("start", "launched", "out_of_memory"):
        life.step(event, 300.0)
    assert (life.failures, life.starved, life.restart_at) == (0, 2, None)
    life.step("start", 400.0)
    assert life.starved == 0
    waking = stepped("start", "launched", "ready", "sleep", "slept", "wake", "out_of_memory")
    assert (waking.state, waking.failures, waking.starved) == (ERROR, 0, 1)


def test_a_start_that_taught_is_followed_by_the_next_at_once_and_not_for_ever() -> None:
    life = Lifecycle(0.0)
    for number in range(1, MOST_TAUGHT + 1):
        for event in ("start", "launched", "taught"):
            life.step(event, 100.0, "why")
        assert (life.failures, life.starved, life.taught, life.last_error) == (0, 0, number, "why")
        assert life.restart_at == (100.0 if number < MOST_TAUGHT else None)
    assert life.rests_until == 400.0


@pytest.mark.parametrize("event", ["failed", "out_of_memory", "taught"])
def test_what_fails_while_it_is_being_stopped_is_stopped_and_not_counted(event: Event) -> None:
    life = stepped("start", "launched", "stop", event)
    assert (life.state, life.pending, life.failures, life.starved) == (ERROR, STOP, 0, 0)
    assert (life.last_error, life.restart_at) == ("why", None)
    assert life.step("stopped", 300.0) is STOPPED


def test_a_stop_and_a_start_do_not_forgive_failures() -> None:
    life = stepped("start", "launched", "failed", "stop", "stopped", "start", "launched", "failed")
    assert (life.failures, life.restart_at) == (2, 220.0)


def test_it_is_not_restarted_twice_at_once() -> None:
    assert stepped("start", "launched", "failed").restart_at == 210.0
    assert stepped("start", "launched", "failed", "start").restart_at is None
    assert stepped("start", "launched", "ready").restart_at is None


def test_an_engine_found_alive_begins_where_it_is() -> None:
    life = Lifecycle(100.0, SLEEPING)
    assert (life.state, life.pending, life.since) == (SLEEPING, None, 100.0)
    assert life.step("wake", 101.0) is SLEEPING
