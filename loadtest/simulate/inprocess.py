"""Gateway in virtual time: its real pipeline and decisions over simulated engines, without a socket.

The only module of the load test that runs the gateway. Whatever touches a network is replaced: connections by
`memory_wire.py`, telemetry by `memory_watch.py`, the call log by `Records`. Everything between them is the gateway as
it ships.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Protocol, cast

import msgspec

from gateway.core.admission.witness import NOBODY_WATCHES, Witnesses
from gateway.core.engines.engine import Engine
from gateway.core.money.engine_time import HOME
from gateway.core.money.tariff import MICRO
from gateway.core.policy.file import decode
from gateway.core.policy.policy import EngineEntry, Logging, Policy
from gateway.core.policy.routes import ModelRoute
from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.call import Call
from gateway.core.request.record import COPY, Record
from gateway.core.request.tenants import ANONYMOUS, Account, with_keys
from gateway.core.routes.prospect import Readiness, prospect_of
from gateway.decider.call_log import CallLog
from gateway.decider.loading import Configuration
from gateway.decider.waking import Transport
from gateway.relay.pipeline import Pipeline
from gateway.relay.wire.messages import Request, WireError, refusal
from gateway.relay.wire.responder import Responder
from gateway.serve.assembly import Gateway
from gateway.shared.files.checked import InvalidFile
from gateway.shared.protocol import Role
from gateway.upstream.client import Client
from loadtest.clients.calls import ClientCall, Try
from loadtest.load.workload import Planned
from loadtest.report.records import TokenGaps
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.memory_provider import MemoryProvider
from loadtest.simulate.memory_requests import Taker, nothing
from loadtest.simulate.memory_watch import Watch
from loadtest.simulate.memory_wire import MemoryClient, MemoryReply, Sends, Upstream, Wire
from loadtest.simulate.posting import full, leaving, posted


def _ignored(*_: object) -> None:
    """Nobody watches."""


class Watcher(msgspec.Struct, frozen=True, kw_only=True):
    """Watcher of each call from outside and from inside. `say` takes the gateway's lines for an operator. `sending` is
    told of each request to an engine; `failed` of each call that was given up as its engine's failure, or for the time
    it took, and whether the engine is taken for dead; `heard` of each record, with its try."""

    witnesses: Witnesses = NOBODY_WATCHES
    say: Callable[[str], None] = _ignored
    sending: Callable[[bytes], None] = _ignored
    failed: Callable[[bytes, bool], None] = _ignored
    heard: Callable[[Record, Try | None], None] = _ignored


NOBODY = Watcher()


class Records:
    """The call log's place: each record goes to the try it tells of. A record nobody waits for is `stray`. `heard` is
    given each record, with its try."""

    def __init__(self, heard: Callable[[Record, Try | None], None]) -> None:
        self.open: dict[str, Try] = {}
        self.stray: list[str] = []
        self.heard = heard

    def write(self, record: Record, now: float) -> None:
        tried = self.open.pop(record.request_id, None)
        if tried is not None:
            self._note(record, tried, now)
        elif record.mirrored != COPY:
            self.stray.append(record.request_id)
        self.heard(record, tried)

    @staticmethod
    def _note(record: Record, tried: Try, now: float) -> None:
        tried.recorded = record.outcome.value
        tried.recorded_at = now
        tried.engine = record.engine
        tried.upstream = record.attempts
        tried.queue = record.queue

    async def aclose(self) -> None:
        """Nothing to flush."""


class ClassTarget(msgspec.Struct, frozen=True):
    """Targets of a class: seconds to the first and to the last token; `ttft` is infinite where it has none."""

    ttft: float
    deadline: float


def targets_of(text: bytes) -> dict[str, ClassTarget]:
    """Every class's target under a policy in YAML. Raises ValueError where it is none, or demands keys."""
    policy = policy_of(text)
    if "anonymous" not in policy.tenants:
        raise ValueError("simulated calls have no key: the policy must have the tenant `anonymous`")
    return {
        name: ClassTarget(traffic_class.ttft or math.inf, traffic_class.deadline)
        for name, traffic_class in policy.classes.items()
    }


def policy_of(text: bytes, name: str = "policy") -> Policy:
    """The policy that `text` is, in YAML; b"": the defaults. `name` is how messages call the file. Raises ValueError,
    which names the lines at fault."""
    try:
        return decode(text, name) if text.strip() else Policy()
    except InvalidFile as error:
        raise ValueError(str(error)) from error


def key_of(tenant: str) -> str:
    """A tenant's API key in a simulation."""
    return f"simulated-{tenant}"


