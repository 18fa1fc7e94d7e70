"""Gateway of several processes in a simulation: relays, and the decider or the cluster that they ask.

Relays and deciders are the code that runs as processes; `laws.py` says what must hold. Whom a relay reaches say
`one_decider.py` and, for a cluster, `members.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from gateway.core.request.record import COPY, Record
from gateway.decider.loading import Configuration
from gateway.frames.channel import Channel
from loadtest.clients.calls import ClientCall, Try
from loadtest.lab.dst.case import Call, DeciderFault, Event, MemberFault, RelayFault, Reload
from loadtest.lab.dst.parts import believe_rates
from loadtest.lab.dst.relays.laws import RelayLaws
from loadtest.lab.dst.relays.members import Members
from loadtest.lab.dst.relays.one_decider import OneDecider
from loadtest.lab.dst.relays.parts import ClientLine, Log, Relay
from loadtest.load.workload import Planned
from loadtest.simulate.inprocess import GatewayTarget
from loadtest.simulate.memory_frames import FrameLink
from loadtest.simulate.relays import look_for_stalls, pid_of, relay_of

if TYPE_CHECKING:
    from loadtest.lab.dst.world import World

SETTLES = 3.0  # seconds after the last call, in which nothing of any may come, and by which none may be left
ELECTS = 16.0  # by which none may be left of a cluster, where somebody must be elected first
LATE = 0.3  # seconds after its deadline a call may need to notice it, beside its way to the decider
LOOK = 0.25  # seconds between two looks for engines that have stopped


class SeveralProcesses:
    """Gateway of several processes: relays, and the deciders that they ask."""

    longest = 300.0  # seconds after the last event by which every call must have ended
    left_to_proxies = 0  # no proxy asks it

    def __init__(self, world: World) -> None:
        self.world, self.case = world, world.case
        self.tell, self.found, self.loop = world.tell, world.found, world.loop
        self._policy = world.read(self.case.policy.encode())
        self._rng = random.Random(f"relays {self.case.seed}")  # noqa: S311 # a simulation
        self._ending: set[asyncio.Task[None]] = set()
        self._epoch = 0  # of the last process that began
        self.relays: list[Relay] = []
        self._rule: OneDecider | Members = Members(self) if self.case.members else OneDecider(self)
        self.laws = RelayLaws(world, self._rule, self.relays)
        self.at_rest = self.laws.at_rest
        self._target = self._rule.begin()
        self._target.records.heard = world.heard
        for number in range(1, self.case.relays + 1):
            self._begin_relay(number)

    # -- the run ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Look for engines that have stopped, from now on."""
        for relay in self.relays:
            if relay.ready:
                look_for_stalls(relay.side)
        self._rule.look()
        if not self.world.over:
            self.loop.call_later(LOOK, self.begin)

    async def settle(self) -> None:
        """Wait until nothing is left of any call: no client waits any more."""
        world = self.world
        world.reopen()
        longest = self.loop.time() + self.longest
        while self._copying() and not world.wrong and self.loop.time() < longest:
            await world.wait(SETTLES)
        until = self.loop.time() + (ELECTS if self.case.members else SETTLES)
        await world.wait(SETTLES)
        while (left := list(self._left())) and not world.wrong and self.loop.time() < until:
            await world.wait(SETTLES)
        for each in left:
            self.found(each)

    async def aclose(self) -> None:
        """End all processes."""
        for relay in self.relays:
            if relay.dead_at < 0.0:
                await relay.aclose(self.loop.time())
        await self._rule.aclose()
        await asyncio.gather(*self._ending)

    def _copying(self) -> bool:
        """Whether a copy for a mirror is under way, which no client waits for."""
        living = [relay.side.pipeline for relay in self.relays if relay.ready]
        return any(live.record.mirrored == COPY for pipeline in living for live in pipeline.tasks.values())

    def _left(self) -> Iterator[str]:
        yield from self.laws.left(len(self.world.asked))
        for number, memory in enumerate(self.world.engines):
            if memory.open:
                yield f"{len(memory.open)} requests are open at engine-{number}"
        for id in self._target.records.open:
            yield f"call {id} has no record"

    def happen(self, event: Event) -> None:
        """Let an event happen that is no call and no engine's fault."""
        match event:
            case Reload():
                self._policy = self.world.read(event.policy.encode())
                self._rule.apply(self._policy)
            case RelayFault():
                self._befalls(event)
            case DeciderFault():
                self._rule.befalls(event)
            case MemberFault():
                self._rule.befalls_member(event)

    def epoch(self) -> int:
        """The next process's."""
        self._epoch += 1
        return self._epoch

    def target(self) -> GatewayTarget:
        """Return another gateway, over the same engines."""
        target = GatewayTarget(
            self._policy, self.world.engines, seed=self.case.seed + self._epoch, roles=self.world.roles
        )
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

    # -- calls --------------------------------------------------------------------------------------------------

    @property
    def listens(self) -> bool:
        """Whether a relay lives that a client can reach."""
        return any(relay.ready for relay in self.relays)

    def send(self, event: Call, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        """Send a request to a relay that lives, to each in turn."""
        ready = [relay for relay in self.relays if relay.ready]
        relay = ready[(len(self.world.asked) - 1) % len(ready)]
        line = ClientLine(client_call)
        relay.lines.append(line)
        self._target.doors = (relay.side,)
        return self._target.send(call, cast("ClientCall", line), tried)

    def heard(self, record: Record, call: Call) -> None:
        """Judge the end of a call, in its relay's log."""
        late = LATE + 0.25 + 4 * (self.case.delay + self.case.spread)
        if call.within and record.total > call.within + late:
            self.found(f"call {record.request_id} had {call.within} s and took {record.total:.4f} s")

    def copied(self, record: Record) -> None:
        """Ignore the end of a copy. One that is charged is counted beyond the calls that were asked, see
        `RelayLaws.left`."""
