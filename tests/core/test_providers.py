"""Decisions about providers: who may leave the house, in which order, with what, and when a provider is let alone."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway.core.admission.admission import AdmissionControl
from gateway.core.admission.decision import Reason, Refuse
from gateway.core.engines.breaker import BreakerState, CircuitBreaker
from gateway.core.engines.choice import usable_of
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.models import model_list
from gateway.core.engines.origin import origin_of
from gateway.core.money.tariff import MICRO, Tariff
from gateway.core.policy.advice import advise
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.providers import MoneyLimit, Provider
from gateway.core.policy.routes import ModelRoute, RouteMember
from gateway.core.policy.traffic import Breaker
from gateway.core.request.routes import ROUTES
from gateway.core.routes.prospect import Prospect, Readiness
from gateway.core.routes.provider_call import dropped_line, may_leave, provider_body, provider_lines
from gateway.core.routes.resolution import Resolved, resolve
from gateway.shared.addresses import is_private
from gateway.shared.files.checked import spelled
from gateway.shared.vllm.answers import ModelCard
from tests.calls import a_call

NOW = 100.0
CHAT = ROUTES[b"/v1/chat/completions"]


def provider(**more: Any) -> Provider:
    fields: dict[str, Any] = {
        "url": "https://api.example.com/v1",
        "key_file": "key",
        "models": {"mini": "small-model-name"},
        "prices": Tariff(MICRO, MICRO, MICRO),
        "budget": (MoneyLimit(1.0, "day"),),
        "tenants": ("t",),
        "classes": ("default",),
    }
    return Provider(**(fields | more))


# -- who may leave ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (b"/v1/chat/completions", {}, True),
        (b"/v1/completions", {}, True),
        (b"/v1/messages", {"tools": [{"name": "f"}]}, True),
        (b"/v1/chat/completions", {"tools": [{"type": "function"}, {"type": "custom"}]}, True),
        (b"/v1/chat/completions", {"tools": None}, True),
        (b"/v1/messages", {"tools": [{"name": "f"}, {"type": "web_search_20250305"}]}, False),
        (b"/v1/chat/completions", {"tools": [{"type": "code_interpreter"}]}, False),
        (b"/v1/chat/completions", {"tools": "web_search"}, False),
        (b"/v1/responses", {}, False),
        (b"/v1/messages/count_tokens", {}, False),
        (b"/v1/embeddings", {}, False),
        (b"/v1/audio/transcriptions", {}, False),
    ],
)
def test_text_whose_cost_its_tokens_bound_may_leave(path: bytes, body: dict[str, Any], expected: bool) -> None:
    assert may_leave(a_call(route=ROUTES[path], body=json.dumps(body).encode())) is expected


def test_media_and_unreadable_bodies_stay() -> None:
    assert not may_leave(a_call(body=b"{}", media=1))
    assert not may_leave(a_call(body=b"\xff"))


def test_tenant_and_class_must_be_named() -> None:
    control = AdmissionControl(Fleet(), Policy(providers={"cloud": provider()}))
    call = a_call(leaves=1)
    assert control.may_leave(call, "mini")
    assert not control.may_leave(call, "m")
    for other in ({"leaves": 0}, {"leaves": 1, "tenant": "u"}, {"leaves": 1, "class_name": "batch"}):
        assert not control.may_leave(a_call(**other), "mini")


def test_a_provider_that_nobody_may_use_is_advised_on() -> None:
    found = advise(Policy(providers={"cloud": provider(tenants=()), "other": provider(tenants=(), classes=())}))
    assert [(spelled(path), text) for path, text in found if path[0] == "providers"] == [
        ("providers.cloud", "no call may leave the house: it names no tenants"),
        ("providers.other", "no call may leave the house: it names no tenants and classes"),
    ]


def test_every_call_to_a_provider_is_asked_for_its_permission() -> None:
    policy = Policy(providers={"cloud": provider()})
    fleet = Fleet()
    engine = Engine("provider:cloud", "https://api.example.com/v1", policy, capacity=10**12)
    engine.provider = "cloud"
    fleet.add(engine)
    fleet.has_models(engine, [ModelCard(id="mini")])
    engine.ready(NOW)
    control = AdmissionControl(fleet, policy)
    control.money.ahead, control.money.known = False, True
    call = a_call(model="mini", leaves=1, asked=10, arrived=NOW, deadline=NOW + 60)
    rng = random.Random(0)
    assert control.at_once(call, NOW, rng, frozenset()) is not None
    call.leaves = 0
    assert control.at_once(call, NOW, rng, frozenset()) is None
    assert isinstance(control.decide(call, NOW, rng), Refuse)


# -- the order --------------------------------------------------------------------------------------------------------

READY = Prospect(Readiness.AT_ONCE)
LEAVES = Prospect(Readiness.LEAVES)
LATE = Prospect(Readiness.NEVER, Refuse(reason=Reason.TOO_LATE))
GONE = Prospect(Readiness.NEVER, Refuse(reason=Reason.NO_ENGINE))
ROUTE = ModelRoute(members=(RouteMember(model="a"),), fallback=("mini", "b"))


@pytest.mark.parametrize(
    ("a", "b", "mini", "spills", "expected"),
    [
        (READY, READY, READY, True, Resolved("a", "member")),
        (LATE, READY, READY, True, Resolved("b", "fallback")),
        (LATE, LATE, READY, True, Resolved("mini", "spilled", Resolved("a", "member"))),
        (GONE, LATE, READY, True, Resolved("mini", "spilled")),
        (LATE, LATE, READY, False, Resolved("a", "member")),
        (GONE, LATE, LATE, True, Resolved("b", "fallback")),
        (GONE, GONE, LATE, True, Resolved("a", "member")),
        (LEAVES, READY, READY, True, Resolved("a", "member")),
        (LEAVES, LATE, READY, True, Resolved("mini", "spilled", Resolved("a", "member"))),
        (LEAVES, LATE, LATE, True, Resolved("a", "member")),
        (LATE, LEAVES, LATE, True, Resolved("b", "fallback")),
    ],
)
def test_a_provider_is_the_last_resort(
    a: Prospect, b: Prospect, mini: Prospect, spills: bool, expected: Resolved
) -> None:
    seen = []

    def spill(model: str, members: Any) -> bool:
        seen.append((model, members))
        return spills

    asks = {"a": a, "b": b, "mini": mini}.__getitem__
    found = resolve(ROUTE, 1, asks, permitted=lambda _: True, fallback=True, spills=spill, outside={"mini"})
    assert found == expected
    assert seen in ([], [("mini", [a])])


def test_without_a_member_that_could_be_late_nothing_spills() -> None:
    found = resolve(
        ROUTE,
        1,
        {"b": GONE, "mini": READY}.__getitem__,
        permitted=lambda model: model != "a",
        fallback=True,
        spills=lambda *_: True,
        outside={"mini"},
    )
    assert found == Resolved("b", "fallback")


def test_members_are_down_for_want_of_an_engine() -> None:
    assert GONE.is_down
    assert Prospect(Readiness.HELD).is_down
    assert not LATE.is_down
    assert not READY.is_down


# -- what goes out ----------------------------------------------------------------------------------------------------


def test_a_body_has_the_fields_of_the_api_and_no_others() -> None:
    body = {"model": "support", "messages": [], "top_k": 1, "cache_salt": "s", "n": 2, "model ": "x"}
    sent, dropped = provider_body(a_call(stream=True), json.dumps(body).encode(), "small")
    options = {"include_usage": True}
    assert json.loads(sent) == {"model": "small", "messages": [], "n": 2, "stream_options": options}
    assert dropped == ["top_k", "model "]
    sent, dropped = provider_body(
        a_call(route=ROUTES[b"/v1/messages"], stream=True), b'{"top_k":1,"min_p":1,"model":1,"model":2}', "small"
    )
    assert (json.loads(sent), dropped) == ({"top_k": 1, "model": "small"}, ["min_p"])


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        ({"max_tokens": 9000, "max_completion_tokens": 1}, {"max_completion_tokens": 1}),
        ({"max_tokens": 9000, "max_completion_tokens": None}, {"max_tokens": 9000, "max_completion_tokens": None}),
        ({"max_tokens": 9000}, {"max_tokens": 9000}),
    ],
)
def test_of_two_limits_the_one_that_counts_goes_out(limits: dict[str, int | None], sent: dict[str, int | None]) -> None:
    body, dropped = provider_body(a_call(), json.dumps(limits).encode(), "small")
    assert (json.loads(body), dropped) == (sent | {"model": "small"}, [])


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/messages"])
def test_a_limit_of_another_api_lifts_none(path: bytes) -> None:
    limits = b'{"max_tokens":1,"max_completion_tokens":9000}'
    body, dropped = provider_body(a_call(route=ROUTES[path]), limits, "small")
    assert (json.loads(body), dropped) == ({"max_tokens": 1, "model": "small"}, ["max_completion_tokens"])


def test_a_head_has_nothing_of_the_callers() -> None:
    lines = b"content-type: application/json\r\nuser-agent: weir\r\nx-request-id: r\r\n"
    assert provider_lines(a_call()) == lines
    assert provider_lines(a_call(route=ROUTES[b"/v1/messages"])) == lines + b"anthropic-version: 2023-06-01\r\n"


def test_dropped_fields_are_named_as_far_as_a_header_can() -> None:
    assert dropped_line([]) == b""
    assert dropped_line(["top_k", "a\r\nset-cookie: x", "min_p"]) == b"x-weir-dropped: top_k, min_p\r\n"
    assert dropped_line([f"f{number}" for number in range(99)]).count(b",") == 15


# -- its engine -------------------------------------------------------------------------------------------------------


def test_a_pause_holds_off_probes() -> None:
    breaker = CircuitBreaker(Breaker())
    breaker.pause(120.0, NOW)
    assert (breaker.state, breaker.probe_at) == (BreakerState.OPEN, NOW + 120.0)
    assert not breaker.allows(NOW + 119.0)
    assert breaker.allows(NOW + 120.0)
    breaker.pause(60.0, NOW + 10.0)
    assert breaker.probe_at == NOW + 120.0, "the longer one"


def outside() -> Engine:
    engine = Engine("provider:cloud", "https://api.example.com/v1", Policy(), capacity=10**12)
    engine.provider = "cloud"
    engine.go_by(EngineEntry(url="https://api.example.com", name="cloud", max_concurrency=2))
    engine.ready(NOW)
    return engine


def test_an_open_breaker_of_a_provider_is_never_ignored() -> None:
    engine = outside()
    engine.breaker.pause(60.0, NOW)
    assert usable_of([engine], NOW) == []


def test_its_ledger_is_a_limit_of_calls() -> None:
    engine = outside()
    assert (engine.name, engine.label) == ("cloud", "provider:cloud")
    for _ in range(2):
        assert engine.ledger.fits(10**6)
        engine.hold(10**6, 10**6, NOW)
    assert not engine.ledger.fits(1)
    assert engine.prefills.reading(0, NOW) == 2, "it reads prompts beside each other"
    engine.remember((1, 2, 3), 300, NOW)
    assert engine.cache.leading((1, 2, 3)) == 0, "or its index would grow for ever"


def test_its_address_is_that_of_openais_clients() -> None:
    origin = origin_of("provider:cloud", "https://api.example.com/openai/v1/")
    assert (origin.host, origin.port, origin.tls, origin.base_path) == ("api.example.com", 443, True, "/openai/v1")
    assert origin_of("provider:cloud", "http://h:81").port == 81
    assert origin_of("provider:cloud", "http://h").port == 80
    assert origin_of("e", "http://h:81").base_path == ""


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("8.8.8.8", False), ("127.0.0.1", True), ("10.1.2.3", True), ("169.254.169.254", True), ("100.64.0.1", True),
        ("224.0.0.1", True), ("::1", True), ("fe80::1%eth0", True), ("fd00::1", True),
        ("::ffff:10.0.0.1", True), ("64:ff9b::a00:1", True), ("2002:a00:1::", True), ("2606:4700::1111", False),
        ("64:ff9b::808:808", False), ("api.example.com", False), ("localhost", True), ("a.localhost.", True),
    ],
)  # fmt: skip
def test_addresses_within_the_house(host: str, expected: bool) -> None:
    assert is_private(host) is expected


def test_its_models_are_hidden_from_others() -> None:
    fleet, engine = Fleet(), outside()
    fleet.add(engine)
    fleet.has_models(engine, [ModelCard(id="mini")])
    routes = {"support": ModelRoute(members=(RouteMember(model="a"),), fallback=("mini",))}

    def told(hidden: set[str]) -> set[str]:
        return {card["id"] for card in json.loads(model_list(fleet, b"/v1/models", (), {}, routes, hidden)[1])["data"]}

    assert told(set()) == {"mini", "support"}
    assert told({"mini"}) == set()
