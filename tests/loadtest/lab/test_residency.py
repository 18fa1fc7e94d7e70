"""Residency command: its arguments, and a row of it."""

from __future__ import annotations

import pytest

from loadtest.lab.residency.command import main


def test_a_row_that_there_is_not_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--rows", "turns,none"])
    assert stopped.value.code == 2
    assert "there is no row none; one of turns, rounds" in capsys.readouterr().err


def test_a_row_is_measured_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "rounds", "--quick"]) == 0
    assert ">= 7 of 9" in capsys.readouterr().out


@pytest.mark.slow
def test_all_that_is_measured_in_virtual_time_meets_its_targets() -> None:
    assert main(["--quick"]) == 0
