"""Assembly of one gateway: every object, built once and wired together. The one place where a new policy takes effect.

`apply` is a reload: everything that can be wrong with the new policy is found before anything changes. Then the
snapshot is swapped, and what has state (buckets, queues, ledgers, breakers, learned rates) goes by the new policy with
the state it has. Engines the policy no longer names get no new calls and are forgotten once their last one has ended.
So are those that a sidecar has brought and no longer has; they come and go between reloads.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import TYPE_CHECKING, Literal

import msgspec

from gateway.batches.door import FORM
from gateway.batches.site import BatchSite
from gateway.control.calls import CallView, active_calls
from gateway.core.admission.limits import LimitBook
from gateway.core.admission.quotas import Calendar
from gateway.core.admission.retries import RetryBudget
from gateway.core.admission.witness import NOBODY_WATCHES, Witnesses
from gateway.core.engines.announcer import Announcer
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.origin import PROVIDER, engine_id, origin_of, parse_origin, provider_of
from gateway.core.history import History
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.snapshot import Current, Snapshot, largest_body
from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.cost import CostModel
from gateway.core.request.record import Record
from gateway.core.sidecars.addresses import is_relayed
from gateway.core.sidecars.sidecar import Member
from gateway.decider.call_log import CallLog
from gateway.decider.checkpoint import Checkpoints
from gateway.decider.dispatch import Dispatch
from gateway.decider.ended_calls import EndedCalls
from gateway.decider.kubernetes.api import Unreachable
from gateway.decider.kubernetes.source import PodEngines
from gateway.decider.loading import NO_PYJWT, Configuration
from gateway.decider.local import LocalDecider
from gateway.decider.metrics.collector import Metrics
from gateway.decider.metrics.families import Families, batch_families, lengths, money_families, quota_families
from gateway.decider.metrics.model_routes import route_families
from gateway.decider.metrics.sidecars import SidecarMetrics
from gateway.decider.observer import Observer
from gateway.decider.recorder import Recorder
from gateway.decider.report_intake import ReportIntake
from gateway.decider.telemetry import Telemetry
from gateway.decider.waking import Transport, Waking
from gateway.frames.messages import RelayCounts
from gateway.relay.attempts import Attempts
from gateway.relay.large_bodies import LargeBodies
from gateway.relay.pipeline import Pipeline
from gateway.relay.tracing import Tracing
from gateway.relay.wire.server import Server, ServerSettings
from gateway.serve.batch_api import BatchApi
from gateway.serve.issuers import issuer_of
from gateway.serve.starting import Spans
from gateway.serve.token_use import TokenUse
from gateway.shared.files.file_status import FileStatus
from gateway.shared.storage import Storage
from gateway.shared.vllm.answers import ModelCard
from gateway.upstream.client import Client, ClientSettings
from gateway.upstream.trust import Trust

if TYPE_CHECKING:
    from gateway.decider.cache_events import KvEvents
    from gateway.relay.issuer import Issuer

MOST_OUTSIDE = 4096  # calls at a provider at once: its own bound is its 429, whose Retry-After is obeyed
UNBOUNDED = 10**12  # tokens: a provider has no KV cache that calls here could fill
PROVIDER_CONNECTS_WITHIN = 5.0  # seconds, TLS included
NO_PYZMQ = "kv_events: pyzmq is not installed: pip install 'WEIR.whl[kv-events]', or leave kv_events out"


class ApplyError(Exception):
    """A policy that is well-formed and cannot be used here; the message says why."""


class Monitoring(msgspec.Struct, frozen=True):
    """Sources of metrics beside the gateway's own objects, and where its records go."""

    lost_lines: Callable[[], int] = int
    policy_status: Callable[[], FileStatus] = FileStatus
    relays: Callable[[], Sequence[RelayCounts]] = tuple  # totals of relays that are processes of their own
    spans: Spans | None = None  # where traces of calls go; None: none is made
    gen_ai: bool = False  # OpenTelemetry's metrics too
    history: History | None = None  # where `say` notes events


