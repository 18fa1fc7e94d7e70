"""World of one simulation with relays: clients, relays, deciders and engines, in virtual time.

    wrong = vtime.run(simulate_relays(case, log))

Relays and deciders are the code that runs as processes; `relay_laws.py` says what must hold. Whom a relay reaches say
`one_decider.py` and, for a cluster, `members.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from gateway.core.policy.policy import Policy
from gateway.core.request.record import Record
from gateway.decider.loading import Configuration
from gateway.frames.channel import Channel
from loadtest.lab.dst.answers import Reader
from loadtest.lab.dst.case import Call, Reload
from loadtest.lab.dst.course import Course, OpenCalls
from loadtest.lab.dst.members import Members
from loadtest.lab.dst.one_decider import OneDecider
from loadtest.lab.dst.parts import believe_rates, engine_of, faults_of_transfers, roles_of
from loadtest.lab.dst.relay_case import DeciderFault, MemberFault, RelayCase, RelayEvent, RelayFault
from loadtest.lab.dst.relay_laws import RelayLaws
from loadtest.lab.dst.relay_parts import ClientLine, Log, Relay
from loadtest.load.workload import Planned
from loadtest.simulate.inprocess import GatewayTarget, policy_of
from loadtest.simulate.memory_frames import FrameLink
from loadtest.simulate.relays import look_for_stalls, pid_of, relay_of
from loadtest.simulate.run_records import Fault
from loadtest.simulate.simulated_client import ClientCall, Try
from loadtest.simulate.simulation import strike

LONGEST = 300.0  # seconds after the last thing happened by which every call must have ended
SETTLES = 3.0  # seconds after the last call, in which nothing of any may come, and by which none may be left
ELECTS = 16.0  # by which none may be left of a cluster, where somebody must be elected first
LATE = 0.3  # seconds after its deadline a call may need to notice it, beside its way to the decider
LOOK = 0.25  # seconds between two looks for engines that have stopped


class RelayWorld:
    """Everything of one simulation. `log` takes all that happens, a line each; `read` reads policies."""

    def __init__(self, case: RelayCase, log: list[str], read: Callable[[bytes], Policy]) -> None:
        self.case = case
        self.course = course = Course(case, log, self._happen, lambda: list(self._calls.numbers.values()))
        self.tell, self.found, self.loop = course.tell, course.found, course.loop
        self._read = read
        self._policy = read(case.policy.encode())
        self._rng = random.Random(f"relays {case.seed}")  # noqa: S311 # a simulation
        self._memories = [engine_of(machine, number) for number, machine in enumerate(case.fixed)]
        self._roles = roles_of(case)
        for number, _ in enumerate(self._roles):
            faults_of_transfers(case, number, self._memories)
        self._events = dict(zip(case.numbers, case.events, strict=True))
        self._calls = OpenCalls(case.seed, self, course)
        self._asked: dict[int, tuple[Try, Call]] = {}  # by the try's identity
        self._ending: set[asyncio.Task[None]] = set()
        self._epoch = 0  # of the last process that began
        self.relays: list[Relay] = []
        self._rule: OneDecider | Members = Members(self) if case.members else OneDecider(self)
        self.laws = RelayLaws(course, self._rule, self.relays)
        self._target = self._rule.begin()
        self._target.records.heard = self._heard
        for number in range(1, case.relays + 1):
            self._begin_relay(number)

    # -- the run ------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """From the first event until nothing is left. What was wrong first; empty: nothing."""
        course = self.course
        course.watch(self.laws.at_rest)
        self._look()
        await course.play(LONGEST)
        if not course.wrong:
            await self._settle()
        await self._aclose()
        return course.wrong

    async def _settle(self) -> None:
        """No client waits any more: until nothing is left of any call."""
        course = self.course
        course.reopen()
        until = self.loop.time() + (ELECTS if self.case.members else SETTLES)
        await course.wait(SETTLES)
        while (left := list(self._left())) and not course.wrong and self.loop.time() < until:
            await course.wait(SETTLES)
        for each in left:
            self.found(each)

    async def _aclose(self) -> None:
        for relay in self.relays:
            if relay.dead_at < 0.0:
                await relay.aclose(self.loop.time())
        await self._rule.aclose()
        await asyncio.gather(*self._ending)
        self.course.check_tasks()

    def _left(self) -> Iterator[str]:
        yield from self.laws.left(len(self._asked))
        for number, memory in enumerate(self._memories):
            if memory.open:
                yield f"{len(memory.open)} requests are open at engine-{number}"
        for id in self._target.records.open:
            yield f"call {id} has no record"

    def _happen(self, number: int, event: RelayEvent) -> None:
        match event:
            case Call():
                self._calls.begin(number, event)
            case Fault():
                for each in event.engines:
                    strike(self._memories[each], event)
            case Reload():
                self._policy = self._read(event.policy.encode())
                self._rule.apply(self._policy)
            case RelayFault():
                self._befalls(event)
            case DeciderFault():
                self._rule.befalls(event)
            case MemberFault():
                self._rule.befalls_member(event)

    def _look(self) -> None:
        for relay in self.relays:
            if relay.ready:
                look_for_stalls(relay.side)
        self._rule.look()
        if not self.course.over:
            self.loop.call_later(LOOK, self._look)

    def epoch(self) -> int:
        """The next process's."""
        self._epoch += 1
        return self._epoch

    def target(self) -> GatewayTarget:
        """Return another gateway, over the same engines."""
        target = GatewayTarget(self._policy, self._memories, seed=self.case.seed + self._epoch, roles=self._roles)
        believe_rates(self.case, target.gateway)
        target.gateway.apply(Configuration(self._policy, {}))
        return target

    def soon(self, work: Any) -> None:
        """Let it be done, and wait for it in the end."""
        task = self.loop.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # -- relays -------------------------------------------------------------------------------------------------

    def _begin_relay(self, number: int) -> None:
        epoch = self.epoch()
        pid = pid_of(number, epoch)
        log = Log(self._target.records, self._forget)
        relay: Relay

        async def connect(made: Callable[[], Channel]) -> None:
            await self._connect(relay, made)

        side = relay_of(
            number=number,
            epoch=epoch,
            relays=self.case.relays,
            log=log,
            connect=connect,
            memories=self._target.memories,
            sends=self._target.sends,
            seed=self.case.seed,
            say=self.tell,
        )
        relay = Relay(side, log, number, pid, self._rule.machine(number))
        self.relays.append(relay)
        side.link.start()

    async def _connect(self, relay: Relay, made: Callable[[], Channel]) -> None:
        await asyncio.sleep(2 * self.case.delay)
        decider = self._rule.reached(relay)
        if decider is None or self.loop.time() < relay.unreachable:
            raise ConnectionRefusedError("nobody is there")
        relay.connected()
        link: FrameLink

        def sent(channel: Channel, data: bytes) -> None:
            relay.sent(channel, data, link)

        link = relay.link = decider.links[relay.pid] = FrameLink(made(), decider.hub.channel(), self._delay, sent)

    def _delay(self) -> float:
        return self.case.delay + self.case.spread * self._rng.random() ** 4

    def _living(self, number: int) -> Relay | None:
        return next((each for each in self.relays if each.number == number + 1 and each.dead_at < 0.0), None)

    def _befalls(self, event: RelayFault) -> None:
        relay = self._living(event.relay)
        if relay is None:
            return
        link = relay.link
        if event.what == "kill":
            self.kill_relay(relay, event.seconds)
        elif link is None or not link.up:
            return
        elif event.what == "break":
            relay.unreachable = self.loop.time() + event.seconds
            link.cut(ConnectionResetError("the network is gone"))
        elif event.what == "hold":
            link.hold()
            self.loop.call_later(event.seconds, link.release)
        else:
            relay.echo(link, random.Random(f"{self.case.seed} {event.at}"))  # noqa: S311 # a simulation

    def kill_relay(self, relay: Relay, seconds: float) -> None:
        """SIGKILL; so many seconds later there is another."""
        if relay.link is not None:
            relay.link.closed_by(relay.link.relay)
        relay.dead_at = self.loop.time()
        self.soon(relay.aclose(self.loop.time()))
        self.loop.call_later(seconds, self._begin_relay, relay.number)

    def _forget(self, request_id: str) -> None:
        """A dead relay's call has no record, and nobody waits for it."""
        self._target.records.open.pop(request_id, None)

    # -- clients ------------------------------------------------------------------------------------------------

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        """To a relay that lives; to nobody, where there is none."""
        event = self._events[self._calls.numbers[client_call]]
        assert isinstance(event, Call)  # noqa: S101 # nothing else is sent
        ready = [relay for relay in self.relays if relay.ready]
        if not ready:
            self.loop.call_soon(client_call.over, False)
            return partial(self._calls.leave, client_call)
        relay = ready[len(self._asked) % len(ready)]
        self._asked[id(tried)] = tried, event
        line = ClientLine(Reader(client_call, event, self.found))
        relay.lines.append(line)
        self._target.doors = (relay.side,)
        return self._target.send(call, cast("ClientCall", line), tried)

    def _heard(self, record: Record, tried: Try | None) -> None:
        """The end of a call, in its relay's log."""
        self.tell(f"record {record.request_id} {record.outcome.value} after {record.total:.4f} s: {record.reason}")
        if tried is None:
            self.found(f"a record of {record.request_id}, which is nobody's or has one")
            return
        _, call = self._asked[id(tried)]
        if record.outcome.value == "bug":
            self.found(f"call {record.request_id} ended without an outcome")
        late = LATE + 0.25 + 4 * (self.case.delay + self.case.spread)
        if call.within and record.total > call.within + late:
            self.found(f"call {record.request_id} had {call.within} s and took {record.total:.4f} s")


async def simulate_relays(case: RelayCase, log: list[str], read: Callable[[bytes], Policy] = policy_of) -> str:
    """Run it, in virtual time. What was wrong first, empty for nothing; `log` takes all that happens, a line each;
    `read` reads policies. Raises vtime.Deadlock."""
    return await RelayWorld(case, log, read).run()
