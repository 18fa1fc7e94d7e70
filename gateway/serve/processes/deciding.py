"""Data port of a gateway whose relays are processes of their own, as its decider has it."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from gateway.control.calls import CallView
from gateway.control.processes import ProcessView
from gateway.decider.loading import Configuration
from gateway.frames.messages import VERSION, RelayCounts
from gateway.relay.wire.server import address_of, bound_sockets
from gateway.serve.assembly import Gateway
from gateway.serve.hub_of import calls_of, hub_of, relays_of, tell_policy
from gateway.serve.processes.decider_memory import SavedCheckpoint, read, read_state, write
from gateway.serve.processes.place import CLOSING, HANDED, READY, TAKE, Beats, Place
from gateway.serve.saving import Saving, go_on_from
from gateway.serve.starting import Options, StartError
from gateway.serve.upgrade.receiver import InheritedSockets, Predecessor, receive_payload, same_member
from gateway.serve.upgrade.rendezvous import HandOffPayload, Offer
from gateway.shared.control.listener import bound_to

JOINED_WITHIN = 30.0  # seconds for the relays to be there at the first start


def sockets_of(
    options: Options, inherited: InheritedSockets, stack: ExitStack
) -> tuple[list[socket.socket], socket.socket]:
    """The listening sockets of data port and control port, until the stack ends. Raises StartError."""
    flag = f"--listen {options.listen}"
    try:
        data = [stack.enter_context(each) for each in inherited.data or bound_sockets(options.listen)]
        flag = f"--control {options.control}"
        control = stack.enter_context(inherited.control or bound_to(options.control))
    except OSError as error:
        raise StartError(f"{flag}: {error.strerror or error}") from error
    return data, control


class RelayedPort:
    """A DataPort, as in gateway/serve/data_port.py."""

    def __init__(
        self, gateway: Gateway, place: Place, beats: Beats, configuration: Configuration, *, secure: bool
    ) -> None:
        self._gateway = gateway
        self._place = place
        self._beats = beats
        self.addresses = [address_of(each, secure) for each in place.data]
        self._file = Path(place.path).with_name("kept")
        self._kept = read(self._file)
        taken = place.inherited.taken
        if not (place.first or self._kept.relays) and taken is not None and taken.understood:
            self._kept.relays = taken.offer.pids  # the decider before this one ended in the middle of taking over
        self._hub = hub_of(gateway, place.epoch, {**place.living, **self._kept.relays}, self._keep)
        self._hub.totals.take(self._kept.left)
        self._server: asyncio.Server | None = None
        self._state = self._file.with_name("state")
        go_on_from(gateway.checkpoints, *read_state(self._state, gateway.clock()))
        self._saving = Saving(self._take, self._changes, self._save)
        tell_policy(self._hub, gateway, configuration)

    def _keep(self) -> None:
        """A relay has left: its totals are for a decider that comes after this one, too."""
        self._kept.left = self._hub.totals.left()
        write(self._file, self._kept)

    def _take(self) -> bytes:
        return self._gateway.checkpoints.take(self._hub.ungranted)

    def _changes(self) -> int:
        return self._hub.changes + self._gateway.metrics.counts.calls

    async def _save(self, state: bytes) -> None:
        write(self._state, SavedCheckpoint(self._gateway.clock(), state))

    async def take_over(self, taken: Predecessor) -> None:
        same_member(taken)
        given = await receive_payload(taken, partial(self._beats.tell, TAKE))
        go_on_from(self._gateway.checkpoints, given.state, 0.0)
        self._hub.totals.take(given.left)
        self._hub.expect(given.relays)
        self._kept.relays = given.relays
        self._keep()

    async def listen(self, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        self._hub.start()
        self._saving.start()
        self._server = await loop.create_unix_server(self._hub.channel, sock=self._place.inner)
        if self._place.first:
            await self._hub.joined(self._place.relays, JOINED_WITHIN)
        self._beats.tell(READY)

    def apply(self, configuration: Configuration) -> None:
        self._gateway.apply(configuration)
        tell_policy(self._hub, self._gateway, configuration)

    def offer(self) -> tuple[Offer, list[int]]:
        place = self._place
        relays, owner = place.inherited.relays + place.relays, place.inherited.owner
        offer = Offer(VERSION, place.epoch, relays, len(place.data), owner, pids=self._hub.relays())
        return offer, [each.fileno() for each in place.data]

    def hand_over(self, within: float, decider: str) -> HandOffPayload:
        self._beats.tell(HANDED)
        given = (
            HandOffPayload(self._hub.relays(), self._hub.totals.left(), self._take()) if decider else HandOffPayload()
        )
        self._hub.hand_over(within, decider)
        return given

    async def drain(self, within: float, *, gently: bool = False) -> None:
        if gently:
            await self._hub.empty.wait()
            return
        self._beats.tell(CLOSING)
        await self._hub.drain(within)

    def totals(self) -> Sequence[RelayCounts]:
        return self._hub.totals.all()

    async def count(self) -> None:
        await self._hub.count()

    def calls(self) -> Iterable[CallView]:
        return calls_of(self._hub)

    def processes(self) -> list[ProcessView]:
        place = self._place
        calls = self._gateway.metrics.counts.calls + self._hub.totals.ended
        return [
            ProcessView("parent", place.parent, place.parent_started, 0, 0),
            ProcessView("decider", os.getpid(), place.started, calls, 0),
            *relays_of(self._hub),
        ]

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._saving.aclose()
        await self._hub.aclose()
