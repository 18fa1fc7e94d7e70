"""Life of an ended call: who went first, who used the room, and the route that tells it."""

from __future__ import annotations

from typing import Any

from gateway.control.console.life import Beside, beside_of, life
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.decider.ended_calls import EndedCalls
from tests.control.parts import TOKEN, Parts, play

ADMIN = {"authorization": f"Bearer {TOKEN}"}
INTERACTIVE = TrafficClass(ttft=2.0, deadline=60.0)


def call(tenant: str, name: str, arrived: float, admitted: float | None, ended: float, held: int = 100) -> Beside:
    return Beside(tenant, name, arrived, admitted, ended, held)


def record(**facts: Any) -> Record:
    given = {"request_id": "i", "class_name": "interactive", "tenant": "acme", "model": "m"}
    return Record(route="/v1/chat/completions", **given | facts)


def told(record: Record, *beside: Beside, ended: float = 103.0) -> dict[str, str]:
    return {step.name: step.words for step in life(record, ended, "e0", INTERACTIVE, beside)}


def test_a_wait_is_told_by_the_calls_that_had_the_room_meanwhile() -> None:
    waited = record(engine="e0", queue=1.2, total=3.0, ttft=1.5, predicted_wait=1.0, stream=True, outcome=Outcome.OK)
    words = told(
        waited,  # came at 100.0, had its engine at 101.2
        call("globex", "interactive", 99.0, 100.5, 104.0),  # ahead, went first
        call("globex", "interactive", 99.5, None, 100.1),  # ahead, left
        call("globex", "interactive", 100.2, 100.3, 101.3, 300),  # came later, went first
        call("acme", "batch", 90.0, 91.0, 100.6),  # ran
        call("acme", "batch", 90.0, 91.0, 99.0),  # over before
        call("acme", "batch", 102.0, 102.0, 103.0),  # came after
    )
    assert words["waited"] == (
        "1.2 s (1.0 s were predicted): 2 of its class ahead; meanwhile 2 of interactive went first, 1 of which had "
        "come later; the room was used 85% by interactive of globex, 15% by batch of acme"
    )
    assert words["first byte"] == "300 ms after it was sent, in time for its class"
    assert words["judged"] == "class interactive, model m: first token within 2.0 s, whole within 60.0 s"


def test_a_call_that_did_not_wait_and_one_that_was_refused() -> None:
    assert told(record(engine="e0", total=1.0))["waited"] == "not at all: an engine had room"
    late = record(outcome=Outcome.SHED, status=503, total=2.5, reason="It has become too late.")
    words = told(late, call("globex", "interactive", 90.0, 91.0, 104.0))
    assert words["waited"] == "2.5 s: nothing had room for it; the room was used 100% by interactive of globex"
    assert (words["ended"], words["because"]) == ("after 2.5 s; the caller got 503 (shed)", "It has become too late.")
    assert "waited" not in told(record(outcome=Outcome.RATE_LIMITED, status=429))
    limited = told(
        record(engine="e0", total=9.0, ttft=5.0, stream=True, attempts=2, shaped_tokens=7, affinity_tokens=9)
    )
    assert limited["first byte"].endswith("3.0 s later than its class's target")
    assert "2 attempts" in limited["engine"]
    assert "7 tokens shorter" in limited["shaped"]


def test_an_ended_call_stands_beside_others_by_its_record() -> None:
    facts = {"queue": 1.0, "total": 4.0, "held_tokens": 9}
    assert beside_of(104.0, record(engine="e0", **facts)) == call("acme", "interactive", 100.0, 101.0, 104.0, 9)
    assert beside_of(104.0, record(**facts)).admitted is None


def test_the_life_of_a_kept_call_is_given_with_the_token() -> None:
    kept = EndedCalls(2)
    for number in range(3):
        kept.add(record(request_id=f"r{number}", engine="e0", total=0.1), float(number))

    async def scene(gateway: Parts) -> None:
        assert (await gateway.get("/calls/3")).status_code == 401
        steps = (await gateway.get("/calls/3", **ADMIN)).json()
        assert steps[0] == {"at": 0.0, "name": "came", "words": "POST /v1/chat/completions, request r2"}
        for gone in ("1", "4", "0"):
            assert (await gateway.get(f"/calls/{gone}", **ADMIN)).json()["error"]["code"] == "call_not_kept"
        for none in ("x", "9" * 5000):
            assert (await gateway.get(f"/calls/{none}", **ADMIN)).status_code == 404

    play(scene, TOKEN, ended=kept)
