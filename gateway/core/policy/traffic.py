"""Traffic policy: classes, tenants, limits, shaping, circuit breaker, modes, batching, scaling signal.

A field is here only if code obeys it. Times are seconds, sizes bytes or tokens, shares 0..1, whatever units the file
used. The file's `class`, `global` and `except` have a trailing `_` here, since they are Python's keywords.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.core.policy import types
from gateway.shared.files.units import Count, Seconds, Share


class When(msgspec.Struct, frozen=True, kw_only=True):
    """Condition under which a call without a class belongs to this one. All fields must hold.

    `prompt_tokens`: The prompt's estimated tokens are above this, such as "> 8000".
    `routes`: The call is of one of these kinds of route, such as [embedding, rerank].
    `models`: The call is for one of these models.
    """

    prompt_tokens: types.Above | None = None
    routes: tuple[types.RouteKind, ...] = ()
    models: tuple[types.EngineModel, ...] = ()


class TrafficClass(msgspec.Struct, frozen=True, kw_only=True):
    """One traffic class: the priority, targets and limits of its calls.

    `weight`: Share of tokens while classes compete for the same engines. A class of weight 4 gets twice the tokens of
    one of weight 2.
    `strict`: Whether it goes before every later class, whatever the weights. Bound it with max_concurrency.
    `ttft`: Target for the time to first token. Calls that miss it are refused or dropped (see deadlines); null: none.
    `tpot`: Target for the time per output token. A prompt that would break it for streams of this class is read on
    another engine, where engines exchange KV caches (see fleet.engines); null: none.
    `deadline`: Time from arrival to the last token. A client may set another one with x-weir-deadline-ms. A call that
    has waited half of it is next, whatever the order.
    `max_queue`: Calls that may wait for each model. One more is refused with 503.
    `max_concurrency`: Calls of the class that may run at once in the whole fleet; null: no limit.
    `reserve`: Share of each engine's budget that only this class may use.
    `headroom`: Room that calls of this class leave when they start, as a share of the most that other classes held on
    the engine in the last minutes. With it they start one at a time, where all prompts are read: work that fills gaps.
    `when`: Condition under which calls that name no class belong to this one.
    """

    weight: types.Weight = 1.0
    strict: bool = False
    ttft: types.Moment | None = None
    tpot: types.Moment | None = None
    deadline: types.Moment = 300.0
    max_queue: Annotated[Count, types.Bounds(ge=0, le=1_000_000)] = 512
    max_concurrency: types.Positive | None = None
    reserve: Annotated[Share, types.Bounds(ge=0, le=0.9)] = 0.0
    headroom: Annotated[Share, types.Bounds(ge=0, le=0.9)] = 0.0
    when: When | None = None


def default_classes() -> Mapping[str, TrafficClass]:
    """The default classes, the most important first."""
    return {
        "interactive": TrafficClass(weight=8, ttft=2.0, deadline=60.0, max_queue=256),
        "default": TrafficClass(weight=4, deadline=300.0, max_queue=512),
        "long_context": TrafficClass(weight=2, deadline=600.0, max_queue=512, when=When(prompt_tokens=8000)),
        "batch": TrafficClass(weight=1, deadline=3600.0, max_queue=4096),
    }


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A rate limit as a token bucket. A bare rate such as 600/min is one too.

    `rate`: Amount per time, such as 600/min.
    `burst`: Size of the bucket: the amount that may come at once; null: the amount of one period.
    """

    shorthand: ClassVar[str] = "rate"

    rate: types.Rate
    burst: types.Positive | None = None


Quantity = RateLimit | Literal["unlimited"] | None  # None: the default of its level


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """Rate limits on calls and on tokens. null: the default of its level.

    `requests`: Calls per time.
    `tokens`: Tokens of prompts and answers per time. They are charged at the estimate, and settled at the real usage.
    """

    requests: Quantity = None
    tokens: Quantity = None


class TokenQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Token quotas of a tenant over calendar windows in UTC. They need `storage`, which keeps the counts. null: the
    default, `limits.quota`; where that is null, no quota.

    `day`: Tokens of prompts and answers a day, such as 10M. They are held at the estimate while a call is under way,
    and counted at the real usage.
    `month`: The same, a calendar month.
    """

    day: types.Tokens | Literal["unlimited"] | None = None
    month: types.Tokens | Literal["unlimited"] | None = None


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's own rate limits, in place of `limits.per_tenant`.

    `requests`: The tenant's calls per time.
    `tokens`: Tokens of its prompts and answers per time.
    `quota`: Its tokens per calendar day and month.
    `classes`: Its limits within a class, such as {batch: {tokens: 1M/min}}.
    `models`: Its limits on a model, such as {llama-3-8b: {requests: 10/s}}.
    """

    requests: Quantity = None
    tokens: Quantity = None
    quota: TokenQuota = TokenQuota()
    classes: Mapping[types.ClassName, Limit] = {}
    models: Mapping[types.EngineModel, Limit] = {}