class Gateway:
    """All of one gateway but its sockets: `serve` runs it, tests and simulations drive it.

    `entries` are engines beside the policy's: the command line's, which stay whatever the policy says. `say` takes
    lines for the operator. `most_clients`: connections that the process can afford. `sidecar_transport`: in place of
    sockets to sidecars. Raises ValueError for a policy that only looks right.
    """

    def __init__(
        self,
        configuration: Configuration,
        entries: Sequence[EngineEntry],
        log: CallLog | None,
        rng: random.Random,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        most_clients: int = sys.maxsize,
        sidecar_transport: Transport | None = None,
        witnesses: Witnesses = NOBODY_WATCHES,
        parser: Executor | None = None,
        monitoring: Monitoring = Monitoring(),  # noqa: B008 # it is frozen
    ) -> None:
        self._drawn_secret = secrets.token_bytes(32)  # for cache salts, where no file has one
        self.say = say
        self.issuer: Issuer | None = None  # of callers' tokens, where the policy has one
        self._configuration, policy = configuration, configuration.policy
        self.current = Current(self._snapshot(configuration))
        self.previous: Policy | None = None  # the one before
        self.rng = rng
        self.clock = asyncio.get_running_loop().time
        self._fixed = tuple(entries)
        self.retired: dict[Engine, str] = {}  # and why
        self.brought: dict[str, Member] = {}  # by sidecars, by engine id
        self._by_hand: set[str] = set()  # engines that an operator has drained
        self._most_clients = most_clients
        self._deciding(policy, witnesses, sidecar_transport)
        self._monitoring(monitoring, log)
        self._relaying(witnesses, parser, monitoring.spans)
        self.pods = PodEngines(self._pods_changed, say, rng)
        self._watch_pods(policy)
        self._engines(self._entries(policy))

    def _deciding(self, policy: Policy, witnesses: Witnesses, sidecar_transport: Transport | None) -> None:
        """Build what decides, and what it decides by."""
        self.fleet = Fleet()
        self._announcer = Announcer()
        self.retries = RetryBudget(self.current)
        calendar = Calendar()
        self.limits = LimitBook(policy, witnesses.limits, calendar)
        self.dispatch = Dispatch(
            self.fleet,
            policy,
            self.rng,
            self.clock,
            self.retries,
            witnesses.dispatch,
            money=self.limits.money,
            wake=self._wake,
            woken=self._woken,
        )
        self.telemetry = Telemetry(self.fleet, self.changed, self.clock)
        self.storage: Storage | None = None  # what outlasts the gateway, where the policy wants it
        self.kv_events: KvEvents | None = None  # from the first policy on that wants them
        cost = CostModel(policy.budget.alpha)
        cost.learn_lengths(policy.lengths == "learned")
        self.token_use = TokenUse(
            lambda: self.storage,
            self.limits.quotas,
            self.limits.money,
            calendar,
            self.clock,
            self.say,
            self.dispatch.pump,
        )
        self.decider = LocalDecider(
            self.fleet, self.dispatch, self.limits, cost, self.telemetry.asked, self.clock, self.rng
        )
        self.checkpoints = Checkpoints(self.fleet, self.dispatch, self.limits, cost, self.clock)
        self.waking = Waking(self.dispatch, self.say, sidecar_transport)
        self.sidecars = ReportIntake(self.dispatch, self, self.waking.heard, self.say)
        self.decider.reported = self.sidecars.reported

    def _monitoring(self, monitoring: Monitoring, log: CallLog | None) -> None:
        """Build what counts and records."""
        self.bodies = BodyMemory(self.policy.body.memory)
        self.batches: BatchApi | None = None  # once the storage is open, where the policy offers it
        self._sidecar_metrics = SidecarMetrics(self.dispatch, self.waking.results)
        relays, spans, cost = monitoring.relays, monitoring.spans, self.decider.cost
        self.families: list[Families] = [
            self._sidecar_metrics.collect,
            lambda: quota_families(self.limits.quotas, self.clock),
            lambda: money_families(self.limits.money, self.clock),
            lambda: route_families(self.dispatch.routes),
            lambda: batch_families([*([] if self.batches is None else [self.batches]), *relays()]),
            lambda: () if cost.lengths is None else lengths(cost.lengths),
        ]
        self.metrics = Metrics(
            self.fleet,
            self.dispatch,
            lambda: self.server.connections,
            lambda: self.server.refusals,
            self.retries,
            lambda: self.pipeline.batcher,
            self.bodies,
            more=lambda: chain.from_iterable([families() for families in self.families]),
            lost_lines=monitoring.lost_lines,
            policy_status=monitoring.policy_status,
            relays=relays,
            lost_spans=lambda: 0 if spans is None else spans.dropped,
            gen_ai=monitoring.gen_ai,
        )
        self.dispatch.routes.say = self.say
        self.ended_calls = EndedCalls(routed=self.dispatch.routes.observe)
        self.recorder = Recorder(self.current, self.metrics, log, self._ended, self.clock, self.rng, self.ended_calls)
        history = History() if monitoring.history is None else monitoring.history
        self.observer = Observer(history, self.fleet, self.dispatch, self.metrics.totals, self.ended_calls, self.clock)

    def _relaying(self, witnesses: Witnesses, parser: Executor | None, spans: Spans | None) -> None:
        """Build what carries bytes."""
        self.clients: dict[str, Client] = {}
        self.attempts = Attempts(self.current, self.clients, self.clock)
        self.pipeline = Pipeline(
            self.current,
            self.decider,
            self.attempts,
            self.recorder.observe,
            self.clock,
            self.rng,
            self.bodies,
            witness=witnesses.batches,
            large=None if parser is None else LargeBodies(parser, self.clock),
            tracing=None if spans is None else Tracing(self.current, spans.put, self.rng, self.recorder.labels),
        )
        settings = server_settings(self.current.snapshot, self._most_clients)
        self.server = Server(self.pipeline, settings, self.bodies)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.current.policy

    # -- a reload -----------------------------------------------------------------------------------------------

    def apply(self, configuration: Configuration) -> None:
        """Go by this policy from now on. Raises ApplyError, and then nothing has changed."""
        policy = configuration.policy
        self._entries(policy)  # may raise
        snapshot = self._snapshot(configuration)
        self._watch_pods(policy)
        self.previous = self.policy
        self.current.apply(snapshot)
        self.decider.cost.set_alpha(policy.budget.alpha)
        self.decider.cost.learn_lengths(policy.lengths == "learned")
        self.limits.apply(policy, self.clock())
        self._configuration = configuration
        self._engines(self._entries(policy))
        self.server.settings = server_settings(snapshot, self._most_clients)
        self.bodies.apply(policy.body.memory)
        self.dispatch.apply(policy)

    def _watch_pods(self, policy: Policy) -> None:
        """Raises ApplyError where no API server can be asked for the pods that the policy wants."""
        try:
            self.pods.apply(policy.fleet.inference_pool)
        except Unreachable as error:
            raise ApplyError(f"fleet.inference_pool: {error}") from error

    def _pods_changed(self) -> None:
        """Make the fleet what the pods of now say."""
        self._engines(self._entries(self.policy))
        self.dispatch.pump()

    def _snapshot(self, configuration: Configuration) -> Snapshot:
        policy, secret = configuration.policy, configuration.cache_secret
        try:
            self.issuer = issuer_of(policy, configuration.jwks, self.issuer, self.say)
        except ModuleNotFoundError as error:
            raise ApplyError(NO_PYJWT) from error
        return Snapshot(policy, self._drawn_secret if secret is None else secret.encode(), self.issuer)

    def _entries(self, policy: Policy) -> dict[str, EngineEntry]:
        """The engines there are to be, by id. Raises ApplyError if the policy names one of the command line's, or wants
        events that cannot be listened to."""
        entries = {engine_id(entry.url): entry for entry in self._fixed}
        for entry in policy.fleet.engines:
            id = engine_id(entry.url)
            if id in entries:
                raise ApplyError(f"the engine {id} is there twice: in the policy, and there or on the command line")
            entries[id] = entry
        entries = {**self.pods.entries, **entries, **provider_entries(policy)}
        if self.kv_events is None and any(entry.kv_events for entry in entries.values()):
            self.kv_events = self._listeners()
        return entries

    def _listeners(self) -> KvEvents:
        try:
            from gateway.decider.cache_events import KvEvents  # noqa: PLC0415 # pyzmq is an extra
        except ModuleNotFoundError as error:
            raise ApplyError(NO_PYZMQ) from error
        return KvEvents(self.clock)

    def _engines(self, entries: Mapping[str, EngineEntry]) -> None:
        """Make the fleet what `entries` say, with what sidecars have brought and may still bring."""
        configuration = self._configuration
        api_keys = configuration.api_keys
        self.waking.go_by(configuration.orders_by, configuration.sidecar_trust)
        self.sidecars.apply(self.policy.fleet.sidecars, configuration.sidecar_token, entries)
        settings = client_settings(self.policy)
        for engine in list(self.fleet):
            if engine.id in self.brought:
                engine.apply(self.policy)
                self.clients[engine.id].go_by(settings, *self._shown(engine))
                self.telemetry.watch(engine, *self._shown(engine))
            elif engine.id not in entries:
                self._leaves(engine, "the policy no longer names it")
        for id, entry in entries.items():
            engine = self._engine(id, entry.url)
            engine.apply(self.policy)
            engine.go_by(entry)
            self.fleet.has_models(engine, engine.models.values())  # those it may no longer serve are gone at once
            self.recorder.name(id, engine.label)
            key = api_keys.get(engine.provider or entry.url)
            self.clients[id].go_by(client_settings(self.policy, id), key)
            if engine.provider:
                self.fleet.has_models(engine, [ModelCard(id=model) for model in entry.models])
                if not engine.health.up:
                    engine.ready(self.clock())
            self.telemetry.watch(engine, key)
            if self.kv_events is not None:
                self.kv_events.listen(engine, entry.kv_events)
        self._retire()

    def _engine(self, id: str, url: str) -> Engine:
        """The engine of this id, made if there is none; one that was to be forgotten is wanted again."""
        if id not in self.fleet.engines:
            provider = provider_of(id)
            self.fleet.add(Engine(id, url, self.policy, capacity=UNBOUNDED if provider else None))
            self.fleet.engines[id].provider = provider
            self._new_client(id, url)
        engine = self.fleet.engines[id]
        if engine.provider and engine.url != url:
            engine.url = url
            self.clients.pop(id).close()
            self._new_client(id, url)
        if self.retired.pop(engine, None) is not None:
            engine.draining = engine.leaving = False
        return engine

    def _new_client(self, id: str, url: str) -> None:
        settings = client_settings(self.policy, id)
        self.clients[id] = Client(origin_of(id, url), settings, names=self.telemetry.names)

    def _leaves(self, engine: Engine, why: str) -> None:
        """Send the engine no new calls, and forget it once it has none."""
        engine.draining = engine.leaving = True
        self.retired.setdefault(engine, why)
        self._tell(engine)

    def _retire(self) -> None:
        """Forget the engines that are no longer wanted and have nothing left to do."""
        for engine in [engine for engine in self.retired if not engine.ledger.in_flight]:
            del self.retired[engine]
            self._announcer.forget(engine.id)
            self._by_hand.discard(engine.id)
            self.recorder.labels.pop(engine.id, None)
            self.fleet.remove(engine.id)
            self.telemetry.forget(engine)
            if self.kv_events is not None:
                self.kv_events.forget(engine)
            self.clients.pop(engine.id).close()
        self.recorder.watched = bool(self.retired or self.brought)

    # -- engines of sidecars ------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """A sidecar has a new engine that serves: it is believed, so calls may go at once."""
        engine = self._engine(member.id, member.url)
        self.clients[engine.id].go_by(client_settings(self.policy), *self._shown(engine))
        self.brought[member.id] = member
        self.recorder.watched = True
        engine.label = f"{member.profile}@{member.sidecar}"
        self.recorder.name(member.id, engine.label)
        self._open(engine, member)
        self.checkpoints.joined(engine)
        self.telemetry.watch(engine, *self._shown(engine))

    def _shown(self, engine: Engine) -> tuple[str | None, Trust | None]:
        """Key and trust for an engine of a sidecar's: the order token, if it is behind a relay; else nothing."""
        configuration = self._configuration
        return (configuration.orders_by, configuration.sidecar_trust) if is_relayed(engine.url) else (None, None)

    def update(self, member: Member) -> None:
        """A sidecar says something else of an engine; a model that it puts to sleep must not be sent a call more."""
        engine, before = self.fleet.engines[member.id], self.brought[member.id]
        self.brought[member.id] = member
        if member.url != before.url:  # its relay has TLS now, or no longer
            engine.url = member.url
            self.clients.pop(member.id).close()
            self.clients[member.id] = Client(
                parse_origin(member.url), client_settings(self.policy), names=self.telemetry.names
            )
            self.clients[member.id].go_by(client_settings(self.policy), *self._shown(engine))
            self.telemetry.forget(engine)
            self.telemetry.watch(engine, *self._shown(engine))
        role = (member.transfer, member.role) != (before.transfer, before.role)
        if member.open and (not before.open or member.served != before.served or role):
            self._open(engine, member)
        elif member.open:
            engine.expect_sizes(member.kv_tokens, member.max_concurrency)
        else:
            engine.draining = True
            self._tell(engine)
            self.dispatch.changed(engine)

    def leave(self, id: str) -> None:
        """A sidecar no longer has this engine, or may not bring it any more."""
        del self.brought[id]
        engine = self.fleet.engines[id]
        self._leaves(engine, "its sidecar no longer has it, or may not bring it")
        self.dispatch.changed(engine)
        self._retire()

    def held_on(self, id: str, url: str) -> Engine:
        """The engine that a call of before this decider's time is on: one that is not known gets no other calls."""
        engine = self.fleet.engines.get(id)
        if engine is None:
            engine = self._engine(id, url)
            self._leaves(engine, "it is not known yet, and ends its calls")
            self.recorder.watched = True
        return engine

    def _open(self, engine: Engine, member: Member) -> None:
        """Let the engine have calls for what it serves."""
        engine.expect_sizes(member.kv_tokens, member.max_concurrency)
        engine.priorities = member.priorities
        self.fleet.take_role(engine, member.transfer, member.role)
        if not engine.models.keys() >= set(member.served):
            context = member.context_length or None
            model = member.served[0]  # the others are its LoRA adapters
            cards = [
                ModelCard(id=name, max_model_len=context, parent=None if name == model else model)
                for name in member.served
            ]
            self.fleet.has_models(engine, cards)
        engine.ready(self.clock())
        engine.draining = member.id in self._by_hand
        self.changed(engine)

    # -- for the control port -----------------------------------------------------------------------------------

    def calls(self) -> Iterable[CallView]:
        """Return the calls that wait and run now."""
        return active_calls(self.pipeline.tasks.values(), self.recorder.labels, self.clock())

    def is_user_key(self, key: str) -> bool:
        """Whether this is a key of the data port's, as the policy of now has them."""
        return self.current.snapshot.tenants.has_key(key)

    def drain_engine(self, engine: Engine, wanted: bool) -> None:
        """No new calls for an engine, or new ones again; one that the policy no longer names, or that its sidecar is
        about to put to sleep or has, gets none in any case."""
        (self._by_hand.add if wanted else self._by_hand.discard)(engine.id)
        brought = self.brought.get(engine.id)
        engine.draining = wanted or engine in self.retired or (brought is not None and not brought.open)
        self._tell(engine)
        self.dispatch.changed(engine)

    # -- news from the other parts ------------------------------------------------------------------------------

    def changed(self, engine: Engine) -> None:
        """React to a change of an engine: grant waiting calls, and move calls away from a dead engine."""
        if not engine.health.up and engine.ledger.in_flight:
            self.clients[engine.id].abandon()
        self.dispatch.changed(engine)
        self._tell(engine)

    def _tell(self, engine: Engine) -> None:
        """The operator, of what has changed since the last line about it."""
        for line in self._announcer.look(engine, self.clock(), self._drained(engine)):
            self.say(line)

    def _drained(self, engine: Engine) -> str:
        """Reason why an engine gets no new calls; empty if it gets them."""
        if not engine.draining:
            return ""
        by_hand = "drained by an operator" if engine.id in self._by_hand else ""
        return self.retired.get(engine) or by_hand or "its sidecar puts it to sleep, or ends it"

    def _ended(self, record: Record) -> None:
        self.call_ended(record.engine)

    def shown(self, engine: Engine) -> tuple[str | None, Trust | None]:
        """Key and trust for an engine's connections."""
        if engine.id in self.brought:
            return self._shown(engine)
        return self._configuration.api_keys.get(engine.provider or engine.url), None

    def call_ended(self, id: str) -> None:
        """A call of this engine (empty: of none) has ended while engines come and go."""
        if not self.recorder.watched:
            return
        if id in self.brought:
            self.dispatch.sidecars.used(id, self.clock())
        self._retire()

    def _wake(self, model: str, seconds: float) -> None:
        self.waking.wanted(model, seconds)

    def _woken(self, class_name: str, seconds: float) -> None:
        self._sidecar_metrics.woken(class_name, seconds)

    async def offer_batches(self) -> None:
        """Take files and batches, where the policy says so, and go on with those that are not over. Raises OSError and
        StorageError."""
        if self.policy.batches is not None and self.storage is not None:
            site = BatchSite(self.policy.batches, self.storage, self.pipeline, self.bodies, self.say)
            self.batches = BatchApi(site)
            await self.batches.start()

    async def give_storage(self) -> None:
        """Hand the storage over to another gateway. This one only ends what is under way."""
        if self.batches is not None:
            await self.batches.give()
        await self.token_use.aclose()
        if self.storage is not None:
            await self.storage.share()

    async def aclose(self) -> None:
        self.pipeline.mirrors.close()
        if self.batches is not None:
            await self.batches.aclose()
        if self.issuer is not None:
            await self.issuer.aclose()
        self.sidecars.close()
        await self.pods.aclose()
        await self.waking.aclose()
        await self.telemetry.aclose()
        if self.kv_events is not None:
            await self.kv_events.aclose()
        for client in self.clients.values():
            client.close()
        await self.recorder.aclose()
        await self.token_use.aclose()
        if self.storage is not None:
            await self.storage.aclose()


