"""Blocking calls in threads, beside an event loop: a disk that hangs costs one thread and holds up nothing else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(
    call: Callable[[], T], *, within: float | None = None, raises: tuple[type[Exception], ...] = (OSError,)
) -> T:
    """What `call` returns, or raises of `raises`. Raises TimeoutError after `within` seconds; it is not ended then,
    since nothing can end it, but nobody waits for it, not even the end of the process."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()  # from now on no waiter's cancellation touches it
    # A daemon, not an executor's thread: those are joined when the process ends.
    threading.Thread(target=_answer, args=(call, answer, raises), name="blocking-call", daemon=True).start()
    async with asyncio.timeout(within):
        return await asyncio.wrap_future(answer)


def _answer(call: Callable[[], T], answer: concurrent.futures.Future[T], raises: tuple[type[Exception], ...]) -> None:
    try:
        answer.set_result(call())
    except raises as error:
        answer.set_exception(error)
    except BaseException as error:  # a bug: whoever waits is told, and the thread's end shows where
        answer.set_exception(error)
        raise
