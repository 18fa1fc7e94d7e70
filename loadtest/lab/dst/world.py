"""World of one simulation: clients, engines, and a gateway as one process or as several, in virtual time.

    wrong = vtime.run(simulate(case, log))

The gateway is the code that ships: everything but its sockets. What lies between a call's relay and its decider is a
parameter of the case: nothing (`one_process.py`), or frames that are late and lost, to one decider or to the leader of
a cluster (`relays/several_processes.py`). Every call is followed from its client's side as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gateway.core.policy.policy import Policy
from gateway.core.request.record import COPY, Record
from loadtest.clients.calls import ClientCall, Try
from loadtest.lab.dst.case import Call, Case, Event
from loadtest.lab.dst.course import Course, OpenCalls
from loadtest.lab.dst.one_process import OneProcess
from loadtest.lab.dst.parts import engine_of, faults_of_transfers, roles_of
from loadtest.lab.dst.policy import read_json
from loadtest.lab.dst.relays.several_processes import SeveralProcesses
from loadtest.load.workload import Planned
from loadtest.simulate.simulation import Fault, strike


class World:
    """Everything of one simulation. `log` takes all that happens, a line each; `read` reads policies."""

    def __init__(self, case: Case, log: list[str], read: Callable[[bytes], Policy] = read_json) -> None:
        self.case = case
        self.read = read
        self.course = course = Course(case, log, self._happen, self._open_calls)
        self.tell, self.found, self.loop = course.tell, course.found, course.loop
        self.engines = [engine_of(machine, number) for number, machine in enumerate(case.fixed)]
        self.roles = roles_of(case)
        for number, _ in enumerate(self.roles):
            faults_of_transfers(case, number, self.engines)
        self.calls = OpenCalls(case.seed, self, course)
        self.asked: dict[int, tuple[Try, Call]] = {}  # by the try's identity
        self._events = dict(zip(case.numbers, case.events, strict=True))
        self.gateway: OneProcess | SeveralProcesses = SeveralProcesses(self) if case.relays else OneProcess(self)

    async def run(self) -> str:
        """From the first event until nothing is left. What was wrong first; empty: nothing."""
        course = self.course
        course.watch(self.gateway.at_rest)
        self.gateway.begin()
        await course.play(self.gateway.longest)
        if not course.wrong:
            await self.gateway.settle()
        await self.gateway.aclose()
        course.check_tasks()
        return course.wrong

    def _happen(self, number: int, event: Event) -> None:
        if isinstance(event, Call):
            self.calls.begin(number, event)
        elif isinstance(event, Fault):
            for each in event.engines:
                strike(self.engines[each], event)
        else:
            self.gateway.happen(event)

    def _open_calls(self) -> list[int]:
        """Numbers of the open calls; -1 for each call that a proxy still has."""
        return [*self.calls.numbers.values(), *[-1] * self.gateway.left_to_proxies]

    # -- clients ------------------------------------------------------------------------------------------------

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        """Send a client's request. What it asked is remembered for its record."""
        event = self._events[self.calls.numbers[client_call]]
        assert isinstance(event, Call)  # noqa: S101 # nothing else is sent
        if not self.gateway.listens:
            self.loop.call_soon(client_call.over, False)
            return partial(self.calls.leave, client_call)
        self.asked[id(tried)] = tried, event
        return self.gateway.send(event, call, client_call, tried)

    def heard(self, record: Record, tried: Try | None) -> None:
        """The end of a call: its line in the call log."""
        self.tell(f"record {record.request_id} {record.outcome.value} after {record.total:.4f} s: {record.reason}")
        if record.outcome.value == "bug":
            self.found(f"call {record.request_id} ended without an outcome")
        if tried is not None:
            self.gateway.heard(record, self.asked[id(tried)][1])
        elif record.mirrored == COPY:
            self.gateway.copied(record)
        else:
            self.found(f"a record of {record.request_id}, which is nobody's or has one")


async def simulate(case: Case, log: list[str], read: Callable[[bytes], Policy] = read_json) -> str:
    """Run it, in virtual time. What was wrong first, empty for nothing; `log` takes all that happens, a line each;
    `read` reads policies. Raises vtime.Deadlock."""
    return await World(case, log, read).run()
