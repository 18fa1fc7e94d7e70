"""The call log: valid lines whatever a client sends, and a reader that stands still stops nobody."""

from __future__ import annotations

import asyncio
import json
import os
import select
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway import calllog
from gateway.calllog import CallLog
from gateway.core.outcome import Outcome, Record

HOSTILE = 'a"b\\c\n{"ts":0}\r\x00\x1b[2J\u2028é\U0001f600' + "x" * 5000


def record(**more: str) -> Record:
    return Record(request_id=more.pop("request_id", "r"), route="/v1/completions", outcome=Outcome.OK, **more)  # type: ignore[arg-type]  # by name


def lines(data: bytes) -> list[dict[str, Any]]:
    """Every line as JSON. Split at line feeds only, as a log shipper does."""
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def with_pipe(scene: Callable[[CallLog, int], Awaitable[None]]) -> None:
    read, write = os.pipe()

    async def main() -> None:
        await scene(CallLog(write), read)

    try:
        asyncio.run(main())
    finally:
        os.close(read)
        os.close(write)


def test_lines_are_json_whatever_is_in_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)

    async def main() -> None:
        log = CallLog(fd)
        log.write(record(request_id="one"), time.monotonic())
        log.write(record(model=HOSTILE, reason=HOSTILE, tenant=HOSTILE), time.monotonic())
        await log.aclose()

    asyncio.run(main())
    os.close(fd)
    first, second = lines(path.read_bytes())
    assert (first["request_id"], first["outcome"], first["route"]) == ("one", "ok", "/v1/completions")
    assert abs(first["ts"] - time.time()) < 60
    assert second["model"] == second["reason"] == second["tenant"] == HOSTILE
    assert not set(path.read_bytes()) & {0x00, 0x0D, 0x1B}, "control characters reach no terminal"


def test_lines_appear_without_being_asked_for() -> None:
    async def scene(log: CallLog, read: int) -> None:
        log.write(record(), time.monotonic())
        data = await asyncio.wait_for(asyncio.to_thread(os.read, read, 65536), 5)
        assert len(lines(data)) == 1
        await log.aclose()

    with_pipe(scene)


def test_a_pipe_that_nobody_reads_blocks_nobody_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calllog, "LIMIT", 200_000)
    monkeypatch.setattr(calllog, "EVERY", 0.01)

    async def scene(log: CallLog, read: int) -> None:
        log.write(record(request_id="first"), time.monotonic())
        async with asyncio.timeout(5):
            while log._writing is None:
                await asyncio.sleep(0.001)
        await log._writing
        filler = record(reason="x" * 1000)
        for _ in range(100):  # more than a pipe holds: the writing thread is stuck from here on
            log.write(filler, time.monotonic())
        async with asyncio.timeout(5):
            while log._lines:
                await asyncio.sleep(0.001)
        began = time.monotonic()
        for _ in range(2000):
            log.write(filler, time.monotonic())
        await asyncio.sleep(0)
        assert time.monotonic() - began < 1.0
        assert log._size < 205_000
        assert log._dropped > 1000
        dropped = log._dropped
        closing = asyncio.create_task(log.aclose())
        data = b""
        while not closing.done() or select.select([read], [], [], 0)[0]:
            if select.select([read], [], [], 0)[0]:
                data += os.read(read, 1 << 20)
            else:
                await asyncio.sleep(0.001)
        await closing
        told = lines(data)
        assert told[0]["request_id"] == "first"
        assert [line["dropped_lines"] for line in told if "dropped_lines" in line] == [dropped]
        assert len(told) - 1 + dropped == 1 + 100 + 2000

    with_pipe(scene)


def test_a_pipe_that_nobody_reads_does_not_keep_the_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calllog, "CLOSE_WITHIN", 0.1)

    async def scene(log: CallLog, read: int) -> None:
        for _ in range(100):
            log.write(record(reason="x" * 1000), time.monotonic())
        async with asyncio.timeout(5):
            await log.aclose()

    with_pipe(scene)


def test_a_reader_that_went_away_loses_the_log_and_nothing_else() -> None:
    read, write = os.pipe()
    os.close(read)

    async def main() -> None:
        log = CallLog(write)
        log.write(record(), time.monotonic())
        await log.aclose()

    asyncio.run(main())
    os.close(write)


def test_a_request_is_in_its_line_only_where_the_policy_wants_it() -> None:
    plain, full = Record(request_id="a", route="r"), Record(request_id="b", route="r", request='{"x":"\u00e9\\n"}')
    assert "request" not in msgspec.json.decode(msgspec.json.encode(plain))
    assert msgspec.json.decode(msgspec.json.encode(full))["request"] == '{"x":"\u00e9\\n"}'
