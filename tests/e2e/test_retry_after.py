"""Retry-After under steady overload: a client that returns at that time is admitted."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from loadtest.clients.answer import Answer
from loadtest.processes import until
from tests.e2e.children import SimEngine
from tests.e2e.traffic import CHAT, QUICK, Site, Tree, body
from tests.raw_calls import chat, exchange

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

TOKENS = 20  # 0.15 s on the engine
RATE = 26.0  # calls per second; two at a time are half of that
PROBES = 60
REFUSED = {"deadline_unreachable", "queue_full", "shed"}


def policy(engine: SimEngine) -> Tree:
    only = {"engines": [{"url": engine.url, "max_concurrency": 2}]}
    classes = {"interactive": {}, "default": {"ttft": "1s", "deadline": "5s", "max_queue": 64}}
    return {"classes": classes, "service_tiers": {}, "fleet": QUICK | only}


async def flood(url: str, ended: list[Answer], over: asyncio.Event) -> None:
    """Newcomers at a steady rate, who do not come back."""
    parts, rng = urlsplit(url), random.Random(1)
    async with asyncio.TaskGroup() as group:
        while not over.is_set():
            answer = Answer()
            ended.append(answer)
            request = chat(
                parts.hostname or "", "sim", f"call {rng.random()}", max_tokens=TOKENS, stream=rng.random() < 0.5
            )
            group.create_task(exchange(parts.hostname or "", parts.port or 0, request, answer, limit=60.0))
            await asyncio.sleep(rng.expovariate(RATE))


async def probe(client: httpx.AsyncClient, number: int) -> list[httpx.Response]:
    """One client that obeys, once: its first answer, and the one after the time it was told."""
    asked = body(max_tokens=TOKENS, messages=[{"role": "user", "content": f"probe {number}"}])
    answers = [await client.post(CHAT, json=asked)]
    if "retry-after-ms" in answers[0].headers:
        await asyncio.sleep(int(answers[0].headers["retry-after-ms"]) / 1000)
        answers.append(await client.post(CHAT, json=asked))
    return answers


def test_who_comes_back_when_it_was_told_to_is_let_in(tmp_path: Path, engine: SimEngine) -> None:
    async def main(site: Site) -> tuple[list[list[httpx.Response]], list[Answer]]:
        ended: list[Answer] = []
        over = asyncio.Event()
        others = asyncio.create_task(flood(site.gateway.url, ended, over))
        await asyncio.sleep(4.0)
        async with httpx.AsyncClient(base_url=site.gateway.url, timeout=60.0, trust_env=False) as client:
            probes = []
            for number in range(PROBES):
                probes.append(asyncio.create_task(probe(client, number)))
                await asyncio.sleep(0.2)
            found = await asyncio.gather(*probes)
        over.set()
        await others
        return found, ended

    with Site(tmp_path, policy(engine), engine) as site:
        probes, others = asyncio.run(main(site))
        assert until(site.empty, 60.0) is not None
    for answers in probes:
        for answer in answers:
            assert answer.status_code in (200, 503)
            if answer.status_code == 503:
                assert answer.headers["x-weir-reason"] in REFUSED
                assert ("retry-after-ms" in answer.headers) != ("x-should-retry" in answer.headers)
    outcomes = Counter(answer.outcome for answer in others)
    assert outcomes["deadline_unreachable"] > 0.2 * outcomes.total(), "it is overload"
    returned = [answers for answers in probes if len(answers) == 2]
    admitted = [answers for answers in returned if answers[1].status_code == 200]
    waits = sorted(int(answers[0].headers["retry-after-ms"]) for answers in returned)
    told = f"{len(admitted)} of {len(returned)} let in, after {waits[0]}..{waits[-1]} ms; {outcomes}"
    assert len(returned) >= 20, told
    assert len(admitted) >= 0.8 * len(returned), told
