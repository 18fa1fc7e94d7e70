"""Timing attack on other tenants' prompts: it succeeds on shared caches, and fails on salted calls."""

from __future__ import annotations

import pytest

from loadtest.lab import isolation


def test_salts_leave_a_guesser_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "PROMPTS", 25)
    assert isolation.run("none", 1).told_apart == 1.0
    assert 0.25 < isolation.run("tenant", 1).told_apart < 0.75  # 3 standard errors


def test_ties_are_halves() -> None:
    assert isolation.Guesses([1.0, 2.0], [2.0, 3.0]).told_apart == 0.875
