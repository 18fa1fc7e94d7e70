"""The policy's part about traffic: who may ask for what, how much, in which order, and what gives way first.

A field is here only if something obeys it. Times are seconds, sizes bytes or tokens, shares 0..1, whatever units the
file used. `class`, `global` and `except` are the file's words; Python's keywords get a `_` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.core.policy.types import (
    Above,
    Bounds,
    Json,
    JsonName,
    KeyHash,
    Level,
    ModelName,
    Moment,
    Name,
    Part,
    Positive,
    Rate,
    RouteKind,
    Times,
    Weight,
)
from gateway.shared.files.units import Count, Seconds, Share


class When(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that belong to a class though nobody asked for it: all that is written here must hold.

    `prompt_tokens`: the estimate is above this. `routes`: kinds of route. `models`: the model asked for.
    """

    prompt_tokens: Above | None = None
    routes: tuple[RouteKind, ...] = ()
    models: tuple[ModelName, ...] = ()


class TrafficClass(msgspec.Struct, frozen=True, kw_only=True):
    """How calls of one importance are treated. `weight`: share of tokens when classes compete. `strict`: before every
    class after it, whatever the weights.

    `ttft`: until the first token; null: no such target. `deadline`: until the last token; a client may ask for another
    one with x-weir-deadline-ms. `max_queue`: calls that may wait, for each model. `max_queued_tokens`: tokens that may
    wait, for each model; null: no bound. `max_concurrency`: calls that may run at once in the whole fleet; null: no
    bound. `reserve`: share of each engine's budget that is kept for it. `max_wait`: a call that has waited half of it
    is served next; null: the deadline. `min_tokens`: shaping never cuts max_tokens below this. `overload`: which calls
    of a tenant go first while the queue does not empty: `edf`, those with the earliest deadline, or `lifo`, the newest.
    `when`: calls that belong here though they do not ask for it.
    """

    weight: Weight = 1.0
    strict: bool = False
    ttft: Moment | None = None
    deadline: Moment = 300.0
    max_queue: Annotated[Count, Bounds(ge=0, le=1_000_000)] = 512
    max_queued_tokens: Positive | None = None
    max_concurrency: Positive | None = None
    reserve: Annotated[Share, Bounds(ge=0, le=0.9)] = 0.0
    max_wait: Moment | None = None
    min_tokens: Positive = 16
    overload: Literal["edf", "lifo"] = "edf"
    when: When | None = None


def default_classes() -> Mapping[str, TrafficClass]:
    """Most important first."""
    return {
        "interactive": TrafficClass(weight=8, ttft=2.0, deadline=60.0, max_queue=256),
        "default": TrafficClass(weight=4, ttft=10.0, deadline=300.0, max_queue=512),
        "long_context": TrafficClass(
            weight=2, deadline=600.0, max_queue=64, max_concurrency=8, when=When(prompt_tokens=8000)
        ),
        "batch": TrafficClass(weight=1, deadline=3600.0, max_queue=4096),
    }


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """A bare rate is a quota too. `rate`: how much over time. `burst`: how much of it may come at once; null: what one
    period allows.
    """

    shorthand: ClassVar[str] = "rate"

    rate: Rate
    burst: Positive | None = None


Quantity = Quota | Literal["unlimited"] | None  # None: the default of its level


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """Calls and KV tokens over time; null: the default of its level. `requests`: calls. `tokens`: of prompts and
    answers, reserved at the estimate and settled at real usage.
    """

    requests: Quantity = None
    tokens: Quantity = None


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's own limits, in place of `limits.per_tenant`. `requests`: calls. `tokens`: of prompts and answers.
    `classes`: on what it does in a class. `models`: on what it does with a model.
    """

    requests: Quantity = None
    tokens: Quantity = None
    classes: Mapping[Name, Limit] = {}
    models: Mapping[ModelName, Limit] = {}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Levels, most specific first: (tenant, model), (tenant, class), tenant, class, model, global.

    A specific limit replaces the default of its level; `global` always holds, for all tenants together. `per_tenant`:
    of a tenant without a limit of its own. `per_class`: of a class without. `per_model`: of a model without. `classes`:
    limits of classes, all tenants together. `models`: limits of models, all tenants together.
    """

    global_: Limit = msgspec.field(default=Limit(), name="global")
    per_tenant: Limit = Limit()
    per_class: Limit = Limit()
    per_model: Limit = Limit()
    classes: Mapping[Name, Limit] = {}
    models: Mapping[ModelName, Limit] = {}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant over its limit is answered in place of OpenAI's error object.

    `status`: of the answer. `body`: a JSON object; its texts may hold {tenant}, {class}, {model}, {limit},
    {retry_after} (seconds) and {request_id}.
    """

    status: Annotated[Count, Bounds(ge=400, le=599)] = 429
    body: Mapping[JsonName, Json]


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Who pays. `class`: of calls that ask for none; null: default. `best_class`: the most important it may ask for;
    null: any. `weight`: its share within a class. `models`: what it may use; empty: all. `keys`: the SHA-256 of its
    keys; more may be in the keys_file. `refusal`: what it is answered when it is over a limit; null: OpenAI's error.
    """

    class_: Name | None = msgspec.field(default=None, name="class")
    best_class: Name | None = None
    weight: Weight = 1.0
    limits: TenantLimits = TenantLimits()
    models: tuple[ModelName, ...] = ()
    keys: tuple[KeyHash, ...] = ()
    refusal: Refusal | None = None


