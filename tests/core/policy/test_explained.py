"""`gateway check --explain`: the text about one tenant's calls, which agrees with the code that decides."""

from __future__ import annotations

from itertools import product

import pytest

from gateway.core.admission.mode import Mode, ModelMode
from gateway.core.admission.shaping import cap
from gateway.core.policy.explained import NOTHING, class_of, explain_call
from gateway.core.policy.file import decode
from gateway.core.policy.policy import EngineEntry, FleetPolicy, Policy, Routing
from gateway.core.request.call import CallSettings
from gateway.core.request.classes import ClassRules, classify
from gateway.core.request.parser import parse
from gateway.core.request.routes import route_of
from gateway.core.request.tenants import Tenants

POLICY = decode(
    """
classes:
  interactive: {weight: 8, strict: true, ttft: 2s, deadline: 60s, max_queue: 256, reserve: 20%, max_concurrency: 64}
  default: {weight: 3, ttft: 10s, deadline: 5m}
  long: {weight: 1, deadline: 10m, when: {prompt_tokens: "> 8000", routes: [chat, completion], models: [llama]}}
  batch: {weight: 1, deadline: 1h, max_queue: 4096}
tenants:
  acme:
    best_class: default
    weight: 2
    models: [llama, qwen]
    keys: [0000000000000000000000000000000000000000000000000000000000000001]
    limits: {tokens: {rate: 2M/min, burst: 500k}}
    refusal: {status: 503, body: {resultStatus: 1002, tips: "顾客太多,客官请稍候"}}
  anonymous: {class: batch, best_class: long}
limits:
  per_tenant: {requests: 600/min}
  global: {requests: 50k/min}
  models: {llama: {tokens: 10M/min}}
shaping:
  - {kv_above: 85%, max_tokens: 1024, except: [interactive, default]}
  - {kv_above: 92%, max_tokens: 256, except: []}
modes:
  tight: {enter: {kv: 85%, waiting: 8}, leave: {kv: 75%, waiting: 1}, refuse: [batch]}
  brownout: {enter: {ttft: 2x}, leave: {ttft: 1.2x}, refuse: [batch]}
  closed: {enter: {}, leave: {}, refuse: all_but_most_important}
fleet:
  engines:
    - {url: "http://10.0.0.11:8000"}
    - {url: "unix:///run/vllm/a.sock", models: [qwen, llama]}
    - {url: "http://10.0.0.12:8000", models: [qwen]}
trusted_proxies: [10.0.0.1, unix]
keys_file: keys.txt
""".encode()
)

ACME = """\
tenant          acme: 1 key in the policy; keys in keys.txt; x-tenant from 10.0.0.1, unix
model           llama: one of those it may use
class           default: clamped from interactive to the best_class of acme
                asked for with x-weir-class: default, or service_tier: default
time            first token within 10s, last token within 5m or what x-weir-deadline-ms says
                what cannot make it: refused on arrival or dropped before it runs, unless an engine is idle
                what runs past it: cancelled
order           after all calls of interactive
                weight 3, 60% of the tokens while long, batch have work too; among tenants weight 2
agent hints     nvext.agent_hints of its calls are ignored
lengths         by model, class and max_tokens
cached prompts  waited for at a full engine as long as reading them anew would take, never past targets
room            512 calls may wait for a model
limits                            requests                     tokens
                tenant and model  -                            -
                tenant and class  -                            -
                tenant            600/min (limits.per_tenant)  2M/min, burst 500k
                class             -                            -
                model             -                            10M/min
                global            50k/min                      -
                requests of tenant and global are counted before a body is read; a 4xx gives none back
quota           none
over a limit    503 with {"resultStatus":1002,"tips":"顾客太多,客官请稍候"}
shaping         max_tokens at most 256 where the engine's KV cache is above 92%
modes           tight     taken    from kv 85% or waiting 8 on
                brownout  taken    from ttft 2x on
                closed    refused  never entered
engines         http://10.0.0.11:8000, if it has the model
                unix:///run/vllm/a.sock
all down        calls wait for an engine to come back, for 1m in all, within their targets; then 503
"""