def policy_for(text: bytes, tenants: Iterable[str], name: str = "policy") -> Policy:
    """The policy under which calls come from these `tenants`. Those it has are known by their `key_of`; the others,
    and nobody in particular (""), have no key and are `anonymous`. Raises ValueError where there is no such policy, or
    nobody in it without a key."""
    policy = policy_of(text, name)
    wanted = [tenant for tenant in tenants if tenant != ANONYMOUS]
    unknown = [tenant for tenant in wanted if tenant not in policy.tenants]
    if unknown and ANONYMOUS not in policy.tenants:
        who = f"the tenant {unknown[0]}" if unknown[0] else "no tenant in particular"
        raise ValueError(f"{name}: calls come from {who}, expected one of the policy's: {', '.join(policy.tenants)}")
    digests = {sha256(key_of(tenant).encode()).hexdigest(): tenant for tenant in wanted if tenant not in unknown}
    return with_keys(policy, digests, name)


class Door(Protocol):
    """Taker of calls: a gateway that decides itself, or one of its relays."""

    bodies: BodyMemory

    @property
    def pipeline(self) -> Pipeline | None: ...


def spill_on_load(gateway: Gateway) -> None:
    """Let routes ask no prediction: whatever would have to wait goes to a provider, if it may leave the house."""
    routes, control, rng = gateway.dispatch.routes, gateway.dispatch.control, random.Random(0)  # noqa: S311 # ties
    predicted = routes.resolve

    def resolve(call: Call, route: ModelRoute, account: Account, appraise: Callable[[Call], None]) -> None:
        predicted(call, route, account, appraise)
        outside, now, others = control.rules.outside, gateway.dispatch.clock(), call.others
        appraise(call)
        if call.model in outside or prospect_of(control, call, now, rng).readiness is Readiness.AT_ONCE:
            return
        call.others = tuple([model for model in others if model in outside])
        provider, call.others = routes.other(call, now), others
        if provider is not None:
            routes.give(call, provider, now, "spilled")

    routes.resolve = resolve  # type: ignore[method-assign] # the rule that is compared, in the place of the gateway's


