"""Data port as the process that decides sees it: its own, or that of relays which are processes of their own."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from gateway.control.calls import CallView
from gateway.control.processes import ProcessView
from gateway.decider.loading import Configuration
from gateway.decider.relays.hub import RelayHub
from gateway.frames.messages import VERSION, RelayCounts
from gateway.serve.assembly import Gateway
from gateway.serve.hub_of import calls_of, hub_of, relays_of, tell_policy
from gateway.serve.saving import go_on_from
from gateway.serve.starting import Options, say
from gateway.serve.upgrade.outgoing import OutgoingCalls
from gateway.serve.upgrade.receiver import InheritedSockets, Predecessor, receive_payload, same_member, tell_ready
from gateway.serve.upgrade.rendezvous import HandOffPayload, Offer

TOLD_WITHIN = 5.0  # seconds for the gateway before to tell what its calls hold


class DataPort(Protocol):
    """Where clients connect. `addresses` are known once it listens."""

    @property
    def addresses(self) -> list[str]: ...

    async def take_over(self, taken: Predecessor) -> None:
        """Have the gateway that runs stop, and know what its calls hold. Raises StartError, and then that one goes
        on."""

    async def listen(self, context: ssl.SSLContext | None) -> None:
        """Take connections from now on. Raises OSError."""

    def apply(self, configuration: Configuration) -> None:
        """Go by this policy from now on. Raises ApplyError, and then nothing has changed."""

    def offer(self) -> tuple[Offer, list[int]]:
        """What a successor is offered, and the descriptors of the listening sockets."""

    def hand_over(self, within: float, decider: str) -> HandOffPayload:
        """Stop accepting, for a successor whose decider is at this socket; empty: it cannot be asked. What calls hold
        is told there. They are to end within so many seconds."""

    async def drain(self, within: float, *, gently: bool = False) -> None:
        """Finish what is under way within so many seconds; back when no connection is left. `gently`: as after
        `hand_over`, what comes on open connections is served once more."""

    def totals(self) -> Sequence[RelayCounts]:
        """The counts of relays."""

    async def count(self) -> None:
        """Have relays tell their counts of now."""

    def calls(self) -> Iterable[CallView]:
        """What waits and runs now."""

    def processes(self) -> list[ProcessView]:
        """The processes of this gateway."""

    async def aclose(self) -> None:
        """End it."""


class OwnDataPort:
    """The data port of a gateway in one process. Where it has taken over from another, that one's processes are its
    relays until they have ended; where another has taken over from it, it is itself one of that one's."""

    def __init__(
        self, gateway: Gateway, options: Options, configuration: Configuration, inherited: InheritedSockets,
        lost: Callable[[], int],
    ) -> None:  # fmt: skip
        self._gateway = gateway
        self._listen = options.listen
        self._inherited = inherited
        self._lost = lost
        self._configuration = configuration
        self._started = time.time()
        self._epoch, self._number = inherited.epoch + 1, inherited.relays + 1
        self._hub: RelayHub | None = None  # of the gateway before
        self._folder = ""
        self._server: asyncio.Server | None = None
        self._outgoing: OutgoingCalls | None = None

    @property
    def addresses(self) -> list[str]:
        return self._gateway.server.addresses

    async def take_over(self, taken: Predecessor) -> None:
        same_member(taken)
        self._folder = tempfile.mkdtemp(prefix="weir-")
        path = str(Path(self._folder) / "decider")
        # Nothing is granted to its relays before it has said which there are.
        hub = self._hub = hub_of(self._gateway, self._epoch, {0: os.getpid()})
        tell_policy(hub, self._gateway, self._configuration)
        hub.start()
        self._server = await asyncio.get_running_loop().create_unix_server(hub.channel, path)
        given = await receive_payload(taken, partial(tell_ready, taken, path))
        go_on_from(self._gateway.checkpoints, given.state, 0.0)
        hub.totals.take(given.left)
        hub.expect(given.relays)
        try:
            async with asyncio.timeout(TOLD_WITHIN):
                await hub.until_synced()
        except TimeoutError:
            say(f"the gateway before (pid {taken.pid}) does not say what its calls hold: engines' metrics alone tell")

    async def listen(self, context: ssl.SSLContext | None) -> None:
        server = self._gateway.server
        if self._inherited.data:
            for each in self._inherited.data:
                await server.listen(None, None, sock=each, ssl=context, owner=self._inherited.owner)
        elif self._listen.startswith("unix:"):
            await server.listen(None, None, path=self._listen.removeprefix("unix:"), ssl=context)
        else:
            host, _, port = self._listen.rpartition(":")
            await server.listen(host.strip("[]"), int(port), ssl=context)

    def apply(self, configuration: Configuration) -> None:
        self._gateway.apply(configuration)
        self._configuration = configuration
        if self._hub is not None:
            tell_policy(self._hub, self._gateway, configuration)

    def offer(self) -> tuple[Offer, list[int]]:
        sockets = self._gateway.server.sockets()
        pids = {**({} if self._hub is None else self._hub.relays()), self._number: os.getpid()}
        return Offer(VERSION, self._epoch, self._number, len(sockets), self._inherited.owner, pids=pids), sockets

    def hand_over(self, within: float, decider: str) -> HandOffPayload:
        gateway, hub = self._gateway, self._hub
        gateway.server.stop_accepting(given=True)
        if decider:  # from now on nothing is granted here
            self._outgoing = OutgoingCalls(gateway, self._number, self._epoch, decider, self._lost)
            gateway.dispatch.successor = self._outgoing
        relays = {} if hub is None else hub.relays()
        state = gateway.checkpoints.take(() if hub is None else hub.ungranted)
        if hub is not None:
            hub.hand_over(within, decider)
        if self._outgoing is None:
            return HandOffPayload()
        gateway.dispatch.hand_over()
        self._outgoing.start()
        return HandOffPayload({**relays, self._number: os.getpid()}, [] if hub is None else hub.totals.left(), state)

    async def drain(self, within: float, *, gently: bool = False) -> None:
        async with asyncio.TaskGroup() as group:
            if self._hub is not None:
                ends: Coroutine[None, None, object] = self._hub.empty.wait() if gently else self._hub.drain(within)
                group.create_task(ends)
            await self._gateway.server.drain(within, gently=gently)  # begins at once: see gateway/serve/ending.py

    def totals(self) -> Sequence[RelayCounts]:
        return () if self._hub is None else self._hub.totals.all()

    async def count(self) -> None:
        if self._hub is not None:
            await self._hub.count()

    def calls(self) -> Iterable[CallView]:
        yield from self._gateway.calls()
        if self._hub is not None:
            yield from calls_of(self._hub)

    def processes(self) -> list[ProcessView]:
        calls, connections = self._gateway.metrics.counts.calls, self._gateway.server.connections
        relays = [] if self._hub is None else relays_of(self._hub)
        return [ProcessView("decider", os.getpid(), self._started, calls, connections), *relays]

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._outgoing is not None:
            await self._outgoing.aclose()
            self._outgoing = None
        if self._hub is not None:
            await self._hub.aclose()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
