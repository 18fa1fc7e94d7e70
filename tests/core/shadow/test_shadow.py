"""Shadow policy: its decisions beside the enforced policy's, and no effect on the calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from typing import Any

import pytest

from gateway.core.admission.limits import Charge, LimitBook
from gateway.core.admission.model_traffic import ModelTraffic
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.engines.fleet import Engine, Fleet
from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.core.policy.snapshot import Snapshot
from gateway.core.request.classes import classify
from gateway.core.request.cost import CostModel
from gateway.core.request.outcome import Outcome
from gateway.core.request.routes import ROUTES
from gateway.core.shadow.shadow import Shadow
from gateway.core.shadow.verdict import Verdict
from gateway.shared.vllm.answers import EngineSample, ModelCard
from tests.calls import a_call

KEY = hashlib.sha256(b"password").hexdigest()
HEADERS = {b"authorization": b"Bearer password"}
ACME = f"tenants: {{acme: {{keys: [{KEY}]}}}}\n"
MODEL = "tenants: {anonymous: {models: [other]}}\n"
OPEN = "tenants: {anonymous: {}}\n"


def policy(text: str) -> Policy:
    return decode((text or OPEN).encode(), "p.yaml")


class World:
    """One engine of model `m` under an enforced policy and its shadow; `send` is a call's way through the pipeline."""

    def __init__(self, enforced: str, shadow: str, *, engine: bool = True) -> None:
        self.snapshot = Snapshot(policy(enforced))
        self.limits = LimitBook(self.snapshot.policy)
        self.failures: list[Exception] = []
        self.shadow = Shadow(policy(shadow), self.failures.append)
        self.fleet = Fleet()
        self.engine = Engine("e", "http://e", self.snapshot.policy, capacity=10_000, max_concurrency=4)
        if engine:
            self.fleet.add(self.engine)
            self.fleet.has_models(self.engine, [ModelCard(id="m")])
        self.engine.up = True
        self.queues = Queues(self.snapshot.policy.classes)
        self.traffic = ModelTraffic(self.snapshot.policy, 0.0)

    def judge(self, headers: Mapping[bytes, bytes] = {}, **fields: Any) -> tuple[Any, Verdict]:
        fields = {"prompt_tokens": 100, "output_tokens": 50, "asked": 100, "max_tokens": 100} | fields
        call = a_call(**fields)
        account = self.snapshot.tenants.identify(headers, "127.0.0.1")
        classify(call, self.snapshot.classes, account.default_class, account.best)
        before = copy(call)
        arrival = self.shadow.arrive(account, headers, "127.0.0.1", call.arrived)
        verdict = self.shadow.judge(
            call, account, self.snapshot, headers, "127.0.0.1", self.queues, self.traffic,
            self.fleet.serving(call.model), call.arrived, arrival,
        )  # fmt: skip
        assert not self.failures, self.failures
        assert verdict is not None
        assert call == before, "the enforced policy's call is not touched"
        return call, verdict

    def charge(self, call: Any, verdict: Verdict) -> Charge:
        charge = self.limits.charge("anonymous", call.class_name, call.model, call.cost, call.arrived)
        return charge if verdict.charge is None else charge.with_beside(verdict.charge)

    def send(
        self,
        headers: Mapping[bytes, bytes] = {},
        *,
        outcome: Outcome = Outcome.OK,
        wait: float | None = None,
        booked: bool = False,
        used: int | None = None,
        **fields: Any,
    ) -> dict[str, tuple[str, str]]:
        """Decisions on a call that ends as the test says: granted at once, after `wait`, or never (a refusal). The
        result is what the call has added to the counts."""
        before = self.shadow.counts()
        call, verdict = self.judge(headers, **fields)
        call.predicted_wait = wait or 0.0
        if outcome is Outcome.OK:
            ticket = None
            if wait is not None:
                ticket = Ticket(call, call.arrived, since=call.arrived - booked)
            with self.charge(call, verdict) as charge:
                hold = self.engine.hold(call.cost, 0, call.arrived)
                verdict.granted(self.engine, hold, ticket)
                hold.release()
                if used is not None:
                    charge.settle(used, call.arrived)
        verdict.ended(outcome)
        assert not self.failures, self.failures
        return self.added(before)

    def added(self, before: dict[tuple[str, str, str], int]) -> dict[str, tuple[str, str]]:
        counts = self.shadow.counts()
        return {key[0]: key[1:] for key, calls in counts.items() if calls > before.get(key, 0)}

    def queue(self, class_name: str, calls: int = 1, **fields: Any) -> None:
        for _ in range(calls):
            self.queues.push(Ticket(a_call(class_name=class_name, prompt_tokens=100, **fields), 0.0))

    def differ(self, *args: Any, **fields: Any) -> dict[str, tuple[str, str]]:
        """Only the decisions that differed."""
        return {name: words for name, words in self.send(*args, **fields).items() if words[0] != words[1]}

    def left(self) -> float:
        """What the shadow's buckets hold, requests and tokens."""
        return sum(bucket.level for bucket in self.shadow.limits._buckets.values())


