"""Call of a line: what its answer holds in memory, when its engine waits, and what is left when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.batches import line_call
from gateway.batches.line_call import AWAY, HIGH, STORAGE_FULL, TOO_LONG, LineCall
from gateway.batches.site import BatchSite
from gateway.core.policy.batches import BatchesPolicy
from gateway.core.policy.policy import Policy
from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.routes import ROUTES
from gateway.core.request.tenants import ANONYMOUS, Tenants
from gateway.relay.wire.responder import Responder
from gateway.shared.storage import Storage

PIECE = bytes(64 * 1024)


class Engine:
    """In place of the pipeline, and of the engine's connection that waits when it is told to."""

    def __init__(self) -> None:
        self.responder: Responder | None = None
        self.waits: list[bool] = []

    def begin(self, _: Any, responder: Responder, *__: Any) -> None:
        self.responder = responder

    def started(self) -> Responder:
        assert self.responder is not None
        self.responder.flow(lambda: self.waits.append(True), lambda: self.waits.append(False))
        self.responder.start(200, b"content-type: application/json\r\n")
        return self.responder


def run(
    tmp_path: Path, main: Callable[[LineCall, Engine, BatchSite], Awaitable[None]], memory: int = 2**30, **policy: int
) -> None:
    async def whole() -> None:
        engine, bodies = Engine(), BodyMemory(memory, 1.0)
        site = BatchSite(BatchesPolicy(**policy), Storage(tmp_path), cast(Any, engine), bodies, print)
        site.folder.make()
        account = Tenants(Policy()).accounts[ANONYMOUS]
        call = LineCall(site, ROUTES[b"/v1/completions"], account, {}, b"{}")
        await main(call, engine, site)
        call.close()
        async with asyncio.timeout(60):
            while bodies.held or site.spilled[ANONYMOUS]:
                await asyncio.sleep(0.001)
        assert list(site.folder.path.iterdir()) == []

    asyncio.run(whole())


def test_a_short_answer_stays_in_memory(tmp_path: Path) -> None:
    async def main(call: LineCall, engine: Engine, site: BatchSite) -> None:
        responder = engine.started()
        responder.write(b"x" * HIGH)
        assert site.bodies.held == HIGH
        responder.end()
        answer = await call.answer
        assert (answer.status, len(answer.body), answer.spilled) == (200, HIGH, None)
        assert engine.waits == []

    run(tmp_path, main)


def test_the_rest_of_a_long_answer_goes_to_the_disk_while_its_engine_waits(tmp_path: Path) -> None:
    async def main(call: LineCall, engine: Engine, site: BatchSite) -> None:
        responder, sent = engine.started(), 0
        while sent < 4 * HIGH:
            responder.write(PIECE)
            sent += len(PIECE)
            assert site.bodies.held <= HIGH + len(PIECE)
            async with asyncio.timeout(60):
                while len(engine.waits) % 2:
                    await asyncio.sleep(0.001)
        responder.write(b"end")
        responder.end()
        answer = await call.answer
        assert answer.spilled is not None
        answer.spilled.seek(0)
        assert (answer.spilled.read(), answer.body) == (bytes(sent) + b"end", b"")
        assert engine.waits[:2] == [True, False]
        assert site.spilled[ANONYMOUS] == sent + 3

    run(tmp_path, main)


def test_where_there_is_no_memory_every_piece_goes_to_the_disk_first(tmp_path: Path) -> None:
    async def main(call: LineCall, engine: Engine, site: BatchSite) -> None:
        responder = engine.started()
        responder.write(PIECE)
        assert (engine.waits, site.bodies.held) == ([True], 0)
        responder.end()
        answer = await call.answer
        assert answer.spilled is not None
        answer.spilled.seek(0)
        assert answer.spilled.read() == PIECE

    run(tmp_path, main, memory=1)


def test_answers_that_are_more_than_they_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def long(call: LineCall, engine: Engine, site: BatchSite) -> None:
        engine.started().write(PIECE)
        assert await call.answer is TOO_LONG

    async def full(call: LineCall, engine: Engine, site: BatchSite) -> None:
        site.kept[ANONYMOUS] = site.policy.per_tenant + 1
        engine.started().write(bytes(HIGH + 1))
        assert await call.answer is STORAGE_FULL

    run(tmp_path, full)
    monkeypatch.setattr(line_call, "MAX_ANSWER", 1024)
    run(tmp_path, long)


def test_a_disk_that_fails_is_told_once_and_nothing_stays(tmp_path: Path) -> None:
    async def main(call: LineCall, engine: Engine, site: BatchSite) -> None:
        site.folder.path.rmdir()
        responder = engine.started()
        responder.write(bytes(HIGH + 1))
        try:
            await call.answer
        except FileNotFoundError:
            site.folder.make()
        responder.write(PIECE)
        assert engine.waits == [True, False]

    run(tmp_path, main)


def test_a_call_that_is_given_up_while_the_disk_works_leaves_nothing(tmp_path: Path) -> None:
    async def main(call: LineCall, engine: Engine, site: BatchSite) -> None:
        engine.started().write(bytes(HIGH + 1))
        await asyncio.sleep(0)
        call.close()
        assert (await call.answer) is line_call.BROKEN

    run(tmp_path, main)


def test_a_model_that_is_away_is_waited_for(tmp_path: Path) -> None:
    async def main(call: LineCall, engine: Engine, site: BatchSite) -> None:
        assert engine.responder is not None
        engine.responder.send(404, b"x-weir-reason: model_away\r\nx-should-retry: false\r\n", b"{}")
        assert await call.answer is AWAY

    run(tmp_path, main)
