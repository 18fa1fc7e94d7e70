"""Console's questions about the policy, its tenants and limits, and calls to try: real sockets, bounded, guarded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.control.console.sources import Sources
from gateway.control.console.tenants import tenant_entries
from gateway.core.admission.limits import LimitBook
from gateway.core.policy.file import decode
from tests.control.parts import TOKEN, Parts, play

POLICY = decode(
    b"tenants: {acme: {weight: 3, limits: {requests: 60/min}, keys: [" + b"ab" * 32 + b"]}, other: {}}\n"
    b"limits: {global: {tokens: 1000/min}}\n"
)
ADMIN = {"authorization": f"Bearer {TOKEN}"}


def test_the_last_change_is_told_without_keys() -> None:
    async def scene(gateway: Parts) -> None:
        assert (await gateway.get("/policy/diff")).status_code == 401
        text = (await gateway.get("/policy/diff", **ADMIN)).text
        assert "-    weight: 3.0" in text.replace("weight: 3\n", "weight: 3.0\n")
        assert "abababab" in text
        assert "ab" * 8 not in text

    play(scene, TOKEN, sources=Sources(previous=lambda: POLICY))


def test_without_a_change_there_is_nothing_to_tell() -> None:
    async def scene(gateway: Parts) -> None:
        assert (await gateway.get("/policy/diff")).text == ""

    play(scene)


def test_what_becomes_of_a_call_is_explained_as_by_gateway_check() -> None:
    async def scene(gateway: Parts) -> None:
        assert (await gateway.get("/policy/explain?tenant=acme&model=m")).status_code == 401
        text = (await gateway.get("/policy/explain?tenant=acme&model=m&class=batch", **ADMIN)).text
        assert text.startswith("tenant ")
        assert "60/min" in text
        for query in ("tenant=nobody&model=m", "model=m", "tenant=acme", "tenant=acme&model=m&x=y"):
            assert (await gateway.get(f"/policy/explain?{query}", **ADMIN)).status_code == 400

    play(scene, TOKEN, POLICY)


def test_tenants_are_told_with_what_their_limits_have_left() -> None:
    book = LimitBook(POLICY)
    book.charge("acme", "batch", "m", 400, 0.0)
    told: dict[str, Any] = dict(tenant_entries(POLICY.tenants, {"other": (3, 2, 50)}, book.buckets(), 0.0))
    assert told["tenant/other"]["order"] == 0
    assert told["tenant/acme"]["share"] == 0.75
    assert told["tenant/acme"]["keys"] == ["ab" * 4]
    assert told["tenant/acme"]["limits"] == [["requests", "", "60/min", 60, 59]]
    assert told["limits"] == [["tokens", "", "1k/min", 1000, 600]]


@asynccontextmanager
async def data_port(answer: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A data port that gives one answer to everybody, and what it was sent."""
    heard: list[bytes] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        heard.append(head + await reader.readexactly(length))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


CHUNK = 'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n'
STREAMED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-weir-engine: e0\r\nserver: x\r\nconnection: close\r\n\r\n"
    + (CHUNK % "a" + CHUNK % "b<i>" + "data: [DONE]\n\n").encode()
)
REFUSED = b"HTTP/1.1 429 No\r\ncontent-length: 4\r\nretry-after: 7\r\nconnection: close\r\n\r\nno, "


def tried(answer: bytes, **fields: Any) -> tuple[list[tuple[str, Any]], list[bytes]]:
    """The events of a trial, and what the data port was sent."""
    found: list[tuple[str, Any]] = []
    sent: list[bytes] = []
    addresses: list[str] = []

    async def scene(gateway: Parts) -> None:
        async with data_port(answer) as (address, heard):
            addresses.append(address)
            body = json.dumps({"model": "m", "prompt": "p"} | fields)
            told = await gateway.client.post(gateway.port.address + "/playground", content=body, timeout=60)
            assert told.status_code == 200
            for event in told.text.strip().split("\n\n"):
                name, data = event.split("\n")
                found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
            sent.extend(heard)

    play(scene, sources=Sources(data=lambda: addresses))
    return found, sent


def test_a_trial_is_a_call_on_the_data_port_and_its_answer_comes_as_events() -> None:
    events, (sent,) = tried(STREAMED, class_name="batch", key="sk-1")
    assert events[0][0] == "head"
    assert events[0][1]["status"] == 200
    assert events[0][1]["headers"] == {"x-weir-engine": "e0"}
    assert "".join(data["text"] for name, data in events if name == "text") == "ab<i>"
    assert (events[-1][0], events[-1][1]["error"]) == ("end", "")
    assert b"authorization: Bearer sk-1\r\n" in sent
    assert b"x-weir-class: batch\r\n" in sent


def test_twenty_trials_run_at_once_and_a_refusal_is_shown() -> None:
    events, sent = tried(REFUSED, calls=20)
    assert len(sent) == 20
    heads = [data for name, data in events if name == "head"]
    assert {data["call"] for data in heads} == set(range(1, 21))
    assert {(data["status"], data["headers"]["retry-after"]) for data in heads} == {(429, "7")}
    assert {data["text"] for name, data in events if name == "text"} == {"no, "}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"model":"m","prompt":"p","calls":21}',
        b'{"model":"m","prompt":"p","key":"a\\r\\nb"}',
        b"x" * 70_000,
    ],
)
def test_a_trial_is_read_strictly(body: bytes) -> None:
    async def scene(gateway: Parts) -> None:
        path = gateway.port.address + "/playground"
        assert (await gateway.client.post(path, content=body)).status_code == 401
        assert (await gateway.client.post(path, content=body, headers=ADMIN)).status_code == 400

    play(scene, TOKEN, sources=Sources(data=lambda: ["http://127.0.0.1:9"]))


def test_nobody_on_the_data_port_is_told() -> None:
    async def scene(gateway: Parts) -> None:
        told = await gateway.client.post(gateway.port.address + "/playground", content=b'{"model":"m","prompt":"p"}')
        assert '"error":""' not in told.text
        assert told.text.startswith("event: end")

    play(scene, sources=Sources(data=lambda: ["http://127.0.0.1:9"]))