SAME = {
    "account": ("passed", "passed"), "class": ("default", "default"), "deadline": ("equal", "equal"),
    "model": ("passed", "passed"), "limit": ("passed", "passed"), "mode": ("passed", "passed"),
    "outcome": ("admitted", "admitted"),
}  # fmt: skip
NUMBER = {"max_tokens": ("equal", "equal")}
WAITED = {"wait": ("passed", "passed"), "room": ("passed", "passed")}


def test_the_same_policy_decides_the_same() -> None:
    world = World(OPEN, OPEN)
    assert world.send() == SAME | NUMBER
    assert world.send(wait=1.0) == SAME | NUMBER | WAITED
    assert set(world.shadow.differences().values()) == {0}
    assert world.shadow.counts()["outcome", "admitted", "admitted"] == 2


def test_a_shadow_with_another_order_of_classes_tells_engines_other_priorities() -> None:
    world = World(OPEN, OPEN + "classes: {default: {}, interactive: {}, batch: {}}")
    world.engine.priorities = True
    interactive = {"headers": {b"x-weir-class": b"interactive"}, "asked_class": "interactive"}
    assert world.differ()["priority"] == ("more", "less")
    assert world.differ(**interactive)["priority"] == ("less", "more")
    strict = World(OPEN, ACME)
    strict.engine.priorities = True
    assert "priority" not in strict.send(), "the shadow has refused the call: it has no class there"


def test_a_shadow_that_holds_no_call_for_an_engine_to_come_back_says_so() -> None:
    world = World(OPEN, OPEN + "routing: {hold_unserved: 10s}")

    def held(after: float, headers: Mapping[bytes, bytes] = {}) -> dict[str, tuple[str, str]]:
        before, call = world.shadow.counts(), a_call(prompt_tokens=100)
        engines = world.fleet.serving(call.model)
        world.shadow.judge(
            call, world.snapshot.tenants.identify(headers, "127.0.0.1"), world.snapshot, headers, "127.0.0.1",
            None, None, engines, call.arrived, None, after,
        )  # fmt: skip
        assert not world.failures, world.failures
        return world.added(before)

    assert held(9.0) == {"hold": ("held", "held")}
    assert held(10.0) == {"hold": ("held", "refused")}
    assert held(60.0) == {"hold": ("refused", "refused")}
    strict = World(OPEN, ACME)
    world = strict
    assert held(9.0) == {}, "the shadow has refused it before"


