"""Relays of a gateway in virtual time: several of the real ones and a decider, with frames between them.

Each relay and the decider's side of it are the code that runs as processes; the sockets between them, and those of
clients and engines, are in memory.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from gateway.decider.relays.hub import RelayHub
from gateway.frames.messages import EngineNews
from gateway.serve.assembly import Gateway
from gateway.serve.processes.place import Place
from gateway.serve.processes.relaying import RelaySide
from gateway.serve.upgrade.receiver import InheritedSockets
from gateway.upstream.client import Client
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.memory_wire import MemoryClient, Sends

if TYPE_CHECKING:
    from gateway.decider.call_log import CallLog
    from gateway.relay.remote.link import Connect


def hub_of(gateway: Gateway, epoch: int, expected: dict[int, int], **changed: Any) -> RelayHub:
    """The relays' side of a gateway that decides for them."""
    wired: dict[str, Any] = {
        "engine_of": gateway.engines.held_on,
        "shown": gateway.engines.credentials,
        "call_ended": gateway.engines.call_ended,
        "say": gateway.say,
        "deposed": lambda _: None,
    }
    hub = RelayHub(gateway.decider, epoch, expected, **(wired | changed))
    hub.apply(gateway.current.snapshot, b"a secret of cache salts")
    hub.start()
    return hub


def relay_of(
    number: int,
    epoch: int,
    relays: int,
    log: Any,
    connect: Connect,
    memories: Mapping[str, MemoryEngine],
    sends: Sends,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> RelaySide:
    """A relay over engines in memory; its link is not started. Its process has the id `pid_of` its number and epoch."""
    nothing = cast("Any", None)  # it opens no socket, and has no parent
    place = Place(
        role="relay",
        number=number,
        epoch=epoch,
        relays=relays,
        data=[],
        control=nothing,
        inner=nothing,
        path="",
        beats=nothing,
        living={},
        secret="",
        parent=0,
        started=0.0,
        first=False,
        inherited=InheritedSockets(),
        parent_started=0.0,
    )

    def client_of(engine: EngineNews) -> Client:
        stall = side.current.policy.timeouts.stall
        client = MemoryClient(memories[engine.id], stall, sends)
        return cast("Client", client)  # it has all of the surface that is used

    side = RelaySide(
        place,
        sys.maxsize,
        cast("CallLog", log),
        None,
        int,
        connect=connect,
        client_of=client_of,
        rng=random.Random(f"{seed} relay {number} {epoch}"),  # noqa: S311 # a simulation
        pid=pid_of(number, epoch),
        say=say,
    )
    return side


def pid_of(number: int, epoch: int) -> int:
    """Id of a simulated relay's process."""
    return 1000 * epoch + number


def look_for_stalls(side: RelaySide) -> None:
    """Give up answers of stopped engines, as each connection's own timers would."""
    now = asyncio.get_running_loop().time()
    for client in side.clients.values():
        cast("MemoryClient", client).check(now)