ANONYMOUS = """\
tenant          anonymous: calls without a key; keys in keys.txt; x-tenant from 10.0.0.1, unix
model           phi: it may use all
class           batch: the class of anonymous
                asked for with x-weir-class: batch, or service_tier: flex
time            last token within 1h or what x-weir-deadline-ms says
                what cannot make it: refused on arrival or dropped before it runs, unless an engine is idle
                what runs past it: cancelled
order           after all calls of interactive
                weight 1, 20% of the tokens while default, long have work too; among tenants weight 1
agent hints     nvext.agent_hints of its calls are ignored
lengths         by model, class and max_tokens
cached prompts  waited for at a full engine as long as reading them anew would take, never past targets
room            4096 calls may wait for a model
limits                            requests                     tokens
                tenant and model  -                            -
                tenant and class  -                            -
                tenant            600/min (limits.per_tenant)  -
                class             -                            -
                model             -                            -
                global            50k/min                      -
                requests of tenant and global are counted before a body is read; a 4xx gives none back
quota           none
over a limit    429 with OpenAI's error object
shaping         max_tokens at most 1024 where the engine's KV cache is above 85%
                max_tokens at most 256 where the engine's KV cache is above 92%
modes           tight     refused  from kv 85% or waiting 8 on
                brownout  refused  from ttft 2x on
                closed    refused  never entered
engines         http://10.0.0.11:8000, if it has the model
all down        calls wait for an engine to come back, for 1m in all, within their targets; then 503
"""


def test_a_call_in_full() -> None:
    assert explain_call(POLICY, "acme", "interactive", "llama") == ACME


def test_a_call_that_asks_for_nothing() -> None:
    assert explain_call(POLICY, "anonymous", NOTHING, "phi") == ANONYMOUS


@pytest.mark.parametrize(
    ("policy", "tenant", "asked", "model", "lines"),
    [
        (POLICY, "acme", "flex", "llama", ["class           batch: asked for as service tier flex"]),
        (POLICY, "acme", "batch", "llama", ["class           batch: as asked for"]),
        (POLICY, "acme", "priority", "llama", [
            "class           default: clamped from interactive to the best_class of acme",
        ]),
        (
            POLICY,
            "acme",
            NOTHING,
            "llama",
            [
                "class           default: for calls that ask for none",
                "                long: where the prompt has more than 8k tokens and the route is chat or completion "
                "and the model is this one",
            ],
        ),
        (POLICY, "acme", NOTHING, "phi", ["model           phi: refused with 403, acme may use only llama, qwen"]),
        (
            POLICY,
            "anonymous",
            "interactive",
            "llama",
            ["class           long: clamped from interactive to the best_class of anonymous"],
        ),
        (
            Policy(),
            "anonymous",
            "interactive",
            "llama",
            [
                "class           interactive: as asked for",
                "room            256 calls may wait for a model",
                "shaping         max_tokens as asked for, always",
                "engines         the policy names none; those of --engine are not known here",
            ],
        ),
        (
            Policy(
                fleet=FleetPolicy(engines=(EngineEntry(url="http://e:1", scheduling_policy="priority"),)),
                routing=Routing(hold_unserved=0.0),
            ),
            "anonymous",
            "batch",
            "llama",
            [
                "engines         http://e:1, if it has the model, with priority 3 (0 goes first)",
                "all down        refused with 503 at once",
            ],
        ),
        (
            decode(b"classes: {default: {}, few: {max_concurrency: 8}}"),
            "anonymous",
            "few",
            "llama",
            [
                "                asked for with x-weir-class: few",
                "                8 calls may run at once in the whole fleet",
            ],
        ),
        (
            Policy(),
            "anonymous",
            NOTHING,
            "llama",
            ["                long_context: where the prompt has more than 8k tokens"],
        ),
        (
            decode(
                b"classes: {top: {strict: true, reserve: 20%, headroom: 10%}, default: {}}\ndeadlines: drop"
            ),
            "anonymous",
            "top",
            "m",
            [
                "                what cannot make it: dropped before it runs, unless an engine is idle",
                "order           weight 1; among tenants weight 1",
                "                20% of each engine's budget is kept for it",
                "                its calls start where all prompts are read, and leave others 10% more than they had",
            ],
        ),
        (
            decode(
                b"tenants: {a: {models: [x], keys: ['%s', '%s']}, b: {}}\n" % (b"0" * 64, b"1" * 64)
                + b"deadlines: run\n"
                + b"fleet: {engines: [{url: 'http://h:1', models: [y]}]}"
            ),
            "a",
            "default",
            "x",
            [
                "tenant          a: 2 keys in the policy",
                "                what cannot make it: runs all the same",
                "                what runs past it: finished",
                "engines         none of fleet.engines serves it; those of --engine are not known here",
            ],
        ),
        (
            decode(b"classes: {default: {}, search: {when: {routes: [embedding]}}}"),
            "anonymous",
            "-",
            "m",
            ["                search: where the route is embedding"],
        ),
        (decode(b"tenants: {b: {}}"), "b", "-", "m", ["tenant          b: nobody, it has no key"]),
    ],
)  # fmt: skip
def test_what_else_is_said(policy: Policy, tenant: str, asked: str, model: str, lines: list[str]) -> None:
    text = explain_call(policy, tenant, asked, model)
    assert [line for line in lines if line not in text.splitlines()] == []


