"""Request batching before a simulated engine process: split answers, a real 400, real aborts.

The batcher has an exchange of its own here, without admission or retries: one request on the engine's connection pool.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.core.answer.json_usage import JSONUsage
from gateway.core.policy.traffic import Merge
from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.call import Call
from gateway.relay.batcher import Batcher, Exchanged
from gateway.upstream.client import Client, ClientSettings, parse_origin
from loadtest.processes import total, until
from tests.e2e.children import SimEngine
from tests.pooled import EMBEDDINGS, RERANK, SCORE, asked

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

RULE = Merge(window=0.02, max_items=64, max_tokens=100_000)
MERGED = {"embeddings": RULE, "rerank": RULE, "score": RULE}


class World:
    """A batcher on one engine. `sent` counts requests; `ids` numbers the calls, whose ids the answers carry."""

    def __init__(self, url: str) -> None:
        self.client = Client(parse_origin(url), ClientSettings())
        self.batching = MERGED
        self.batcher = Batcher(lambda: self.batching, self.exchange, asyncio.get_running_loop().time, BodyMemory())
        self.sent = 0
        self.ids = 0

    async def exchange(self, call: Call) -> Exchanged:
        self.sent += 1
        headers = b"content-type: application/json\r\nx-request-id: %b\r\n" % call.request_id.encode()
        path = call.route.path.encode()
        reply = await self.client.send(b"POST", path, headers, call.body, timeout=20.0)
        with closing(reply):
            body, usage = await reply.read(1 << 26), JSONUsage()
            usage.whole(body)
            return Exchanged(status=reply.status, body=body, engine="sim", prompt_tokens=usage.prompt_tokens)

    def call(self, path: str, body: dict[str, Any]) -> Call:
        self.ids += 1
        now = asyncio.get_running_loop().time()
        return asked(path, {"model": "sim"} | body, now=now, request_id=f"call{self.ids}")

    async def together(self, calls: list[Call]) -> list[Exchanged]:
        pieces = [piece for call in calls if (piece := self.batcher.piece(call)) is not None]
        assert len(pieces) == len(calls)
        return list(await asyncio.gather(*map(self.batcher.answer, pieces)))


def real(url: str, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World(url)
        with closing(world.client):
            await scenario(world)
        assert not world.batcher.tasks
        assert world.client.active == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    uvloop.run(main())


def read(body: bytes) -> dict[str, Any]:
    """An answer without what may differ: when it was made, and the tokens, which are estimates of shares."""
    answer: dict[str, Any] = json.loads(body)
    return answer | {"created": None, "usage": list(answer["usage"])}


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        (EMBEDDINGS, [{"input": f"text {number}"} for number in range(64)]),
        (EMBEDDINGS, [{"input": ["é" * number, "日本"], "encoding_format": "base64"} for number in range(1, 17)]),
        (EMBEDDINGS, [{"input": [number, number + 1], "dimensions": 8} for number in range(1, 17)]),
        (RERANK, [{"query": "q", "documents": [f"a{n}", f"b{n}", f"c{n}"], "top_n": n % 4} for n in range(16)]),
        (SCORE, [{"text_1": f"a{number}", "text_2": f"b{number}"} for number in range(16)]),
        (SCORE, [{"text_1": "a", "text_2": [f"b{number}", f"c{number}"]} for number in range(16)]),
    ],
    ids=["texts", "base64", "ids", "rerank", "pairs", "one_against_several"],
)
def test_each_caller_gets_what_the_engine_answers_it_alone(
    engine: SimEngine, path: str, bodies: list[dict[str, Any]]
) -> None:
    async def scenario(world: World) -> None:
        calls = [world.call(path, body) for body in bodies]
        parts = await world.together(calls)
        assert world.sent <= 4
        assert world.batcher.merged >= len(calls) - 2
        for call, part in zip(calls, parts, strict=True):
            alone = await world.exchange(call)
            assert (part.status, read(part.body)) == (200, read(alone.body))
            assert json.loads(part.body)["id"].endswith(call.request_id)
        told = [part.prompt_tokens for part in parts if part.prompt_tokens is not None]
        real_tokens = sum([json.loads((await world.exchange(call)).body)["usage"]["prompt_tokens"] for call in calls])
        assert sum(told) == real_tokens, "nothing of what the engine counted is lost, and nothing is added"

    real(engine.url, scenario)


def test_an_input_too_long_fails_nobody_else(tmp_path: Path) -> None:
    engine = SimEngine(tmp_path / "engine.log", "--max-model-len", "128", "--max-num-batched-tokens", "2048")

    async def scenario(world: World) -> None:
        bodies = [{"input": f"text {number}"} for number in range(20)]
        bodies[7] = {"input": "much too long " * 100}
        calls = [world.call(EMBEDDINGS, body) for body in bodies]
        parts = await world.together(calls)
        assert [part.status for part in parts] == [200] * 7 + [400] + [200] * 12
        assert "maximum context length is 128" in json.loads(parts[7].body)["error"]["message"]
        for call, part in zip(calls, parts, strict=True):
            if part.status == 200:
                assert read(part.body) == read((await world.exchange(call)).body)

    with engine.child:
        real(engine.url, scenario)


def test_the_engine_is_told_when_the_last_caller_has_left(engine: SimEngine) -> None:
    engine.faults(slow=1000.0)

    async def scenario(world: World) -> None:
        tasks = [asyncio.create_task(world.together([world.call(EMBEDDINGS, {"input": f"t{n}"})])) for n in range(9)]

        async def waiting(expected: int) -> bool:
            def seen() -> bool:
                return total(engine.url + "/metrics", "vllm:num_requests_waiting") == expected

            return await asyncio.to_thread(until, seen, 60.0) is not None

        assert await waiting(8), "the first went alone and is in the engine's step; eight merged ones are behind it"
        for task in tasks[:8]:
            task.cancel()
        await asyncio.wait(tasks[:8])
        assert (world.client.active, await waiting(8)) == (1, True), "the ninth still wants the merged request"
        tasks[8].cancel()
        assert await waiting(0)
        await asyncio.wait(tasks)

    real(engine.url, scenario)
