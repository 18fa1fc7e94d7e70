"""World of one simulation: clients, engines, and a gateway as one process or as several, in virtual time.

    wrong = vtime.run(simulate(case, log))

The gateway is the code that ships: everything but its sockets. What lies between a call's relay and its decider is a
parameter of the case: nothing (`one_process.py`), or frames that are late and lost, to one decider or to the leader of
a cluster (`relays/several_processes.py`). Every call is followed from its client's side as well.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from gateway.core.policy.policy import Policy
from gateway.core.request.record import COPY, Record
from gateway.core.request.tenants import MIRROR
from loadtest.clients.calls import ClientCall, Try
from loadtest.clients.retries import Clients
from loadtest.lab.dst.answers import wrong_with
from loadtest.lab.dst.case import Call, Case, Event
from loadtest.lab.dst.one_process import OneProcess
from loadtest.lab.dst.parts import engine_of, faults_of_transfers, planned, roles_of
from loadtest.lab.dst.policy import read_json
from loadtest.lab.dst.relays.several_processes import SeveralProcesses
from loadtest.load.workload import Planned
from loadtest.simulate.simulation import Fault, strike
from loadtest.simulate.vtime import VirtualLoop


class World:
    """Everything of one simulation. `log` takes all that happens, a line each; `wrong` is what went wrong first, empty:
    nothing. `read` reads policies. `calls`: those that are open, and their numbers in the case."""

    def __init__(self, case: Case, log: list[str], read: Callable[[bytes], Policy] = read_json) -> None:
        self.case, self.log, self.read = case, log, read
        self.wrong = ""
        self.calls: dict[ClientCall, int] = {}
        self.asked: dict[int, tuple[Try, Call]] = {}  # by the try's identity
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._broken)
        self._events = dict(zip(case.numbers, case.events, strict=True))
        self._coming = len(case.events)
        self._over: asyncio.Future[None] = self.loop.create_future()
        self.engines = [engine_of(machine, number) for number, machine in enumerate(case.fixed)]
        self.roles = roles_of(case)
        for number, _ in enumerate(self.roles):
            faults_of_transfers(case, number, self.engines)
        self.gateway: OneProcess | SeveralProcesses = SeveralProcesses(self) if case.relays else OneProcess(self)

    async def run(self) -> str:
        """From the first event until nothing is left. What was wrong first; empty: nothing."""
        assert isinstance(self.loop, VirtualLoop)  # noqa: S101 # else nothing is ever at rest
        self.loop.watch(self.gateway.at_rest)
        self.gateway.begin()
        for number, event in self._events.items():
            self.loop.call_at(event.at, self._happens, number, event)
        last = self.case.events[-1].at if self.case.events else 0.0
        await self.wait(last + self.gateway.longest)
        if not self.over:
            self.found(f"calls without an end: {sorted(self._open_calls())}")
        if not self.wrong:
            await self.gateway.settle()
        await self.gateway.aclose()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks and not self.wrong:
            self.found(f"tasks that still run: {tasks}")
        return self.wrong

    # -- the course of events -----------------------------------------------------------------------------------

    def tell(self, line: str) -> None:
        """Log a line with its time."""
        self.log.append(f"{self.loop.time():10.4f}  {line}")

    def found(self, what: str) -> None:
        """End the simulation because something is wrong."""
        if not self.wrong:
            self.wrong = f"at {self.loop.time():.4f} s: {what}"
            self.tell(f"WRONG: {what}")
            self._end()

    @property
    def over(self) -> bool:
        return self._over.done()

    async def wait(self, seconds: float) -> None:
        """Wait for the end, at most so long."""
        await asyncio.wait((self._over,), timeout=seconds)

    def reopen(self) -> None:
        """Go on after all calls have ended, until something is wrong."""
        self._over = self.loop.create_future()

    def end_if_all(self) -> None:
        """End the simulation if every event has happened and no call is open."""
        if not self._coming and not self._open_calls():
            self._end()

    def _end(self) -> None:
        if not self.over:
            self._over.set_result(None)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found(f"{context['message']}: {context.get('exception')!r}")

    def _happens(self, number: int, event: Event) -> None:
        if self.wrong:
            return
        self.tell(f"[{number}] {event}")
        if isinstance(event, Call):
            self._begin(number, event)
        elif isinstance(event, Fault):
            for each in event.engines:
                strike(self.engines[each], event)
        else:
            self.gateway.happen(event)
        self._coming -= 1
        self.end_if_all()

    def _open_calls(self) -> list[int]:
        """Numbers of the open calls; -1 for each call that a proxy still has."""
        return [*self.calls.values(), *[-1] * self.gateway.left_to_proxies]

    # -- clients ------------------------------------------------------------------------------------------------

    def _begin(self, number: int, call: Call) -> None:
        """A client begins a call."""
        rng = random.Random(f"{self.case.seed} {number}")  # noqa: S311 # a client's whims
        whole, clients = planned(number, call), Clients(retries=call.retries)

        def check(answer: bytes) -> None:
            if wrong := wrong_with(call, whole.body, answer):
                self.found(f"the answer to {call} is not its own: {wrong}")

        client_call = ClientCall(whole, self, clients, rng, self._ended, check=check)
        self.calls[client_call] = number
        if call.leaves > 0.0:
            self.loop.call_later(call.leaves, self.leave, client_call)
        client_call.send()
        if not call.leaves:  # before anybody has had a turn
            self.leave(client_call)

    def leave(self, client_call: ClientCall) -> None:
        """Let its client go away, if it is there still."""
        if client_call in self.calls:
            self.tell(f"client of [{self.calls[client_call]}] leaves")
            client_call.leave("left")

    def _ended(self, client_call: ClientCall) -> None:
        number = self.calls.pop(client_call, None)
        if number is None:
            self.found("a call ended twice")
        self.tell(f"[{number}] ended: {client_call.tried.outcome}")
        self.end_if_all()

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        """Send a client's request. What it asked is remembered for its record."""
        event = self._events[self.calls[client_call]]
        assert isinstance(event, Call)  # noqa: S101 # nothing else is sent
        if not self.gateway.listens:
            self.loop.call_soon(client_call.over, False)
            return partial(self.leave, client_call)
        self.asked[id(tried)] = tried, event
        return self.gateway.send(event, call, client_call, tried)

    def heard(self, record: Record, tried: Try | None) -> None:
        """Judge the end of a call, or of a copy of one for a mirror: its line in the call log."""
        name = record.request_id
        self.tell(f"record {name} {record.outcome.value} after {record.total:.4f} s: {record.reason}")
        if record.outcome.value == "bug":
            self.found(f"call {name} ended without an outcome")
        if tried is not None:
            self.gateway.heard(record, self.asked[id(tried)][1])
        elif record.mirrored == COPY:
            if record.tenant != MIRROR:
                self.found(f"the copy {name} of {record.tenant} ended as {record.outcome.value}")
            if record.attempts > 1:
                self.found(f"the copy {name} was sent {record.attempts} times")
            self.gateway.copied(record)
        else:
            self.found(f"a record of {name}, which is nobody's or has one")


async def simulate(case: Case, log: list[str], read: Callable[[bytes], Policy] = read_json) -> str:
    """Run a case in virtual time, see World. Return what was wrong first; empty: nothing. Raises vtime.Deadlock."""
    return await World(case, log, read).run()