AnyLimit = Limit | TenantLimits


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Rate limits. A call over a limit is refused with 429. Levels, most specific first: (tenant, model), (tenant,
    class), tenant, class, model, global.

    A specific limit replaces the default of its level. The global limit always holds, for all tenants together.

    `per_tenant`: Default limit of each tenant without one of its own.
    `quota`: Default quota of each tenant: tokens per calendar day and month.
    `classes`: Limits of single classes, all tenants together, such as {batch: {requests: 100/s}}.
    `models`: Limits of single models, all tenants together, such as {llama-3-70b: {tokens: 10M/min}}.
    """

    global_: Limit = msgspec.field(default=Limit(), name="global")
    per_tenant: Limit = Limit()
    quota: TokenQuota = TokenQuota()
    classes: Mapping[types.ClassName, Limit] = {}
    models: Mapping[types.EngineModel, Limit] = {}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a tenant's call over its limit, in place of OpenAI's error object.

    `status`: HTTP status of the answer.
    `body`: A JSON object. Its texts may hold {tenant}, {class}, {model}, {limit}, {retry_after} (seconds) and
    {request_id}.
    """

    status: Annotated[Count, types.Bounds(ge=400, le=599)] = 429
    body: Mapping[types.JsonName, types.Json]


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: the owner of API keys, rate limits and a share of the engines.

    `class`: Class of its calls that name none; null: default.
    `best_class`: Most important class it may ask for. Better ones are clamped to it; null: any class.
    `weight`: Its share within a class. A tenant of weight 2 gets twice the tokens of one of weight 1.
    `models`: Models it may use, others get 403; empty: all.
    `keys`: SHA-256 of its API keys. More may be in the keys_file.
    `refusal`: Its own answer to calls over its limits; null: OpenAI's error object.
    """

    class_: types.ClassName | None = msgspec.field(default=None, name="class")
    best_class: types.ClassName | None = None
    weight: types.Weight = 1.0
    limits: TenantLimits = TenantLimits()
    models: tuple[types.EngineModel, ...] = ()
    keys: tuple[types.KeyHash, ...] = ()
    refusal: Refusal | None = None


class ShapingTier(msgspec.Struct, frozen=True, kw_only=True):
    """A cap on the tokens that calls may generate.

    `kv_above`: It applies while the KV cache of the chosen engine is fuller than this.
    `max_tokens`: The cap on max_tokens.
    `except`: Classes that are not capped; null: the most important one.
    """

    kv_above: Annotated[Share, types.Bounds(ge=0.05, le=1)]
    max_tokens: types.Positive
    except_: tuple[types.ClassName, ...] | None = msgspec.field(default=None, name="except")


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    """Circuit breaker of each engine. While it is open, the engine gets no calls.

    `failures`: Failed calls in a row that open it. It opens too if more than half of 20 calls or more in 10 s failed.
    `open_for`: Time it stays open at first. Each time that it opens again doubles it, up to twelve times as long. Three
    good calls, one after another, close it.
    """

    failures: types.Positive = 5
    open_for: types.Moment = 5.0


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """Signals of one model's engines. One reached signal enters the mode; to leave it, all must be below.

    `kv`: Mean share of the engines' KV caches in use.
    `waiting`: Mean number of calls that wait inside an engine.
    `ttft`: p90 of the time to first token, as a multiple of its class's ttft, such as 2x.
    `errors`: Share of calls that failed through the engines' fault.
    """

    kv: types.Part | None = None
    waiting: Annotated[Count, types.Bounds(ge=0, le=100_000)] | None = None
    ttft: types.Times | None = None
    errors: types.Part | None = None


class ModeRule(msgspec.Struct, frozen=True, kw_only=True):
    """One mode of load shedding, and the calls it refuses.

    `enter`: Signals that begin the mode.
    `leave`: Signals below which the mode ends.
    `dwell`: Shortest time that the mode lasts.
    `refuse`: Classes that are refused.
    """

    enter: Threshold
    leave: Threshold
    dwell: Annotated[Seconds, types.Bounds(ge=0, le=3600)] = 10.0
    refuse: tuple[types.ClassName, ...] | Literal["least_important", "all_but_most_important"] = ()


class Modes(msgspec.Struct, frozen=True, kw_only=True):
    """Load shedding in steps, while a model's engines are overloaded. Modes change one step at a time, both ways."""

    tight: ModeRule = ModeRule(enter=Threshold(kv=0.85, waiting=8), leave=Threshold(kv=0.75, waiting=1), dwell=5.0)
    brownout: ModeRule = ModeRule(
        enter=Threshold(kv=0.96, ttft=2.0, errors=0.10),
        leave=Threshold(kv=0.85, ttft=1.2, errors=0.02),
        refuse="least_important",
    )
    closed: ModeRule = ModeRule(
        enter=Threshold(kv=0.99, errors=0.50),
        leave=Threshold(kv=0.90, errors=0.20),
        refuse="all_but_most_important",
    )


BatchedKind = Literal["embeddings", "rerank", "score"]


class Merge(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on merging calls of one kind into one request to an engine. `window`: seconds that the first call waits
    for others at most, the policy's. `max_items` and `max_tokens` are of the merged call, which an engine reads in a
    step or two."""

    window: float = 0.02
    max_items: int = 64
    max_tokens: int = 16_000
