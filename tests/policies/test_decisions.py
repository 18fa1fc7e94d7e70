"""Decisions of each shipped policy on calls: tenant, class, limits, load shedding."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.core.admission.limits import LimitBook
from gateway.core.admission.mode import Mode, ModelMode, Signals
from gateway.core.admission.refusals import own_words
from gateway.core.admission.shaping import cap
from gateway.core.batching.merge_pieces import rule_of
from gateway.core.engines.engine import Engine
from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.core.policy.snapshot import Snapshot
from gateway.core.policy.traffic import Limit, Merge
from gateway.core.request.call import Call
from gateway.core.request.classes import classify
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.parser import parse
from gateway.core.request.routes import route_of
from gateway.core.request.tenants import with_keys

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


def shipped(name: str) -> Policy:
    policy = decode((ROOT / "policies" / f"{name}.yaml").read_bytes(), name)
    keys = {hashlib.sha256(f"key-of-{tenant}".encode()).hexdigest(): tenant for tenant in policy.tenants}
    return with_keys(policy, keys, "keys") if policy.keys_file else policy


def decided(
    policy: Policy, headers: dict[str, str] | None = None, path: str = CHAT, tokens: int = 10, **body: Any
) -> Call:
    """The call as the gateway understands it, with a prompt of about so many tokens. Raises Refused."""
    snapshot = Snapshot(policy)
    sent = {"content-type": "application/json"} | (headers or {})
    given = {name.encode(): value.encode() for name, value in sent.items()}
    account = snapshot.tenants.identify(given, "127.0.0.1")
    route = route_of(path.encode())
    assert route is not None
    content: dict[str, Any] = {"input": "x"} if route.kind == "embedding" else {"query": "x", "documents": ["y"]}
    if route.kind == "chat":
        content = {"messages": [{"role": "user", "content": "hello"}]}
    raw = msgspec.json.encode({"model": "sim", **content, **body})
    call = parse(route, given, raw, settings=snapshot.calls, request_id="r", tenant=account.name, now=0.0)
    call.prompt_tokens = tokens
    classify(call, snapshot.classes, account.default_class, account.best)
    if account.models and call.model not in account.models:
        raise Refused(Outcome.FORBIDDEN, "model")
    return call


def key_of(tenant: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{tenant}", **more}


# -- interactive-first ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "tier", "tokens", "expected"),
    [
        ({}, None, 10, "default"),
        ({}, "auto", 10, "default"),
        ({}, "default", 10, "default"),
        ({}, "priority", 10, "interactive"),
        ({}, "flex", 10, "batch"),
        ({"x-weir-class": "interactive"}, None, 10, "interactive"),
        ({"x-weir-class": "batch"}, "priority", 10, "batch"),
        ({"x-weir-class": "long_context"}, None, 10, "long_context"),
        ({}, None, 8001, "long_context"),
        ({}, "priority", 8001, "interactive"),
        ({"authorization": "Bearer none"}, "priority", 10, "interactive"),  # clients of servers without keys send one
    ],
)
def test_anybody_may_ask_for_any_class(headers: dict[str, str], tier: str | None, tokens: int, expected: str) -> None:
    call = decided(shipped("interactive-first"), headers, tokens=tokens, service_tier=tier)
    assert (call.tenant, call.class_name) == ("anonymous", expected)


def test_interactive_calls_have_two_seconds_to_their_first_token() -> None:
    call = decided(shipped("interactive-first"), {"x-weir-class": "interactive"})
    assert (call.ttft_by, call.deadline) == (2.0, 60.0)


@pytest.mark.parametrize(
    ("mode", "refused"),
    [
        (Mode.NORMAL, []),
        (Mode.TIGHT, ["batch"]),
        (Mode.BROWNOUT, ["long_context", "batch"]),
        (Mode.CLOSED, ["default", "long_context", "batch"]),
    ],
)
def test_batch_gives_way_first(mode: Mode, refused: list[str]) -> None:
    policy = shipped("interactive-first")
    order = tuple(policy.classes)
    modes = ModelMode(policy.modes)
    modes.mode = mode
    assert [name for name in order if modes.refuses(name, order) is not None] == refused


@pytest.mark.parametrize(
    ("watermark", "caps"),
    [
        (0.80, [None, None, None, None]),
        (0.85, [None, None, None, 512]),
        (0.95, [None, 256, 256, 256]),
    ],
)
def test_batch_is_cut_first(watermark: float, caps: list[int | None]) -> None:
    policy = shipped("interactive-first")
    order = tuple(policy.classes)
    assert [cap(policy.shaping, watermark, name, order) for name in order] == caps


# -- multi-tenant -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "tenant", "expected"),
    [
        (key_of("acme"), "acme", "default"),
        (key_of("acme", **{"x-weir-class": "interactive"}), "acme", "interactive"),
        (key_of("globex", **{"x-weir-class": "interactive"}), "globex", "default"),
        (key_of("globex", **{"x-weir-class": "batch"}), "globex", "batch"),
        (key_of("shop", **{"x-weir-class": "interactive"}), "shop", "default"),
        (key_of("evals"), "evals", "batch"),
        (key_of("evals", **{"x-weir-class": "default"}), "evals", "batch"),
        ({"x-api-key": "key-of-acme"}, "acme", "default"),
        ({}, "anonymous", "batch"),
        ({"x-weir-class": "interactive"}, "anonymous", "batch"),
        ({"x-tenant": "acme"}, "anonymous", "batch"),  # nobody is believed who says so
    ],
)
def test_a_key_says_who_pays_and_what_may_be_asked_for(headers: dict[str, str], tenant: str, expected: str) -> None:
    call = decided(shipped("multi-tenant"), headers)
    assert (call.tenant, call.class_name) == (tenant, expected)


def test_a_wrong_key_is_refused_and_is_not_anonymous() -> None:
    with pytest.raises(Refused) as refused:
        decided(shipped("multi-tenant"), {"authorization": "Bearer key-of-nobody"})
    assert refused.value.outcome is Outcome.UNAUTHORIZED


@pytest.mark.parametrize(("tenant", "allowed"), [("acme", True), ("globex", False), ("shop", True), ("evals", True)])
def test_a_tenant_may_use_the_models_it_has(tenant: str, allowed: bool) -> None:
    if allowed:
        assert decided(shipped("multi-tenant"), key_of(tenant), model="llama-3-70b").model == "llama-3-70b"
    else:
        with pytest.raises(Refused) as refused:
            decided(shipped("multi-tenant"), key_of(tenant), model="llama-3-70b")
        assert refused.value.outcome is Outcome.FORBIDDEN


@pytest.mark.parametrize(
    ("tenant", "class_name", "tokens", "calls", "limit"),
    [
        ("acme", "default", 100_000, 8, "2M/min tokens"),  # its burst
        ("acme", "batch", 100_000, 8, "2M/min tokens"),
        ("acme", "default", 1, 1200, "1200/min requests"),
        ("globex", "default", 100_000, 5, "500k/min tokens"),
        ("globex", "default", 1, 600, "600/min requests"),
        ("shop", "default", 1, 30, "300/min requests"),
        ("evals", "batch", 1_000_000, 5, "5M/h tokens"),
        ("anonymous", "batch", 1, 10, "10/min requests"),
        ("anonymous", "batch", 5_000, 4, "20k/min tokens"),
    ],
)
def test_quotas(tenant: str, class_name: str, tokens: int, calls: int, limit: str) -> None:
    book = LimitBook(shipped("multi-tenant"))
    for _ in range(calls):
        book.charge(tenant, class_name, "sim", tokens, 0.0)
    with pytest.raises(Refused) as refused:
        book.charge(tenant, class_name, "sim", tokens, 0.0)
    assert refused.value.limit == limit


def test_all_tenants_together_have_a_limit_on_the_expensive_model() -> None:
    policy = shipped("multi-tenant")
    limits = msgspec.structs.replace(policy.limits, per_tenant=Limit())
    book = LimitBook(msgspec.structs.replace(policy, limits=limits))
    for tenant in range(10):
        book.charge(f"t{tenant}", "default", "llama-3-70b", 1_000_000, 0.0)
    with pytest.raises(Refused) as refused:
        book.charge("another", "default", "llama-3-70b", 1_000_000, 0.0)
    assert refused.value.limit == "10M/min tokens"


@pytest.mark.parametrize(
    ("tenant", "status", "body"),
    [
        ("shop", 503, '{"resultStatus":1002,"tips":"顾客太多,客官请稍候"}'),
        (
            "globex",
            429,
            '{"error":{"code":"over_quota","message":"globex is over 600/min requests. Try again in 1 s."}}',
        ),
    ],
)
def test_refusals_are_in_the_customers_own_words(tenant: str, status: int, body: str) -> None:
    policy = shipped("multi-tenant")
    refusal = policy.tenants[tenant].refusal
    assert refusal is not None
    assert refusal.status == status
    refused = Refused(Outcome.RATE_LIMITED, "", retry_after=0.1, limit="600/min requests")
    written = own_words(refusal, refused, tenant=tenant, class_name="default", model="sim", request_id="r")
    assert written.decode() == body


# -- batch-night ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "tier", "expected"),
    [
        ({}, None, "batch"),
        ({}, "flex", "batch"),
        ({}, "default", "default"),
        ({"x-weir-class": "default"}, None, "default"),
    ],
)
def test_who_asks_for_nothing_at_night_is_batch(headers: dict[str, str], tier: str | None, expected: str) -> None:
    assert decided(shipped("batch-night"), headers, service_tier=tier).class_name == expected


def test_a_night_is_long_and_nothing_is_cut() -> None:
    policy = shipped("batch-night")
    call = decided(policy)
    assert (call.deadline, call.ttft_by) == (12 * 3600.0, float("inf"))
    assert policy.classes["batch"].max_queue >= 100_000
    order = tuple(policy.classes)
    assert [cap(policy.shaping, 1.0, name, order) for name in order] == [None, None]


def test_full_engines_are_no_reason_to_refuse_at_night_and_failing_ones_are() -> None:
    modes = ModelMode(shipped("batch-night").modes)
    assert not modes.step(Signals(kv=1.0, waiting=1000.0, ttft=100.0, errors=0.0), 0.0)
    assert modes.step(Signals(kv=0.0, errors=0.3), 1.0)
    assert modes.mode is Mode.TIGHT


# -- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "tokens", "expected", "merge"),
    [
        ("/v1/embeddings", 10, "default", Merge(window=0.02)),
        ("/v1/embeddings", 4001, "bulk", Merge(window=0.02)),
        ("/v1/rerank", 10, "search", Merge(window=0.01)),
        ("/v1/rerank", 4001, "search", Merge(window=0.01)),
        (CHAT, 10, "default", None),
    ],
)
def test_small_calls_are_merged_and_large_ones_wait_for_a_gap(
    path: str, tokens: int, expected: str, merge: Merge | None
) -> None:
    policy = shipped("embeddings")
    call = decided(policy, path=path, tokens=tokens)
    assert (call.class_name, rule_of(Snapshot(policy).merges, call)) == (expected, merge)


def test_a_merged_call_waits_for_a_small_part_of_its_deadline() -> None:
    policy = shipped("embeddings")
    windows = policy.batching.values()
    assert max(windows) * 50 <= min(each.deadline for each in policy.classes.values())


# -- default, demo ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "demo"])
@pytest.mark.parametrize(
    ("headers", "tier", "expected"),
    [
        ({}, None, "default"),
        ({"x-weir-class": "batch"}, None, "batch"),
        ({}, "flex", "batch"),
        ({}, "priority", "interactive"),
    ],
)
def test_the_first_look(name: str, headers: dict[str, str], tier: str | None, expected: str) -> None:
    assert decided(shipped(name), headers, service_tier=tier).class_name == expected


def test_long_prompts_have_a_class_of_their_own() -> None:
    assert decided(shipped("default"), tokens=8001).class_name == "long_context"
    assert decided(shipped("default"), tokens=8000).class_name == "default"
    assert decided(shipped("demo"), tokens=8001).class_name == "default"


# -- one-engine -------------------------------------------------------------------------------------------------------


def one_engine(batch: int) -> Engine:
    """Its engine, as the policy has it, with so many batch calls on it."""
    policy = shipped("one-engine")
    engine = Engine("e", "http://127.0.0.1:8100", policy, capacity=100_000)
    engine.go_by(policy.fleet.engines[0])
    for _ in range(batch):
        engine.hold(800, 600, 0.0, "batch")
    return engine


@pytest.mark.parametrize(("batch", "another", "person"), [(0, True, True), (6, True, True), (7, False, True)])
def test_one_of_eight_places_is_kept_for_people(batch: int, another: bool, person: bool) -> None:
    engine = one_engine(batch)
    assert engine.ledger.fits(800, "batch") is another
    assert engine.ledger.fits(100, "interactive") is person


def test_batch_jobs_may_wait_and_are_dropped_only_when_they_are_hopeless() -> None:
    policy = shipped("one-engine")
    assert policy.deadlines == "drop"
    assert decided(policy, {"x-weir-class": "batch"}).deadline == 29.0
    assert decided(policy, {"x-weir-class": "interactive"}).ttft_by == 1.0
    assert decided(policy, tokens=9000).class_name == "long_context"
