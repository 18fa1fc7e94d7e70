"""Figure of sessions: shortfall of a tenant's share, and where the oracle places sessions."""

from __future__ import annotations

from loadtest.lab.figures.agentic import ENGINES, KEYS, SECONDS, Sent, calls, placed, shortfall
from loadtest.simulate.simulated_client import Try


def sent(tenant: str, at: float, queue: float, tokens: int) -> Sent:
    return Sent(tenant, Try("default", 1, at, at, outcome="ok", prompt_tokens=tokens, queue=queue))


def test_a_tenant_that_is_passed_falls_short_by_half_of_what_passes_it() -> None:
    run = [sent("few", 0.0, 10.0, 100), *(sent("many", 0.0, at, 1000) for at in (1.0, 2.0, 3.0, 11.0))]
    assert shortfall(run, "few") == 1500.0, "three calls, while it waited"
    assert shortfall(run, "many") == 50.0


def test_nobody_falls_short_who_does_not_wait() -> None:
    run = [sent("few", 5.0, 0.0, 100), *(sent("many", 0.0, at, 1000) for at in (1.0, 2.0, 3.0))]
    assert shortfall(run, "few") == 0.0
    lost = [sent("few", 0.0, 10.0, 100), sent("many", 0.0, 1.0, 1000), sent("many", 0.0, 20.0, 1)]
    lost[0].tried.outcome = "shed"
    assert shortfall(lost, "few") == 0.0, "one that is not served is not counted"


def test_the_oracle_gives_every_session_to_one_engine_and_about_as_many_to_each() -> None:
    planned = list(calls(0.01, SECONDS, 1, KEYS))
    parts = placed(planned, ENGINES)
    assert sorted(call.asked.index for part in parts for call in part) == [call.asked.index for call in planned]
    assert min(map(len, parts)) >= 2
