"""Subscription to engines' prefix-cache events over ZeroMQ (vLLM's `--kv-events-config`).

Each engine with a `kv_events` address in the policy has one subscription. Its events go to `core.engines.cache_age`
unchanged. ZeroMQ connects and reconnects by itself, and a monitor reports whether it is connected. At most QUEUED
messages wait between socket and loop. A gateway that cannot keep up misses some, notices the gap in their sequence
numbers, and does without events until they are complete again.

pyzmq is an optional dependency: this module is imported only when a policy has an address.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from gateway.core.engines.cache_age import CacheAge
from gateway.core.engines.engine import Engine
from gateway.shared.tasks import lasting

QUEUED = 256  # messages; an engine sends one per step
LARGEST = 16 * 1024 * 1024  # bytes of a message; 64k tokens in a step make half a megabyte
RECONNECT = 100, 5_000  # milliseconds between two attempts: at first, at most
AGAIN = 10.0  # seconds without a connection after which the socket connects anew
HEARTBEAT = 2_000, 6_000  # milliseconds between pings, and without an answer until it counts as disconnected


class KvEvents:
    """All subscriptions. `clock`: the fleet's, in monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._context = zmq.asyncio.Context()
        self._listeners: dict[str, Listener] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def listen(self, engine: Engine, url: str | None) -> None:
        """Subscribe to an engine's events at this address from now on; None: end the subscription."""
        listener = self._listeners.get(engine.id)
        if listener is None or listener.url != url:
            self.forget(engine)
            if url is not None:
                self._listeners[engine.id] = Listener(engine, url, self._context, self._clock)

    def forget(self, engine: Engine) -> None:
        """End an engine's subscription. Its cache contents are then estimated by time alone."""
        listener = self._listeners.pop(engine.id, None)
        if listener is not None:
            listener.close()
            self._ending.add(listener.task)
            listener.task.add_done_callback(self._ending.discard)

    async def aclose(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        await asyncio.gather(*self._ending, *(each.task for each in self._listeners.values()), return_exceptions=True)
        self._listeners.clear()
        self._context.destroy(linger=0)


class Listener:
    """Subscription to one engine's events, until `close`."""

    def __init__(self, engine: Engine, url: str, context: zmq.asyncio.Context, clock: Callable[[], float]) -> None:
        self.url = url
        self._engine = engine
        self._cache_age = engine.cache.age = CacheAge()
        self._clock = clock
        self._socket = context.socket(zmq.SUB)
        # The monitor is made before the socket connects, so that it misses no event.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        _subscribe(self._socket, url)
        self.task = lasting(f"cache events of {engine.id}", self._run)
        # Only then: who waits for a socket that closes is told an error, which would hide that the task is cancelled.
        self.task.add_done_callback(lambda _: self._close_sockets())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._follow())

    async def _watch(self) -> None:
        linked = False
        while True:
            try:
                async with asyncio.timeout(None if linked else AGAIN):
                    message = await self._monitor.recv_multipart()
            except TimeoutError:
                self._connect_again()
                continue
            linked = parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._cache_age.link(linked)

    def _connect_again(self) -> None:
        """Reconnect. ZeroMQ does not reconnect by itself to a peer that does not speak ZeroMQ or sent a message above
        LARGEST.
        """
        with contextlib.suppress(zmq.ZMQError):  # it has given up this address already
            self._socket.disconnect(self.url)
        self._socket.connect(self.url)

    async def _follow(self) -> None:
        while True:
            self._cache_age.take(await self._socket.recv_multipart(), self._clock())
            await asyncio.sleep(0)  # messages that wait are received without a pause, and other tasks need the loop

    def close(self) -> None:
        if self._engine.cache.age is self._cache_age:
            self._engine.cache.age = None
        self.task.cancel()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()


def _subscribe(socket: zmq.asyncio.Socket, url: str) -> None:
    """Configure and connect a socket. ZeroMQ keeps trying until the address answers."""
    socket.linger = 0
    socket.rcvhwm = QUEUED
    socket.maxmsgsize = LARGEST
    socket.ipv6 = True  # names and addresses of both kinds
    socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT
    socket.subscribe(b"")
    socket.connect(url)
