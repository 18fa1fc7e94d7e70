"""Data port of a gateway on one machine, as the process that decides sees it; and what a data port is."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from gateway.control.calls import CallView
from gateway.control.processes import ProcessView
from gateway.decider.loading import Configuration
from gateway.frames.messages import VERSION, RelayCounts
from gateway.relay.wire.server import address_of
from gateway.serve.assembly import Gateway
from gateway.serve.hub_of import calls_of, hub_of, processes_of, relays_of, tell_policy
from gateway.serve.processes.deciding import JOINED_WITHIN, DeciderProcess
from gateway.serve.processes.place import CLOSING, HANDED, OFFERED, READY, TAKE
from gateway.serve.saving import Saving, go_on_from
from gateway.serve.starting import OTHER_CLUSTER, ApplyError, Options, StartError
from gateway.serve.upgrade.outgoing import OutgoingCalls
from gateway.serve.upgrade.receiver import InheritedSockets, Predecessor, receive_payload, same_member, tell_ready
from gateway.serve.upgrade.rendezvous import HandOffPayload, Offer
from gateway.shared.certificate import Certificate
from gateway.shared.lines import say
from gateway.shared.tasks import done_within

if TYPE_CHECKING:
    from gateway.serve.cluster.port import ClusterPort
    from gateway.serve.epp_port import EppListener

NOT_GIVEN = "its endpoint picker cannot be handed over: restart it"
NO_GRPC = "--epp: gRPC is not installed: pip install 'WEIR.whl[epp]'"
TOLD_WITHIN = 5.0  # seconds for the gateway before to tell what its calls hold


def _picker(gateway: Gateway, where: str, certificate: Certificate | None) -> EppListener:
    """Return the endpoint picker. Raises StartError where gRPC is missing."""
    try:
        from gateway.serve.epp_port import EppListener  # noqa: PLC0415 # gRPC is an extra
    except ModuleNotFoundError as error:
        raise StartError(NO_GRPC) from error
    return EppListener(gateway, where, certificate)


class MachinePort:
    """Port that clients connect to, of one machine. `addresses` are known once it listens.

    One process serves connections of its own. After an upgrade the processes of the gateway before ask it too, as
    relays, until their streams end; after the next upgrade it is itself a relay of its successor. Of several processes
    (`process`) relays have all connections, and this one decides.
    """

    def __init__(
        self,
        gateway: Gateway,
        options: Options,
        configuration: Configuration,
        inherited: InheritedSockets,
        process: DeciderProcess | None = None,
    ) -> None:
        self._gateway = gateway
        gateway.relays = self.totals
        self._options = options
        self._configuration = configuration
        self._inherited = inherited
        self._process = process
        self._started = time.time()
        self._epoch = inherited.epoch + 1 if process is None else process.place.epoch
        self._highest = inherited.relays + (1 if process is None else process.place.relays)  # number of a relay
        if process is None:
            self._hub = hub_of(gateway, self._epoch, {})
        else:
            self._hub = hub_of(gateway, self._epoch, process.expected, self._keep)
            self._hub.totals.take(process.memory.left)
            process.restore(gateway.checkpoints)
            tell_policy(self._hub, gateway, configuration)
        self._saving = None if process is None else Saving(self._state, self._changes, process.save)
        self.picker = None if options.epp is None else _picker(gateway, options.epp, options.certificate)
        self._folder = ""  # of the socket for relays, where no parent has made one
        self._server: asyncio.Server | None = None  # for relays
        self._outgoing: OutgoingCalls | None = None

    @property
    def addresses(self) -> list[str]:
        if self._process is None:
            return self._gateway.server.addresses
        return [address_of(each, self._options.certificate is not None) for each in self._process.place.data]

    async def take_over(self, taken: Predecessor) -> None:
        """Have the gateway that runs stop, and know what its calls hold. Raises StartError, and then that one goes
        on."""
        same_member(taken)
        process, hub = self._process, self._hub
        if process is None:
            path = await self._serve_relays()
            payload = await receive_payload(taken, partial(tell_ready, taken, path))
        else:
            payload = await receive_payload(taken, partial(process.beats.tell, TAKE))
        go_on_from(self._gateway.checkpoints, payload.state, 0.0)
        hub.totals.take(payload.left)
        hub.expect(payload.relays)
        if process is not None:
            process.take(payload.relays)
            self._keep()
            return
        if not await done_within(hub.until_synced(), TOLD_WITHIN):
            say(f"the gateway before (pid {taken.pid}) does not say what its calls hold: engines' metrics alone tell")

    async def _serve_relays(self) -> str:
        """Let the processes of the gateway before ask this one. Return the path of the socket."""
        self._folder = tempfile.mkdtemp(prefix="weir-")
        path = str(Path(self._folder) / "decider")
        self._hub.expect({0: os.getpid()})  # nothing is granted to relays before it is known which there are
        tell_policy(self._hub, self._gateway, self._configuration)
        self._hub.start()
        self._server = await asyncio.get_running_loop().create_unix_server(self._hub.channel, path)
        return path

    async def listen(self, context: ssl.SSLContext | None) -> None:
        """Take connections from now on. Raises OSError."""
        if self.picker is not None:
            await self.picker.listen()
        if self._process is not None:
            await self._listen_to_relays(self._process)
            return
        data, owner = self._inherited.data, self._inherited.owner
        for where in data or (self._options.listen,):
            await self._gateway.server.listen(where, ssl=context, owner=owner)

    async def _listen_to_relays(self, process: DeciderProcess) -> None:
        self._hub.start()
        if self._saving is not None:
            self._saving.start()
        inner = process.place.inner
        self._server = await asyncio.get_running_loop().create_unix_server(self._hub.channel, sock=inner)
        if process.place.first:
            await self._hub.joined(process.place.relays, JOINED_WITHIN)
        process.beats.tell(READY)

    def apply(self, configuration: Configuration) -> None:
        """Go by this policy from now on. Raises ApplyError, and then nothing has changed."""
        if configuration.policy.cluster is not None:
            raise ApplyError(OTHER_CLUSTER)
        self._gateway.apply(configuration)
        self._configuration = configuration
        if self._process is not None or self._server is not None:
            tell_policy(self._hub, self._gateway, configuration)

    # -- a checkpoint -------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Save totals after a relay has left, for the next process of this decider. A full disk keeps no relay."""
        if self._process is None:
            return
        try:
            self._process.keep(self._hub.totals.left())
        except OSError as error:
            say(f"counts of relays that have ended: {error}: if this decider dies, the next one does not know them")

    def _state(self) -> bytes:
        return self._gateway.checkpoints.take(self._hub.ungranted)

    def _changes(self) -> int:
        return self._hub.changes + self._gateway.metrics.counts.calls

    # -- a hand-over --------------------------------------------------------------------------------------------

    def _holders(self) -> dict[int, int]:
        """Return the processes whose calls hold something here, by their numbers as relays."""
        own = {self._highest: os.getpid()} if self._process is None else {}
        return {**self._hub.relays(), **own}

    def offer(self) -> tuple[Offer, list[int]]:
        """Return the offer to a successor, and the descriptors of the listening sockets."""
        if self.picker is not None:
            return Offer(refused=NOT_GIVEN), []
        process, server = self._process, self._gateway.server
        if process is None:
            data = server.sockets()
            server.give_paths()
        else:
            data = [each.fileno() for each in process.place.data]
            process.beats.tell(OFFERED)
        offer = Offer(VERSION, self._epoch, self._highest, len(data), self._inherited.owner, pids=self._holders())
        return offer, data

    def hand_over(self, within: float, decider: str) -> HandOffPayload:
        """Stop accepting, for a successor whose decider is at this socket; empty: it cannot be asked. That decider
        receives the holds of calls. The calls end within so many seconds."""
        gateway, hub = self._gateway, self._hub
        if self._process is not None:
            self._process.beats.tell(HANDED)
            self._process.place.stop_listening()
        else:
            gateway.server.stop_accepting(given=True)
            if decider:  # from now on nothing is granted here
                self._outgoing = OutgoingCalls(gateway, self._highest, self._epoch, decider)
                gateway.dispatch.successor = self._outgoing
        payload = HandOffPayload(self._holders(), hub.totals.left(), self._state()) if decider else HandOffPayload()
        hub.hand_over(within, decider)
        if self._outgoing is not None:
            gateway.dispatch.hand_over()
            self._outgoing.start()
        return payload

    async def resign(self) -> None:
        """Nobody else could decide for what waits."""

    async def drain(self, within: float, *, gently: bool = False) -> None:
        """Finish what is under way within so many seconds; back when no connection is left. `gently`: as after
        `hand_over`, what comes on open connections is served once more."""
        hub, process = self._hub, self._process
        if process is not None and not gently:
            process.beats.tell(CLOSING)
            process.place.stop_listening()
        relays: Coroutine[None, None, object] = hub.empty.wait() if gently else hub.drain(within)
        own = self._gateway.server.drain(within, gently=gently)
        # The one that has clients begins at once: see gateway/serve/ending.py.
        first, other = (own, relays) if process is None else (relays, own)
        async with asyncio.TaskGroup() as group:
            group.create_task(other)
            if self.picker is not None:
                group.create_task(self.picker.drain(within))
            await first

    # -- what is there ------------------------------------------------------------------------------------------

    def totals(self) -> Sequence[RelayCounts]:
        """The counts of relays."""
        return self._hub.totals.all()

    async def count(self) -> None:
        """Ask all relays for their current counts."""
        await self._hub.count()

    def calls(self) -> Iterable[CallView]:
        """Return the calls that wait and run now."""
        yield from self._gateway.calls()
        yield from calls_of(self._hub)
        if self.picker is not None:
            yield from self.picker.calls()

    def processes(self) -> list[ProcessView]:
        """The processes of this gateway."""
        calls, relays = self._gateway.metrics.counts.calls, self._hub.sessions
        if self._process is not None:
            return processes_of(self._process.place, calls + self._hub.totals.ended, relays)
        connections = self._gateway.server.connections
        return [ProcessView("decider", os.getpid(), self._started, calls, connections), *relays_of(relays)]

    async def aclose(self) -> None:
        """Close the port and what it has opened."""
        if self.picker is not None:
            await self.picker.aclose()
        if self._server is not None:
            self._server.close()
        if self._outgoing is not None:
            await self._outgoing.aclose()
            self._outgoing = None
        if self._saving is not None:
            await self._saving.aclose()
        await self._hub.aclose()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


DataPort: TypeAlias = "MachinePort | ClusterPort"
