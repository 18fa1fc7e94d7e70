"""Load-shedding mode of a model, step by step, and the signals that are computed from calls."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from gateway.core.admission.mode import UNKNOWN_HOLDS, Mode, ModelMode, Signals, Window
from gateway.core.policy.traffic import ModeRule, Modes, Threshold
from gateway.core.quantile import TTFTQuantile, nearest_rank

NORMAL, TIGHT, BROWNOUT, CLOSED = Mode
ORDER = ("interactive", "default", "batch")
CALM = Signals(kv=0.1, waiting=0, ttft=0.1, errors=0.0)


def rule(enter: Threshold, leave: Threshold, dwell: float = 0.0, **rest: Any) -> ModeRule:
    return ModeRule(enter=enter, leave=leave, dwell=dwell, **rest)


def at(mode: Mode, rules: Modes | None = None, now: float = 0.0) -> ModelMode:
    """A model that was pressed into `mode`, the last step at `now`."""
    it = ModelMode(Modes())
    for step in range(mode.value):
        assert it.step(Signals(kv=1.0), now - 100.0 * (mode.value - 1 - step))
    assert it.mode is mode
    if rules is not None:
        it.apply(rules)
    return it


# -- the enum ---------------------------------------------------------------------------------------------------------


def test_modes_are_ordered_and_named_as_the_policy_names_them() -> None:
    for milder, worse in pairwise(Mode):
        assert milder < worse
        assert milder <= worse
        assert worse > milder
        assert worse >= milder
        assert worse >= worse  # noqa: PLR0124 # what is asked is that >= holds of equals
        assert not milder < milder  # noqa: PLR0124 # nor < of equals
        assert not milder > worse
        assert not milder >= worse


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "signals", "expected", "why"),
    [
        (NORMAL, Signals(), NORMAL, ""),
        (NORMAL, Signals(kv=0.849, waiting=7.9), NORMAL, ""),
        (NORMAL, Signals(kv=0.85), TIGHT, "kv 0.85 >= 0.85"),
        (NORMAL, Signals(kv=0.9123), TIGHT, "kv 0.912 >= 0.85"),
        (NORMAL, Signals(waiting=12.5), TIGHT, "waiting 12.5 >= 8"),
        (NORMAL, Signals(kv=1.0), TIGHT, "kv 1 >= 0.85"),  # one step, and why this one
        (NORMAL, Signals(kv=0.2, errors=0.6), TIGHT, "errors 0.6 >= 0.1"),  # tight names no errors; brownout does
        (NORMAL, Signals(ttft=250.0), TIGHT, "ttft 250 >= 2"),
        (TIGHT, Signals(kv=0.96, waiting=0), BROWNOUT, "kv 0.96 >= 0.96"),
        (TIGHT, Signals(kv=0.8, waiting=0), TIGHT, ""),  # between leave and enter
        (TIGHT, Signals(kv=0.749, waiting=1), TIGHT, ""),
        (TIGHT, Signals(kv=0.75, waiting=0.9), TIGHT, ""),
        (TIGHT, Signals(kv=0.749, waiting=0.9), NORMAL, "kv 0.749 < 0.75, waiting 0.9 < 1"),
        (TIGHT, Signals(kv=0.1, waiting=0.0, errors=0.2), BROWNOUT, "errors 0.2 >= 0.1"),
        (BROWNOUT, Signals(kv=0.5, ttft=1.0, errors=0.5), CLOSED, "errors 0.5 >= 0.5"),
        (BROWNOUT, Signals(kv=0.84, ttft=1.19, errors=0.02), BROWNOUT, ""),
        (BROWNOUT, Signals(kv=0.84, ttft=1.19, errors=0), TIGHT, "kv 0.84 < 0.85, ttft 1.19 < 1.2, errors 0 < 0.02"),
        (CLOSED, Signals(kv=1.0, errors=1.0), CLOSED, ""),
        (CLOSED, Signals(kv=0.5, errors=0.1, ttft=9.0), BROWNOUT, "kv 0.5 < 0.9, errors 0.1 < 0.2"),
    ],
)
def test_a_step_by_the_default_rules(mode: Mode, signals: Signals, expected: Mode, why: str) -> None:
    it = at(mode, now=0.0)
    before = (it.mode, it.why, it.since)
    assert it.step(signals, 50.0) is (expected is not mode)
    assert (it.mode, it.why, it.since) == (before if expected is mode else (expected, why, 50.0))


def test_all_the_way_up_and_down_one_step_at_a_time_with_dwell_times() -> None:
    it = ModelMode(Modes())
    changes = []
    for tenth in range(1000):
        now = tenth / 10
        if it.step(Signals(kv=1.0) if now < 40 else CALM, now):
            changes.append((now, str(it.mode)))
            assert it.since == now
    assert changes == [
        (0.0, "tight"), (5.0, "brownout"), (15.0, "closed"),
        (40.0, "brownout"), (50.0, "tight"), (55.0, "normal"),
    ]  # fmt: skip


def test_pressure_that_comes_back_is_met_at_once_from_normal_and_after_the_dwell_elsewhere() -> None:
    it = at(TIGHT, now=0.0)
    assert it.step(CALM, 5.0)
    assert it.step(Signals(kv=0.99), 5.1)
    assert not it.step(Signals(kv=0.99), 10.0)
    assert it.step(Signals(kv=0.99), 10.1)
    assert it.mode is BROWNOUT


def test_a_mode_is_not_left_while_what_brought_it_lasts() -> None:
    never = rule(Threshold(), Threshold())
    rules = Modes(tight=rule(Threshold(kv=0.8, errors=0.1), Threshold(kv=0.7)), brownout=never, closed=never)
    it = ModelMode(rules)
    assert it.step(Signals(kv=0.2, errors=0.2), 0.0)
    assert not it.step(Signals(kv=0.2, errors=0.1), 1.0)
    assert it.step(Signals(kv=0.2, errors=0.09), 2.0)


def test_a_leave_threshold_of_zero_is_met_by_zero() -> None:
    it = at(TIGHT, Modes(tight=rule(Threshold(waiting=8), Threshold(waiting=0))))
    assert not it.step(Signals(waiting=0.1), 1.0)
    assert it.step(Signals(waiting=0), 2.0)
    assert it.why == "waiting 0"


def test_a_rule_that_names_nothing_to_leave_is_left_when_it_may() -> None:
    it = at(TIGHT, Modes(tight=rule(Threshold(kv=0.8), Threshold(), dwell=3.0)))
    assert not it.step(CALM, 2.9)
    assert it.step(CALM, 3.0)
    assert it.why == "nothing keeps it"


def test_a_signal_that_gets_lost_holds_the_mode_a_while_and_not_for_ever() -> None:
    it = at(TIGHT, now=0.0)
    assert not it.step(Signals(kv=0.5, waiting=3), 20.0)
    assert not it.step(Signals(kv=0.5), 20.1), "who waits is not known at the moment"
    assert not it.step(Signals(kv=0.5), 20.0 + UNKNOWN_HOLDS - 0.1)
    assert it.step(Signals(kv=0.5), 20.0 + UNKNOWN_HOLDS)
    assert it.why == "kv 0.5 < 0.75, waiting unknown"


def test_with_no_signal_at_all_a_model_comes_back_to_normal() -> None:
    it = at(CLOSED, now=0.0)
    changed = [now for now in range(1, 100) if it.step(Signals(), float(now))]
    assert it.mode is NORMAL
    assert changed == [10, 20, 25]


def test_new_rules_keep_the_mode() -> None:
    it = at(BROWNOUT, now=0.0)
    it.apply(Modes(brownout=rule(Threshold(kv=0.5), Threshold(kv=0.4), dwell=1.0)))
    assert (it.mode, it.since) == (BROWNOUT, 0.0)
    assert not it.step(Signals(kv=0.45), 2.0)
    assert it.step(Signals(kv=0.39), 2.0)


# -- what is refused --------------------------------------------------------------------------------------------------

NAMED = Modes(
    brownout=rule(Threshold(), Threshold(), refuse=("batch", "default")),
    closed=rule(Threshold(), Threshold(), refuse=("interactive", "default")),
)


@pytest.mark.parametrize(
    ("rules", "mode", "class_name", "expected"),
    [
        (Modes(), NORMAL, "batch", None),
        (Modes(), TIGHT, "batch", None),
        (Modes(), BROWNOUT, "batch", "mode brownout refuses class 'batch'"),
        (Modes(), BROWNOUT, "default", None),
        (Modes(), CLOSED, "interactive", None),
        (Modes(), CLOSED, "default", "mode closed refuses class 'default'"),
        (NAMED, TIGHT, "batch", None),
        (NAMED, BROWNOUT, "default", "mode brownout refuses class 'default'"),
        (NAMED, BROWNOUT, "interactive", None),
        (NAMED, CLOSED, "interactive", "mode closed refuses class 'interactive'"),
        (NAMED, CLOSED, "batch", "mode brownout refuses class 'batch'"),
    ],
)
def test_refusals(rules: Modes, mode: Mode, class_name: str, expected: str | None) -> None:
    why = at(mode, rules).refuses(class_name, ORDER)
    if expected is None:
        assert why is None
    else:
        assert why is not None
        assert why.startswith(expected)


def test_the_only_class_is_the_most_important_one() -> None:
    for mode in Mode:
        assert at(mode).refuses("default", ("default",)) is None


# -- signals made of calls --------------------------------------------------------------------------------------------


def test_the_p90_of_first_bytes_of_the_last_ten_seconds() -> None:
    window = Window()
    assert window.ttft(100.0) is None
    for tenth in range(1, 10):
        window.first_byte(tenth / 10, 100.0)
    assert window.ttft(100.0) is None, "nine are too few"
    window.first_byte(50.0, 101.0)
    assert window.ttft(101.0) == 0.9, "one slow call of ten is not the p90"
    assert window.ttft(109.9) == 0.9
    assert window.ttft(110.0) is None
    for _ in range(1000):
        window.first_byte(3.0, 111.0)
    assert window.ttft(111.0) == 3.0
    for _ in range(64):
        window.first_byte(1.0, 111.0)
    assert window.ttft(111.0) == 1.0, "only the last are remembered"


@pytest.mark.parametrize(
    ("q", "expected"), [(0.0, 1.0), (0.1, 1.0), (0.5, 5.0), (0.9, 9.0), (0.91, 10.0), (0.95, 10.0), (1.0, 10.0)]
)
def test_nearest_rank(q: float, expected: float) -> None:
    assert nearest_rank([float(value) for value in range(1, 11)], q) == expected
    assert nearest_rank([7.0], q) == 7.0


def test_the_usual_time_to_first_token() -> None:
    usual = TTFTQuantile()
    for _ in range(7):
        usual.add(1.0)
    assert usual.value(0.95) is None
    usual.add(1.0)
    assert usual.value(0.95) == 1.0
    for _ in range(7):
        usual.add(9.0)
    assert usual.value(0.95) == 1.0, "sorted again every eight samples"
    usual.add(9.0)
    assert (usual.value(0.5), usual.value(0.95)) == (1.0, 9.0)
    for _ in range(128):
        usual.add(2.0)
    assert usual.value(1.0) == 2.0, "only the last are remembered"
