"""Parts of one decision, as a process that callgrind counts: in one process, at a relay and at its decider.

`decisions.py` runs it, and answers each of its marks with a line. It opens no socket.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from typing import cast

import uvloop

from gateway.core.admission.decider import Decider
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome
from gateway.core.request.parser import parse
from gateway.core.request.record import Record
from gateway.core.request.routes import ROUTES
from gateway.core.request.tenants import ANONYMOUS
from gateway.decider.loading import Configuration
from gateway.frames.channel import Channel
from gateway.frames.codec import FrameWriter
from gateway.frames.messages import VERSION, AllHeld, Hello, RelayCounts
from gateway.relay.remote.decider import RemoteDecider
from gateway.relay.remote.link import Link
from gateway.relay.settling import note_grant
from gateway.serve.assembly import Gateway
from gateway.serve.hub_of import hub_of, tell_policy
from gateway.shared.vllm.answers import ModelCard
from loadtest.clients.stub import StubLoad

AT_ONCE = (1, 8)  # calls
ROUNDS = (256, 256, 1024)  # calls: to warm up, few, many
ROUTE = ROUTES[b"/v1/chat/completions"]
FIELDS = {b"content-type": b"application/json"}
PARTS = ("loop", "local", "frames", "decider")


class KeptBytes:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        """There is nothing to close."""

    def take(self) -> list[bytes]:
        written, self.written = self.written, []
        return written


class Decisions:
    """A gateway with one engine that is up, and a relay of it. `sent` is what the relay sent in the last part."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        engines = [EngineEntry(url="http://127.0.0.1:9")]  # nobody is asked anything there
        self.gateway = Gateway(Policy(), engines, None, random.Random(1), say=lambda _: None)  # noqa: S311 # jitter
        fleet = self.gateway.fleet
        for engine in fleet:
            fleet.has_models(engine, [ModelCard(id="m", max_model_len=32768)])
            fleet.health(engine, True, self.clock())
        self.hub = hub_of(self.gateway, 1, {})
        tell_policy(self.hub, self.gateway, Configuration(self.gateway.policy))
        self.snapshot = self.gateway.pipeline.snapshot
        self.account = self.snapshot.tenants.accounts[ANONYMOUS]
        self.body = StubLoad(requests=0, connections=0).body
        self.sent: list[bytes] = []
        self._relays = 1
        self._ends = KeptBytes(), KeptBytes()  # of the relay, of the decider
        self._channels = [self._opened(self.hub.channel(), self._ends[1])]
        counts = RelayCounts(b"", 0, 0, 0, {}, {}, {}, 0, 0, 0)
        self._link = Link(
            self._connect, Hello(VERSION, 1, 1, 1, 0.0, 0), self.clock, on_policy=lambda _: None,
            on_fleet=lambda _: None, on_drain=lambda _: None, counts=lambda: counts, say=print,
        )  # fmt: skip
        self._remote = RemoteDecider(self._link)

    async def begin(self) -> None:
        """The relay and its decider say hello."""
        self._link.start()
        while not self._link.ready.is_set():
            await asyncio.sleep(0)
            self._deliver()

    async def aclose(self) -> None:
        await self._link.aclose()
        await self.hub.aclose()
        await self.gateway.aclose()

    async def part(self, name: str, number: int, at_once: int) -> Callable[[], Awaitable[None]]:
        """So many calls, prepared; what is counted is the rest."""
        if name == "decider":
            return await self._replayed()
        calls = [self._call(each) for each in range(number)]
        self.sent = []
        deciders: dict[str, Decider | None] = {"loop": None, "local": self.gateway.decider, "frames": self._remote}
        decider = deciders[name]

        async def lives() -> None:
            for first in range(0, number, at_once):
                tasks = [asyncio.create_task(self._life(call, decider)) for call in calls[first : first + at_once]]
                while self._link.calls or not all(task.done() for task in tasks):
                    await asyncio.sleep(0)
                    self._deliver()
                await asyncio.sleep(0)  # their ends are written at the end of the turn in which they come
                self._deliver()
                for task in tasks:
                    task.result()

        return lives

    async def _replayed(self) -> Callable[[], Awaitable[None]]:
        """The last part's frames, by another relay."""
        self._relays += 1
        wire, hello = KeptBytes(), FrameWriter()
        channel = self._opened(self.hub.channel(), wire)
        hello.add(Hello(VERSION, self._relays, self._relays, 1, 0.0, 0))
        hello.add(AllHeld(0, []))
        channel.data_received(hello.take())

        async def replay() -> None:
            for data in self.sent:
                channel.data_received(data)
                await asyncio.sleep(0)
                wire.take()

        return replay

    async def _life(self, call: Call, decider: Decider | None) -> None:
        """As the pipeline has it, of a call that is answered at once and whole."""
        record, clock = Record(request_id=call.request_id, route=call.route.path), self.clock
        await asyncio.sleep(0)
        if decider is None:
            return
        with decider.arrive(self.snapshot, self.account, record, call.arrived, call.body) as admission:
            await admission.judge(call)
            with await admission.ask(call) as grant:
                note_grant(record, call, grant, clock())
                grant.answered(200)
                now = clock()
                grant.first_byte(now)
                admission.settle(220, now)
                decider.learn(call, 120, 100)
                grant.finished(now, 120, 100, 0)
                admission.headers(now)
        admission.ended(Outcome.OK)

    def _call(self, number: int) -> Call:
        return parse(
            ROUTE, FIELDS, self.body, settings=self.snapshot.calls, request_id=f"0123456789ab-{number:x}",
            tenant=ANONYMOUS, now=self.clock(),
        )  # fmt: skip

    async def _connect(self, made: Callable[[], Channel]) -> None:
        self._channels.insert(0, self._opened(made(), self._ends[0]))

    @staticmethod
    def _opened(channel: Channel, wire: KeptBytes) -> Channel:
        channel.connection_made(cast("asyncio.Transport", wire))  # it has all of the surface that is used
        return channel

    def _deliver(self) -> None:
        """Bring each side the bytes that the other has written."""
        (relay, decider), (relays, deciders) = self._channels, self._ends
        for data in relays.take():
            self.sent.append(data)
            decider.data_received(data)
        for data in deciders.take():
            relay.data_received(data)


async def run() -> None:
    """Each part, few calls and many, between two marks of the counting process, which answers each with a line."""
    decisions = Decisions()
    await decisions.begin()
    for at_once in AT_ONCE:
        for number in ROUNDS:
            for name in PARTS:
                counted = await decisions.part(name, number, at_once)
                mark()
                await counted()
                mark()
    await decisions.aclose()


def mark() -> None:
    print("mark", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    uvloop.run(run())
