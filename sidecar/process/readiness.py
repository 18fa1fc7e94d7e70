"""Readiness of an engine: polling from the start of its process until it serves, with deadlines.

There are no fixed pauses. A look that fails is repeated, soon at first, every second at last. The deadline moves with
the start's progress: the duration of a start depends on model, disk and compilation, but a start that works goes on. A
process that has ended is given up at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sidecar.process.engine_api import ApiError, EngineApi

FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0  # seconds between two looks


async def ready(
    api: EngineApi,
    progress: Callable[[], float],
    stall: float,
    hard: float | None,
    clock: Callable[[], float],
    *,
    dead: Awaitable[object],
    prompt: str = "hello",
    requests: int = 1,
) -> None:
    """Until the engine is healthy, serves its name and has answered `requests` warm-up requests.

    `progress` tells when it last got on (a line of its log, say), as `clock` gives seconds; what happens here counts
    too. `dead` is over when the process is; a future is left as it is. Raises ApiError: `timeout` after `stall` seconds
    without progress or `hard` seconds in all, `lost` as soon as `dead` is over, and whatever fails of the warm-up. The
    message says what was waited for.
    """
    began = clock()
    stage = _Stage(began)
    end_of_it = asyncio.ensure_future(dead)
    steps = asyncio.ensure_future(_steps(api, stage, clock, prompt, requests))
    try:
        while not steps.done():
            last = max(stage.since, progress())
            end = last + stall if hard is None else min(last + stall, began + hard)
            if end_of_it.done():
                raise ApiError("lost", f"the process ended before it was ready: {stage.why}")
            if (now := clock()) >= end:
                took = f"not ready after {now - began:.1f} s, {now - last:.1f} s of them without progress"
                raise ApiError("timeout", f"{took}: {stage.why}")
            await asyncio.wait((steps, end_of_it), timeout=end - now, return_when=asyncio.FIRST_COMPLETED)
        steps.result()
    finally:
        ours = [steps] if end_of_it is dead else [steps, end_of_it]
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)


class _Stage:
    """Progress of a start: the time of the last, and what it waits for."""

    __slots__ = ("since", "why")

    def __init__(self, since: float) -> None:
        self.since = since
        self.why = "nothing was asked yet"


async def _steps(api: EngineApi, stage: _Stage, clock: Callable[[], float], prompt: str, requests: int) -> None:
    async def serves() -> None:
        names = await api.models()
        if api.served_name not in names:
            raise ApiError("status", f"/v1/models: it serves {list(names)[:5]}, not {api.served_name!r}")

    for check in (api.health, serves):
        pause = FIRST_PAUSE
        while True:
            try:
                await check()
                break
            except ApiError as error:
                stage.why = str(error)
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, LAST_PAUSE)
        stage.since = clock()
    for number in range(requests):
        stage.why = f"warm-up request {number + 1} of {requests} is not answered"
        await api.warm_up(prompt, 1)
        stage.since = clock()
