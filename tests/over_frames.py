"""The same gateway with a decider that is reached by frames: every call's questions go over a real socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator, Callable

from gateway.core.call_counts import CallCounts
from gateway.core.policy.policy import Policy
from gateway.decider.relays.hub import RelayHub
from gateway.frames.channel import Channel
from gateway.frames.messages import VERSION, Hello, RelayCounts
from gateway.relay.pipeline import Pipeline
from gateway.relay.remote.decider import RemoteDecider
from gateway.relay.remote.link import Link
from gateway.relay.wire.server import Server
from gateway.serve.assembly import Gateway
from tests.faults import scripted

NOTHING = RelayCounts(CallCounts().told(), 0, 0, 0, {}, {}, {}, 0, 0, 0)


def hub_of(
    gateway: Gateway,
    epoch: int = 1,
    expected: dict[int, int] | None = None,
    lives: Callable[[int], bool] | None = None,
) -> RelayHub:
    """The decider's side, over the gateway's own decider."""
    hub = RelayHub(
        gateway.decider,
        epoch,
        expected or {},
        engine_of=gateway.engines.held_on,
        shown=gateway.engines.credentials,
        call_ended=gateway.engines.call_ended,
        say=gateway.say,
        deposed=lambda _: None,
        lives=lives,
        ended=gateway.ended_calls.add,
    )
    hub.apply(gateway.current.snapshot, b"")
    hub.start()
    return hub


def hello(relay: int = 1, epoch: int = 1) -> Hello:
    return Hello(VERSION, relay, epoch, os.getpid(), 0.0, 0)


def link_to(
    hub: Callable[[], RelayHub],
    relay: int = 1,
    said: list[str] | None = None,
    broken: Callable[[], bool] = lambda: False,
) -> Link:
    """A relay's side of a socket pair, made anew at each connection to the hub of then; not started."""
    loop = asyncio.get_running_loop()

    async def connect(made: Callable[[], Channel]) -> None:
        if broken():
            raise ConnectionRefusedError("nobody is there")
        ours, theirs = socket.socketpair()
        await loop.connect_accepted_socket(hub().channel, theirs)
        await loop.create_unix_connection(made, sock=ours)

    return Link(
        connect,
        hello(relay),
        loop.time,
        on_policy=lambda _: None,
        on_fleet=lambda _: None,
        on_drain=lambda _: None,
        counts=lambda: NOTHING,
        say=(said if said is not None else []).append,
    )


@contextlib.asynccontextmanager
async def gateway_over(
    engines: list[scripted.ScriptedEngine] | list[str], policy: Policy | None = None, seed: int = 1, **wire: float
) -> AsyncIterator[Gateway]:
    """As `scripted.gateway_over`, with frames between pipeline and decider. At the end nothing is left of a call."""
    async with scripted.gateway_over(engines, policy, seed, **wire) as gateway:
        hub = hub_of(gateway)
        link = link_to(lambda: hub)
        link.start()
        await link.ready.wait()
        await gateway.server.drain(0.0)
        old = gateway.pipeline
        gateway.pipeline = Pipeline(
            RemoteDecider(link), gateway.attempts, old.endings.observe, random.Random(seed), gateway.bodies
        )
        gateway.server = Server(gateway.pipeline, gateway.server.settings, gateway.bodies)
        await gateway.server.listen("127.0.0.1:0")
        try:
            yield gateway
        finally:
            await gateway.server.drain(0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(60):
                    while any(session.calls for session in hub.sessions):
                        await asyncio.sleep(0.001)
            left = dict(link.calls), [session.calls for session in hub.sessions]
            await link.aclose()
            await hub.aclose()
            assert left == ({}, [{}]), left
