"""LoRA adapters of a simulated engine, as vLLM tells of them, and the gateway in front of two such engines."""

from __future__ import annotations

import asyncio

import httpx

from gateway.shared.vllm.answers import LoraLoad, models_from, sample_from
from loadtest.engine.config import sim_config
from loadtest.engine.server import SimServer
from tests.plain_http import NOBODY

ADAPTERS = ("sql", "law")


def asked(model: str, tokens: int = 3) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "Why?"}], "max_tokens": tokens}


def test_it_tells_its_adapters_as_vllm_does() -> None:
    async def scenario() -> None:
        config = sim_config(models=("m",), adapters=ADAPTERS, max_loras=2, speed=10.0)
        async with (
            SimServer(config) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, verify=NOBODY, timeout=60.0) as client,
        ):
            cards = models_from((await client.get("/v1/models")).content)
            assert [(card.id, card.parent) for card in cards] == [("m", None), ("sql", "m"), ("law", "m")]
            assert sample_from((await client.get("/metrics")).content).lora == LoraLoad(2, ())
            call = asyncio.ensure_future(client.post("/v1/chat/completions", json=asked("sql", 4000)))
            async with asyncio.timeout(60):
                while sample_from((await client.get("/metrics")).content).lora != LoraLoad(2, ("sql",)):
                    await asyncio.sleep(0.01)
            call.cancel()
            assert (await client.post("/v1/chat/completions", json=asked("gone"))).status_code == 404

    asyncio.run(scenario())


def test_an_engine_without_adapters_tells_nothing_of_them() -> None:
    async def scenario() -> None:
        async with (
            SimServer(sim_config()) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, verify=NOBODY, timeout=60.0) as client,
        ):
            assert b"lora" not in (await client.get("/metrics")).content

    asyncio.run(scenario())
