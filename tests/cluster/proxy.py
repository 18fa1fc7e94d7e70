"""TCP proxy between a member and what it calls, which drops, delays, or answers nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Literal

Mode = Literal["passes", "drops", "refuses", "resets", "nonsense"]
RESET = struct.pack("ii", 1, 0)  # linger that has a close reset the connection


class Proxy:
    """On a port of loopback, in a thread of its own. `mode` may change at any time: `drops` lets nothing through and
    closes nothing, as a network that is cut; `resets` accepts, and resets after its first answer. So may `delay`:
    seconds by which what is asked arrives late, also where nobody waits for the answer any more. `target`: the port
    that a new connection is passed to."""

    def __init__(self, target: int) -> None:
        self.mode: Mode = "passes"
        self.delay = 0.0
        self.port = 0
        self.target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    def cut(self) -> None:
        """Close every connection there is."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        for listening in server.sockets:
            self._loop.remove_reader(listening.fileno())
        await asyncio.sleep(0.05)  # a server that is closed loses connections that are accepted just now
        server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # for transports to end

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._one(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())  # a task that is cancelled before it begins runs no `finally`

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "refuses":
            return
        if self.mode == "resets":
            await reader.read(4096)
            writer.write(b"+OK\r\n")  # to the first of several questions
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            return
        try:
            await asyncio.gather(self._pipe(reader, far_writer, b""), self._pipe(far_reader, writer, b"$3\r\nhum\r\n"))
        finally:
            far_writer.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, nonsense: bytes) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                while self.mode == "drops":
                    await asyncio.sleep(0.05)
                if self.mode in ("refuses", "resets"):
                    break
                if self.delay and not nonsense:  # what is asked, not what is answered
                    await asyncio.sleep(self.delay)
                writer.write(nonsense if nonsense and self.mode == "nonsense" else data)
                await writer.drain()
        writer.close()
