"""`gateway check --probe`: one health check of each engine of a policy, as a gateway would make it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from gateway.core.policy.policy import Budget, EngineEntry
from gateway.decider.telemetry import MODELS_WITHIN, Questions, Unanswered, unmeasured
from gateway.shared.files.checked import listed
from gateway.shared.vllm.answers import AnswerError, sample_from
from gateway.upstream.names import Names

WITHIN = 2.0  # seconds for /health: more than a running gateway gives, since a new connection is made
AT_ONCE = 32  # engines


def probe(engines: Sequence[EngineEntry], api_keys: Mapping[str, str]) -> list[tuple[bool, str]]:
    """Probe each engine, in order: whether it is well, and the models that it serves or the reason of its trouble."""
    return asyncio.run(_all(engines, api_keys))


async def _all(engines: Sequence[EngineEntry], api_keys: Mapping[str, str]) -> list[tuple[bool, str]]:
    names, room = Names(), asyncio.Semaphore(AT_ONCE)

    async def one(entry: EngineEntry) -> tuple[bool, str]:
        async with room:
            return await _one(entry, Questions(entry.url, api_keys.get(entry.url), names))

    return await asyncio.gather(*(one(entry) for entry in engines))


async def _one(entry: EngineEntry, questions: Questions) -> tuple[bool, str]:
    try:
        await questions.health(WITHIN)
        has = sorted(card.id for card in await questions.models(MODELS_WITHIN))
        assumed = await _assumed(entry, questions)
    except Unanswered as error:
        return False, f"is down: {error}"
    finally:
        questions.close()
    missing = sorted(set(entry.models) - set(has))
    if missing:
        return False, f"is up, and does not have {listed(missing)}; it has {listed(has) or 'no model'}"
    return True, f"is up; serves {listed(sorted(entry.models) or has) or 'no model'}{assumed}"


async def _assumed(entry: EngineEntry, questions: Questions) -> str:
    """Text on the budget that a gateway would assume of an engine without vLLM's metrics; empty if the engine has
    them."""
    try:
        sample_from(await questions.metrics(WITHIN))
    except (Unanswered, AnswerError) as error:
        budget = Budget()
        capacity, slots = budget.capacity, entry.max_concurrency or budget.max_concurrency
        why = unmeasured(error) or str(error)
        return f"; tells no metrics, as a vLLM would ({why}): {capacity} tokens of KV cache, {slots} calls are assumed"
    return ""
