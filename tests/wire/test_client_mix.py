"""Random mix of answers, faults and cancellations: nothing is left, and no answer has another's bytes."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from gateway.upstream.client import EngineError, Reply
from gateway.upstream.connection import EngineConnection
from tests.wire.client_harness import CHUNKED, OK, Peer, Rig, Taken, chunk, run

ENDS = ["good", "good", "good", "closing", "extra", "close", "reset", "stall", "garbage"]
CALLERS = ["read", "read", "read", "relay", "leave", "cancel", "pause", "hurry"]
ENDINGS = {"good", "left", "cancelled", "reset", "truncated", "garbage", "stall", "timeout"}


async def engine(peer: Peer, rng: random.Random) -> None:
    """Answers each request with its own body, some times over, until it draws a fault."""
    while True:
        try:
            body = (await peer.request()).partition(b"\r\n\r\n")[2]
        except (asyncio.IncompleteReadError, ConnectionError):
            break
        end = rng.choice(ENDS)
        times = rng.randrange(1, 6)
        head = b"connection: close\r\n" if end == "closing" else b""
        if rng.random() < 0.5 and end != "garbage":
            raw = OK + head + b"content-length: %d\r\n\r\n" % (len(body) * times) + body * times
        else:
            raw = CHUNKED[:-2] + head + b"\r\n" + chunk(body) * times + b"0\r\n\r\n"
        if end == "extra":
            raw += body
        elif end in ("close", "reset", "stall", "garbage"):
            raw = raw[: rng.randrange(len(raw))]
        if end == "garbage":
            raw += b"\0\0\0\0"
        cuts = sorted(rng.choices(range(len(raw) + 1), k=rng.randrange(6)))
        await peer.send(*(raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) if a < b))
        if end == "reset":
            peer.reset()
            break
        if end in ("close", "closing"):
            break
    peer.close()


async def caller(rig: Rig, number: int, how: str, rng: random.Random) -> str:
    """One request; how it ended."""
    body = b"<%d>" % number
    sending = rig.sending(body, timeout=0.001 if how == "hurry" else 0.05)
    if how == "cancel":
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        sending.cancel()
    try:
        reply = await sending
    except EngineError as error:
        return error.kind
    except asyncio.CancelledError:
        return "cancelled"
    try:
        return await taken(reply, body, how)
    finally:
        reply.close()


async def taken(reply: Reply, body: bytes, how: str) -> str:
    if how == "leave":
        return "left"
    if how == "read":
        try:
            whole = await reply.read(1000)
        except EngineError as error:
            return error.kind
        assert whole == body * (len(whole) // len(body))
        return "good"
    got = Taken().of(reply)
    if how == "pause":
        reply.pause()
        await asyncio.sleep(0.002)
        reply.resume()
    ended = await got.end()
    assert (body * 6).startswith(got.body.rstrip(b"\0"))
    return "good" if ended is None else ended.kind


def alive() -> int:
    gc.collect()
    return sum(type(thing) in (EngineConnection, Reply) for thing in gc.get_objects())


def mix(seed: int, calls: int) -> set[str]:
    before = alive()
    rng = random.Random(seed)
    endings: set[str] = set()

    async def scenario(rig: Rig) -> None:
        engines: list[asyncio.Task[None]] = []

        async def accept() -> None:
            while True:
                peer = await rig.peers.get()
                engines.append(asyncio.create_task(engine(peer, random.Random(rng.random()))))

        accepting = asyncio.create_task(accept())
        tasks = []
        for number in range(calls):
            tasks.append(asyncio.create_task(caller(rig, number, rng.choice(CALLERS), rng)))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003]))
        async with asyncio.timeout(60):
            endings.update(await asyncio.gather(*tasks))
        assert rig.client.active == 0
        assert rig.client.idle <= 3
        await rig.client.aclose()
        accepting.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(accepting, *engines, return_exceptions=True)
        for task in engines:
            assert task.exception() is None

    run(scenario, max_idle=3, idle_for=0.01, stall_timeout=0.03)
    assert endings <= ENDINGS
    assert alive() == before
    return endings


@pytest.mark.slow
def test_after_a_long_mix_of_everything_nothing_is_left() -> None:
    endings: set[str] = set()
    for seed in range(10):
        endings |= mix(seed, 400)
    assert endings == ENDINGS
