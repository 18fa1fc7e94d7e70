"""Bodies in pieces: their memory together, and their time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.request.body_memory import SMALL, BodyMemory
from tests.wire.server_harness import Client, Rig, serve

COUNTED = b"POST /p HTTP/1.1\r\nHost: a\r\ncontent-length: 20000\r\n\r\n"
CHUNKED = b"POST /p HTTP/1.1\r\nHost: a\r\ntransfer-encoding: chunked\r\n\r\n4e20\r\n"
HOLD = b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n"
TEXT = b"content-type: text/plain\r\n"


async def held(rig: Rig, size: int) -> None:
    """Wait until so many bytes are."""
    async with asyncio.timeout(60):
        while rig.server._shared.bodies.held != size:
            await asyncio.sleep(0.001)


async def no_room(client: Client, word: str) -> None:
    answer = await client.answer()
    assert (answer.status, answer.headers[b"x-weir-reason"], answer.headers[b"retry-after"]) == (503, b"bodies", b"2")
    assert answer.error["code"] == "server_is_overloaded"
    assert word in answer.error["message"]
    assert answer.headers[b"connection"] == b"close"


@pytest.mark.parametrize("head", [COUNTED, CHUNKED])
@pytest.mark.parametrize(("share", "word"), [(1.0, "all the memory"), (0.6, "one client may (half of body.memory)")])
def test_what_has_come_of_bodies_is_bounded_together_and_comes_back(head: bytes, share: float, word: str) -> None:
    bodies = BodyMemory(30_000 if share == 1.0 else 50_000, share)

    async def scenario(rig: Rig) -> None:
        first, second, third = [await rig.client() for _ in range(3)]
        await first.send(head + b"x" * 19_000)
        await held(rig, 19_000)
        await second.send(head + b"x" * SMALL)  # so much more is not even counted
        await second.send(b"x" * 10_000)
        await no_room(second, word)
        await held(rig, 19_000)
        await first.send(b"x" * 1000 + b"\r\n0\r\n\r\n" * (head is CHUNKED))
        assert (await first.answer()).status == 200
        await held(rig, 0)
        await third.send(head + b"x" * 19_999)
        await held(rig, 19_999)
        third.writer.transport.abort()
        await held(rig, 0)

    serve(scenario, bodies=bodies)
    assert sum(bodies.refused.values()) == 1


def test_a_body_that_came_with_its_head_is_counted_too() -> None:
    async def scenario(rig: Rig) -> None:
        client, other = await rig.client(), await rig.client()
        await client.send(b"POST /hold HTTP/1.1\r\nHost: a\r\ncontent-length: 6000\r\n\r\n" + b"x" * 6000)
        await rig.handler.holding()
        assert (rig.handler.sizes, rig.server._shared.bodies.held) == ([6000], 0)  # this handler lets go at once
        await other.send(b"POST /p HTTP/1.1\r\nHost: a\r\ncontent-length: 12000\r\n\r\n" + b"x" * 12_000)
        await no_room(other, "all the memory")

    serve(scenario, bodies=BodyMemory(10_000, 1.0))


def test_what_follows_a_request_and_a_long_head_are_counted() -> None:
    async def scenario(rig: Rig) -> None:
        client, other = await rig.client(), await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        begun = b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 5000
        await client.send(begun)
        await held(rig, len(begun))
        responder.send(200, TEXT, b"x")
        assert (await client.answer()).status == 200
        await held(rig, len(begun))  # it has become a head that is not complete
        await other.send(begun)
        await no_room(other, "one client")
        await client.send(b"\r\n\r\n")
        assert (await client.answer()).status == 200
        await held(rig, 0)

    serve(scenario, bodies=BodyMemory(20_000, 0.4))


def test_where_there_is_no_room_for_what_follows_the_answer_is_the_last() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        await client.send(b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 15_000)
        async with asyncio.timeout(60):
            while not rig.server._shared.bodies.refused["memory"]:
                await asyncio.sleep(0.001)
        responder.send(200, TEXT, b"x")
        assert (await client.answer()).headers[b"connection"] == b"close"

    serve(scenario, bodies=BodyMemory(10_000, 1.0))


def test_a_handler_that_fails_leaves_nothing_held() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(b"POST /bug HTTP/1.1\r\nHost: a\r\ncontent-length: 6000\r\n\r\n" + b"x" * 6000)
        assert (await client.end())[1] == "reset"

    serve(scenario, errors=1)


@pytest.mark.parametrize("head", [COUNTED, CHUNKED])
def test_a_body_that_makes_progress_has_an_end_all_the_same(head: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        began = asyncio.get_running_loop().time()
        await client.send(head)
        answering = asyncio.ensure_future(client.answer())
        while not answering.done():
            await client.send(b"x")
            await asyncio.wait([answering], timeout=0.01)
        answer = answering.result()
        assert (answer.status, answer.error["message"]) == (408, "the body was not complete in 0.2 s")
        assert asyncio.get_running_loop().time() - began >= 0.19

    serve(scenario, body_timeout=5.0, body_total=0.2)


def test_a_body_is_of_no_use_after_its_callers_deadline() -> None:
    async def scenario(rig: Rig) -> None:
        rig.handler.body_within = 0.1
        client = await rig.client()
        await client.send(COUNTED + b"x")
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")

    serve(scenario)
