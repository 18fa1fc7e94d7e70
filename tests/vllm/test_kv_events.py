"""Priority scheduling and cache events of a real vLLM that runs one call at a time and has a small cache."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from gateway.core.engines.cache_age import CacheAge
from gateway.core.engines.engine import Engine
from gateway.core.policy.policy import Policy
from gateway.decider.cache_events import KvEvents
from loadtest.processes import Gateway
from tests.e2e.children import post
from tests.priority_order import answered, policy
from tests.vllm.conftest import Place
from tests.vllm.real_vllm import MODEL, Vllm

pytestmark = pytest.mark.vllm
BLOCK = 32  # tokens; on CPU a multiple of it
BLOCKS = 65  # one is set aside
PROMPT = 10 * BLOCK + 1  # tokens: ten full blocks, and one that is always computed again
PRIORITY = ("--scheduling-policy", "priority", "--max-num-seqs", "1")
SMALL = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "512")
WITHIN = 100.0  # seconds


async def ask(vllm: Vllm, number: int) -> int:
    """Have prompt `number` read; how many of its tokens were cached."""
    body = {"model": MODEL, "prompt": [100 + number] * PROMPT, "max_tokens": 1, "temperature": 0}
    status, _, answer = await asyncio.to_thread(post, f"{vllm.url}/v1/completions", body)
    assert status == 200, answer
    details = json.loads(answer)["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


@pytest.fixture(scope="module")
def small(alone: None, place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, str]]:
    """The engine, and the address of its events."""
    with tempfile.TemporaryDirectory(prefix="weir-") as folder:  # a short path, for a unix socket
        url = f"ipc://{folder}/events"
        config = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": url})
        flags = (*SMALL, *PRIORITY, "--enable-prompt-tokens-details", "--kv-events-config", config)
        with Vllm(tmp_path_factory.mktemp("small") / "vllm.log", place.port, *flags) as vllm:
            yield vllm, url


def test_events_tell_what_is_cached(small: tuple[Vllm, str]) -> None:
    uvloop.run(told(*small))


def test_an_important_call_goes_before_what_waits_in_the_engine(small: tuple[Vllm, str], tmp_path: Path) -> None:
    vllm, _ = small
    file = policy(tmp_path, vllm.url, "priority")
    with Gateway(tmp_path / "gateway.log", "--policy", str(file)) as gateway:
        ended = answered(gateway, vllm.url, MODEL, 400)
        message = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        status, _, answer = post(f"{gateway.url}/v1/messages", message, **{"x-weir-class": "batch"})
    assert {status for _, status in ended} == {200}
    assert [name for name, _ in ended].index("interactive") <= 1
    assert status == 200, answer


def test_an_engine_that_ends_is_listened_to_no_longer(small: tuple[Vllm, str]) -> None:
    uvloop.run(ended(*small))


@asynccontextmanager
async def heard(vllm: Vllm, url: str) -> AsyncIterator[CacheAge]:
    """State of the engine's cache, as a listener to its events keeps it."""
    engine, events = Engine("e", vllm.url, Policy()), KvEvents(asyncio.get_running_loop().time)
    events.listen(engine, url)
    cache_age = engine.cache.age
    assert isinstance(cache_age, CacheAge)
    try:
        await until(lambda: cache_age._linked)
        yield cache_age
    finally:
        await events.aclose()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN):
        while not holds():
            await asyncio.sleep(0.01)


async def ended(vllm: Vllm, url: str) -> None:
    async with heard(vllm, url) as cache_age:
        await ask(vllm, 0)
        await until(lambda: cache_age.live)
        vllm.stop()
        await until(lambda: not cache_age.live)
        assert not cache_age.problem


async def told(vllm: Vllm, url: str) -> None:
    clock = asyncio.get_running_loop().time
    async with heard(vllm, url) as cache_age:

        def cached(at: float) -> bool:
            return at >= cache_age.cut

        async def read(number: int) -> None:
            asked = clock()
            await ask(vllm, number)
            await until(lambda: max(cache_age.stored.values()) >= asked)  # its events may come after the answer

        begun = clock()
        await ask(vllm, 0)
        await until(lambda: cache_age.live and cache_age.cached == PROMPT // BLOCK)
        assert (cache_age.cut, cache_age.problem) == (-math.inf, "")
        used = {}
        for number in range(1, 13):  # twice what the cache holds
            await read(number)
            used[number] = clock()
        assert cache_age.cut > begun
        assert BLOCKS - 2 * PROMPT // BLOCK <= cache_age.cached < BLOCKS
        believed = [number for number in used if cached(used[number])]
        assert believed == list(range(believed[0], 13))
        assert 6 <= len(believed) <= 8, "six prompts fit; LATEST evictions are as many blocks as another two have"
        assert await ask(vllm, believed[-5]) == PROMPT - 1
        assert await ask(vllm, believed[-1]) == PROMPT - 1
        assert await ask(vllm, believed[0] - 1) == 0
        assert (await asyncio.to_thread(post, f"{vllm.url}/reset_prefix_cache", {}))[0] == 200
        reset = clock()
        assert not await ask(vllm, believed[-1])
        await until(lambda: cache_age.cut >= reset)
        assert not cached(used[12])