ONLY = OPEN + "classes: {default: {%s}}"
CASES: list[tuple[str, dict[str, Any], dict[str, tuple[str, str]]]] = [
    (ACME, {}, {"account": ("passed", "refused"), "outcome": ("admitted", "unauthorized")}),
    (ACME, {"headers": HEADERS}, {"account": ("passed", "another")}),
    (MODEL, {}, {"model": ("passed", "refused"), "outcome": ("admitted", "forbidden")}),
    ("tenants: {anonymous: {class: batch}}", {}, {"class": ("default", "batch"), "deadline": ("less", "more")}),
    (
        "tenants: {anonymous: {best_class: batch}}",
        {"headers": {b"x-weir-class": b"interactive"}, "asked_class": "interactive"},
        {"class": ("interactive", "batch"), "deadline": ("less", "more")},
    ),
    (ONLY % "deadline: 1s", {}, {"deadline": ("more", "less")}),
    (
        ONLY % "",
        {"headers": {b"x-weir-class": b"batch"}, "asked_class": "batch"},
        {"class": ("batch", "refused"), "outcome": ("admitted", "bad_request")},
    ),
    (
        OPEN + "limits: {per_tenant: {tokens: {rate: 1/h, burst: 100}}}",
        {},
        {"limit": ("passed", "refused"), "outcome": ("admitted", "rate_limited")},
    ),
    (OPEN + "shaping: [{max_tokens: 40, kv_above: 5%, except: []}]", {"kv": 0.5}, {"max_tokens": ("more", "less")}),
    (OPEN + "shaping: [{max_tokens: 400, kv_above: 5%, except: []}]", {"kv": 0.5}, {}),
    (OPEN + "shaping: [{max_tokens: 40, kv_above: 5%}]", {"prompt_tokens": 4000}, {}),  # empty before this very call
    (OPEN + "shaping: [{max_tokens: 40, kv_above: 5%}]", {"kv": 0.5, "route": ROUTES[b"/v1/embeddings"]}, {}),
    (
        OPEN + "shaping: [{max_tokens: 40, kv_above: 5%}]",
        {"kv": 0.5, "shaped": 20},  # by the enforced policy
        {"max_tokens": ("less", "more")},
    ),
    (
        ONLY % "max_queue: 0",
        {"wait": 0.0},
        {"room": ("passed", "refused"), "outcome": ("admitted", "queue_full")},
    ),
    (ONLY % "max_queue: 0", {}, {}),  # it did not have to wait
    (
        ONLY % "max_queued_tokens: 100",
        {"wait": 0.0},
        {"room": ("passed", "refused"), "outcome": ("admitted", "queue_full")},
    ),
    (
        ONLY % "ttft: 2s",
        {"wait": 3.0},
        {"wait": ("passed", "refused"), "outcome": ("admitted", "hopeless")},
    ),
    (ONLY % "ttft: 2s", {"wait": 1.0}, {}),
    (ONLY % "" + "\nshaping: []", {}, {}),
    (ONLY % "ttft: 2s", {"wait": 3.0, "booked": True}, {}),
    (ONLY % "ttft: 2s" + "\ndeadlines: {predict: false}", {"wait": 3.0}, {}),
]


@pytest.mark.parametrize(("shadow", "sent", "differences"), CASES)
def test_what_the_shadow_would_have_done(
    shadow: str, sent: dict[str, Any], differences: dict[str, tuple[str, str]]
) -> None:
    world = World(OPEN, shadow)
    kv = sent.get("kv")
    if kv is not None:
        world.engine.sampled(EngineSample(running=0, waiting=0, kv_usage=kv), 0.0)
    assert world.differ(**{name: value for name, value in sent.items() if name != "kv"}) == differences
    counted = {decision: sum(c for (d, *_), c in world.shadow.counts().items() if d == decision) for decision in SAME}
    assert set(counted.values()) <= {0, 1}
    assert {name for name, calls in world.shadow.differences().items() if calls} == set(differences)


@pytest.mark.parametrize("idle", [False, True])
def test_no_policy_predicts_a_wait_where_an_engine_is_idle(idle: bool) -> None:
    """Others wait: their class may not go now."""
    world = World(OPEN, ONLY % "ttft: 2s")
    world.queue("default", 2)
    hold = world.engine.hold(100, 0, 0.0)
    if idle:
        hold.release()
    late = {"wait": ("passed", "refused"), "outcome": ("admitted", "hopeless")}
    assert world.differ(wait=3.0) == ({} if idle else late)


FULL = {"outcome": ("queue_full", "admitted"), "room": ("refused", "passed")}


