"""Policy: all settings that an operator may change while the gateway runs, as one frozen tree.

`Policy()` has the defaults. A field is here only if code obeys it. Times are seconds, sizes bytes or tokens, shares
0..1, whatever units the file used. The docstrings' field lines become the JSON Schema and docs/policy.md. `file.py`
reads the YAML; `traffic.py` holds the part about classes, tenants, limits and overload; `snapshot.py` is what a call
sees of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from gateway.core.money.tariff import HourlyPrice
from gateway.core.policy import traffic, types
from gateway.core.policy.auth import AuthPolicy
from gateway.core.policy.batches import BatchesPolicy
from gateway.core.policy.cluster import ClusterPolicy
from gateway.core.policy.providers import Provider
from gateway.core.policy.routes import ModelRoute
from gateway.shared.files.units import SAMPLE, Bytes, Count, Seconds, Share
from gateway.shared.protocol import Role


def default_service_tiers() -> Mapping[str, str]:
    """The default class of each value of OpenAI's `service_tier`."""
    return {"priority": "interactive", "default": "default", "flex": "batch"}


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """KV-cache tokens and calls that the gateway may send to one engine.

    `kv_target`: Share of the engine's KV cache up to which calls start; the last one may end 15 % above. Where less
    than a quarter of the held tokens is output: up to 93 % and 96 %, because prompts do not grow.
    `capacity`: KV-cache tokens of an engine that does not report its own.
    `max_concurrency`: Calls on one engine at once, until the gateway has learned a better limit from its metrics.
    """

    kv_target: Annotated[Share, types.Bounds(ge=0.05, le=1)] = 0.80
    capacity: types.Positive = 100_000
    max_concurrency: types.Positive = 256


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """Load balancing: a call goes to the engine where its prompt costs least, counting its time to first token and
    the delay of others. The cached part of the prompt costs nothing.

    `slow_start`: Time until an engine that was added, started, woken or repaired gets its full share of calls; 0s:
    at once.
    `hold_unserved`: Time after the loss of a model's last engine in which its calls wait, within their targets and
    queues; 0s: they get 503 at once.
    `gateways`: Number of gateways that share these engines. With more than one, each call takes the better of two
    random engines.
    `cache_isolation`: Tenants' isolation in the engines' prefix caches. tenant: each tenant finds only its own prefixes
    (vLLM's cache_salt); none: all tenants share them.
    `cache_secret_file`: File with the secret of tenants' cache salts alone in it; null: a new secret at each start.
    """

    slow_start: Annotated[Seconds, types.Bounds(ge=0, le=3600)] = 30.0
    hold_unserved: Annotated[Seconds, types.Bounds(ge=0, le=3600)] = 60.0
    gateways: Annotated[Count, types.Bounds(ge=1, le=1000)] = 1
    cache_isolation: Literal["tenant", "none"] = "tenant"
    cache_secret_file: types.SaltFile | None = None


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of clients' and engines' connections, and of the shutdown.

    `first_byte`: Time to the first byte of an engine's streamed answer. Other answers get more time, by their length.
    `stall`: Longest pause between two reads of an engine's answer.
    `keep_alive`: Time after which an idle client connection is closed.
    `drain_grace`: Time after SIGTERM in which calls are still taken while /readyz fails, for balancers to notice.
    `drain`: Time after SIGTERM, and after drain_grace, for answers in flight to finish.
    """

    first_byte: types.Moment = 60.0
    stall: types.Moment = 60.0
    keep_alive: types.Moment = 75.0
    drain_grace: Annotated[Seconds, types.Bounds(ge=0, le=3600)] = 0.0
    drain: types.Moment = 60.0


class BodyPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on request bodies: of one request, and of all requests together.

    `max`: Largest body, without the images, audio and files in it. One JSON value is allowed for each 20 bytes of this
    limit, and one message, prompt, input or document for each KiB; images, recordings and files as many again.
    Smaller limits allow as many as 2 MiB do.
    `max_media`: Largest body with images, audio and files. Data URLs are a third larger than their files.
    `max_n`: Choices (n) that one request may ask for.
    `media`: Images, audio and files in a prompt. data_urls_only: in the body itself; a list such as
    [images.example.com]: also URLs of these hosts, which engines fetch; any: URLs of all hosts; none: text only.
    `memory`: Memory for the bodies of all requests while they arrive, wait and are sent. Beyond it requests get 503.
    One tenant, or one address among clients without a key, may use half of it.
    """

    max: types.Buffer = 2 * 1024**2
    max_media: types.Buffer = 16 * 1024**2
    max_n: Annotated[Count, types.Bounds(ge=1, le=1024)] = 8
    media: Literal["data_urls_only", "any", "none"] | tuple[types.HostName, ...] = "data_urls_only"
    memory: Annotated[Bytes, types.Bounds(ge=1024**2, le=1024**4)] = 512 * 1024**2


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM server.

    `url`: Address of the engine's HTTP server.
    `name`: Name of the engine towards clients, as in the header x-weir-engine; null: a number, such as engine-1.
    `models`: Models of the engine that are served; empty: all that it has.
    `api_key_file`: File with the engine's --api-key alone in it.
    `max_concurrency`: Calls on the engine at once; null: learned.
    `scheduling_policy`: The engine's --scheduling-policy. priority: calls carry the place of their class in `classes`
    as their priority. An engine that runs fcfs refuses them.
    `kv_events`: Address where the engine publishes KV events (vLLM's --kv-events-config); null: it publishes none.
    `transfer`: Name of the group of engines that exchange KV caches with it (vLLM's --kv-transfer-config): those of the
    same connector, model, block size, parallelism and dtype; null: it exchanges none. See docs/prefill.md.
    `role`: With a transfer group: prefill reads prompts for others, and answers what they have no room for; decode
    answers calls and reads no prompt for others; both.
    """

    url: types.EngineUrl
    name: types.Name | None = None
    models: tuple[types.ModelName, ...] = ()
    api_key_file: types.KeyFile | None = None
    max_concurrency: types.Positive | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    kv_events: types.EventsUrl | None = None
    transfer: types.Name | None = None
    role: Role = "both"


class SidecarTls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS to sidecars on other machines. With it none is used at http://.

    `ca_file`: File with the CA certificates of the sidecars, in PEM; null: the system's authorities.
    `name`: Name in all sidecars' certificates; null: each one's address.
    """

    ca_file: types.FileName | None = None
    name: types.HostName | None = None


class SidecarsPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Sidecars that may add their engines to the fleet.

    `token_file`: File with the token that sidecars must show, or with two; null: sidecar.token beside this file, which
    is made if it is missing, but not in a cluster.
    `order_token_file`: File with the token that this gateway shows sidecars, or with two; null: the token that
    sidecars show.
    `tls`: TLS to sidecars on other machines; null: http:// is allowed.
    `allow`: Networks of the sidecars and their engines. Others are refused.
    `copies`: Time by which a class's predicted wait for a full model must exceed the start of a copy of it, until a
    sidecar's other profile of the model is woken; null: never. The wait must be too long for 1.5 times as long.
    """

    token_file: types.TokenFile | None = None
    order_token_file: types.TokenFile | None = None
    tls: SidecarTls | None = None
    allow: tuple[types.Block, ...] = ("127.0.0.0/8", "::1")
    copies: Annotated[Seconds, types.Bounds(ge=0, le=3600)] | None = 2.0


class FleetPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Engines of the gateway, and the intervals of their health checks and metrics.

    `poll`: Time between two readings of an engine's /metrics.
    `health`: Time between two checks of an engine's /health. Three failures take it out, two successes bring it back.
    `engines`: Engines that calls go to, beside those given with --engine.
    `sidecars`: Sidecars whose engines are used too; null: no sidecar's report is taken.
    `inference_pool`: Name of an InferencePool, in the namespace of the gateway's own pod, whose ready pods are engines
    too, on each of its target ports; null: none.
    """

    poll: Annotated[Seconds, types.Bounds(ge=0.02, le=60)] = 0.5
    health: Annotated[Seconds, types.Bounds(ge=0.02, le=60)] = 2.0
    engines: tuple[EngineEntry, ...] = ()
    sidecars: SidecarsPolicy | None = None
    inference_pool: types.ObjectName | None = None


class ServerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the data port, which clients call.

    `max_connections`: Client connections at once. One address may have half of them; trusted proxies all.
    `hosts`: Allowed names in the Host header of a gateway without keys, such as [gateway.internal]; empty: any from
    other machines, localhost from this one.
    `progress`: Time between comments in a waiting stream, against idle time-outs. The first one sends status 200; a
    later refusal is an error event. null: only for calls with x-weir-progress.
    """

    max_connections: types.Positive = 10_000
    hosts: tuple[types.HostName, ...] = ()
    progress: Annotated[Seconds, types.Bounds(ge=1, le=300)] | None = None


class Logging(msgspec.Struct, frozen=True, kw_only=True):
    """Call log: a JSON line per call. Traces: spans of a call's phases.

    `calls`: Share of calls that get a line. true: all, false: none, 10%: a sample.
    `traces`: Share of calls whose spans are sent with --otlp-traces-endpoint. A caller's own trace decides for its
    calls.
    `prompts`: Whether the line has the request's body, which users wrote.
    """

    calls: Annotated[float, SAMPLE, types.Bounds(ge=0, le=1)] = 1.0
    traces: Annotated[float, SAMPLE, types.Bounds(ge=0, le=1)] = 0.01
    prompts: bool = False


def default_tenants() -> Mapping[str, traffic.Tenant]:
    """The one tenant `anonymous`: no call needs a key."""
    return {"anonymous": traffic.Tenant()}


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that may change while the gateway runs.

    `version`: Version of this format.
    `classes`: Traffic classes, the most important first. One must be `default`. Giving any replaces the whole list.
    `service_tiers`: Class of each value of OpenAI's field service_tier. A value that is not here is ignored.
    `tenants`: Tenants, who own keys, limits and shares. A call without a key is the tenant `anonymous`'s; without such
    a tenant it gets 401.
    `keys_file`: File with more keys, a line of SHA-256 and tenant each; `gateway key add` writes it.
    `auth`: Issuer whose tokens (JWT) callers may send in place of a key; null: none. See docs/operating.md.
    `trusted_proxies`: Addresses of front proxies that authenticate callers and name their tenant in the header
    x-tenant: 10.0.0.5, 10.0.0.0/24, or unix for the data port's unix socket. From other peers the header is ignored.
    `shaping`: Caps on max_tokens while engines are full; the smallest that applies counts.
    `lengths`: Estimate of an answer's length, which sets its booked tokens and its predicted end. by_model: learned by
    model, class and max_tokens; 50%: so much of max_tokens is booked.
    `deadlines`: Fate of calls that cannot be answered by their deadline or their target for the first token. refuse: on
    arrival, unless an engine of their model is idle; drop: once they wait and can no longer be in time; run: they run
    and finish late. With refuse and drop a call that runs past its deadline is cancelled, and refuse drops too.
    `retries`: Second attempts of a call on another engine, made only before the first byte has gone to the client: a
    share of the calls of the last 10 s, and two for one call. Three in 10 s are always allowed; 0%: none is.
    `hedging`: Time to wait for a call's first byte before a second attempt on another engine, whose loser is cancelled:
    a percentile of the class's times to first token, or a fixed time; null: no second attempts. They count in the
    budget of retries.
    `batching`: Request batching: kinds of call that are merged before they go to an engine, each with the longest time
    that the first call waits for others, such as {embeddings: 20ms}. A merged call has at most 64 inputs and 16k
    tokens.
    `scaling`: Share of what engines can do that calls should fill, by weir_engines_wanted: the engines that each model
    needs, for an autoscaler such as KEDA. After 10 min without a call a model wants none.
    `cors`: Origins of web pages that may call the data port, such as https://chat.example.com; *: all. CORS binds
    browsers only.
    `console`: Dashboard of yours that the console links to, such as deploy/grafana/fleet.json in your Grafana; null: no
    link.
    `models`: Model routes: names that callers use, each with the models that answer it. See docs/routes.md.
    `providers`: APIs outside the house, as the last resort of model routes, within a budget of money. See
    docs/providers.md.
    `engines_price`: Price of an own engine's hour, paid by the calls on it; null: none. See docs/providers.md.
    `cluster`: Gateways on several machines, of which one decides for all; null: alone. See docs/scale.md.
    `storage`: Folder for what outlasts the gateway, in the file weir.db, on a disk of this machine; null: none. It
    takes effect at a start, is made if it is missing, and serves one gateway at a time. See docs/operating.md.
    `batches`: Files of calls, run when there is room; null: none. See docs/batches.md.
    """

    version: Literal[1] = 1
    classes: Mapping[types.Name, traffic.TrafficClass] = msgspec.field(default_factory=traffic.default_classes)
    service_tiers: Mapping[types.Name, types.ClassName] = msgspec.field(default_factory=default_service_tiers)
    tenants: Mapping[types.TenantName, traffic.Tenant] = msgspec.field(default_factory=default_tenants)
    keys_file: types.FileName | None = None
    auth: AuthPolicy | None = None
    trusted_proxies: tuple[types.Network, ...] = ()
    limits: traffic.Limits = traffic.Limits()
    budget: Budget = Budget()
    shaping: tuple[traffic.ShapingTier, ...] = (
        traffic.ShapingTier(kv_above=0.85, max_tokens=1024),
        traffic.ShapingTier(kv_above=0.92, max_tokens=256),
    )
    lengths: Literal["by_model"] | types.Part = "by_model"
    deadlines: Literal["refuse", "drop", "run"] = "refuse"
    routing: Routing = Routing()
    retries: types.Part = 0.20
    hedging: Literal["p90", "p95", "p99"] | types.Moment | None = None
    breaker: traffic.Breaker = traffic.Breaker()
    modes: traffic.Modes = traffic.Modes()
    batching: Mapping[traffic.BatchedKind, Annotated[Seconds, types.Bounds(ge=0, le=1)]] = {}
    scaling: Annotated[Share, types.Bounds(ge=0.1, le=1)] = 0.83
    timeouts: Timeouts = Timeouts()
    body: BodyPolicy = BodyPolicy()
    fleet: FleetPolicy = FleetPolicy()
    server: ServerPolicy = ServerPolicy()
    cors: tuple[types.WebOrigin, ...] = ()
    logging: Logging = Logging()
    console: types.WebPage | None = None
    models: Mapping[types.ModelName, ModelRoute] = {}
    providers: Mapping[types.Name, Provider] = {}
    engines_price: HourlyPrice | None = None
    cluster: ClusterPolicy | None = None
    storage: types.FileName | None = None
    batches: BatchesPolicy | None = None