def client_settings(policy: Policy, id: str = "") -> ClientSettings:
    """Return what a pool of connections to an engine needs of the policy; to a provider, by its `id`."""
    name = provider_of(id)
    if not name:
        return ClientSettings(stall_timeout=policy.timeouts.stall)
    provider = policy.providers.get(name)
    if provider is None or not provider.allow_private:
        network: Literal["any", "public", "private"] = "public"
    else:  # a key that goes out in the clear stays in the house
        network = "any" if provider.url.startswith("https:") else "private"
    return ClientSettings(
        stall_timeout=policy.timeouts.stall, connect_timeout=PROVIDER_CONNECTS_WITHIN, network=network
    )


def provider_entries(policy: Policy) -> dict[str, EngineEntry]:
    """Return the policy's providers as engines, by id."""
    return {
        PROVIDER + name: EngineEntry(url=each.url, name=name, models=tuple(each.models), max_concurrency=MOST_OUTSIDE)
        for name, each in policy.providers.items()
    }


def server_settings(snapshot: Snapshot, most_clients: int) -> ServerSettings:
    """The data port's part of a policy. `most_clients`: connections that the process can afford."""
    policy = snapshot.policy
    connections = min(policy.server.max_connections, most_clients)
    upload = 0 if policy.batches is None else policy.batches.max_file + FORM
    return ServerSettings(
        max_connections=connections,
        max_per_peer=max(1, connections // 2),
        refused_at_once=max(4, min(256, connections // 16)),  # they need descriptors too
        exempt=snapshot.tenants.trusts,
        body_total=policy.timeouts.body_total,
        keep_alive=policy.timeouts.keep_alive,
        max_body=max(largest_body(policy), upload),
    )
