"""Log lines about engines' health: one for each change, none without a change, few for an engine that flaps."""

from __future__ import annotations

from gateway.core.engines.announcer import BURST, REFILL, Announcer, state_of
from gateway.core.engines.breaker import PROBES, Ending
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.trouble import REASONS, Trouble
from gateway.core.policy.policy import Policy
from gateway.shared.notice import Notice
from gateway.shared.vllm.answers import ModelCard

REFUSED = Trouble("refused", "connection refused")
EXPIRED = Trouble("tls_expired", "its TLS certificate has expired")


class World:
    def __init__(self) -> None:
        self.fleet = Fleet()
        self.engine = Engine("10.0.0.11:8000", "http://10.0.0.11:8000", Policy())
        self.fleet.add(self.engine)
        self.announcer = Announcer()
        self.now = 100.0

    def check(self, trouble: Trouble | None = None, *models: str, after: float = 0.4) -> list[Notice]:
        """One check, and what is told of it."""
        self.now += after
        if models:
            self.fleet.has_models(self.engine, [ModelCard(id=model) for model in models])
        self.engine.check(trouble is None, self.now, trouble)
        return self.look()

    def look(self, drained: str = "") -> list[Notice]:
        return self.announcer.look(self.engine, self.now, drained)


def test_an_engine_comes_goes_and_comes_back_a_line_each() -> None:
    world = World()
    assert world.look() == []
    assert state_of(world.engine) == "not asked yet"
    assert world.check(None, "b", "a") == ["engine 10.0.0.11:8000 is up; serves a, b"]
    assert state_of(world.engine) == "up"
    assert world.check() == world.check(REFUSED) == world.check(REFUSED) == []
    assert world.check(REFUSED) == ["engine 10.0.0.11:8000 is down: connection refused (3 checks)"]
    assert state_of(world.engine) == "down: connection refused"
    assert [world.check(REFUSED) for _ in range(20)] == [[]] * 20
    assert world.check(EXPIRED) == ["engine 10.0.0.11:8000 is still down: its TLS certificate has expired (24 checks)"]
    assert world.check(after=3.0) == []
    assert world.check(None, "a", "b") == ["engine 10.0.0.11:8000 is up again after 13 s; serves a, b"]
    assert world.check() == []
    assert world.engine.health.check_failures == {"refused": 23, "tls_expired": 1}
    assert {REFUSED.reason, EXPIRED.reason} <= set(REASONS)


def test_one_that_was_never_reached_is_told_of_once() -> None:
    world = World()
    assert world.check(REFUSED) == ["engine 10.0.0.11:8000 is not up yet: connection refused (1 check)"]
    assert world.check(REFUSED) == []
    assert world.check(None, "a") == ["engine 10.0.0.11:8000 is up; serves a"]


def test_one_that_a_call_could_not_reach() -> None:
    world = World()
    world.check(None, "a")
    world.engine.down(Trouble("reset", "the connection was reset (a call)", world.now))
    assert world.look() == ["engine 10.0.0.11:8000 is down: the connection was reset (a call)"]


def test_its_list_of_models() -> None:
    world = World()
    assert world.check(None) == ["engine 10.0.0.11:8000 is up; serves no model"]
    assert world.check(None, "a", "b") == ["engine 10.0.0.11:8000 now serves a, b"]
    assert world.check(None, "b", "c") == ["engine 10.0.0.11:8000 now serves c and no longer serves a"]
    assert world.check(None, "b") == ["engine 10.0.0.11:8000 no longer serves c"]


def test_its_breaker() -> None:
    world = World()
    world.check(None, "a")
    breaker = world.engine.breaker
    world.engine.health.failed_call = "it answered 500"
    for _ in range(breaker.policy.failures):
        breaker.ended(breaker.sent(world.now), Ending.FAILURE, world.now)
    told = "engine 10.0.0.11:8000 gets no calls but probes, since its breaker is open"
    assert world.look() == [f"{told}: it answered 500"]
    assert world.look() == []
    world.now = breaker.probe_at
    for _ in range(PROBES):
        breaker.ended(breaker.sent(world.now), Ending.SUCCESS, world.now)
    lasted = breaker.policy.open_for
    assert world.look() == [f"engine 10.0.0.11:8000 gets calls again, its breaker is closed after {lasted:.0f} s"]
    world.engine.health.failed_call = ""
    for _ in range(breaker.policy.failures):
        breaker.ended(breaker.sent(world.now), Ending.FAILURE, world.now)
    assert world.look() == [told]


def test_a_drain() -> None:
    world = World()
    world.check(None, "a")
    hold = world.engine.hold(10, 5, world.now)
    assert world.look("drained by an operator") == [
        "engine 10.0.0.11:8000 gets no new calls: drained by an operator (1 still run)"
    ]
    assert world.look("drained by an operator") == []
    hold.release()
    assert world.look("") == ["engine 10.0.0.11:8000 gets new calls again"]
    assert world.look("it sleeps") == ["engine 10.0.0.11:8000 gets no new calls: it sleeps"]


def test_one_that_flaps_is_told_of_a_few_times_and_then_rarely_with_a_count() -> None:
    world = World()
    lines = world.check(None, "a")
    for _ in range(500):
        for _ in range(3):
            lines += world.check(REFUSED)
        for _ in range(2):
            lines += world.check()
    lasted = world.now - 100.0
    assert BURST < len(lines) <= BURST + lasted / REFILL + 1
    assert "changes since the last line: it changes too often to tell each)" in lines[-1]
    quiet = [line for _ in range(100) for line in world.check()]
    assert len(quiet) <= 1
    assert world.announcer._engines[world.engine.id].told.up is world.engine.health.up


def test_one_that_is_back_as_it_was_told_is_not_told_of() -> None:
    world = World()
    world.check(None, "a")
    world.announcer._engines[world.engine.id].left = 0.0
    world.engine.down(REFUSED)
    assert world.look() == []
    world.engine.health.up = True
    assert world.look() == []


def test_one_that_has_left_is_new_when_it_comes_again() -> None:
    world = World()
    world.check(None, "a")
    world.announcer.forget(world.engine.id)
    world.announcer.forget("nobody")
    assert world.look() == ["engine 10.0.0.11:8000 is up; serves a"]


def test_one_that_goes_down_without_a_word() -> None:
    world = World()
    world.check(None, "a")
    world.engine.down()
    assert world.look() == ["engine 10.0.0.11:8000 is down"]
    assert state_of(world.engine) == "down"


def test_an_engine_without_metrics_is_told_of_once_with_what_is_assumed() -> None:
    world = World()
    world.check(None, "a")
    world.engine.health.unmeasured = "GET /metrics was answered 404"
    (line,) = world.look()
    assert line.startswith("engine 10.0.0.11:8000 tells no metrics, as a vLLM would (GET /metrics was answered 404): ")
    assert (
        f"{world.engine.ledger.capacity} tokens of KV cache and {world.engine.ledger.slots} calls at once are assumed"
        in line
    )
    assert world.look() == []


def test_lines_have_an_event_and_a_level() -> None:
    world = World()
    lines = world.check(None, "a") + [line for _ in range(3) for line in world.check(REFUSED)] + world.look("by hand")
    assert [(line.event, line.level) for line in lines] == [
        ("engine_up", "info"),
        ("engine_down", "warning"),
        ("engine_drained", "info"),
    ]
