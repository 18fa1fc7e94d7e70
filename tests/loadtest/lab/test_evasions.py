"""Evasions of rate limits: none gains tokens; without the charge for abandoned answers, each does."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.relay import forwarding, pipeline
from loadtest.lab.evasions import CALLS, EVASIONS, IN_FLIGHT, got, main
from loadtest.simulate.vtime import run


def test_nothing_is_got_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(EVASIONS)


@pytest.mark.parametrize("what", [what for what in EVASIONS if "before its first" in what or "whole" in what])
def test_it_would_be_without_the_charge_for_what_was_left(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(*_: Any) -> None:
        """As if no engine had it."""

    for module in (forwarding, pipeline):
        monkeypatch.setattr(module, "settle_unanswered", free)
    worked, charged = run(got(EVASIONS[what]))
    assert worked - charged > IN_FLIGHT * CALLS
