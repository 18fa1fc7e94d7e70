"""One simulation of the whole gateway: clients, engines, sidecars, reloads and an operator's hand, in virtual time.

    wrong = vtime.run(simulate(case, told))

The gateway is the one of `inprocess.py`: everything but its sockets. What must hold is in `dst_invariants.py`; here
every call is followed from its client's side, and the two must agree.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import httpx

from gateway.assembly import ApplyError
from gateway.core.fleet import Engine, engine_id
from gateway.core.outcome import Record
from gateway.core.sidecars import Untrusted
from gateway.loading import Configuration
from gateway.wire.client import Client, EngineError
from loadtest.dst_books import Ledger
from loadtest.dst_case import Call, Case, Event, Hand, Reload, Word
from loadtest.dst_invariants import BACKOFF, SLACK, Invariants
from loadtest.dst_parts import engine_of, planned, strike
from loadtest.dst_policy import PER_CALL
from loadtest.dst_sidecars import PlayedSidecar
from loadtest.inprocess import GatewayTarget, Watch, policy_of
from loadtest.memory_wire import MemoryClient
from loadtest.simulated_client import Clients, Life, Try
from loadtest.vtime import VirtualLoop
from loadtest.workload import Planned
from sidecar.wire import DemandReport

if TYPE_CHECKING:
    from gateway.calllog import CallLog

LONGEST = 600.0  # seconds after the last thing happened by which every call must have ended
QUIET = 120.0  # seconds in which what calls wanted is no longer asked for
# What a client sees, and what the gateway may call it; anything else has the same name on both sides. Who leaves in the
# very moment of an answer's end sees nothing of it.
AGREES = {"left": {"client_gone", "ok", "expired", "shed", "upstream"}, "truncated": {"truncated", "expired"}}


class World:
    """Everything of one simulation. `told` takes all that happens, a line each."""

    def __init__(self, case: Case, told: list[str]) -> None:
        self.case = case
        self.told = told
        self.wrong = ""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._open: dict[Life, int] = {}
        self._asked: dict[int, tuple[Try, Call]] = {}  # by the try's identity
        self._flighty: dict[str, Life] = {}  # by request id: clients that leave as soon as it is their turn
        self._ledger = Ledger()
        self._coming = len(case.events)
        self._loop.set_exception_handler(self._broken)
        fixed = [engine_of(machine, number) for number, machine in enumerate(case.fixed)]
        self.memories = {f"engine-{number}:8000": memory for number, memory in enumerate(fixed)}
        for number, machine in enumerate(case.extra):
            self.memories[f"extra-{number}:8000"] = engine_of(machine, 10 + number)
        self.target = GatewayTarget(case.policy.encode(), fixed, seed=case.seed)
        self.gateway = gateway = self.target.gateway
        gateway.log = cast("CallLog", self)  # it has all of the surface that is used
        gateway.waking.transport = httpx.MockTransport(self._order)
        gateway.sidecars._say = gateway.waking._say = self.tell
        self.invariants = Invariants(gateway, self.found, self._granted)
        self.sidecars: dict[int, PlayedSidecar] = {}
        for number, helper in enumerate(case.sidecars):
            engines = [engine_of(machine, 20 + 10 * number + index) for index, machine in enumerate(helper.engines)]
            sidecar = PlayedSidecar(number, engines, helper.running, helper.takes, self._report, self.found)
            self.sidecars[sidecar.port] = sidecar
            self.memories |= {engine_id(sidecar.url(index)): memory for index, memory in enumerate(engines)}

    def tell(self, line: str) -> None:
        """Something happened."""
        self.told.append(f"{self._loop.time():10.4f}  {line}")

    def found(self, what: str) -> None:
        """Something is wrong: the first is what the simulation ends with."""
        if not self.wrong:
            self.wrong = f"at {self._loop.time():.4f} s: {what}"
            self.tell(f"WRONG: {what}")
            self._end()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found(f"{context['message']}: {context.get('exception')!r}")

    # -- the run ------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """From the first event until nothing is left. What was wrong first; empty: nothing."""
        loop, case = self._loop, self.case
        assert isinstance(loop, VirtualLoop)  # noqa: S101 # else nothing is ever at rest
        loop.watch(self.invariants.at_rest)
        self._reload(Reload(at=0.0, policy=case.policy))
        for sidecar in self.sidecars.values():
            sidecar.start()
        for number, event in zip(case.numbers, case.events, strict=True):
            loop.call_at(event.at, self._happen, number, event)
        last = case.events[-1].at if case.events else 0.0
        await asyncio.wait((self._over,), timeout=last + LONGEST)
        if not self._over.done():
            self.found(f"calls without an end: {sorted(self._open.values())}")
        if not self.wrong:
            await self._quiet()
        if not self.wrong:
            self._settled()
        self._over = loop.create_future()
        await self.gateway.aclose()
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks and not self.wrong:
            self.found(f"tasks that still run: {tasks}")
        return self.wrong

    async def _quiet(self) -> None:
        """What calls wanted is asked for a little longer; then no longer."""
        end = self._loop.time() + QUIET
        self._over = self._loop.create_future()
        await asyncio.sleep(0.001)
        while not self.wrong and self.gateway.waking.models and self._loop.time() < end:  # noqa: ASYNC110 # it has no event
            await asyncio.sleep(1.0)

    def _settled(self) -> None:
        self.invariants.idle()
        for left in self.target.left_over():
            self.found(left)
        for id, memory in self.memories.items():
            if memory.open:
                self.found(f"{len(memory.open)} requests are open at {id}")
        self._ledger.compare(self.gateway, self.found)
        for tried, call in self._asked.values():
            if tried.recorded not in AGREES.get(tried.outcome, {tried.outcome}):
                self.found(f"the client of {call} saw {tried.outcome!r}, the gateway {tried.recorded!r}")
            if tried.recorded_at - tried.finished > SLACK:
                self.found(
                    f"the client of {call} was done {tried.recorded_at - tried.finished:.6f} s before its record"
                )

    # -- what happens -------------------------------------------------------------------------------------------

    def _happen(self, number: int, event: Event) -> None:
        if self.wrong:
            return
        self.tell(f"[{number}] {_words(event)}")
        if isinstance(event, Call):
            self._call(number, event)
        elif isinstance(event, Reload):
            self._reload(event)
        elif isinstance(event, Hand) and event.engine is None:
            self.gateway.dispatch.refuse_waiting()
        elif isinstance(event, Hand):
            engine = self.gateway.fleet.engines.get(f"engine-{event.engine}:8000")
            if engine is not None:
                self.gateway.drain_engine(engine, event.drain)
        elif isinstance(event, Word):
            list(self.sidecars.values())[event.sidecar].hear(event)
        else:
            for each in event.engines:
                strike(self.memories[f"engine-{each}:8000"], event)
        self._coming -= 1
        if not self._coming and not self._open:
            self._end()

    def _call(self, number: int, call: Call) -> None:
        rng = random.Random(f"{self.case.seed} {number}")  # noqa: S311 # a client's whims
        life = Life(planned(number, call), self, Clients(retries=call.retries), rng, self._ended)
        self._open[life] = number
        if call.leaves > 0.0:
            self._loop.call_later(call.leaves, self._leave, life)
        life.send()
        if not call.leaves:  # before anybody has had a turn
            self._leave(life)

    def _leave(self, life: Life) -> None:
        if life in self._open:
            self.tell(f"client of [{self._open[life]}] leaves")
            life.leave("left")

    def _ended(self, life: Life) -> None:
        number = self._open.pop(life, None)
        if number is None:
            self.found("a call ended twice")
        self.tell(f"[{number}] ended: {life.tried.outcome}")
        if not self._open and not self._coming:
            self._end()

    def send(self, call: Planned, attempt: Life, tried: Try) -> Callable[[], None]:
        """To the gateway. What a client asked is remembered for its record."""
        event = self.case.events[self.case.numbers.index(self._open[attempt])]
        assert isinstance(event, Call)  # noqa: S101 # nothing else is sent
        self._asked[id(tried)] = tried, event
        leave = self.target.send(call, attempt, tried)
        if event.leaves_granted and self.target.records.open:
            self._flighty[next(reversed(self.target.records.open))] = attempt
        return leave

    def _granted(self, request_id: str, engine: str) -> None:
        self.tell(f"grant {request_id} on {engine}")
        life = self._flighty.pop(request_id, None)
        if life is not None:
            self._loop.call_soon(self._leave, life)

    def write(self, record: Record, now: float) -> None:
        """The end of a call: as the gateway's call log."""
        tried = self.target.records.open.get(record.request_id)
        self.target.records.write(record, now)
        self.tell(f"record {record.request_id} {record.outcome.value} after {record.total:.4f} s: {record.reason}")
        if tried is None:
            self.found(f"a record of {record.request_id}, which is nobody's or has one")
            return
        _, call = self._asked[id(tried)]
        if record.outcome.value == "bug":
            self.found(f"call {record.request_id} ended without an outcome")
        if self.case.cancels and call.within and record.total > call.within + BACKOFF:
            self.found(f"call {record.request_id} had {call.within} s and took {record.total:.4f} s")
        if record.attempts > 1 + PER_CALL + 1:  # the last of them may have been hedged
            self.found(f"call {record.request_id} was sent {record.attempts} times")
        self.invariants.ended(record.request_id)
        self.invariants.retries.sends += max(0, record.attempts - 1)
        self._ledger.count(record, call.asked)

    async def aclose(self) -> None:
        """Nothing to flush."""

    def _reload(self, reload: Reload) -> None:
        gateway, before = self.gateway, list(self.gateway.fleet)
        try:
            gateway.apply(Configuration(policy_of(reload.policy.encode())))
        except ApplyError as error:
            if not reload.bad or list(gateway.fleet) != before:
                self.found(f"a reload failed: {error}")
        else:
            if reload.bad:
                self.found("a policy with one engine twice was taken")
        self._attend()

    def _report(self, body: bytes) -> DemandReport | None:
        try:
            self.gateway.sidecars.admit(None, local=True)
        except Untrusted:
            return None
        answer = self.gateway.sidecars.report(body, local=True)
        self._attend()
        return answer

    async def _order(self, request: httpx.Request) -> httpx.Response:
        return await self.sidecars[request.url.port or 0].ordered(request)

    def _attend(self) -> None:
        """Engines that are new in the fleet get their connections and their watch, before a call is sent to them."""
        for engine in self.gateway.fleet:
            if not isinstance(self.gateway.clients[engine.id], MemoryClient):
                self._watch(engine)

    def _watch(self, engine: Engine) -> None:
        gateway, memory = self.gateway, self.memories[engine.id]
        client = MemoryClient(memory, gateway.policy.timeouts.stall, EngineError, self.target.sends)
        gateway.clients[engine.id] = cast("Client", client)  # it has all of the surface that is used
        Watch(gateway, engine, memory, client).start(0.5)


def _words(event: Event) -> str:
    if isinstance(event, Reload):
        return f"reload {event.policy}"
    return str(event)


async def simulate(case: Case, told: list[str]) -> str:
    """Run it, in virtual time. What was wrong first, empty for nothing; `told` takes all that happens, a line each.
    Raises vtime.Deadlock."""
    return await World(case, told).run()