@pytest.mark.parametrize(
    ("enforced", "shadow", "outcome", "differences"),
    [
        (MODEL, OPEN, Outcome.FORBIDDEN, {"model": ("refused", "passed"), "outcome": ("forbidden", "admitted")}),
        (MODEL, MODEL, Outcome.FORBIDDEN, {}),
        (OPEN, OPEN, Outcome.RATE_LIMITED, {"limit": ("refused", "passed"), "outcome": ("rate_limited", "admitted")}),
        (
            OPEN,
            ONLY % "max_queue: 0",  # where nobody waits it need not wait either
            Outcome.RATE_LIMITED,
            {"limit": ("refused", "passed"), "outcome": ("rate_limited", "admitted")},
        ),
        (OPEN, OPEN, Outcome.HOPELESS, {"wait": ("refused", "passed"), "outcome": ("hopeless", "admitted")}),
        (OPEN, OPEN, Outcome.QUEUE_FULL, FULL),
        (OPEN, ONLY % "max_queue: 0", Outcome.QUEUE_FULL, {}),
        (OPEN, MODEL, Outcome.QUEUE_FULL, {"model": ("passed", "refused"), "outcome": ("queue_full", "forbidden")}),
        # No policy's decision: what comes after it is not compared.
        (OPEN, ONLY % "max_queue: 0", Outcome.NO_ENGINE, {}),
        (OPEN, MODEL, Outcome.TOO_LARGE, {"model": ("passed", "refused"), "outcome": ("too_large", "forbidden")}),
        # It was admitted, and ended later.
        (OPEN, OPEN, Outcome.EXPIRED, {}),
        (OPEN, OPEN, Outcome.SHED, {}),
        (
            OPEN,
            ONLY % "max_queue: 0",
            Outcome.CLIENT_GONE,
            {"room": ("passed", "refused"), "outcome": ("admitted", "queue_full")},
        ),
    ],
)
def test_calls_that_are_not_granted(
    enforced: str, shadow: str, outcome: Outcome, differences: dict[str, tuple[str, str]]
) -> None:
    assert World(enforced, shadow).differ(outcome=outcome) == differences


def test_a_refusal_is_compared_up_to_where_it_was_made() -> None:
    assert "mode" not in World(OPEN, OPEN).send(outcome=Outcome.RATE_LIMITED)
    assert "mode" not in World(OPEN, OPEN).send(outcome=Outcome.DRAINING)
    assert "limit" in World(OPEN, OPEN).send(outcome=Outcome.DRAINING)
    unknown = World(OPEN, OPEN + "limits: {per_tenant: {requests: 9/h}}", engine=False)
    assert "limit" not in unknown.send(outcome=Outcome.NOT_FOUND)
    assert unknown.send(outcome=Outcome.NOT_FOUND)["outcome"] == ("not_found", "not_found")
    assert unknown.left() == 2, "no token is charged for a model that nobody has"


# -- room -------------------------------------------------------------------------------------------------------------


CLASSES = OPEN + "classes: {high: {max_queue: 2}, default: {max_queue: 2}, low: {max_queue: %s}}"


@pytest.mark.parametrize(
    ("waiting", "fields", "full"),
    [
        ({"default": 1}, {}, False),
        ({"default": 2}, {}, True),
        ({"default": 2, "low": 1}, {}, True),  # half of its places: none is driven out
        ({"default": 2, "low": 2}, {}, False),  # takes the place of the newest
        ({"default": 2, "high": 1}, {}, True),
        ({"other": 2, "low": 0}, {}, False),
        ({"high": 4}, {}, False),
        ({"high": 6}, {}, True),  # all the places there are
    ],
)
def test_room_is_the_shadows_measure_of_the_queue_there_is(
    waiting: dict[str, int], fields: dict[str, Any], full: bool
) -> None:
    enforced = OPEN + "classes: {high: {}, default: {}, low: {}, other: {}}"
    world = World(enforced, CLASSES % 2)
    for name, calls in waiting.items():
        world.queue(name, calls)
    assert (world.differ(wait=0.0).get("room") == ("passed", "refused")) is full
    # Refused before it came to that: others wait, so it would have had to.
    told = world.send(outcome=Outcome.RATE_LIMITED)["outcome"]
    assert told == ("rate_limited", "queue_full" if full else "admitted")


