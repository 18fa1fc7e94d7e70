"""The policy: everything an operator may change while the gateway runs, as one frozen tree.

`Policy()` is the defaults. One snapshot serves a call from start to end. A field is here only if something obeys it.
Times are seconds, sizes bytes or tokens, shares 0..1, whatever units the file used. `policy_file.py` reads the YAML;
`policy_traffic.py` holds the part about classes, tenants and limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from gateway.core.policy.traffic import (
    Batching,
    Breaker,
    Deadlines,
    Hedging,
    Limits,
    Modes,
    ShapingTier,
    Tenant,
    TrafficClass,
    default_classes,
)
from gateway.core.policy.types import (
    Block,
    Bounds,
    Buffer,
    EngineUrl,
    EventsUrl,
    FileName,
    HeaderName,
    HostName,
    ModelName,
    Moment,
    Name,
    Network,
    Part,
    Positive,
    TenantName,
    WebOrigin,
)
from gateway.shared.files.units import SAMPLE, Bytes, Count, Factor, Seconds, Share


def default_service_tiers() -> Mapping[str, str]:
    return {"priority": "interactive", "default": "default", "flex": "batch"}


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How much may be promised on an engine. `kv_target`: share of its KV cache that calls may fill. `alpha`: share of
    max_tokens a call is expected to use; auto: learned from real answers. `engine_backlog`: calls that may wait inside
    an engine; order is decided here, so few. `capacity`: KV tokens of an engine that does not tell its own.
    `max_concurrency`: calls on one engine, until its own samples teach better.
    """

    kv_target: Annotated[Share, Bounds(ge=0.05, le=1)] = 0.80
    alpha: Literal["auto"] | Part = "auto"
    engine_backlog: Annotated[Count, Bounds(ge=0, le=10_000)] = 2
    capacity: Positive = 100_000
    max_concurrency: Positive = 256


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine a call goes to: the one with the least predicted time to first token.

    `affinity`: what tells where a prompt's beginning is cached: its `prefix`, or the engine of its `session`'s last
    call. `block`: bytes of prompt per prefix block. `affinity_ttl`: how long a cached beginning is believed in.
    `imbalance`: how far above the mean one engine may be held. `slow_start`: until an engine that has come back gets
    its full share. `gateways`: how many share these engines; with more than one, the better of two engines drawn at
    random. `cache_isolation`: who may find a prompt's beginning in an engine's prefix cache: the tenant that sent it,
    or anybody (none). `cache_secret_file`: what tenants' cache salts are made with, alone in a file, relative to this
    one; null: drawn at each start.
    """

    affinity: Literal["prefix", "session", "none"] = "prefix"
    block: Annotated[Bytes, Bounds(ge=64, le=65_536)] = 512
    affinity_ttl: Moment = 600.0
    imbalance: Annotated[Factor, Bounds(ge=1, le=1000)] = 1.5
    slow_start: Annotated[Seconds, Bounds(ge=0, le=3600)] = 30.0
    gateways: Annotated[Count, Bounds(ge=1, le=1000)] = 1
    cache_isolation: Literal["tenant", "none"] = "tenant"
    cache_secret_file: FileName | None = None


RetryCause = Literal["connect", "reset", "timeout", "429", "502", "503", "504"]


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """Second attempts, before the first byte. `budget`: share of the calls of the last 10 s. `at_least`: retries in
    10 s, however few calls there are. `per_call`: retries of one call, each on another engine where there is one. `on`:
    failures of the connection, and statuses of the engine.
    """

    budget: Part = 0.20
    at_least: Annotated[Count, Bounds(ge=0, le=10_000)] = 3
    per_call: Annotated[Count, Bounds(ge=0, le=10)] = 2
    on: tuple[RetryCause, ...] = ("connect", "reset", "timeout", "429", "502", "503", "504")


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for whom. `connect`: to an engine. `first_byte`: from sending a call to an engine to the first
    byte of its answer. `stall`: between two reads of an engine's answer. `headers`: for a client to send them. `body`:
    without progress in a client's body. `body_total`: for all of a client's body. `keep_alive`: until an idle client
    connection is closed. `write_stall`: until a client that reads nothing is dropped. `half_open`: until a client that
    vanished without a word is noticed. `drain_grace`: on SIGTERM, how long calls are still taken while /readyz already
    says no. `drain`: on SIGTERM, for answers in flight to finish.
    """

    connect: Moment = 2.0
    first_byte: Moment = 60.0
    stall: Moment = 60.0
    headers: Moment = 10.0
    body: Moment = 30.0
    body_total: Moment = 300.0
    keep_alive: Moment = 75.0
    write_stall: Moment = 15.0
    half_open: Annotated[Seconds, Bounds(ge=3, le=3600)] = 15.0
    drain_grace: Annotated[Seconds, Bounds(ge=0, le=3600)] = 0.0
    drain: Moment = 60.0


class BodyPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one request, and on all that are here. `max`: its body, without the images, audio and files in it.
    `max_media`: its body with them. `max_values`: JSON values and names of fields in it; an array or object is two.
    `max_messages`: messages, prompts, inputs or documents in it. `max_n`: choices it may ask for. `media`: which
    images, audio and files its prompt may carry; any: engines fetch URLs. `media_hosts`: with data_urls_only, whom
    engines may fetch from all the same. `memory`: for the bodies of all requests, coming in, waiting and being sent.
    `share`: of it, that one tenant may have; of those without a key, one address.
    """

    max: Buffer = 2 * 1024**2
    max_media: Buffer = 16 * 1024**2
    max_values: Annotated[Count, Bounds(ge=1000, le=10_000_000)] = 100_000
    max_messages: Positive = 2000
    max_n: Annotated[Count, Bounds(ge=1, le=1024)] = 8
    media: Literal["data_urls_only", "any", "none"] = "data_urls_only"
    media_hosts: tuple[HostName, ...] = ()
    memory: Annotated[Bytes, Bounds(ge=1024**2, le=1024**4)] = 512 * 1024**2
    share: Annotated[Share, Bounds(ge=0.01, le=1)] = 0.5


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM server. `url`: where it listens. `name`: what clients are told of it, as in x-weir-engine; null: a
    number, as engine-1. `models`: serve only these of what it has; empty: all. `api_key_file`:
    its --api-key, alone in a file, relative to this one. `capacity`: KV tokens; null: what it reports.
    `max_concurrency`: calls at once; null: learned. `kv_events`: where it publishes the events of its prefix cache
    (vLLM's --kv-events-config), if it does.
    """

    url: EngineUrl
    name: Name | None = None
    models: tuple[ModelName, ...] = ()
    api_key_file: FileName | None = None
    capacity: Positive | None = None
    max_concurrency: Positive | None = None
    kv_events: EventsUrl | None = None


class SidecarsPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Sidecars that may bring their engines. `token_file`: what they show, alone in a file, relative to this one; null:
    sidecar.token beside this one, which is made where it is not there. `allow`: networks that their engines, and they
    themselves, may be in. `hosts`: names of this gateway by which they call it; its addresses always count.
    """

    token_file: FileName | None = None
    allow: tuple[Block, ...] = ("127.0.0.0/8", "::1")
    hosts: tuple[HostName, ...] = ()


class FleetPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The engines, and how often they are looked at. `poll`: between readings of an engine's /metrics. `health`:
    between readings of its /health. `engines`: what the gateway sends calls to, beside those given with --engine.
    `sidecars`: those whose engines it uses too; null: no sidecar is heard.
    """

    poll: Annotated[Seconds, Bounds(ge=0.02, le=60)] = 0.5
    health: Annotated[Seconds, Bounds(ge=0.02, le=60)] = 2.0
    engines: tuple[EngineEntry, ...] = ()
    sidecars: SidecarsPolicy | None = None


class ServerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on the data port. `max_connections`: of clients, at once. `max_per_peer`: the share of them that one
    address may have, unless it is a trusted proxy's. `max_request_line`: method, path and query. `max_headers`: all
    headers of a request. `max_header_fields`: their number. `max_pipelined`: requests waiting in line on one
    connection. `write_high_water`: unread bytes of one client before its engine is paused. `hosts`: names that calls
    may know this gateway by where it asks for no keys; empty: any, and from this machine localhost alone.
    """

    max_connections: Positive = 10_000
    max_per_peer: Annotated[Share, Bounds(ge=0.01, le=1)] = 0.50
    max_request_line: Buffer = 8 * 1024
    max_headers: Buffer = 16 * 1024
    max_header_fields: Positive = 100
    max_pipelined: Positive = 16
    write_high_water: Buffer = 256 * 1024
    hosts: tuple[HostName, ...] = ()


class Cors(msgspec.Struct, frozen=True, kw_only=True):
    """Web pages that may call the data port. Browsers obey it, nothing else does. `origins`: where the pages come from;
    empty: none, *: all.
    """

    origins: tuple[WebOrigin, ...] = ()


class Logging(msgspec.Struct, frozen=True, kw_only=True):
    """The call log. `calls`: the share of calls that get a line. `prompts`: the line holds the request's body."""

    calls: Annotated[float, SAMPLE, Bounds(ge=0, le=1)] = 1.0
    prompts: bool = False


class TrustedProxies(msgspec.Struct, frozen=True, kw_only=True):
    """Front proxies that say who calls; from anyone else their header is ignored. `addresses`: theirs. `tenant_header`:
    where they name the tenant.
    """

    addresses: tuple[Network, ...] = ()
    tenant_header: HeaderName = "x-tenant"


def default_tenants() -> Mapping[str, Tenant]:
    """Nobody needs a key."""
    return {"anonymous": Tenant()}


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an operator may change while the gateway runs; what is absent has its default.

    `version`: of this format. `classes`: traffic classes, the most important first; giving them replaces the whole
    list, and one must be `default`. `service_tiers`: from OpenAI's service_tier field to a class. `tenants`: who pays;
    a call without a key is the tenant `anonymous`'s, where there is one. `keys_file`: more of the tenants' keys, lines
    of SHA-256 and tenant, relative to this file. `shaping`: caps on max_tokens as engines fill up.
    """

    version: Literal[1] = 1
    classes: Mapping[Name, TrafficClass] = msgspec.field(default_factory=default_classes)
    service_tiers: Mapping[Name, Name] = msgspec.field(default_factory=default_service_tiers)
    tenants: Mapping[TenantName, Tenant] = msgspec.field(default_factory=default_tenants)
    keys_file: FileName | None = None
    trusted_proxies: TrustedProxies = TrustedProxies()
    limits: Limits = Limits()
    budget: Budget = Budget()
    shaping: tuple[ShapingTier, ...] = (
        ShapingTier(kv_above=0.85, max_tokens=1024),
        ShapingTier(kv_above=0.92, max_tokens=256),
    )
    deadlines: Deadlines = Deadlines()
    routing: Routing = Routing()
    retries: Retries = Retries()
    hedging: Hedging = Hedging()
    breaker: Breaker = Breaker()
    modes: Modes = Modes()
    batching: Batching = Batching()
    timeouts: Timeouts = Timeouts()
    body: BodyPolicy = BodyPolicy()
    fleet: FleetPolicy = FleetPolicy()
    server: ServerPolicy = ServerPolicy()
    cors: Cors = Cors()
    logging: Logging = Logging()
