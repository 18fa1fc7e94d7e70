"""World of one simulation with relays: clients, relays, deciders and engines, in virtual time.

    wrong = vtime.run(simulate_relays(case, told))

Relays and deciders are the code that runs as processes; `relay_laws.py` says what must hold. Whom a relay reaches is
said in one place (`RelayWorld.ruling`): members, partitions and a store of who rules belong there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from gateway.core.policy.policy import Policy
from gateway.core.request.record import Record
from gateway.decider.loading import Configuration
from gateway.frames.channel import Channel
from gateway.serve.assembly import ApplyError
from loadtest.lab.dst.answers import Reader
from loadtest.lab.dst.case import Call, Reload
from loadtest.lab.dst.open_calls import OpenCalls
from loadtest.lab.dst.parts import engine_of, strike
from loadtest.lab.dst.relay_case import DeciderFault, RelayCase, RelayEvent, RelayFault
from loadtest.lab.dst.relay_laws import RelayLaws
from loadtest.lab.dst.relay_parts import ClientLine, Decider, Log, Relay
from loadtest.load.workload import Planned
from loadtest.simulate.inprocess import GatewayTarget, policy_of
from loadtest.simulate.memory_frames import FrameLink
from loadtest.simulate.relays import hub_of, look_for_stalls, pid_of, relay_of
from loadtest.simulate.run_records import Fault
from loadtest.simulate.simulated_client import ClientCall, Try
from loadtest.simulate.vtime import VirtualLoop

LONGEST = 300.0  # seconds after the last thing happened by which every call must have ended
SETTLES = 3.0  # seconds after the last call by which nothing of any may be left
LATE = 0.3  # seconds after its deadline a call may need to notice it, beside its way to the decider
LOOK = 0.25  # seconds between two looks for engines that have stopped


class RelayWorld:
    """Everything of one simulation. `told` takes all that happens, a line each; `read` reads policies."""

    def __init__(self, case: RelayCase, told: list[str], read: Callable[[bytes], Policy]) -> None:
        self.case = case
        self.told = told
        self.wrong = ""
        self._read = read
        self._policy = read(case.policy.encode())
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._broken)
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._rng = random.Random(f"relays {case.seed}")  # noqa: S311 # a simulation
        self._memories = [engine_of(machine, number) for number, machine in enumerate(case.fixed)]
        self._coming = len(case.events)
        self._events = dict(zip(case.numbers, case.events, strict=True))
        self._calls = OpenCalls(case.seed, self, self.tell, self.found, self._end_if_all)
        self._asked: dict[int, tuple[Try, Call]] = {}  # by the try's identity
        self._ending: set[asyncio.Task[None]] = set()
        self._epoch = 0  # of the last process that began
        self._state: tuple[float, bytes] | None = None  # the last checkpoint, and when it was taken
        self.deciders: list[Decider] = []
        self.relays: list[Relay] = []
        self.laws = RelayLaws(self.found, self.tell, lambda: self.deciders, lambda: self.relays)
        self._target = self._begin_decider()
        self._target.records.heard = self._heard
        for number in range(1, case.relays + 1):
            self._begin_relay(number)

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
        loop.watch(self.laws.at_rest)
        self._look()
        for number, event in zip(case.numbers, case.events, strict=True):
            loop.call_at(event.at, self._happen, number, event)
        last = case.events[-1].at if case.events else 0.0
        await asyncio.wait((self._over,), timeout=last + LONGEST)
        if not self._over.done():
            self.found(f"calls without an end: {sorted(self._calls.numbers.values())}")
        if not self.wrong:
            self._over = loop.create_future()
            await asyncio.wait((self._over,), timeout=SETTLES)
        if not self.wrong:
            self._settled()
        await self._aclose()
        return self.wrong

    async def _aclose(self) -> None:
        for relay in self.relays:
            if relay.dead_at < 0.0:
                await relay.aclose(self._loop.time())
        for decider in self.deciders:
            if not decider.dead:
                await decider.aclose()
        await asyncio.gather(*self._ending)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks and not self.wrong:
            self.found(f"tasks that still run: {tasks}")

    def _settled(self) -> None:
        self.laws.idle(len(self._asked))
        for number, memory in enumerate(self._memories):
            if memory.open:
                self.found(f"{len(memory.open)} requests are open at engine-{number}")
        for id in self._target.records.open:
            self.found(f"call {id} has no record")

    def _happen(self, number: int, event: RelayEvent) -> None:
        if self.wrong:
            return
        self.tell(f"[{number}] {event}")
        match event:
            case Call():
                self._calls.begin(number, event)
            case Fault():
                for each in event.engines:
                    strike(self._memories[each], event)
            case Reload():
                self._reload(event.policy)
            case RelayFault():
                self._befalls(event)
            case DeciderFault():
                self._befalls_decider(event)
        self._coming -= 1
        self._end_if_all()

    def _end_if_all(self) -> None:
        if not self._coming and not self._calls.numbers:
            self._end()

    def _look(self) -> None:
        for relay in self.relays:
            if relay.ready:
                look_for_stalls(relay.side)
        decider = self.ruling
        if decider is not None and decider.hub.complete:
            self._state = self._loop.time(), decider.gateway.checkpoints.take(decider.hub.ungranted)
        if not self._over.done():
            self._loop.call_later(LOOK, self._look)

    # -- deciders -----------------------------------------------------------------------------------------------

    @property
    def ruling(self) -> Decider | None:
        """The decider that relays reach; None: there is none."""
        decider = self.deciders[-1] if self.deciders else None
        return None if decider is None or decider.dead or decider.hangs else decider

    def _begin_decider(self) -> GatewayTarget:
        self._epoch += 1
        target = GatewayTarget(self._policy, self._memories, seed=self.case.seed + self._epoch)
        target.gateway.apply(Configuration(self._policy, {}))
        living = {relay.number: relay.pid for relay in self.relays if relay.dead_at < 0.0}
        hub = hub_of(target.gateway, self._epoch, living, lives=self._lives)
        decider = Decider(target.gateway, hub)
        if self._state is not None:
            at, state = self._state
            target.gateway.checkpoints.restore(state, self._loop.time() - at)
            self.laws.goes_on(target.gateway, state)
        self.deciders.append(decider)
        self.laws.begins(decider)
        self.tell(f"a decider of epoch {self._epoch} begins")
        return target

    def _lives(self, pid: int) -> bool:
        return any(relay.pid == pid and relay.dead_at < 0.0 for relay in self.relays)

    def _befalls_decider(self, event: DeciderFault) -> None:
        decider = self.ruling
        if decider is None:
            return
        if event.what == "hang":
            decider.hangs = True
            for link in decider.links.values():
                link.hold()
            self._loop.call_later(event.seconds, self._kill, decider, 0.05)
        else:
            self._kill(decider, event.seconds)

    def _kill(self, decider: Decider, seconds: float) -> None:
        self._soon(decider.aclose())
        if not self.wrong:
            self._loop.call_later(seconds, self._begin_decider)

    def _reload(self, policy: str) -> None:
        decider = self.ruling
        self._policy = self._read(policy.encode())
        if decider is not None:
            try:
                decider.gateway.apply(Configuration(self._policy, {}))
            except ApplyError as error:
                self.found(f"a reload failed: {error}")
            decider.hub.apply(decider.gateway.pipeline.snapshot, b"a secret of cache salts")

    def _soon(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # -- relays -------------------------------------------------------------------------------------------------

    def _begin_relay(self, number: int) -> None:
        self._epoch += 1
        pid = pid_of(number, self._epoch)
        log = Log(self._target.records, self._forget)
        relay: Relay

        async def connect(made: Callable[[], Channel]) -> None:
            await self._connect(relay, made)

        side = relay_of(
            number, self._epoch, self.case.relays, log, connect, self._target.memories, self._target.sends,
            self.case.seed, self.tell,
        )  # fmt: skip
        relay = Relay(side, log, number, pid)
        self.relays.append(relay)
        side.link.start()

    async def _connect(self, relay: Relay, made: Callable[[], Channel]) -> None:
        await asyncio.sleep(2 * self.case.delay)
        decider = self.ruling
        if decider is None or self._loop.time() < relay.unreachable:
            raise ConnectionRefusedError("nobody is there")
        relay.connected()
        link: FrameLink

        def sent(channel: Channel, data: bytes) -> None:
            relay.sent(channel, data, link)

        link = decider.links[relay.pid] = FrameLink(made(), decider.hub.channel(), self._delay, sent)

    def _delay(self) -> float:
        return self.case.delay + self.case.spread * self._rng.random() ** 4

    def _living(self, number: int) -> Relay | None:
        return next((each for each in self.relays if each.number == number + 1 and each.dead_at < 0.0), None)

    def _befalls(self, event: RelayFault) -> None:
        relay, decider = self._living(event.relay), self.ruling
        if relay is None:
            return
        link = None if decider is None else decider.links.get(relay.pid)
        if event.what == "kill":
            if link is not None:
                link.closed_by(link.relay)
            relay.dead_at = self._loop.time()
            self._soon(relay.aclose(self._loop.time()))
            self._loop.call_later(event.seconds, self._begin_relay, relay.number)
        elif link is None or not link.up:
            return
        elif event.what == "break":
            relay.unreachable = self._loop.time() + event.seconds
            link.cut(ConnectionResetError("the network is gone"))
        elif event.what == "hold":
            link.hold()
            self._loop.call_later(event.seconds, link.let_go)
        else:
            relay.echo(link, random.Random(f"{self.case.seed} {event.at}"))  # noqa: S311 # a simulation

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
            self._loop.call_soon(client_call.over, False)
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


async def simulate_relays(case: RelayCase, told: list[str], read: Callable[[bytes], Policy] = policy_of) -> str:
    """Run it, in virtual time. What was wrong first, empty for nothing; `told` takes all that happens, a line each;
    `read` reads policies. Raises vtime.Deadlock."""
    return await RelayWorld(case, told, read).run()
