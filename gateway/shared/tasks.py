"""Background tasks: those that must live as long as their process begin anew where they fail, and the end of any other
by an error is reported.

A task that must live and does not carries that in its name, so whoever is asked (`/readyz`) finds all that fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

FIRST, LATEST = 0.1, 5.0  # seconds before a task that has failed begins anew: twice as many each time
IN_ORDER = 10.0  # seconds without an error after which it is in order again
FAILING = "failing: "


def lasting(name: str, life: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    """Run `life` until it returns or the task is cancelled, and restart it after any error. The loop's exception
    handler receives the first error, and each that differs from the last one reported. `name` is a noun phrase, for
    operators."""
    return asyncio.get_running_loop().create_task(_kept(name, life), name=name)


async def _kept(name: str, life: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101 # this is one
    pause, told = FIRST, ""
    while True:
        began, mended = loop.time(), loop.call_later(IN_ORDER, task.set_name, name)
        try:
            return await life()
        except Exception as error:  # whatever it is: what must live goes on, and the error is told
            if loop.time() >= began + IN_ORDER:
                pause, told = FIRST, ""
            if repr(error) != told:
                since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                if not told:
                    task.set_name(f"{FAILING}{name}, since {since}: {error!r}")
                told = repr(error)
                loop.call_exception_handler({"message": f"{name} failed, and begins anew", "exception": error})
        finally:
            mended.cancel()
        await asyncio.sleep(pause)
        pause = min(2 * pause, LATEST)


def failing() -> list[str]:
    """Lasting tasks of this loop that have failed and are not in order again: the name of each, since when, and why."""
    names = [task.get_name() for task in asyncio.all_tasks()]
    return sorted(name.removeprefix(FAILING) for name in names if name.startswith(FAILING))


def telling(message: str) -> Callable[[asyncio.Task[Any]], None]:
    """For `add_done_callback` of a task that has an end: tells the loop's exception handler, with `message`, of one
    that has failed."""

    def told(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": message, "exception": error, "task": task})

    return told


async def cancel(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait for their ends, whatever these are. None: there is no task."""
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    await asyncio.gather(*there, return_exceptions=True)


async def done_within(work: Awaitable[Any], within: float) -> bool:
    """Whether `work` is done within so many seconds; else it is cancelled."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within):
            await work
            return True
    return False


async def wait_until(enough: Callable[[], object], news: asyncio.Event, within: float) -> None:
    """Wait until `enough` is true, looking again at each pulse of `news`; for `within` seconds at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within):
            while not enough():
                await news.wait()
