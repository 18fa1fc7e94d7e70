"""Upload of one file: from the client's connection through the form's parser to the disk, never whole in memory.

The connection waits while more than HIGH bytes are not yet written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import BinaryIO

from gateway.batches.file_folder import FileFolder
from gateway.core.batches.upload import UploadForm
from gateway.core.request.outcome import Outcome, Refused
from gateway.relay.wire.messages import WireError
from gateway.shared.threads import in_thread

HIGH = 4 * 1024**2  # bytes


class UploadSink:
    """Takes the body of an upload, as the data port's `Sink`. `largest`: bytes of the file. `ended` is called once,
    when nothing is left of it: the file was kept, or given up. Raises Refused for a bad content-type."""

    def __init__(
        self, folder: FileFolder, id: str, content_type: bytes, largest: int, ended: Callable[[], None]
    ) -> None:
        self.form = UploadForm(content_type)
        self.id = id
        self.size = 0  # bytes of the file so far
        self._folder = folder
        self._largest = largest
        self._ended = ended
        self._file: BinaryIO | None = None
        self._waiting: list[bytes] = []
        self._held = 0  # bytes not yet written
        self._writer: asyncio.Task[None] | None = None
        self._failure: OSError | None = None
        self._lost = False
        self._paused = False
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None

    def flow(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._pause, self._resume = pause, resume

    def feed(self, data: bytes) -> None:
        """The next bytes of the body. Raises WireError."""
        try:
            piece = self.form.feed(data)
        except Refused as refused:
            raise WireError(400, refused.message) from refused
        if not piece:
            return
        self.size += len(piece)
        if self.size > self._largest:
            raise WireError(413, f"the file is over the limit of {self._largest} bytes (1 GiB, or batches.per_tenant)")
        self._waiting.append(piece)
        self._held += len(piece)
        if self._held > HIGH and self._pause is not None and not self._paused:
            self._paused = True
            self._pause()
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    def lost(self) -> None:
        """Give up the upload: the client has left, or its body was refused."""
        self._lost = True
        self._waiting.clear()
        self._go_on()
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def kept(self, rest: bytes) -> int:
        """The body is whole, with these last bytes: its file is kept under its id, until `close` as one that is being
        written. Its size in bytes. Raises Refused, or OSError of the disk; then nothing is left of it."""
        kept = False
        try:
            try:
                self.feed(rest)
            except WireError as error:
                outcome = Outcome.TOO_LARGE if error.status == 413 else Outcome.BAD_REQUEST
                raise Refused(outcome, error.message) from error
            self.form.finish()
            if self._writer is not None:
                await asyncio.shield(self._writer)
            if self._failure is not None:
                raise self._failure
            if self._file is None:
                self._file = await in_thread(self._folder.begin, self.id)
            size = await in_thread(self._folder.keep, self.id, self._file)
            kept = True
            return size
        finally:
            if kept:
                self._ended()
            else:
                self.lost()
                if self._writer is not None:
                    await asyncio.shield(self._writer)

    def close(self) -> None:
        """Close the kept file, once its row is stored or the file is deleted."""
        if self._file is not None:
            self._file.close()

    async def _write(self) -> None:
        try:
            if self._file is None and not self._lost:
                self._file = await in_thread(self._folder.begin, self.id)
            while self._waiting and not self._lost:
                piece = b"".join(self._waiting)
                self._waiting.clear()
                assert self._file is not None  # noqa: S101 # only what is lost has none
                await in_thread(self._file.write, piece)
                self._held -= len(piece)
                self._go_on()
        except OSError as error:
            self._failure = error  # whoever waits for the file is told
            self._go_on()
        finally:
            self._writer = None
            if self._lost:
                await self._drop()
                self._ended()

    def _go_on(self) -> None:
        if self._paused and self._resume is not None:
            self._paused = False
            self._resume()

    async def _drop(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            await in_thread(self._folder.drop, self.id, file)
