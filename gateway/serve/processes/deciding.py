"""Data port of a gateway whose relays are processes of their own, as its decider has it."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from gateway.control.calls import CallView
from gateway.control.processes import ProcessView
from gateway.decider.loading import Configuration
from gateway.decider.relays.hub import RelayHub
from gateway.frames.messages import RelayCounts
from gateway.relay.wire.server import address_of, bound_sockets
from gateway.serve.assembly import Gateway
from gateway.serve.processes.place import CLOSING, READY, Beats, Place
from gateway.serve.starting import Options, StartError, say
from gateway.shared.control.listener import bound_to

JOINED_WITHIN = 30.0  # seconds for the relays to be there at the first start


def sockets_of(options: Options, stack: ExitStack) -> tuple[list[socket.socket], socket.socket]:
    """The listening sockets of data port and control port, until the stack ends. Raises StartError."""
    flag = f"--listen {options.listen}"
    try:
        data = [stack.enter_context(each) for each in bound_sockets(options.listen)]
        flag = f"--control {options.control}"
        control = stack.enter_context(bound_to(options.control))
    except OSError as error:
        raise StartError(f"{flag}: {error.strerror or error}") from error
    return data, control


class RelayedPort:
    """A DataPort, as in gateway/serve/data_port.py."""

    def __init__(self, gateway: Gateway, place: Place, configuration: Configuration, *, secure: bool) -> None:
        self._gateway = gateway
        self._place = place
        self._beats = Beats(place.beats)
        self.addresses = [address_of(each, secure) for each in place.data]
        self._hub = RelayHub(
            gateway.decider,
            place.epoch,
            place.living,
            engine_of=gateway.held_on,
            shown=gateway.shown,
            call_ended=gateway.call_ended,
            say=say,
            overruled=lambda _: None,  # on one machine the parent sees to it that there is one
            ended=gateway.ended_calls.add,
        )
        self._server: asyncio.Server | None = None
        self._tell(configuration)

    def _tell(self, configuration: Configuration) -> None:
        secret = (configuration.cache_secret or "").encode()
        self._hub.apply(self._gateway.pipeline.snapshot, secret)

    async def listen(self, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        self._hub.start()
        self._server = await loop.create_unix_server(self._hub.channel, sock=self._place.inner)
        if self._place.first:
            await self._hub.joined(self._place.relays, JOINED_WITHIN)
        self._beats.tell(READY)

    def apply(self, configuration: Configuration) -> None:
        self._gateway.apply(configuration)
        self._tell(configuration)

    async def drain(self, within: float) -> None:
        self._beats.tell(CLOSING)
        await self._hub.drain(within)

    def totals(self) -> Sequence[RelayCounts]:
        return tuple(self._hub.totals.values())

    async def count(self) -> None:
        await self._hub.count()

    def calls(self) -> Iterable[CallView]:
        now = self._hub.clock()
        for session in self._hub.sessions:
            for served in session.calls.values():
                call, grant = served.call, served.grant
                yield CallView(
                    request_id=call.request_id,
                    tenant=call.tenant,
                    class_name=call.class_name,
                    model=call.model,
                    engine=None if grant is None else grant.engine.id,
                    state="queued" if grant is None else "running" if grant.hold.prefill else "streaming",
                    age_s=round(now - call.arrived, 3),
                    deadline_s=round(call.deadline - now, 3),
                    held_tokens=call.cost,
                    attempts=served.attempts + (grant is not None),
                )

    def processes(self) -> list[ProcessView]:
        place, sessions = self._place, sorted(self._hub.sessions, key=lambda session: session.number)
        calls = self._gateway.metrics.counts.calls + sum([counts.ended for counts in self._hub.totals.values()])
        return [
            ProcessView("parent", place.parent, place.parent_started, 0, 0),
            ProcessView("decider", os.getpid(), place.started, calls, 0),
            *(ProcessView("relay", *session.process) for session in sessions),
        ]

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._hub.aclose()
