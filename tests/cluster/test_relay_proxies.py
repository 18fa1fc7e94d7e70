"""Relays of a cluster's machine over socket pairs, which need no store."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
import uvloop

from gateway.frames.codec import FrameWriter, from_decider
from gateway.frames.messages import DrainOrder
from gateway.serve.cluster import relay_proxies
from gateway.serve.cluster.relay_proxies import RelayProxies
from tests.over_frames import NOTHING, hello


def test_a_relay_that_has_left_is_counted_without_its_connections() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        relays = RelayProxies(loop.time, lambda _: None, lambda: None, lambda _: None)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        await loop.connect_accepted_socket(relays.channel, theirs)
        writer = FrameWriter()
        writer.add(hello())
        writer.add(msgspec.structs.replace(NOTHING, ended=3, connections=5, body_bytes=7))
        await loop.sock_sendall(ours, writer.take())
        async with asyncio.timeout(60):
            while not relays.totals.ended:
                await asyncio.sleep(0.001)
            ours.close()
            while relays.all:
                await asyncio.sleep(0.001)
            await relays.count()  # nobody is left to be asked
        (left,) = relays.totals.all()
        assert (left.ended, left.connections, left.body_bytes) == (3, 0, 0)

    uvloop.run(main())


@pytest.mark.parametrize("order", [DrainOrder(5.0), DrainOrder(5.0, True, "another")])
def test_a_relay_that_comes_after_an_order_is_told_it_too(order: DrainOrder) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        relays = RelayProxies(loop.time, lambda _: None, lambda: None, lambda _: None)
        relays.hand_over(order.within, order.decider) if order.decider else relays.drain(order.within)
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            await loop.connect_accepted_socket(relays.channel, theirs)
            writer = FrameWriter()
            writer.add(hello())
            await loop.sock_sendall(ours, writer.take())
            async with asyncio.timeout(5):
                (messages,) = from_decider().feed(await loop.sock_recv(ours, 4096))
            assert messages == [order]
            relays.reconnect()
            await asyncio.sleep(0.01)

    uvloop.run(main())


def test_a_relay_that_has_ended_is_forgotten_as_another_program_may_have_its_pid_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {11, 12}
    monkeypatch.setattr(relay_proxies, "lives", there.__contains__)
    relays = RelayProxies(float, lambda _: None, lambda: None, lambda _: None, pids={1: 11, 2: 12})
    there.remove(11)
    assert relays.living() == {2: 12}
    there.add(11)
    assert relays.living() == {2: 12}
