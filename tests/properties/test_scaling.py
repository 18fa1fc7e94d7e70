"""Properties of the scaling signal: bounds, memory of the stabilization window, zero after the cooldown alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.engines import scaling
from gateway.core.engines.engine import Engine
from gateway.core.engines.scaling import EnginesWanted, FastestPace, Readings, utilization
from gateway.core.policy.policy import Policy
from tests.examples import examples

READINGS = st.builds(
    lambda work, given, refused, queued, up: (work, given, refused, queued, up),
    st.floats(0.0, 20.0),
    st.integers(0, 100_000),
    st.integers(0, 100_000),
    st.sampled_from([0, 0, 5_000]),
    st.integers(0, 20),
)
STREAMS = st.lists(READINGS, min_size=1, max_size=30)


def fed(stream: list[tuple[float, int, int, int, int]], share: float = 0.83, every: float = 1.0) -> list[int]:
    """The signal after each reading of the stream, `every` seconds apart."""
    signal, given, refused, told = EnginesWanted(share, 0.0), 0, 0, []
    for number, (work, more, away, queued, up) in enumerate(stream, 1):
        given, refused = given + more, refused + away
        readings = Readings(work=work, given=given, refused=refused, queued=queued, active=work > 0.0, up=up)
        signal.take(readings, number * every)
        told.append(signal.wanted)
    return told


@settings(max_examples=examples(30))
@given(STREAMS, st.floats(0.1, 1.0))
def test_as_many_as_the_work_needs_and_no_more_than_four_times(
    stream: list[tuple[float, int, int, int, int]], target: float
) -> None:
    most = max(work for work, *_ in stream)
    for wanted in fed(stream, target):
        assert 0 <= wanted <= max(1, stream[0][4], math.ceil(4.0 * most / target + 1e-9))


@settings(max_examples=examples(30))
@given(STREAMS, st.integers(0, 10))
def test_within_the_window_it_never_falls(stream: list[tuple[float, int, int, int, int]], window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "STABLE", 0.0)
        plain = fed(stream, 0.83)
        patch.setattr(scaling, "STABLE", float(window))
        kept = fed(stream, 0.83)
    for number, wanted in enumerate(kept):
        assert wanted == max(plain[max(0, number - window) : number + 1])


@settings(max_examples=examples(30))
@given(STREAMS, st.floats(0.1, 0.9))
def test_a_lower_target_utilization_wants_no_fewer(
    stream: list[tuple[float, int, int, int, int]], target: float
) -> None:
    lower, higher = fed(stream, target), fed(stream, 0.83)
    if target <= 0.83:
        assert all(few >= many for few, many in zip(lower, higher, strict=True))


@settings(max_examples=examples(30))
@given(STREAMS)
def test_refusals_want_no_fewer(stream: list[tuple[float, int, int, int, int]]) -> None:
    served = [(work, given, 0, queued, up) for work, given, _, queued, up in stream]
    assert all(a >= b for a, b in zip(fed(stream, 0.83), fed(served, 0.83), strict=True))


def test_none_is_wanted_after_the_cooldown_and_one_at_the_first_call() -> None:
    signal = EnginesWanted(0.83, 0.0)
    idle = Readings(work=0.0, given=0, refused=0, queued=0, active=False, up=0)
    signal.take(idle, 1.0)
    assert signal.wanted == 0  # nobody has ever called
    waiting = Readings(work=0.0, given=0, refused=0, queued=500, active=False, up=0)
    signal.take(waiting, 2.0)
    assert signal.wanted == 1
    for second in range(3, 602):
        signal.take(idle, float(second))
        assert signal.wanted == 1
    for second in range(602, 644):
        signal.take(idle, float(second))
    assert signal.wanted == 0
    signal.take(Readings(work=0.0, given=0, refused=100, queued=0, active=False, up=0), 650.0)
    assert signal.wanted == 1  # a call was refused, as no engine was there


def test_a_gateway_that_has_just_been_started_wants_no_fewer_than_are_up() -> None:
    signal = EnginesWanted(0.83, 0.0)
    told = []
    for second in range(1, 134):
        work = 3.0 if second == 5 else 0.5  # as many as are up are wanted by what is seen, too
        signal.take(Readings(work=work, given=10 * second, refused=0, queued=0, active=True, up=4), float(second))
        told.append(signal.wanted)
    assert told == [4] * 130 + [1] * 3


def test_late_first_tokens_want_one_more_than_there_are() -> None:
    signal = EnginesWanted(0.83, 0.0)
    signal.take(Readings(work=1.0, given=10, refused=0, queued=0, active=True, up=3, lateness=1.2), 1.0)
    assert signal.wanted == 4
    signal.apply(0.1)
    signal.take(Readings(work=1.0, given=20, refused=0, queued=0, active=True, up=3, lateness=0.9), 2.0)
    assert signal.wanted == 10


def test_a_reading_is_due_once_a_second() -> None:
    signal = EnginesWanted(0.83, 0.0)
    assert not signal.due(0.9)
    assert signal.due(1.0)


def test_an_engine_that_writes_at_half_its_pace_is_half_used() -> None:
    engine = Engine("a", "http://a", Policy())
    engine.speed.tpot = 0.02
    assert utilization(engine, 0.01) == 0.0  # it has no call
    hold = engine.hold(100, 50, 0.0)
    assert utilization(engine, 0.01) == 0.5
    assert utilization(engine, 0.03) == 1 / engine.ledger.slots
    assert utilization(engine, math.inf) == 1 / engine.ledger.slots  # no pace is known
    engine.ledger.slots = 1000
    assert utilization(engine, 0.03) == engine.ledger.load / engine.ledger.budget
    engine.ledger.slots = 1
    assert utilization(engine, 0.01) == 1.0
    hold.release()
    signal = EnginesWanted(0.83, 0.0)
    assert signal.work_of([engine], 1.0) == 0.0


def test_the_fastest_pace_is_forgotten_in_the_end() -> None:
    pace = FastestPace(0.0)
    assert pace.seconds == math.inf
    pace.seen(0.01, 1.0)
    pace.seen(0.02, 1800.0)
    assert pace.seconds == 0.01
    pace.seen(0.03, 3600.0)
    assert pace.seconds == 0.02
    pace.seen(0.03, 5400.0)
    assert pace.seconds == 0.03