@pytest.mark.parametrize(
    ("tenant", "asked", "expected"),
    [
        ("acne", "default", "no tenant 'acne': there are acme, anonymous (did you mean acme?)"),
        (
            "acme",
            "bulk",
            "no class or service tier 'bulk': there are interactive, default, long, batch, priority, flex",
        ),
        (
            "acme",
            "priorty",
            "no class or service tier 'priorty': there are interactive, default, long, batch, priority, flex "
            "(did you mean priority?)",
        ),
    ],
)
def test_names_that_do_not_exist(tenant: str, asked: str, expected: str) -> None:
    with pytest.raises(ValueError, match=r"^no ") as error:
        explain_call(POLICY, tenant, asked, "m")
    assert str(error.value) == expected


def test_a_policy_without_tenants_has_none() -> None:
    with pytest.raises(ValueError, match=r"there are none$"):
        explain_call(decode(b"tenants: {}"), "a", "-", "m")


def test_the_class_is_the_one_that_calls_get() -> None:
    rules = ClassRules(POLICY)
    accounts = Tenants(POLICY).accounts
    route = route_of(b"/v1/chat/completions")
    settings = CallSettings(
        class_deadlines={name: each.deadline for name, each in POLICY.classes.items()},
        service_tiers=dict(POLICY.service_tiers),
    )
    assert route is not None
    for tenant, asked in product(POLICY.tenants, (NOTHING, *POLICY.classes)):
        headers = {b"content-type": b"application/json"}
        headers |= {} if asked == NOTHING else {b"x-weir-class": asked.encode()}
        body = b'{"model": "phi", "messages": [{"role": "user", "content": "hello"}]}'
        call = parse(route, headers, body, settings=settings, request_id="r", tenant=tenant, now=0.0)
        classify(call, rules, accounts[tenant].default_class, accounts[tenant].best)
        assert class_of(POLICY, POLICY.tenants[tenant], asked) == call.class_name


@pytest.mark.parametrize("policy", [POLICY, Policy()], ids=["named", "by rank"])
def test_the_modes_refuse_what_is_said_that_they_refuse(policy: Policy) -> None:
    order = tuple(policy.classes)
    for name in order:
        text = explain_call(policy, "anonymous", name, "qwen")
        said = [
            line[26:33].strip() for line in text.splitlines() if line[16:26].strip() in ("tight", "brownout", "closed")
        ]
        given = class_of(policy, policy.tenants["anonymous"], name)
        modes = ModelMode(policy.modes)
        for word, mode in zip(said, (Mode.TIGHT, Mode.BROWNOUT, Mode.CLOSED), strict=True):
            modes.mode = mode
            assert (word == "refused") == (modes.refuses(given, order) is not None)


@pytest.mark.parametrize("name", list(POLICY.classes))
def test_the_caps_are_those_of_shaping(name: str) -> None:
    text = explain_call(POLICY, "anonymous", name, "m")
    given = class_of(POLICY, POLICY.tenants["anonymous"], name)
    largest = cap(POLICY.shaping, 0.86, given, tuple(POLICY.classes))
    assert ("at most 1024" in text) == (largest == 1024)


def test_agent_hints_are_explained() -> None:
    text = explain_call(decode(b"tenants: {anonymous: {agent_hints: true}}"), "anonymous", NOTHING, "m")
    assert "agent hints     prefix_id is its session, osl its expected length\n" in text
    assert "priority N: N s before its turn among its tenant's, 60 at most" in text


def test_lengths_that_are_learned_and_what_they_order() -> None:
    shown = explain_call(decode(b"lengths: learned"), "anonymous", "default", "m")
    assert "lengths         learned of the tenant's own calls" in shown
    assert "                its waiting calls of a class go by expected length, the shortest first" in shown


def test_lengths_that_are_fixed() -> None:
    assert "lengths         50% of max_tokens" in explain_call(decode(b"lengths: 50%"), "anonymous", "default", "m")


def test_a_model_route_tells_its_members_and_fallbacks() -> None:
    policy = decode(b"models: {support: {members: [{model: a, weight: 95}, {model: b, weight: 5}], fallback: [c]}}")
    text = explain_call(policy, "anonymous", NOTHING, "support")
    assert "a model route: a 95%, b 5%; where none can serve in time: c\n" in text
    alone = decode(b"models: {support: {members: [a]}}")
    assert "a model route: a 100%; where none can serve in time: nobody\n" in explain_call(
        alone, "anonymous", NOTHING, "support"
    )


def test_a_tenant_of_an_issuer_is_told_the_claim_that_names_it() -> None:
    auth = "auth: {issuer: https://login/, audience: weir, jwks: https://login/keys, tenant_claim: team}"
    policy = decode(f"{auth}\ntenants: {{acme: {{}}, anonymous: {{}}}}".encode())
    assert "acme: tokens of https://login/ whose claim team names it\n" in explain_call(policy, "acme", NOTHING, "m")
    assert "tokens of" not in explain_call(policy, "anonymous", NOTHING, "m")
