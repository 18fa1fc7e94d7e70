"""World of one simulation: clients, engines, sidecars, reloads and an operator's hand, in virtual time.

    wrong = vtime.run(simulate(case, log))

The gateway is the one of `inprocess.py`: everything but its sockets. What must hold is in `invariants.py`; here
every call is followed from its client's side, and the two must agree.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import httpx

from gateway.core.engines.engine import Engine
from gateway.core.engines.origin import engine_id
from gateway.core.sidecars.sidecars import NameConflict, UntrustedSidecar
from gateway.decider.loading import Configuration
from gateway.serve.starting import ApplyError
from gateway.shared.protocol import DemandReport
from gateway.upstream.client import EngineError
from loadtest.lab.dst.caches import KvEventFeed
from loadtest.lab.dst.callers import Callers
from loadtest.lab.dst.case import Call, Case, Event, OperatorDrain, Reload, SidecarAct
from loadtest.lab.dst.course import Course
from loadtest.lab.dst.decide.proxies import Proxies
from loadtest.lab.dst.parts import believe_rates, engine_of, faults_of_transfers, roles_of, scheduling_of
from loadtest.lab.dst.sidecars import PlayedSidecar
from loadtest.simulate.inprocess import GatewayTarget, policy_of
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.memory_watch import Watch
from loadtest.simulate.memory_wire import MemoryClient
from loadtest.simulate.simulation import strike

if TYPE_CHECKING:
    from gateway.upstream.client import Client

TOKEN = "what every sidecar shows"  # noqa: S105 # in memory alone
LONGEST = 600.0  # seconds after the last thing happened by which every call must have ended
QUIET = 120.0  # seconds in which what calls wanted is no longer asked for


class World:
    """Everything of one simulation. `log` takes all that happens, a line each."""

    def __init__(self, case: Case, log: list[str]) -> None:
        self.case = case
        self.course = course = Course(case, log, self._happen, self._open_calls)
        self.tell, self.found = course.tell, course.found
        fixed = [engine_of(machine, number) for number, machine in enumerate(case.fixed)]
        self.memories = {f"engine-{number}:8000": memory for number, memory in enumerate(fixed)}
        for number, machine in enumerate(case.extra):
            self.memories[f"extra-{number}:8000"] = engine_of(machine, 10 + number, scheduling_of(number))
        self.callers = Callers(case, course)
        roles = roles_of(case)
        for number, _ in enumerate(roles):
            faults_of_transfers(case, number, fixed)
        self.target = GatewayTarget(
            case.policy.encode(),
            fixed,
            roles=roles,
            seed=case.seed,
            sidecar_token=TOKEN,
            sidecar_transport=httpx.MockTransport(self._order),
            watcher=self.callers,
        )
        self.proxies = Proxies(self.target, self.memories, self.callers, course)
        self.callers.watch(self.target, self.proxies)
        self.gateway = gateway = self.target.gateway
        believe_rates(case, gateway)
        self.invariants = self.callers.invariants
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
            memory.left = self.callers.ledger.left

    # -- the run ------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """From the first event until nothing is left. What was wrong first; empty: nothing."""
        course = self.course
        course.watch(self._at_rest)
        self._reload(Reload(at=0.0, policy=self.case.policy))
        for sidecar in self.sidecars.values():
            sidecar.start()
        await course.play(LONGEST)
        if not course.wrong:
            await self._quiet()
        if not course.wrong:
            self._settled()
        course.reopen()
        await self.gateway.aclose()
        await asyncio.sleep(0)
        course.check_tasks()
        return course.wrong

    async def _quiet(self) -> None:
        """Wait a little longer for models that calls wanted, and for copies of calls, which no client waits for."""
        course, gateway = self.course, self.gateway
        end = course.loop.time() + QUIET
        course.reopen()
        await asyncio.sleep(0.001)
        while not course.wrong and course.loop.time() < end:
            if not (gateway.waking.models or gateway.pipeline.tasks):
                break
            await asyncio.sleep(1.0)

    def _at_rest(self) -> None:
        now = self.course.loop.time()
        for feed in self._kv_feeds:
            feed.deliver(now)
        self.invariants.at_rest()
        for id, memory in self.memories.items():
            engine = self.gateway.fleet.engines.get(id)
            if len(memory.open) > (0 if engine is None else engine.ledger.in_flight):
                self.found(
                    f"{len(memory.open)} requests run on {id}, and nobody holds anything for all of them: {engine}"
                )

    def _settled(self) -> None:
        self.callers.settled()
        if self.callers.charges.left:
            self.found(f"charges without an end: {self.callers.charges.left}")
        for id, memory in self.memories.items():
            if memory.open:
                self.found(f"{len(memory.open)} requests are open at {id}")

    # -- events -------------------------------------------------------------------------------------------------

    def _happen(self, number: int, event: Event) -> None:
        if isinstance(event, Call):
            self.callers.calls.begin(number, event)
        elif isinstance(event, Reload):
            self._reload(event)
        elif isinstance(event, OperatorDrain) and event.engine is None:
            self.gateway.dispatch.refuse_waiting()
        elif isinstance(event, OperatorDrain):
            engine = self.gateway.fleet.engines.get(f"engine-{event.engine}:8000")
            if engine is not None:
                self.gateway.engines.drain(engine, event.drain)
        elif isinstance(event, SidecarAct):
            list(self.sidecars.values())[event.sidecar].hear(event)
        else:
            for each in event.engines:
                strike(self.memories[f"engine-{each}:8000"], event)

    def _open_calls(self) -> list[int]:
        """Numbers of the open calls; -1 for each call that a proxy still has."""
        return [*self.callers.calls.numbers.values(), *[-1] * self.proxies.open]

    def _reload(self, reload: Reload) -> None:
        gateway, before = self.gateway, list(self.gateway.fleet)
        try:
            self.gateway.apply(Configuration(policy_of(reload.policy.encode()), {}, TOKEN))
            self.proxies.port.apply()
        except ApplyError as error:
            if not reload.bad or list(gateway.fleet) != before:
                self.found(f"a reload failed: {error}")
        else:
            if reload.bad:
                self.found("a policy with one engine twice was taken")
            self.invariants.apply(gateway.policy)
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
        gateway, memory = self.gateway, self.memories[engine.id]
        client = MemoryClient(memory, gateway.policy.timeouts.stall, EngineError, self.target.sends)
        gateway.engines.clients[engine.id] = cast("Client", client)  # it has all of the surface that is used
        self._tells(engine, memory)
        Watch(gateway, engine, memory, client).start(0.5)

    def _tells(self, engine: Engine, memory: MemoryEngine) -> None:
        if self.case.lost >= 0.0:
            seed = f"{self.case.seed} {engine.id}"
            self._kv_feeds.append(KvEventFeed(engine, memory, self.case.lost, seed, self.found))


async def simulate(case: Case, log: list[str]) -> str:
    """Run it, in virtual time. What was wrong first, empty for nothing; `log` takes all that happens, a line each.
    Raises vtime.Deadlock."""
    return await World(case, log).run()
