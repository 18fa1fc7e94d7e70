"""Parts of a simulation with relays: one decider, one relay, and the connections of frames between them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from gateway.decider.relays.hub import RelayHub
from gateway.frames import messages as frames
from gateway.frames.channel import Channel
from gateway.frames.codec import FrameWriter, from_decider, from_relay
from gateway.frames.messages import Message
from gateway.serve.assembly import Gateway
from gateway.serve.processes.relaying import RelaySide
from loadtest.clients.calls import ClientCall
from loadtest.simulate.memory_frames import FrameLink

REMEMBERED = 200  # messages of a relay's earlier connections, each way
ECHOES = 12  # of them come once more at a time
OF_CALLS = (
    frames.Ask, frames.WaitAsk, frames.FirstByte, frames.Answered, frames.AttemptFailed, frames.RetryAsk,
    frames.MoveAsk, frames.SecondAsk, frames.SecondEnd, frames.CallEnd,
    frames.Judgement, frames.GrantTerms, frames.RefusedCall, frames.RetryAnswer, frames.SecondNone,
)  # fmt: skip # a message of these is the same whenever it comes: the others are of a connection


class Decider:
    """Life of a decider, or term of a cluster's member. `links`: of its relays, by the relay's process.
    `machine`: the member's; empty: it decides for all relays there are. `owed`: relays' processes that must have told
    what they hold before it grants anything."""

    def __init__(self, gateway: Gateway, hub: RelayHub, machine: str = "") -> None:
        self.gateway = gateway
        self.hub = hub
        self.machine = machine
        self.owed: set[int] = set()
        self.links: dict[int, FrameLink] = {}
        self.dead = self.hangs = False
        self.complete_at = -1.0  # when every relay had told what it held

    def known(self) -> set[int]:
        """The processes of the relays that have told it what they hold."""
        told = {each.hello.pid for each in self.hub.sessions if each.hello is not None and each.resync.done}
        return told | {each.hello.pid for each in self.hub.orphans.values() if each.hello is not None}

    async def ends(self) -> None:
        """End: decide nothing any more."""
        self.dead = True
        self.gateway.dispatch.witness = None  # what it does on its way out, no dead process does
        for link in self.links.values():
            link.closed_by(link.decider)
        await self.hub.aclose()

    async def aclose(self) -> None:
        """End, with all that its gateway does."""
        await self.ends()
        await closed(self.gateway)


async def closed(gateway: Gateway) -> None:
    """End all that a gateway does."""
    for engine in list(gateway.fleet):
        gateway.fleet.remove(engine.id)  # its checks end with that
    await gateway.aclose()


class ClientLine:
    """A client's connection to its relay, which ends with the relay."""

    def __init__(self, client_call: ClientCall) -> None:
        self._client_call = client_call
        self.head: Callable[..., None] = client_call.head
        self.body: Callable[[bytes], None] = client_call.body
        self.over: Callable[[bool], None] = self._ended

    def _ended(self, whole: bool) -> None:
        """Nothing comes any more; the client's next try has a line of its own."""
        self.head = self.body = self.over = _nothing
        self._client_call.over(whole)

    def cut(self) -> None:
        """The relay is dead: nothing comes any more but the end."""
        self.over(False)


class Log:
    """A relay's call log, which ends with the relay."""

    def __init__(self, records: Any, dead: Callable[[str], None]) -> None:
        self._records = records
        self._dead = dead
        self.open = True

    def write(self, record: Any, now: float) -> None:
        if self.open:
            self._records.write(record, now)
        else:
            self._dead(record.request_id)

    async def aclose(self) -> None:
        """Nothing to flush."""


class Relay:
    """Relay in one of its lives. `number`: the relay's; `pid`: the life's; `machine`: the member's. `unreachable`: time
    until which the relay finds no decider."""

    def __init__(self, side: RelaySide, log: Log, number: int, pid: int, machine: str) -> None:
        self.side = side
        self.log = log
        self.number = number
        self.pid = pid
        self.machine = machine
        self.link: FrameLink | None = None
        self.lines: list[ClientLine] = []
        self.dead_at = -1.0
        self.unreachable = 0.0
        self._now: tuple[list[Message], list[Message]] = ([], [])  # this connection's messages: to the decider, from it
        self._past: tuple[deque[Message], deque[Message]] = (deque(maxlen=REMEMBERED), deque(maxlen=REMEMBERED))

    @property
    def ready(self) -> bool:
        return self.dead_at < 0.0 and self.side.link.ready.is_set()

    def connected(self) -> None:
        """Note another connection: the messages of the last one belong to the past."""
        for past, messages in zip(self._past, self._now, strict=True):
            past.extend(messages)
            messages.clear()

    def sent(self, channel: Channel, data: bytes, link: FrameLink) -> None:
        """A frame is on its way."""
        inward = channel is link.relay.channel
        for messages in (from_relay() if inward else from_decider()).feed(data):
            self._now[0 if inward else 1].extend(message for message in messages if isinstance(message, OF_CALLS))

    def echo(self, link: FrameLink, rng: random.Random) -> None:
        """Messages of earlier connections come once more, in any order."""
        for past, side in zip(self._past, (link.decider, link.relay), strict=True):
            chosen = rng.sample(list(past), min(len(past), ECHOES))
            writer = FrameWriter()
            for message in chosen:
                writer.add(message)
            if chosen and link.up:
                side.arrive(writer.take())

    async def aclose(self, now: float) -> None:
        """SIGKILL: its clients' and its engines' connections end, and nobody hears of it."""
        self.dead_at = now
        self.log.open = False
        for line in self.lines:
            line.cut()
        if self.side.link.ready.is_set():
            for live in list(self.side.pipeline.tasks.values()):
                live.leave("client_gone")
        await self.side.aclose()
        await asyncio.sleep(0)


def _nothing(*_: object) -> None:
    """The connection is gone."""
