"""Figures: the definition of goodput on hand-made tries, and the command from its arguments to its table."""

from __future__ import annotations

import pytest
from rich.console import Console

from loadtest.clients.calls import Try
from loadtest.lab.figures import prefill, runs
from loadtest.lab.figures.__main__ import ROWS, main, told
from loadtest.lab.figures.load import goodput, late
from loadtest.lab.figures.runs import Saturation, Setting, in_time
from loadtest.lab.rivals import loads
from loadtest.lab.rows import Row, percent, table_of
from loadtest.report.stats import quantile
from loadtest.simulate.inprocess import ClassTarget

TARGETS = {"chat": ClassTarget(ttft=2.0, deadline=30.0), "batch": ClassTarget(ttft=float("inf"), deadline=600.0)}


def a_try(**fields: object) -> Try:
    """Answered in time with 100 tokens, in the middle of the measured part."""
    return Try(**{
        "class_name": "chat", "number": 1, "intended": 100.0, "sent": 100.0, "first_byte": 101.0, "finished": 110.0,
        "status": 200, "outcome": "ok", "prompt_tokens": 60, "completion_tokens": 40, "upstream": 1,
    } | fields)  # type: ignore[arg-type] # fields of Try, passed through # fmt: skip


def a_setting() -> Setting:
    setting = Setting(warm=60.0, measured=180.0)
    setting.targets = TARGETS
    setting.capacity = Saturation(tokens=100.0 / 180.0, calls=1.0, clients=1)  # one good try is all of it
    return setting


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({}, True),
        ({"first_byte": 102.0}, True),
        ({"first_byte": 102.1}, False),
        ({"finished": 130.0}, True),
        ({"finished": 130.1}, False),
        ({"intended": 50.0, "number": 3}, True),
        ({"outcome": "truncated"}, False),
        ({"class_name": "batch", "first_byte": 109.0}, True),
    ],
)
def test_in_time_is_both_targets_from_the_sending_of_the_try(fields: dict[str, object], good: bool) -> None:
    assert in_time(a_try(**fields), TARGETS) is good


def test_goodput_is_tokens_in_time_over_the_capacity_and_only_of_the_measured_part() -> None:
    setting = a_setting()
    tries = [
        a_try(),
        a_try(number=2),
        a_try(first_byte=105.0),
        a_try(outcome="queue_full", upstream=0, prompt_tokens=0, completion_tokens=0),
        a_try(finished=59.9, sent=50.0, first_byte=50.5),
        a_try(finished=240.0, sent=239.0, first_byte=239.5),
    ]
    assert goodput(setting, tries) == pytest.approx(2.0)
    assert goodput(setting, tries, first=True) == pytest.approx(1.0)
    assert late(setting, tries) == pytest.approx(1 / 3), "of those an engine was given"


@pytest.mark.parametrize(("left_over", "status"), [([], 0), (["a queue is not empty"], 1)])
def test_what_a_gateway_left_behind_is_told_and_fails(
    left_over: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Setting(left=left_over)
    assert told(Console(), setting, []) == status
    assert all(wrong in capsys.readouterr().out for wrong in left_over)


def test_numbers_as_they_are_written() -> None:
    assert [percent(share) for share in (0.0, 0.05, 0.5, 0.999, 1.0)] == [
        "0.00 %",
        "5.00 %",
        "50.0 %",
        "99.90 %",
        "100.0 %",
    ]
    assert [quantile([3.0, 1.0, 2.0], q) for q in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
    assert quantile([], 0.5) == 0.0


def test_bad_arguments_are_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--rows", "prefill,99"])
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"classes: {default: {deadline: 1m}}", b"tenants: {acme: {}}", b"no_such_field: 1"])
def test_a_policy_without_the_classes_and_callers_of_the_traffic_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"classes|anonymous|no_such_field"):
        Setting(policy=text)


@pytest.mark.slow
def test_money_is_of_the_capacity_for_interactive_calls_whatever_was_measured_before() -> None:
    setting = Setting(engines=1, warm=3.0, measured=5.0)
    rows = ROWS["money"](setting)
    setting.capacity = Saturation(tokens=1e4, calls=100.0, clients=1)  # of other traffic
    assert ROWS["money"](setting) == rows


@pytest.mark.slow
def test_every_row_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "CLIENTS", (4,))  # a rough capacity of each load of `prefill`
    monkeypatch.setattr(loads, "SATURATED", (5.0, 25.0))
    monkeypatch.setattr(prefill, "SHARES", prefill.SHARES[:1])
    monkeypatch.setattr(runs, "SWEEP", runs.SWEEP[:1])
    setting = Setting(engines=2, warm=3.0, measured=3.0)
    rows: list[Row] = [row for measure in ROWS.values() for row in measure(setting)]
    assert {row.name for row in rows} >= set(ROWS)
    assert table_of(rows).row_count == len(rows)
    assert setting.left == []