@pytest.mark.parametrize(("most", "full"), [(200, True), (250, False)])
def test_room_in_tokens(most: int, full: bool) -> None:
    enforced = OPEN + "classes: {default: {}, low: {}}"
    world = World(enforced, OPEN + f"classes: {{default: {{max_queued_tokens: {most}}}, new: {{}}}}")
    world.queue("default")
    assert ("room" in world.differ(wait=0.0)) is full


def test_a_class_that_only_the_shadow_has_is_empty() -> None:
    world = World(OPEN, "tenants: {anonymous: {class: new}}\nclasses: {default: {}, new: {max_queued_tokens: 200}}")
    world.queue("default", 3)
    assert world.differ(wait=0.0) == {"class": ("default", "new")}


# -- limits -----------------------------------------------------------------------------------------------------------

LIMIT = OPEN + "limits: {per_tenant: {requests: {rate: 1/h, burst: 9}, tokens: {rate: 1/h, burst: 1000}}}"


@pytest.mark.parametrize("enforced", [OPEN, LIMIT])
@pytest.mark.parametrize(
    ("sent", "left"),
    [
        ({"used": 70}, 71),  # settled as the enforced one
        ({"used": 170}, 171),
        ({}, 0),  # the engine failed: refunded, as the enforced one
        ({"outcome": Outcome.RATE_LIMITED}, 151),  # the shadow would have let it run: the estimate is kept
        ({"outcome": Outcome.HOPELESS}, 151),
        ({"outcome": Outcome.NO_ENGINE}, 0),
        ({"outcome": Outcome.CLIENT_GONE}, 1),  # its request is not given back
        ({"outcome": Outcome.EXPIRED}, 1),
        ({"wait": 400.0}, 0),  # hopeless
        ({"wait": 400.0, "used": 70}, 0),
    ],
)
def test_the_shadows_buckets_are_charged_and_settled(enforced: str, sent: dict[str, Any], left: int) -> None:
    world = World(enforced, LIMIT)
    world.send(**sent)
    assert world.left() == left
    world.send(arrived=0.0)
    assert world.left() == left


def test_a_limit_that_only_the_shadow_has() -> None:
    world = World(OPEN, OPEN + "limits: {per_tenant: {requests: {rate: 1/h, burst: 2}}}")
    told = [world.send(used=10)["limit"] for _ in range(4)]
    assert told == [("passed", "passed")] * 2 + [("passed", "refused")] * 2


def test_a_request_is_counted_before_its_body_is_read() -> None:
    world = World(OPEN, OPEN + "limits: {per_tenant: {requests: {rate: 1/h, burst: 2}}}")
    account = world.snapshot.tenants.identify({}, "127.0.0.1")
    for _ in range(2):  # bodies that cannot be read: nothing is judged
        assert world.shadow.arrive(account, {}, "127.0.0.1", 0.0) is not None
    assert world.differ() == {"limit": ("passed", "refused"), "outcome": ("admitted", "rate_limited")}


@pytest.mark.parametrize(
    ("shadow", "expected"),
    [
        (OPEN, {"account": ("passed", "passed"), "limit": ("refused", "passed"),
                "outcome": ("rate_limited", "admitted")}),
        (OPEN + "limits: {per_tenant: {requests: {rate: 1/h, burst: 1}}}",
         {"account": ("passed", "passed"), "limit": ("refused", "refused"),
          "outcome": ("rate_limited", "rate_limited")}),
        ("tenants: {a: {keys: [%s]}}" % ("0" * 63 + "1"),
         {"account": ("passed", "refused"), "outcome": ("rate_limited", "unauthorized")}),
    ],
)  # fmt: skip
def test_what_the_enforced_limits_turn_away_unread_is_compared(
    shadow: str, expected: dict[str, tuple[str, str]]
) -> None:
    world = World(OPEN, shadow)
    account = world.snapshot.tenants.identify({}, "127.0.0.1")
    world.shadow.arrive(account, {}, "127.0.0.1", 0.0)
    before = world.shadow.counts()
    world.shadow.turned_away(world.shadow.arrive(account, {}, "127.0.0.1", 0.0), Outcome.RATE_LIMITED)
    assert world.added(before) == expected
    world.shadow.turned_away(None, Outcome.RATE_LIMITED)