class ShapingTier(msgspec.Struct, frozen=True, kw_only=True):
    """A cap on what calls may generate; it applies under either condition. `kv_above`: the chosen engine's KV cache is
    fuller than this. `mode`: the model's mode is this one or a worse one. `max_tokens`: the cap. `except`: classes that
    are spared; null: the most important.
    """

    kv_above: Annotated[Share, Bounds(ge=0.05, le=1)] | None = None
    mode: Level | None = None
    max_tokens: Positive
    except_: tuple[Name, ...] | None = msgspec.field(default=None, name="except")


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that cannot be answered in time. `predict`: refuse on arrival what will miss its target, if no engine of
    its model is idle. `shed_late`: drop what no longer can make it before it runs. `on_deadline`: what becomes of a
    call that runs past it.
    """

    predict: bool = True
    shed_late: bool = True
    on_deadline: Literal["cancel", "finish"] = "cancel"


class Hedging(msgspec.Struct, frozen=True, kw_only=True):
    """A second attempt on another engine where the first byte is late; the loser is cancelled. `enabled`: whether there
    is any, within the budget of retries. `after`: the class's usual time to first byte, or a fixed one.
    """

    enabled: bool = False
    after: Literal["p90", "p95", "p99"] | Moment = "p95"


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's breaker: while it is open the engine gets no calls. `failures`: so many in a row open it.
    `error_rate`: more than this share of failed calls opens it too. `at_least`: calls that a share is taken of.
    `window`: the time they are counted in. `open_for`: how long at first; twice as long each time. `open_for_at_most`:
    where that ends. `probes`: calls that must succeed to close it. `panic`: with more than this share of the fleet
    open, breakers are ignored.
    """

    failures: Positive = 5
    error_rate: Part = 0.5
    at_least: Positive = 20
    window: Moment = 10.0
    open_for: Moment = 5.0
    open_for_at_most: Moment = 60.0
    probes: Positive = 3
    panic: Part = 0.5


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """Signals of one model's engines. To enter a mode one must be reached, to leave it all must be below.

    `kv`: mean share of KV cache in use. `waiting`: mean calls waiting inside an engine. `ttft`: p90 over the class's
    target. `errors`: share of calls that failed for the engines' fault.
    """

    kv: Part | None = None
    waiting: Annotated[Count, Bounds(ge=0, le=100_000)] | None = None
    ttft: Times | None = None
    errors: Part | None = None


class ModeRule(msgspec.Struct, frozen=True, kw_only=True):
    """One step of degradation. `enter`: when it begins. `leave`: when it ends. `dwell`: how long it lasts at least.
    `refuse`: classes that are refused; null: the least important. `only`: classes that are not refused; null: the most
    important, empty: no such rule. `max_prompt_tokens`: longer prompts are refused; null: no such rule.
    """

    enter: Threshold
    leave: Threshold
    dwell: Annotated[Seconds, Bounds(ge=0, le=3600)] = 10.0
    refuse: tuple[Name, ...] | None = ()  # None: the least important class
    only: tuple[Name, ...] | None = ()  # empty: no such rule; None: the most important class
    max_prompt_tokens: Positive | None = None


class Modes(msgspec.Struct, frozen=True, kw_only=True):
    """What gives way as a model's engines come under pressure; one step at a time, both ways."""

    tight: ModeRule = ModeRule(enter=Threshold(kv=0.85, waiting=8), leave=Threshold(kv=0.75, waiting=1), dwell=5.0)
    brownout: ModeRule = ModeRule(
        enter=Threshold(kv=0.93, ttft=2.0, errors=0.10),
        leave=Threshold(kv=0.85, ttft=1.2, errors=0.02),
        refuse=None,
        max_prompt_tokens=8000,
    )
    closed: ModeRule = ModeRule(enter=Threshold(kv=0.97, errors=0.50), leave=Threshold(kv=0.90, errors=0.20), only=None)


class Merge(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind merged into one. `window`: how long the first waits for others, at most. `max_items`: inputs in
    one merged call. `max_tokens`: their tokens.
    """

    window: Annotated[Seconds, Bounds(ge=0, le=1)] = 0.02
    max_items: Positive = 64
    max_tokens: Positive = 16_000


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """Which kinds of call are merged; null: not merged."""

    embeddings: Merge | None = None
    rerank: Merge | None = None
    score: Merge | None = None
