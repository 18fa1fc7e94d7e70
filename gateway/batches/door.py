"""Door of the Files and Batch API: requests in, OpenAI's objects out. A tenant sees nothing of another's."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

import msgspec

from gateway.batches import tables
from gateway.batches.site import BatchSite, is_full
from gateway.batches.upload_sink import UploadSink
from gateway.batches.worker import BatchWorker
from gateway.core.batches import requests
from gateway.core.batches.objects import WINDOW_SECONDS, BatchObject, FileObject, page_of
from gateway.core.batches.states import ALL
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.routes import Route
from gateway.core.request.tenants import Account
from gateway.relay.wire.messages import Request
from gateway.relay.wire.responder import Responder
from gateway.shared.storage import StorageError
from gateway.shared.tasks import cancel
from gateway.shared.threads import in_thread

JSON = b"content-type: application/json\r\n"
FORM = 64 * 1024  # bytes of an upload beside its file
UPLOADS = 64  # at once
OF_A_TENANT = 8
FULL = 60.0  # seconds until a full disk may have room
PIECE = 256 * 1024  # bytes of a file that are read at once
_encode = msgspec.json.Encoder().encode


class BatchDoor:
    """The pipeline's `Stored`, and the life of what serves it. The site's storage is open from `start` to `aclose`."""

    def __init__(self, site: BatchSite) -> None:
        self.told = site.told
        self._site = site
        self._worker = BatchWorker(site)
        self._uploads: Counter[str] = Counter()  # under way, by tenant
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Take requests, and go on with the batches that are not over. Raises OSError and StorageError."""
        await self._worker.start()
        self._site.pipeline.others.stored = self

    async def give(self) -> None:
        """Work no batch any more: another process does. Requests that have begun are still answered."""
        await self._worker.aclose()

    async def aclose(self) -> None:
        """End answers and calls under way. A result that is being kept is kept."""
        await self._worker.aclose()
        await cancel(*self._tasks)

    @property
    def batch_states(self) -> dict[str, int]:
        """Batches by state, at the worker's last look; empty: another process works them."""
        states = self._worker.states
        return {status: states.get(status, 0) for status in ALL} if states else {}

    @property
    def lines(self) -> Mapping[str, int]:
        """Numbers of lines by what became of them, since the start."""
        return self._site.lines

    @property
    def line_calls(self) -> int:
        """Lines that wait or run now."""
        return self._site.calls

    # -- the pipeline's ---------------------------------------------------------------------------------------------

    def route_of(self, path: bytes) -> Route | None:
        found = requests.stored_route(path)
        return None if found is None else found[0]

    def head(self, request: Request, account: Account) -> None:
        if self.route_of(request.path) is not requests.FILES or request.method != b"POST":
            request.limit = requests.MOST_BODY
            return
        tenant, largest = account.name, min(self._site.policy.per_tenant, requests.MOST_FILE)
        request.limit = largest + FORM
        if request.length > request.limit:
            return  # the connection refuses it
        if self._uploads.total() >= UPLOADS or self._uploads[tenant] >= OF_A_TENANT:
            message = f"too many uploads at once: {UPLOADS} in all, and {OF_A_TENANT} of one tenant, are taken."
            raise Refused(Outcome.RATE_LIMITED, message, retry_after=5.0)
        content_type = request.fields.get(b"content-type", b"none")
        id = f"file-{secrets.token_hex(12)}"
        request.sink = UploadSink(self._site.folder, id, content_type, largest, partial(self._uploaded, tenant))
        self._uploads[tenant] += 1

    def begin(self, answer: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _uploaded(self, tenant: str) -> None:
        self._uploads[tenant] -= 1
        if not self._uploads[tenant]:
            del self._uploads[tenant]

    # -- answers --------------------------------------------------------------------------------------------------

    async def answer(self, request: Request, responder: Responder, account: Account) -> None:
        found = requests.stored_route(request.path)
        assert found is not None  # noqa: S101 # the pipeline has asked
        try:
            body = await self._body_of(*found, request, responder, account)
        except (OSError, StorageError) as error:
            self._site.say(f"batches: {self._site.told(error)}")
            if is_full(error):
                message = "The gateway's disk is full."
                raise Refused(Outcome.STORAGE_FULL, message, retry_after=FULL) from error
            raise Refused(Outcome.BUG, "The gateway's storage has failed; try again later.") from error
        if not responder.started:
            responder.send(200, JSON, body)

    async def _body_of(self, route: Route, id: str, request: Request, responder: Responder, account: Account) -> bytes:
        """The body of a good answer. Raises Refused."""
        tenant, post = account.name, request.method == b"POST"
        if route is requests.FILES:
            return await (self._keep(request, tenant) if post else self._files(request, tenant))
        if route is requests.FILE:
            return await (self._delete(id, tenant) if request.method == b"DELETE" else self._file(id, tenant))
        if route is requests.CONTENT:
            await self._content(id, tenant, responder)
            return b""
        if route is requests.BATCHES_ROUTE:
            if post:
                self._check_class(account)
            return await (self._create(request, tenant) if post else self._batches(request, tenant))
        if route is requests.CANCEL:
            return await self._cancel(id, tenant)
        assert route is requests.BATCH  # noqa: S101 # there are no others
        return _encode(await self._batch(id, tenant))

    # -- files ----------------------------------------------------------------------------------------------------

    async def _keep(self, request: Request, tenant: str) -> bytes:
        site, sink = self._site, request.sink
        assert isinstance(sink, UploadSink)  # noqa: S101 # head() has made it
        size = await sink.kept(request.body)
        file = FileObject(
            id=sink.id, bytes=size, created_at=site.now(), expires_at=site.now() + int(site.policy.keep),
            filename=sink.form.filename or "upload", purpose="batch",
        )  # fmt: skip
        try:
            requests.check_fields(sink.form.fields)
            await site.storage.run(tables.add_upload, tenant=tenant, file=file, most=site.policy.per_tenant)
        except (Refused, StorageError):
            await in_thread(site.folder.delete, sink.id)
            raise
        finally:
            sink.close()
        return _encode(file)

    async def _files(self, request: Request, tenant: str) -> bytes:
        page = requests.page_asked(request.query, requests.MOST_LISTED, requests.MOST_LISTED)
        found = await self._site.storage.run(tables.files_of, tenant=tenant, page=page)
        return page_of(found[: page.limit], len(found) > page.limit)

    async def _file(self, id: str, tenant: str) -> bytes:
        return _encode(await self._known(id, tenant))

    async def _known(self, id: str, tenant: str) -> FileObject:
        file = await self._site.storage.run(tables.file_of, tenant=tenant, id=id)
        if file is None:
            raise requests.no_file(id)
        return file

    async def _delete(self, id: str, tenant: str) -> bytes:
        file = await self._known(id, tenant)
        storage = self._site.storage
        try:
            needed = await storage.run(tables.delete_file, tenant=tenant, id=file.id)
        except StorageError as error:
            if not error.full:
                raise
            # A full disk keeps its row until its bytes make room. No batch needs them: that is asked before any change.
            await in_thread(self._site.folder.delete, file.id)
            needed = await storage.run(tables.delete_file, tenant=tenant, id=file.id)
        if needed:
            message = f"{file.id} is the input of {needed}, which is not over: cancel that first, or wait"
            raise Refused(Outcome.BAD_REQUEST, message, param="id", code="file_in_use")
        await in_thread(self._site.folder.delete, file.id)
        return _encode({"id": file.id, "object": "file", "deleted": True})

    async def _content(self, id: str, tenant: str, responder: Responder) -> None:
        file = await self._known(id, tenant)
        going = asyncio.Event()
        going.set()
        responder.watch(lambda _: going.set())
        offset = 0
        while not responder.closed:
            try:
                data = await in_thread(self._site.folder.read, file.id, offset, PIECE)
            except FileNotFoundError:
                if responder.started:
                    raise Refused(Outcome.TRUNCATED, "The file was deleted meanwhile.") from None
                raise requests.no_file(id) from None
            if not responder.started and not responder.closed:
                responder.start(200, b"content-type: application/octet-stream\r\n", file.bytes)
                responder.flow(going.clear, going.set)
            offset += len(data)
            responder.write(data)
            if offset >= file.bytes or not data:
                responder.end()
                return
            await going.wait()
        raise Refused(Outcome.CLIENT_GONE, "The client has left.")

    # -- batches --------------------------------------------------------------------------------------------------

    def _check_class(self, account: Account) -> None:
        """Raises Refused if the caller's token names a class that is less important than that of lines."""
        current = self._site.pipeline.current
        rank, name = current.snapshot.classes.rank, (current.policy.batches or self._site.policy).class_
        if rank.get(name, math.inf) < rank.get(account.claimed, -1):
            message = f"Your token is for the class {account.claimed}; batches run in {name}, which is more important."
            raise Refused(Outcome.FORBIDDEN, message)

    async def _create(self, request: Request, tenant: str) -> bytes:
        site = self._site
        asked = requests.new_batch(request.fields.get(b"content-type", b""), request.body)
        file = await self._known(asked.input_file_id, tenant)
        if file.purpose != "batch":
            message = f"{file.id} is a batch's own file: upload one with the purpose batch"
            raise Refused(Outcome.BAD_REQUEST, message, param="input_file_id")
        now = site.now()
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(12)}", endpoint=asked.endpoint, input_file_id=file.id, status="validating",
            created_at=now, expires_at=now + WINDOW_SECONDS, metadata=asked.metadata,
        )  # fmt: skip
        keep_until, most_bytes = now + WINDOW_SECONDS + int(site.policy.keep), site.policy.per_tenant
        if not await site.storage.run(
            tables.add_batch, tenant, batch, keep_until, requests.MOST_UNFINISHED, most_bytes
        ):
            message = f"you have {requests.MOST_UNFINISHED} batches that are not over, as many as one tenant may."
            raise Refused(Outcome.RATE_LIMITED, message, retry_after=60.0)
        self._worker.look()
        return _encode(batch)

    async def _batches(self, request: Request, tenant: str) -> bytes:
        page = requests.page_asked(request.query, requests.MOST_BATCHES, requests.BATCHES)
        found = await self._site.storage.run(tables.batches_of, tenant=tenant, page=page)
        return page_of(found[: page.limit], len(found) > page.limit)

    async def _batch(self, id: str, tenant: str) -> BatchObject:
        batch = await self._site.storage.run(tables.batch_of, tenant=tenant, id=id)
        if batch is None:
            raise requests.no_batch(id)
        return batch

    async def _cancel(self, id: str, tenant: str) -> bytes:
        batch = await self._batch(id, tenant)
        row = await self._site.storage.run(tables.cancel, tenant=tenant, id=id, now=self._site.now())
        if row is not None:
            self._worker.cancelled(row)
        elif batch.status not in {"cancelling", "cancelled"}:
            status = (await self._batch(id, tenant)).status
            message = f"{id} is {status}, and can no longer be cancelled"
            raise Refused(Outcome.BAD_REQUEST, message, code="not_cancellable")
        return _encode(await self._batch(id, tenant))
