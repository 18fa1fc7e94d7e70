"""Soak test: the causes of a late call, and a short soak, of which only counts are checked."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.lab.soak import cause, main
from loadtest.lab.soak_site import Met
from loadtest.simulate.simulated_client import Try

MET = [Met("killed", "a", 10.0, 13.0), Met("slow", "b", 20.0, 23.0)]


@pytest.mark.parametrize(
    ("outcome", "record", "sent", "expected"),
    [
        ("truncated", {"engine": "a"}, 9.0, "answer cut: killed"),
        ("truncated", {"engine": "a"}, 14.0, "answer cut"),
        ("ok", {"engine": "b", "attempts": 2}, 9.0, "moved to another engine"),
        ("ok", {"engine": "b", "attempts": 1}, 9.0, "another engine failed"),
        ("ok", {"engine": "b", "attempts": 1}, 19.5, "engine was slow"),
        ("ok", {"engine": "b", "attempts": 1}, 30.0, "nothing"),
        ("cut", {}, 30.0, "answer cut"),
    ],
)
def test_what_a_call_that_was_not_in_time_has_met(
    outcome: str, record: dict[str, Any], sent: float, expected: str
) -> None:
    tried = Try("interactive", 1, sent, sent, finished=sent + 4.0, outcome=outcome)
    assert cause(tried, record, MET) == expected


def test_bad_arguments_are_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--seconds", "0"], ["--without", "rain"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert "error:" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_clients_metrics_and_log_agree_after_a_short_soak_and_nothing_is_left() -> None:
    assert main(["--seconds", "35"]) == 0
