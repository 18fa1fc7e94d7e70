"""Engines that read prompts for others and answer calls only where the others have no room."""

from __future__ import annotations

import random

import pytest

from gateway.core.admission.admission import AdmissionControl
from gateway.core.admission.decision import Decision, Wait
from gateway.core.engines.breaker import FAILURE, BreakerState
from gateway.core.engines.choice import Choice
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.policy.policy import EngineEntry, Policy, Role
from gateway.shared.vllm.answers import ModelCard
from tests.calls import a_call

NOW = 100.0


class Split:
    """Two engines of 1,000 tokens, of which 920 may be promised: one reads for the other."""

    def __init__(self) -> None:
        fleet = Fleet()
        self.reader, self.writer = self._joins(fleet, "prefill"), self._joins(fleet, "decode")
        self.control = AdmissionControl(fleet, Policy())
        self.control.workload.open("m", NOW)

    @staticmethod
    def _joins(fleet: Fleet, role: Role) -> Engine:
        engine = Engine(role, f"http://{role}", Policy(), capacity=1000)
        engine.go_by(EngineEntry(url=engine.url, transfer="kv", role=role))
        fleet.add(engine)
        fleet.has_models(engine, [ModelCard(id="m")])
        engine.check(True, 0.0)
        return engine

    def decide(self, *failed: Engine, **fields: object) -> Engine | type:
        """The engine that a call of 400 tokens goes to, which these have `failed`, or the kind of the decision."""
        decision = self.decision(*failed, **fields)
        return decision.engine if isinstance(decision, Choice) else type(decision)

    def decision(self, *failed: Engine, **fields: object) -> Decision:
        call = a_call(arrived=NOW, deadline=NOW + 60.0, prompt_tokens=400, **fields)
        return self.control.decide(call, NOW, random.Random(0), frozenset(engine.id for engine in failed))


def test_who_reads_for_others_answers_what_they_have_no_room_for() -> None:
    split = Split()
    assert split.decide() is split.writer
    split.writer.hold(600, 0, NOW)
    assert split.decide() is split.reader


def test_who_has_prompts_to_read_answers_nothing() -> None:
    split = Split()
    split.writer.hold(600, 0, NOW)
    reads = split.reader.hold(100, 100, NOW)
    assert split.decide() is Wait
    reads.release()
    assert split.decide() is split.reader


def test_calls_go_to_who_reads_while_nobody_else_is_up() -> None:
    split = Split()
    for _ in range(3):
        split.writer.check(False, NOW)
    assert not split.writer.health.up
    assert split.decide() is split.reader


@pytest.mark.parametrize(("subset", "found"), [({"decode"}, Wait), ({"decode", "prefill"}, "reader")])
def test_a_call_gets_no_engine_beyond_its_subset(subset: set[str], found: object) -> None:
    split = Split()
    split.writer.hold(600, 0, NOW)
    expected = split.reader if found == "reader" else found
    assert split.decide(subset=frozenset(subset)) is expected


def test_a_call_that_its_engine_has_failed_goes_to_who_reads_and_back_where_that_has_prompts_to_read() -> None:
    split = Split()
    assert split.decide(split.writer) is split.reader
    assert split.decide(split.writer, split.reader) is split.writer
    split.reader.hold(100, 100, NOW)
    assert split.decide(split.writer) is split.writer


def test_calls_go_to_who_reads_while_the_others_breakers_are_open() -> None:
    split = Split()
    breaker = split.writer.breaker
    while breaker.state is BreakerState.CLOSED:
        breaker.ended(breaker.sent(NOW), FAILURE, NOW)
    assert split.decide() is split.reader


def test_an_engine_learns_that_it_had_no_room_for_what_who_reads_answers() -> None:
    split = Split()
    split.writer.hold(600, 0, NOW)
    decision = split.decision()
    assert isinstance(decision, Choice)
    assert decision.engine is split.reader
    assert decision.others_full