# -- modes ------------------------------------------------------------------------------------------------------------

BROWNOUT = OPEN + "modes: {tight: {enter: {kv: 10%}, leave: {kv: 5%}, refuse: [default], dwell: 0s}}\n"


def pressed(world: World, now: float, kv: float) -> None:
    world.engine.sampled(EngineSample(running=0, waiting=0, kv_usage=kv), now)
    world.traffic.step([world.engine], now)


def test_modes_step_on_the_same_signals() -> None:
    world = World(OPEN, BROWNOUT)
    world.send()
    pressed(world, 1.0, 0.5)
    assert world.differ(arrived=1.0) == {"mode": ("passed", "refused"), "outcome": ("admitted", "shed")}
    pressed(world, 2.0, 0.01)
    assert world.differ(arrived=2.0) == {}
    world = World(BROWNOUT, OPEN + "limits: {per_tenant: {requests: {rate: 1/h, burst: 9}}}")
    world.send()
    pressed(world, 1.0, 0.5)
    told = world.differ(arrived=1.0, outcome=Outcome.SHED)
    assert told == {"mode": ("refused", "passed"), "outcome": ("shed", "admitted")}
    world = World(BROWNOUT, BROWNOUT)
    world.send()
    pressed(world, 1.0, 0.5)
    assert world.differ(arrived=1.0, outcome=Outcome.SHED) == {}


def test_what_a_mode_refuses_is_not_charged() -> None:
    world = World(OPEN, BROWNOUT + "limits: {per_tenant: {requests: {rate: 1/h, burst: 9}}}")
    world.send()
    pressed(world, 1.0, 0.5)
    assert world.send(arrived=1.0, used=70)["mode"] == ("passed", "refused")
    assert world.left() == 0


def test_without_engines_that_are_up_a_wait_is_only_a_wait() -> None:
    world = World(OPEN, ONLY % "ttft: 2s")
    world.engine.up = False
    assert world.differ(wait=1.0) == {}
    assert "wait" in world.differ(wait=3.0)


# -- tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "route", "expected"),
    [
        (b'{"service_tier": "flex"}', b"/v1/chat/completions", "high"),
        (b'{"service_tier": "priority"}', b"/v1/chat/completions", "default"),
        (b'{"service_tier": null}', b"/v1/chat/completions", "default"),
        (b"{}", b"/v1/chat/completions", "default"),
        (b'"service_tier"', b"/v1/audio/transcriptions", "default"),
    ],
)
def test_a_tier_may_mean_another_class(body: bytes, route: bytes, expected: str) -> None:
    world = World(OPEN, OPEN + "classes: {high: {}, default: {}}\nservice_tiers: {flex: high}")
    told = world.send(body=body, route=ROUTES[route], asked_class="batch")
    assert told["class"] == ("batch", expected)


# -- whatever happens -------------------------------------------------------------------------------------------------


def test_who_is_unknown_to_the_enforced_policy() -> None:
    world = World(ACME, OPEN)
    world.shadow.unknown({}, "127.0.0.1")
    assert world.shadow.counts() == {("account", "refused", "passed"): 1}
    world = World(ACME, ACME)
    world.shadow.unknown({}, "127.0.0.1")
    assert world.shadow.counts() == {("account", "refused", "refused"): 1}


