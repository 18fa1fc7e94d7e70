"""Retry budget: in any window, retries stay within max(AT_LEAST, share of calls)."""

from __future__ import annotations

import random

from gateway.core.admission.retries import AT_LEAST, RetryBudget
from gateway.core.policy.policy import Policy
from gateway.core.policy.snapshot import Current, Snapshot
from gateway.core.recent_calls import WINDOW


def budget_of(share: float = 0.2) -> RetryBudget:
    return RetryBudget(Current(Snapshot(Policy(retries=share))))


def test_a_quiet_gateway_may_retry_at_least() -> None:
    budget = budget_of()
    assert [budget.take(100.0) for _ in range(5)] == [True, True, True, False, False]
    assert budget.take(100.0 + WINDOW), "the window has passed"


def test_without_a_share_there_is_none() -> None:
    budget = budget_of(0.0)
    budget.call(100.0)
    assert not budget.take(100.0)


def test_a_busy_gateway_may_retry_its_share() -> None:
    budget = budget_of(0.2)
    for _ in range(100):
        budget.call(50.0)
    assert sum(budget.take(50.5) for _ in range(100)) == 20


def test_slots_leave_the_window_one_second_at_a_time() -> None:
    budget = budget_of(0.5)
    for second in range(WINDOW):
        budget.call(second + 0.5)
        budget.call(second + 0.5)
    assert (budget.recent.calls, budget.recent.marked) == (20, 0)
    budget.call(WINDOW + 0.5)
    assert budget.recent.calls == 19
    assert budget.take(WINDOW + 4.5)
    assert (budget.recent.calls, budget.recent.marked) == (11, 1)


def test_random_traffic_never_exceeds_the_budget() -> None:
    rng = random.Random(3)
    budget = budget_of(0.2)
    now, calls, retries = 1000.0, [], []
    for _ in range(2000):
        now += rng.expovariate(50)
        budget.call(now)
        calls.append(now)
        if rng.random() < 0.9 and budget.take(now):
            retries.append(now)
            oldest = int(now) - WINDOW
            recent = sum(int(at) > oldest for at in retries)
            allowed = 0.2 * sum(int(at) > oldest for at in calls)
            assert recent <= max(AT_LEAST, allowed + 1e-9)


def test_backoff_is_full_jitter_over_a_doubling_range() -> None:
    budget = budget_of()
    rng = random.Random(1)
    draws = [budget.backoff(2, rng) for _ in range(500)]
    assert 0 <= min(draws) < 0.01
    assert 0.09 < max(draws) <= 0.1
