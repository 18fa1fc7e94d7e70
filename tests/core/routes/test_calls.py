"""Calls for model routes: what the client says, the conversation that they are of, and what becomes of them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from gateway.core.admission import refusals
from gateway.core.admission.admission import AdmissionControl
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.policy.policy import Policy
from gateway.core.policy.routes import ModelRoute, RouteMember, Until
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.call import Call, CallSettings
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.parser import parse
from gateway.core.request.record import Record
from gateway.core.request.routes import ROUTES
from gateway.core.routes.prospect import Readiness, prospect_of
from gateway.core.sidecars.sidecar import Outlook
from gateway.shared.vllm.answers import ModelCard
from tests.calls import a_call

SETTINGS = CallSettings(model_routes=frozenset({"support"}))
NOW = 100.0


def asked(path: bytes = b"/v1/chat/completions", headers: dict[bytes, bytes] | None = None, **body: Any) -> Call:
    data = msgspec.json.encode({"model": "support", **body})
    fields = {b"content-type": b"application/json", **(headers or {})}
    return parse(ROUTES[path], fields, data, settings=SETTINGS, request_id="r", tenant="t", now=NOW)


def chat(*texts: str, headers: dict[bytes, bytes] | None = None, system: str = "be brief") -> Call:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return asked(headers=headers, messages=[{"role": "system", "content": system}, *messages])


def test_a_conversation_begins_with_its_first_message() -> None:
    first = chat("hello")
    assert (first.asked_model, first.no_fallback) == ("support", False)
    assert chat("hello", "hi", "what is KV?").conversation == first.conversation
    assert len({first.conversation, chat("good day").conversation, chat("hello", system="x").conversation}) == 3
    begun = asked(b"/v1/completions", prompt=[7] * 4000)
    assert asked(b"/v1/completions", prompt=[7] * 4000 + [8]).conversation == begun.conversation
    assert asked(b"/v1/completions", prompt=[8] * 4000).conversation != begun.conversation
    assert asked(model="m", messages=[{"role": "user", "content": "hello"}]).asked_model == ""


def test_a_client_may_want_no_fallback() -> None:
    assert chat("hello", headers={b"x-weir-fallback": b"none"}).no_fallback
    with pytest.raises(Refused, match="x-weir-fallback must be none, or left out, found all") as caught:
        chat("hello", headers={b"x-weir-fallback": b"all"})
    assert caught.value.outcome is Outcome.BAD_REQUEST


def test_a_record_has_both_names() -> None:
    record = Record(request_id="r", route="/v1/chat/completions")
    record.note(a_call(model="llama", asked_model="support"))
    assert (record.model, record.asked_model) == ("llama", "support")


def test_a_route_names_every_model_that_may_answer() -> None:
    route = ModelRoute(members=(RouteMember(model="a"), RouteMember(model="b")), fallback=("c",))
    assert (route.models, route.has_canaries) == (("a", "b", "c"), False)
    canary = RouteMember(model="b", until=Until(errors=0.02))
    assert msgspec.structs.replace(route, members=(route.members[0], canary)).has_canaries


def control() -> AdmissionControl:
    """Over an engine of 1,000 tokens."""
    policy = Policy(classes={"default": TrafficClass(max_queue=1)})
    fleet = Fleet()
    engine = Engine("e", "http://e", policy, capacity=1000)
    fleet.add(engine)
    fleet.has_models(engine, [ModelCard(id="m")])
    engine.check(True, 0.0)
    made = AdmissionControl(fleet, policy)
    made.workload.open("m", NOW)
    return made


def readiness(made: AdmissionControl, model: str = "m") -> tuple[Readiness, bool]:
    call = a_call(model=model, arrived=NOW, deadline=NOW + 60.0, ttft_by=NOW + 60.0, prompt_tokens=400)
    found = prospect_of(made, call, NOW, random.Random(0))
    assert (found.refusal is not None) == (found.readiness is Readiness.NEVER)
    return found.readiness, found.in_time


def test_a_model_s_prospect_is_what_admission_would_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    made = control()
    assert readiness(made) == (Readiness.AT_ONCE, True)
    assert readiness(made, "unknown") == (Readiness.NEVER, False)
    made.fleet.engines["e"].hold(900, 900, NOW)
    assert readiness(made) == (Readiness.IN_TIME, True)
    made.fleet.engines["e"].down()
    assert readiness(made) == (Readiness.HELD, False)
    outlook = Outlook(sidecar="s", profile="p", ready_in=5.0)
    monkeypatch.setattr(made.sidecars, "outlook", lambda model, now: outlook)
    assert readiness(made) == (Readiness.WHEN_READY, True)


def test_a_copy_without_room_says_so() -> None:
    assert refusals.no_room_for_copy().outcome is Outcome.QUEUE_FULL
