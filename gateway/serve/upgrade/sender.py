"""Sender of a hand-off: a running gateway hands its listening sockets to a successor, and goes on where that one
fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gateway.serve.upgrade.rendezvous import HandOffPayload, Offer, Ready, line_of, listen_at, peer_of

TOLD_WITHIN = 10.0  # seconds for the successor to take what it is told
BUSY = "another gateway is taking over already"


class HandOffSender:
    """Sender at the socket `path`, where a successor finds this gateway. `offer` gives what there is now, with the
    descriptors of the sockets. `ready` is set by a successor that can serve. `say` takes lines for the operator. Raises
    UnsafeFolder, OSError."""

    def __init__(
        self, path: Path, offer: Callable[[], tuple[Offer, Sequence[int]]], say: Callable[[str], None]
    ) -> None:
        self._listening = listen_at(path)
        self._path = path
        self._inode = path.stat().st_ino
        self._offer = offer
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._given: asyncio.Future[HandOffPayload] = self._loop.create_future()
        self.ready: asyncio.Future[tuple[int, Ready]] = self._loop.create_future()  # and its process
        self._loop.add_reader(self._listening, self._accept)

    async def give(self, given: HandOffPayload) -> None:
        """Tell the successor that it serves from now on."""
        self._given.set_result(given)
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=TOLD_WITHIN)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        pid, uid = peer_of(connection)
        offer, descriptors = self._offer()
        refused = offer.refused
        if uid != os.geteuid():
            refused = f"it is of user {os.geteuid()}, and only that user may take it over"
        elif self.ready.done() or (self._task is not None and not self._task.done()):
            refused = BUSY
        if refused:
            self._say(f"process {pid} of user {uid} wanted to take over: {refused}")
            with connection, contextlib.suppress(OSError):  # it may be gone
                connection.send(line_of(Offer(refused=refused)))
            return
        self._task = self._loop.create_task(self._serve(connection, pid, offer, descriptors))

    async def _serve(self, connection: socket.socket, pid: int, offer: Offer, descriptors: Sequence[int]) -> None:
        try:
            with connection:
                socket.send_fds(connection, [line_of(offer)], list(descriptors))
                reader, writer = await asyncio.open_unix_connection(sock=connection.dup())
            try:
                line = await reader.readline()
                if not line:
                    self._say(f"process {pid}, which was to take over, has ended before it could: this one goes on")
                    return
                self.ready.set_result((pid, msgspec.json.decode(line, type=Ready)))
                writer.write(line_of(await self._given))
                await writer.drain()
            finally:
                writer.close()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._say(f"process {pid}, which was to take over, failed: {error}: this one goes on")

    def close(self) -> None:
        """Be found no more. A successor may have bound the path anew."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