class GatewayTarget:
    """A gateway over simulated engines. `policy` is YAML, as an operator writes it, or was read; b"" is the default;
    `tenants`: who calls with a key, of `policy_for`; `sidecar_token`: what sidecars show; `roles`: of engines that
    exchange KV caches; `by_load`: see `spill_on_load`."""

    def __init__(
        self,
        policy: bytes | Policy,
        engines: Sequence[MemoryEngine],
        *,
        seed: int = 0,
        tenants: Iterable[str] = (),
        sidecar_token: str | None = None,
        sidecar_transport: Transport | None = None,
        watcher: Watcher = NOBODY,
        roles: Sequence[Role] = (),
        by_load: bool = False,
    ) -> None:
        parsed = policy_for(policy, tenants) if isinstance(policy, bytes) else policy
        self.keys = {name: key_of(name) for name in tenants if name != ANONYMOUS and name in parsed.tenants}
        fleet = msgspec.structs.replace(parsed.fleet, engines=())  # these here instead
        self.policy = msgspec.structs.replace(parsed, fleet=fleet, logging=Logging(calls=1.0))
        self.records = Records(watcher.heard)
        entries = [EngineEntry(url=f"http://engine-{number}:8000") for number in range(len(engines))]
        for number, role in enumerate(roles):
            entries[number] = msgspec.structs.replace(entries[number], transfer="kv", role=role)
        rng = random.Random(seed)  # noqa: S311 # a simulation
        log = cast("CallLog", self.records)
        self.gateway = Gateway(
            Configuration(self.policy, sidecar_tokens=(sidecar_token,) if sidecar_token else ()),
            entries,
            log,
            rng,
            say=watcher.say,
            sidecar_transport=sidecar_transport,
            witnesses=watcher.witnesses,
        )
        if by_load:
            spill_on_load(self.gateway)
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self.doors: Sequence[Door] = (self.gateway,)  # calls go to each in turn
        own = [engine for engine in self.gateway.fleet if not engine.provider]
        self.memories = {engine.id: memory for engine, memory in zip(own, engines, strict=True)}
        self.sends = Sends(watcher.sending, watcher.failed)
        self._offer_providers()
        for number, (engine, memory) in enumerate(zip(own, engines, strict=True)):
            self.watch(engine, memory, number / len(engines))

    def _offer_providers(self) -> None:
        """Put simulated providers in the place of the policy's. Their money is in memory alone."""
        money = self.gateway.limits.money
        money.ahead, money.known = False, True
        for engine in self.gateway.fleet:
            if engine.provider:
                self._connect(engine, MemoryProvider(self.policy.providers[engine.provider].models.values()))

    def _connect(self, engine: Engine, memory: Upstream) -> MemoryClient:
        client = MemoryClient(memory, self.gateway.policy.timeouts.stall, self.sends)
        self.gateway.engines.clients[engine.id] = cast("Client", client)  # it has all of the surface that is used
        return client

    def watch(self, engine: Engine, memory: MemoryEngine, share: float) -> None:
        """Connect an engine of the fleet to its simulation, and watch it; `share`: of the interval until the first
        check."""
        Watch(self.gateway, engine, memory, self._connect(engine, memory)).start(share)

    @property
    def spent(self) -> tuple[float, int]:
        """Money that providers have cost since the start, and their tokens."""
        found = self.gateway.limits.money.totals.items()
        totals = [each for (provider, _, _), each in found if provider != HOME]
        return sum([micro for micro, _ in totals]) / MICRO, sum([tokens for _, tokens in totals])

    def send(self, call: Planned, client_call: ClientCall, tried: Try, upload: float = 0.0) -> Callable[[], None]:
        """Send a request through the gateway's pipeline, as its data port would hand it over. `upload`: seconds from
        the head to the end of the body. Return the function by which the client leaves."""
        self._sent += 1
        request_id = f"{self._sent:x}"
        fields = call.fields | {b"x-request-id": request_id.encode()}
        request = posted(call.path, fields, call.body, self._loop.time())
        self.records.open[request_id] = tried
        door, wire = self.doors[self._sent % len(self.doors)], Wire(client_call)
        pipeline = door.pipeline
        assert pipeline is not None  # noqa: S101 # a relay that is ready
        refused = pipeline.head(request)
        if refused is None and full(request, door.bodies):
            del self.records.open[request_id]
            refused = refusal(WireError(503, "no memory for this body", "bodies"))
        if refused is not None:
            wire.write(refused)
            wire.answered(False)
            return nothing
        responder = Responder(wire, cast("asyncio.Transport", wire), request)
        if upload:
            return self._slowly(pipeline, request, responder, request_id, upload)
        pipeline.call(request, responder)
        return leaving(responder)

    def _slowly(
        self, pipeline: Pipeline, request: Request, responder: Responder, request_id: str, upload: float
    ) -> Callable[[], None]:
        """Take a body that comes slowly. Who leaves before it is whole has made no call, and has no record."""
        coming = True

        def whole() -> None:
            nonlocal coming
            coming = False
            pipeline.call(request, responder)

        timer = self._loop.call_later(upload, whole)

        def leave() -> None:
            if coming:
                timer.cancel()
                request.release()
                del self.records.open[request_id]
            else:
                leaving(responder)()

        return leave

    @property
    def queued(self) -> int:
        """Calls that wait in the gateway."""
        return sum(map(len, self.gateway.dispatch.queues.values()))

    def paced(self, taker: Taker, gaps: TokenGaps) -> None:
        """For its engines' `Pace`: what a stream's inter-token latencies were goes to the try it answers."""
        if isinstance(taker, MemoryReply):
            tried = self.records.open.get(taker.request_id.decode())
            if tried is not None:
                tried.gaps = gaps

    def left_over(self) -> list[str]:
        """Find what an idle gateway must not have, in words; empty: nothing was lost, nothing is held."""
        wrong = [
            f"{engine!r} still holds something"
            for engine in self.gateway.fleet
            if (engine.ledger.held, engine.ledger.in_flight, engine.prefills.queued) != (0, 0, 0)
        ]
        for _, _, purse in self.gateway.limits.money.purses():
            if purse.window.reserved:
                wrong.append(f"{purse.window.tenant} has {purse.window.reserved} micro-units reserved")
        if any(self.gateway.dispatch.queues.values()):
            wrong.append("a queue is not empty")
        for door in self.doors:
            if door.pipeline is not None and door.pipeline.tasks:
                wrong.append(f"{len(door.pipeline.tasks)} tasks still run")
            if door.bodies.held:
                wrong.append(f"{door.bodies} with no request left")
        if self.records.open:
            wrong.append(f"{len(self.records.open)} calls have no record")
        if self.records.stray:
            wrong.append(f"{len(self.records.stray)} records belong to no call")
        if self.sends.again:
            wrong.append(f"{self.sends.again} calls were sent again after their first byte")
        return wrong
