"""Event stream of the console, over real sockets: all entries first, then what has changed; bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.control.console import stream
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.decider.ended_calls import EndedCalls
from gateway.shared.control import http1
from tests.control.parts import TOKEN, Parts, play
from tests.plain_http import NOBODY


class Watcher:
    """One open stream."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self, wanted: str) -> Any:
        """The data of the next event of that name."""
        async with asyncio.timeout(60):
            name = ""
            async for line in self._lines:
                key, _, value = line.partition(": ")
                if key == "event":
                    name = value
                elif key == "data" and name == wanted:
                    return json.loads(value)
        raise AssertionError(f"the stream ended before {wanted}")


@contextlib.asynccontextmanager
async def watching(gateway: Parts, path: str = "/events", token: str = "") -> AsyncIterator[Watcher]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with (
        httpx.AsyncClient(trust_env=False, verify=NOBODY, timeout=60.0) as client,
        client.stream("GET", gateway.port.address + path, headers=headers) as answer,
    ):
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
        yield Watcher(answer.aiter_lines())


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "EVERY", 0.02)


def test_all_is_told_first_and_then_what_has_changed() -> None:
    async def scene(gateway: Parts) -> None:
        async with watching(gateway, token=TOKEN) as watcher:
            first = await watcher.next("entries")
            assert first["whole"]
            assert {"gateway", "policy", "headline", "class/batch", "engine/e0", "engine/e1"} <= first["set"].keys()
            gateway.up("e0")
            then = await watcher.next("entries")
            assert not then["whole"]
            assert "engine/e0" in then["set"]
            assert "engine/e1" not in then["set"]
            assert then["set"]["engine/e0"]["state"] == "up"
            gateway.fleet.remove("e1")
            while "engine/e1" not in then["gone"]:
                then = await watcher.next("entries")

    play(scene, TOKEN)


def test_a_page_that_outlives_its_gateway_can_tell() -> None:
    """Serial numbers of calls begin anew: the page forgets the calls of before, and asks for all."""
    told: list[float] = []

    async def scene(gateway: Parts) -> None:
        for _ in range(2):
            async with watching(gateway) as watcher:
                told.append((await watcher.next("entries"))["set"]["gateway"]["began"])

    play(scene)
    play(scene)
    assert told[0] == told[1] < told[2] == told[3]


def test_ended_calls_are_told_where_they_are_asked_for() -> None:
    ended = EndedCalls()

    def end(id: str) -> None:
        ended.add(Record(request_id=id, route="r", tenant="acme", outcome=Outcome.QUEUE_FULL, request="a prompt"), 1.0)

    async def scene(gateway: Parts) -> None:
        async with watching(gateway, "/events?calls=1") as watcher:
            rows = await watcher.next("calls")
            assert [(row[0], row[2], row[3], row[7]) for row in rows] == [(2, "b", "acme", "queue_full")]
            end("c")
            rows = await watcher.next("calls")
            assert [row[2] for row in rows] == ["c"]
            assert "a prompt" not in json.dumps(rows)

    end("a")
    end("b")
    play(scene, ended=ended)


def test_watchers_are_few_and_one_who_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WATCHERS", 1)

    async def scene(gateway: Parts) -> None:
        async with watching(gateway) as watcher:
            await watcher.next("entries")
            assert (await gateway.get("/events")).status_code == 503
        async with asyncio.timeout(60):
            while True:
                async with gateway.client.stream("GET", gateway.port.address + "/events") as answer:
                    if answer.status_code == 200:
                        return

    play(scene)


def test_a_stream_outlives_the_time_in_which_a_client_has_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "READ_TIMEOUT", 0.1)

    async def scene(gateway: Parts) -> None:
        async with watching(gateway) as watcher:
            await watcher.next("entries")
            await asyncio.sleep(0.3)  # the time that is under test
            gateway.up("e0")
            assert "engine/e0" in (await watcher.next("entries"))["set"]

    play(scene)


@pytest.mark.parametrize("query", ["calls=-1", "calls=x", "class=a", "calls=1111111111111111"])
def test_no_other_query_is_taken(query: str) -> None:
    async def scene(gateway: Parts) -> None:
        assert (await gateway.get(f"/events?{query}")).status_code == 400

    play(scene)


def test_nothing_is_read_while_nobody_watches() -> None:
    async def scene(gateway: Parts) -> None:
        async with watching(gateway) as watcher:
            await watcher.next("entries")
        async with asyncio.timeout(60):
            while any("Streams._run" in repr(task) for task in asyncio.all_tasks()):
                await asyncio.sleep(0.01)

    play(scene)
