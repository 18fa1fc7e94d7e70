"""Assembly of one gateway: every object, built once and wired together. The one place where a new policy takes effect.

`apply` is a reload: everything that can be wrong with the new policy is found before anything changes. Then the
snapshot is swapped, and what has state (buckets, queues, ledgers, breakers, learned rates) goes by the new policy with
the state it has. `fleet_engines.py` has the engines.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import TYPE_CHECKING, Literal

import msgspec

from gateway.batches.door import FORM, BatchDoor
from gateway.control.calls import CallView, active_calls
from gateway.core.admission.limits import LimitBook
from gateway.core.admission.quotas import Calendar
from gateway.core.admission.retries import RetryBudget
from gateway.core.admission.witness import NOBODY_WATCHES, Witnesses
from gateway.core.batches.requests import MOST_FILE
from gateway.core.call_counts import CallCounts
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.history import History
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.snapshot import Current, Snapshot, largest_body
from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.cost import CostModel
from gateway.decider.call_log import CallLog
from gateway.decider.checkpoint import Checkpoints
from gateway.decider.dispatch import Dispatch
from gateway.decider.ended_calls import EndedCalls
from gateway.decider.loading import NO_PYJWT, Configuration
from gateway.decider.local import LocalDecider
from gateway.decider.metrics.collector import Metrics
from gateway.decider.metrics.families import Families, money_families, quota_families, route_families
from gateway.decider.metrics.sidecars import SidecarMetrics
from gateway.decider.observer import Observer
from gateway.decider.recorder import Recorder
from gateway.decider.telemetry import Telemetry
from gateway.decider.waking import Transport, Waking
from gateway.frames.messages import RelayCounts
from gateway.relay.attempts import Attempts
from gateway.relay.batcher import Batcher
from gateway.relay.large_bodies import LargeBodies
from gateway.relay.pipeline import Pipeline
from gateway.relay.tracing import Tracing
from gateway.relay.wire.server import Server, ServerSettings
from gateway.serve.fleet_engines import FleetEngines
from gateway.serve.starting import ApplyError, issuer_of
from gateway.serve.token_use import TokenUse
from gateway.shared.files.file_status import FileStatus
from gateway.shared.storage import Storage

if TYPE_CHECKING:
    from gateway.relay.issuer import Issuer
    from gateway.serve.otlp import SpanExport


class Monitoring(msgspec.Struct, frozen=True):
    """Sources of metrics beside the gateway's own objects, and where its records go."""

    lost_lines: Callable[[], int] = int
    policy_status: Callable[[], FileStatus] = FileStatus
    spans: SpanExport | None = None  # where traces of calls go; None: none is made
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
        policy = configuration.policy
        self.issuer, snapshot = self._snapshot(configuration)
        self.current = Current(snapshot)
        self.previous: Policy | None = None  # the one before
        self.rng = rng
        self.clock = asyncio.get_running_loop().time
        self.relays: Callable[[], Sequence[RelayCounts]] = tuple  # totals of relays that are processes of their own
        self._most_clients = most_clients
        self._deciding(policy, witnesses, sidecar_transport)
        self._monitoring(monitoring, log)
        self.engines = FleetEngines(
            configuration,
            entries,
            self.dispatch,
            self.telemetry,
            self.recorder,
            self.checkpoints,
            self.waking,
            say=say,
        )
        self.sidecars = self.engines.sidecars
        self.decider.reported = self.sidecars.reported
        self._relaying(witnesses, parser, monitoring.spans)
        self.engines.watch_pods(policy)
        self.engines.apply(configuration)

    def _deciding(self, policy: Policy, witnesses: Witnesses, sidecar_transport: Transport | None) -> None:
        """Build what decides, and what it decides by."""
        self.fleet = Fleet()
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
        self.telemetry = Telemetry(self.fleet, self._changed, self.clock)
        self.storage: Storage | None = None  # what outlasts the gateway, where the policy wants it
        cost = CostModel(_alpha(policy))
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
        self.checkpoints = Checkpoints(self.decider)
        self.waking = Waking(self.dispatch, self.say, sidecar_transport)

    def _monitoring(self, monitoring: Monitoring, log: CallLog | None) -> None:
        """Build what counts and records."""
        self.bodies = BodyMemory(self.policy.body.memory)
        self.batches: BatchDoor | None = None  # once the storage is open, where the policy offers it
        self._sidecar_metrics = SidecarMetrics(self.dispatch, self.waking.results)
        self._monitored = monitoring
        self.families: list[Families] = [
            self._sidecar_metrics.collect,
            lambda: quota_families(self.limits.quotas, self.clock),
            lambda: money_families(self.limits.money, self.clock),
            lambda: route_families(self.dispatch.routes),
        ]
        self.metrics = Metrics(
            self.dispatch,
            self.retries,
            self.counted,
            more=lambda: chain.from_iterable([families() for families in self.families]),
            policy_status=monitoring.policy_status,
            relays=lambda: list(self.relays()),
        )
        self.dispatch.routes.say = self.say
        self.ended_calls = EndedCalls(routed=self.dispatch.routes.observe)
        self.recorder = Recorder(
            self.current,
            self.metrics.observe,
            log,
            lambda record: self.engines.call_ended(record.engine),
            self.clock,
            self.rng,
            self.ended_calls,
        )
        history = History() if monitoring.history is None else monitoring.history
        self.observer = Observer(history, self.fleet, self.dispatch, self.metrics.totals, self.ended_calls, self.clock)

    def _relaying(self, witnesses: Witnesses, parser: Executor | None, spans: SpanExport | None) -> None:
        """Build what carries bytes."""
        self.attempts = Attempts(self.current, self.engines.clients, self.clock)
        self.pipeline = Pipeline(
            self.decider,
            self.attempts,
            self.recorder.observe,
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
        self.engines.check(policy)
        issuer, snapshot = self._snapshot(configuration)
        self.engines.watch_pods(policy)
        self.issuer = issuer
        self.previous = self.policy
        self.current.apply(snapshot)
        self.decider.cost.set_alpha(_alpha(policy))
        self.limits.apply(policy, self.clock())
        self.engines.apply(configuration)
        self.server.settings = server_settings(snapshot, self._most_clients)
        self.bodies.apply(policy.body.memory)
        self.dispatch.apply(policy)

    def _snapshot(self, configuration: Configuration) -> tuple[Issuer | None, Snapshot]:
        policy, secret = configuration.policy, configuration.cache_secret
        try:
            issuer = issuer_of(policy, configuration.jwks, self.issuer, self.say)
        except ModuleNotFoundError as error:
            raise ApplyError(NO_PYJWT) from error
        return issuer, Snapshot(policy, self._drawn_secret if secret is None else secret.encode(), issuer)

    # -- for the control port -----------------------------------------------------------------------------------

    def calls(self) -> Iterable[CallView]:
        """Return the calls that wait and run now."""
        return active_calls(self.pipeline.tasks.values(), self.recorder.labels, self.clock())

    def counted(self) -> RelayCounts:
        """Return the totals of this process since the start."""
        spans = self._monitored.spans
        return relay_counts(
            self.metrics.counts, self.server, self.bodies, self.pipeline.batcher, self.batches,
            lost_lines=self._monitored.lost_lines(), lost_spans=0 if spans is None else spans.dropped,
        )  # fmt: skip

    def is_user_key(self, key: str) -> bool:
        """Whether this is a key of the data port's, as the policy of now has them."""
        return self.current.snapshot.tenants.has_key(key)

    def _wake(self, model: str, seconds: float) -> None:
        self.waking.wanted(model, seconds)

    def _woken(self, class_name: str, seconds: float) -> None:
        self._sidecar_metrics.woken(class_name, seconds)

    def _changed(self, engine: Engine) -> None:
        self.engines.changed(engine)

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
        await self.engines.aclose()
        await self.waking.aclose()
        await self.recorder.aclose()
        await self.token_use.aclose()
        if self.storage is not None:
            await self.storage.aclose()


def _alpha(policy: Policy) -> float | Literal["auto"]:
    """Share of its max_tokens that a call books."""
    return policy.lengths if isinstance(policy.lengths, float) else "auto"


def server_settings(snapshot: Snapshot, most_clients: int) -> ServerSettings:
    """The data port's part of a policy. `most_clients`: connections that the process can afford."""
    policy = snapshot.policy
    connections = min(policy.server.max_connections, most_clients)
    upload = 0 if policy.batches is None else min(policy.batches.per_tenant, MOST_FILE) + FORM
    return ServerSettings(
        max_connections=connections,
        max_per_peer=max(1, connections // 2),
        refused_at_once=max(4, min(256, connections // 16)),  # they need descriptors too
        exempt=snapshot.tenants.trusts,
        keep_alive=policy.timeouts.keep_alive,
        max_body=max(largest_body(policy), upload),
    )


def relay_counts(
    calls: CallCounts,
    server: Server,
    bodies: BodyMemory,
    batcher: Batcher,
    batches: BatchDoor | None,
    *,
    lost_lines: int,
    lost_spans: int,
) -> RelayCounts:
    """Return the totals since the start. `batches` None: the Batch API is not offered."""
    return RelayCounts(
        calls=calls.told(),
        ended=calls.calls,
        connections=server.connections,
        body_bytes=bodies.held,
        refusals=server.refusals,
        body_refusals=bodies.refused,
        batches=batcher.batches,
        merged=batcher.merged,
        again=batcher.again,
        lost_lines=lost_lines,
        lost_spans=lost_spans,
        lines={} if batches is None else dict(batches.lines),
        line_calls=0 if batches is None else batches.line_calls,
        batch_states={} if batches is None else batches.batch_states,
    )
