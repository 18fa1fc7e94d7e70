"""Ends of a gateway: a drain, which refuses what comes, or a hand-over to a gateway that serves in its place."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from gateway.serve.assembly import Gateway
from gateway.serve.data_port import DataPort
from gateway.serve.starting import ProcessSignals
from gateway.serve.upgrade.next_gateway import NextGateway
from gateway.serve.upgrade.rendezvous import Offer, UnsafeFolder
from gateway.serve.upgrade.sender import HandOffSender
from gateway.shared.control.http1 import ControlPort
from gateway.shared.lines import say
from gateway.shared.service_manager import ServiceManager

CONTROL_STAYS = 0.5  # seconds that connections of the control port are served, after another has taken over


def listen_for_successor(
    path: Path, port: DataPort, control: ControlPort, stack: AsyncExitStack, signals: ProcessSignals | None
) -> HandOffSender | None:
    """Listen at `path` for a gateway that takes over, until the stack ends. Return None where nothing can listen there.
    With `signals`, SIGUSR2 starts such a gateway."""

    def offer() -> tuple[Offer, list[int]]:
        made, descriptors = port.offer()
        return made, [*descriptors, *control.sockets()]

    try:
        sender = HandOffSender(path, offer, say)
    except (OSError, UnsafeFolder) as error:
        line = f"{error}: no other gateway can take over from this one"
        say(f"warning: {line}")
        if signals is not None:
            signals.on_upgrade(partial(say, line))
        return None
    stack.callback(sender.close)
    if signals is not None:
        signals.on_upgrade(NextGateway(path, say).start)
    return sender


async def end(
    gateway: Gateway,
    port: DataPort,
    control: ControlPort,
    signals: ProcessSignals,
    sender: HandOffSender | None,
    manager: ServiceManager,
) -> None:
    """Wait for a signal, then drain; or for a successor that can serve, then hand over to it, also in the middle of a
    drain: it has the listening sockets, and would wait for a word."""
    told = asyncio.ensure_future(signals.first.wait())
    ready = _never() if sender is None else sender.ready
    await asyncio.wait((told, ready), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if not ready.done():
        manager.stopping()
        await drain(gateway, port, signals, ready)
    if sender is not None and ready.done():
        await hand_over(gateway, port, control, signals, sender, manager)


def _never() -> asyncio.Future[Any]:
    """A successor's word where none can come."""
    return asyncio.get_running_loop().create_future()


async def _closed(control: ControlPort) -> None:
    """Close the control port, after a moment in which accepted requests are answered."""
    await asyncio.sleep(CONTROL_STAYS)
    await control.aclose()


async def hand_over(
    gateway: Gateway, port: DataPort, control: ControlPort, signals: ProcessSignals, sender: HandOffSender,
    manager: ServiceManager,
) -> None:  # fmt: skip
    """Hand over to another gateway. Calls under way here end within `timeouts.drain`, or at a signal."""
    pid, ready = sender.ready.result()
    within, cut = gateway.policy.timeouts.drain, signals.second if signals.first.is_set() else signals.first
    manager.succeeded_by(pid)
    given = port.hand_over(within, ready.decider)
    await gateway.give_storage()
    control.stop_accepting()
    await sender.give(given)
    closing = asyncio.ensure_future(_closed(control))
    say(f"process {pid} has taken over: what is under way here ends within {within:g} s")
    await _until(asyncio.ensure_future(port.drain(within, gently=True)), port, cut, _never())
    await closing


def drained_by_hand(gateway: Gateway, signals: ProcessSignals, wanted: bool) -> None:
    """An operator's drain, which the end of the process overrules."""
    gateway.dispatch.leaving = wanted or signals.first.is_set()


async def drain(gateway: Gateway, port: DataPort, signals: ProcessSignals, ready: asyncio.Future[Any]) -> None:
    """Drain after the first signal: let in-flight answers finish, until the policy's limit or a second signal. Back
    sooner where another gateway is `ready`."""
    dispatch, timeouts = gateway.dispatch, gateway.policy.timeouts
    dispatch.leaving = True
    grace = asyncio.ensure_future(signals.hurried(timeouts.drain_grace))
    await asyncio.wait((grace, ready), return_when=asyncio.FIRST_COMPLETED)
    grace.cancel()
    if not ready.done():
        await port.resign()  # calls of other machines wait on, for the next leader
    if ready.done():  # what waits is for the other to grant
        return
    # The server first: whoever is refused now is also told that the connection ends. The drain's first step comes
    # before that of any call which is woken here.
    drained = asyncio.ensure_future(port.drain(timeouts.drain))
    dispatch.refuse_waiting()
    await _until(drained, port, signals.second, ready)


async def _until(
    drained: asyncio.Future[None], port: DataPort, signal: asyncio.Event, ready: asyncio.Future[Any]
) -> None:
    """Wait for a drain, and cut it short at the signal, or leave it where another gateway is `ready`."""
    hurried = asyncio.ensure_future(signal.wait())
    await asyncio.wait((drained, hurried, ready), return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not drained.done():
        drained.cancel()
        if not ready.done():
            await port.drain(0.0)
