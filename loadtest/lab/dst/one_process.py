"""Gateway of one process in a simulation, with sidecars, proxies, reloads and an operator's hand.

The gateway is the one of `inprocess.py`. What must hold is in `invariants.py` and `call_laws.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx

from gateway.core.engines.engine import Engine
from gateway.core.engines.origin import engine_id
from gateway.core.request.record import Record
from gateway.core.sidecars.sidecars import NameConflict, UntrustedSidecar
from gateway.decider.loading import Configuration
from gateway.serve.starting import ApplyError
from gateway.shared.protocol import DemandReport
from loadtest.clients.calls import ClientCall, Try
from loadtest.lab.dst.caches import KvEventFeed
from loadtest.lab.dst.call_laws import CallLaws
from loadtest.lab.dst.case import Call, Event, OperatorDrain, Reload, SidecarAct
from loadtest.lab.dst.parts import believe_rates, engine_of, scheduling_of
from loadtest.lab.dst.proxies import Proxies
from loadtest.lab.dst.sidecars import PlayedSidecar
from loadtest.load.workload import Planned
from loadtest.simulate.inprocess import GatewayTarget
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.memory_wire import MemoryClient

if TYPE_CHECKING:
    from loadtest.lab.dst.world import World

TOKEN = "what every sidecar shows"  # noqa: S105 # in memory alone
QUIET = 120.0  # seconds in which what calls wanted is no longer asked for


class OneProcess:
    """Gateway of one process: its relay and its decider are one. `left_to_proxies`: calls that a proxy still has."""

    longest = 600.0  # seconds after the last event by which every call must have ended
    listens = True

    def __init__(self, world: World) -> None:
        self._world, self.found, case = world, world.found, world.case
        fixed = world.engines
        self.memories = {f"engine-{number}:8000": memory for number, memory in enumerate(fixed)}
        for number, machine in enumerate(case.extra):
            self.memories[f"extra-{number}:8000"] = engine_of(machine, 10 + number, scheduling_of(number))
        self.laws = laws = CallLaws(world)
        self.target = GatewayTarget(
            world.read(case.policy.encode()),
            fixed,
            roles=world.roles,
            seed=case.seed,
            sidecar_token=TOKEN,
            sidecar_transport=httpx.MockTransport(self._order),
            watcher=laws.watcher,
        )
        self.proxies = Proxies(self.target, self.memories, laws.watcher, world)
        laws.watch(self.target, self.proxies)
        self.gateway = gateway = self.target.gateway
        believe_rates(case, gateway)
        self._kv_feeds: list[KvEventFeed] = []
        for engine in gateway.fleet:
            if engine.id in self.memories:
                self._tells(engine, self.memories[engine.id])
        self.sidecars: dict[int, PlayedSidecar] = {}
        for number, helper in enumerate(case.sidecars):
            engines = [engine_of(machine, 20 + 10 * number + index) for index, machine in enumerate(helper.engines)]
            sidecar = PlayedSidecar(number, engines, helper.running, helper.takes, self._report, self.found)
            self.sidecars[sidecar.port] = sidecar
            self.memories |= {engine_id(sidecar.url(index)): memory for index, memory in enumerate(engines)}
        for memory in self.memories.values():
            memory.left = laws.ledger.left

    # -- the run ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Apply the policy, and let the sidecars report."""
        self._reload(Reload(at=0.0, policy=self._world.case.policy))
        for sidecar in self.sidecars.values():
            sidecar.start()

    async def settle(self) -> None:
        """Wait a little longer for models that calls wanted, and for copies of calls, which no client waits for."""
        world, gateway = self._world, self.gateway
        end = world.loop.time() + QUIET
        world.reopen()
        await asyncio.sleep(0.001)
        while not world.wrong and world.loop.time() < end:
            if not (gateway.waking.models or gateway.pipeline.tasks):
                break
            await asyncio.sleep(1.0)
        if not world.wrong:
            self._settled()

    async def aclose(self) -> None:
        """End all that the gateway does."""
        self._world.reopen()
        await self.gateway.aclose()
        await asyncio.sleep(0)

    def at_rest(self) -> None:
        now = self._world.loop.time()
        for feed in self._kv_feeds:
            feed.deliver(now)
        self.laws.invariants.at_rest()
        for id, memory in self.memories.items():
            engine = self.gateway.fleet.engines.get(id)
            if len(memory.open) > (0 if engine is None else engine.ledger.in_flight):
                self.found(
                    f"{len(memory.open)} requests run on {id}, and nobody holds anything for all of them: {engine}"
                )

    def _settled(self) -> None:
        self.laws.settled()
        if self.laws.charges.left:
            self.found(f"charges without an end: {self.laws.charges.left}")
        for id, memory in self.memories.items():
            if memory.open:
                self.found(f"{len(memory.open)} requests are open at {id}")

    # -- calls --------------------------------------------------------------------------------------------------

    def send(self, event: Call, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        """Send a request to the gateway, or through a proxy that asks it."""
        if event.proxied is None:
            leave = self.target.send(call, client_call, tried, event.upload)
        else:
            leave = self.proxies.send(event.proxied, call, client_call, tried)
        if event.leaves_granted:
            self.laws.leaves_granted(client_call)
        return leave

    @property
    def left_to_proxies(self) -> int:
        return self.proxies.open

    def heard(self, record: Record, call: Call) -> None:
        """Judge the record of a client's call."""
        self.laws.judge(record, call)

    def copied(self, record: Record) -> None:
        """Judge the record of a copy of a call."""
        self.laws.copied(record)

    # -- events -------------------------------------------------------------------------------------------------

    def happen(self, event: Event) -> None:
        """Let an event happen that is no call and no engine's fault."""
        if isinstance(event, Reload):
            self._reload(event)
        elif isinstance(event, SidecarAct):
            list(self.sidecars.values())[event.sidecar].hear(event)
        elif isinstance(event, OperatorDrain) and event.engine is None:
            self.gateway.dispatch.refuse_waiting()
        elif isinstance(event, OperatorDrain):
            engine = self.gateway.fleet.engines.get(f"engine-{event.engine}:8000")
            if engine is not None:
                self.gateway.engines.drain(engine, event.drain)

    def _reload(self, reload: Reload) -> None:
        gateway, before = self.gateway, list(self.gateway.fleet)
        try:
            self.gateway.apply(Configuration(self._world.read(reload.policy.encode()), {}, (TOKEN,)))
        except ApplyError as error:
            if not reload.bad or list(gateway.fleet) != before:
                self.found(f"a reload failed: {error}")
        else:
            if reload.bad:
                self.found("a policy with one engine twice was taken")
            self.laws.invariants.apply(gateway.policy)
        self._attend()

    def _report(self, body: bytes) -> DemandReport | None:
        try:
            self.gateway.sidecars.admit(TOKEN.encode())
            answer = self.gateway.sidecars.report(body, local=True)
        except (UntrustedSidecar, NameConflict):
            return None
        self._attend()
        return answer

    async def _order(self, request: httpx.Request) -> httpx.Response:
        return await self.sidecars[request.url.port or 0].ordered(request)

    def _attend(self) -> None:
        """Engines that are new in the fleet get their connections and their watch, before a call is sent to them."""
        for engine in self.gateway.fleet:
            if not isinstance(self.gateway.engines.clients[engine.id], MemoryClient):
                self._watch(engine)

    def _watch(self, engine: Engine) -> None:
        self._tells(engine, self.memories[engine.id])
        self.target.watch(engine, self.memories[engine.id], 0.5)

    def _tells(self, engine: Engine, memory: MemoryEngine) -> None:
        if self._world.case.lost >= 0.0:
            seed = f"{self._world.case.seed} {engine.id}"
            self._kv_feeds.append(KvEventFeed(engine, memory, self._world.case.lost, seed, self.found))
