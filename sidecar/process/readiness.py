"""Readiness of an engine: polling from the start of its process until it serves, with deadlines.

There are no fixed pauses. A question that fails is repeated, soon at first, every second at last. The deadline moves
with the start's progress (`core.start_progress`): the duration of a start depends on model, disk and compilation, but a
start that works goes on. A process that has ended is given up at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from sidecar.core.start_progress import StartProgress
from sidecar.process.engine_api import ApiError, EngineApi

FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0  # seconds between two questions
LOOK_EVERY = 10.0  # seconds between two looks from outside, or a quarter of a shorter stall


async def ready(
    api: EngineApi,
    progress: StartProgress,
    limit: float | None,
    clock: Callable[[], float],
    *,
    dead: Awaitable[object],
    look: Callable[[], Awaitable[None]],
    prompt: str = "hello",
    requests: int = 1,
) -> None:
    """Until the engine is healthy, serves its name and has answered `requests` warm-up requests.

    `progress` is told of what happens here, and by `look` of what can be seen from outside, every few seconds and once
    more before the start is given up. `dead` is over when the process is; a future is left as it is. Raises ApiError:
    `timeout` when `progress` says so or after `limit` seconds in all, `lost` as soon as `dead` is over, and whatever
    fails of the warm-up. The message says what was waited for, and the last progress.
    """
    began = clock()
    latest = math.inf if limit is None else began + limit
    end_of_it = asyncio.ensure_future(dead)
    steps = asyncio.ensure_future(_steps(api, progress, clock, prompt, requests))
    looks = asyncio.ensure_future(_looks(look, min(LOOK_EVERY, progress.stall / 4)))
    try:
        while not steps.done():
            if end_of_it.done():
                raise ApiError("lost", f"the process ended before it was ready: {progress.awaits}")
            end = min(progress.ends_at, latest)
            if clock() >= end:
                if clock() < latest:
                    await look()
                if steps.done() or end < min(progress.ends_at, latest):
                    continue
                now = clock()
                raise ApiError(
                    "timeout", f"not ready after {now - began:.1f} s, {progress.words(now)}: {progress.awaits}"
                )
            await asyncio.wait((steps, end_of_it), timeout=end - clock(), return_when=asyncio.FIRST_COMPLETED)
        steps.result()
    finally:
        ours = [steps, looks] if end_of_it is dead else [steps, looks, end_of_it]
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)


async def _looks(look: Callable[[], Awaitable[None]], every: float) -> None:
    while True:
        await look()
        await asyncio.sleep(every)


async def _steps(
    api: EngineApi, progress: StartProgress, clock: Callable[[], float], prompt: str, requests: int
) -> None:
    async def serves() -> None:
        names = await api.models()
        if api.served_name not in names:
            raise ApiError("status", f"/v1/models: it serves {list(names)[:5]}, not {api.served_name!r}")

    for check, what in ((api.health, "it is healthy"), (serves, "it serves its name")):
        pause = FIRST_PAUSE
        while True:
            try:
                await check()
                break
            except ApiError as error:
                progress.awaits = str(error)
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, LAST_PAUSE)
        progress.reached(what, clock())
    for number in range(requests):
        progress.awaits = f"warm-up request {number + 1} of {requests} is not answered"
        await api.warm_up(prompt, 1)
        progress.reached(f"it has answered warm-up request {number + 1}", clock())