def test_a_reload_keeps_what_was_taken() -> None:
    world = World(OPEN, OPEN + "limits: {per_tenant: {requests: {rate: 1/h, burst: 2}}}")
    world.send(used=10)
    _, verdict = world.judge()
    tighter = OPEN + "limits: {per_tenant: {requests: {rate: 1/h, burst: 3}}}\nclasses: {default: {}, new: {}}"
    world.shadow.apply(policy(tighter), 0.0)
    verdict.ended(Outcome.RATE_LIMITED)
    assert [world.send(used=10)["limit"] for _ in range(2)] == [("passed", "passed"), ("passed", "refused")]
    world.send()
    world.shadow.apply(policy(BROWNOUT), 1.0)
    pressed(world, 1.0, 0.5)
    assert "mode" in world.differ(arrived=1.0)


class Broken:
    """Facts that nobody foresaw."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


def test_a_bug_is_counted_reported_once_and_no_calls_concern() -> None:
    failures: list[Exception] = []
    shadow = Shadow(policy(OPEN), failures.append)
    world = World(OPEN, OPEN)
    call, verdict = world.judge()
    broken: Any = Broken()
    account = world.snapshot.tenants.identify({}, "127.0.0.1")
    judged = shadow.judge(call, account, world.snapshot, {}, "unix", None, broken, world.fleet.serving("m"), 0.0)
    assert judged is None
    shadow.snapshot = broken
    shadow.unknown({}, "unix")
    assert (shadow.bugs, len(failures)) == (2, 1)
    assert isinstance(failures[0], ZeroDivisionError)
    verdict.granted(broken, broken, broken)
    assert (world.shadow.bugs, len(world.failures)) == (1, 1)
    verdict.ended(Outcome.OK)
    assert world.shadow.bugs == 1
    assert world.engine.held == world.left() == 0


def test_a_call_that_waits_for_a_model_and_that_the_shadow_would_refuse_took_no_tokens_of_its() -> None:
    world = World("", "classes: {default: {max_queue: 0}}", engine=False)
    assert world.send(outcome=Outcome.EXPIRED)["outcome"] == ("admitted", "queue_full")


def test_lengths_that_only_the_shadow_would_learn_are_compared() -> None:
    world, cost = World("", "lengths: {learned: true}"), CostModel()
    world.shadow.cost = cost
    cost.set_lengths(world.snapshot.policy.lengths, world.shadow.snapshot.policy.lengths)
    assert cost.lengths is not None
    unknown = world.differ(output_tokens=51, tenant="anonymous")
    assert unknown == {}, "nothing is known yet"
    for tokens in (10, 1000) * 50:
        cost.lengths.learn(a_call(tenant="anonymous", asked=100, max_tokens=100, prompt_tokens=tokens), tokens)
    added = world.send(prompt_tokens=10, output_tokens=51, tenant="anonymous")
    assert (added["booked"], added["turn"]) == (("more", "less"), ("more", "less"))
    added = World("", "lengths: {learned: true}").send()
    assert "booked" not in added, "nobody learns"
    assert "booked" not in world.send(route=ROUTES[b"/v1/embeddings"], asked=0)


HINTED = b'{"model": "m", "nvext": {"agent_hints": {"osl": 90, "priority": 4}}}'


def test_agent_hints_that_only_one_of_them_reads_are_compared() -> None:
    world = World("", "tenants: {anonymous: {agent_hints: true}}")
    world.shadow.cost = CostModel()
    added = world.send(body=HINTED, output_tokens=51)
    assert (added["booked"], added["turn"]) == (("less", "more"), ("more", "less"))
    form = world.send(body=HINTED, route=ROUTES[b"/v1/audio/transcriptions"])
    assert form["turn"] == ("equal", "equal")
    bad = world.send(body=HINTED.replace(b"90", b"0"))
    assert bad["turn"] == ("equal", "equal"), "it would be refused for its form, which is not compared"

    world = World("tenants: {anonymous: {agent_hints: true}}", "tenants: {anonymous: {}}")
    world.shadow.cost = CostModel()
    added = world.send(body=HINTED, output_tokens=90, hinted_tokens=90, hinted_ahead=4.0)
    assert (added["booked"], added["turn"]) == (("more", "less"), ("less", "more"))
