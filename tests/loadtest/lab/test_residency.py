"""Residency command: its arguments, and a look at machines."""

from __future__ import annotations

import pytest

from loadtest.lab.residency.__main__ import main


def test_no_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--machines", "0"])
    assert stopped.value.code == 2
    assert "--machines must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_machines_are_looked_at_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machines", "2"]) == 0
    assert "2 random machines" in capsys.readouterr().out
