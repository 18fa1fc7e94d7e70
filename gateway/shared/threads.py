"""Blocking calls in threads, beside an event loop: a disk that hangs costs one thread and holds up nothing else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
A = TypeVarTuple("A")


async def in_thread(
    call: Callable[[*A], T],
    *arguments: *A,
    within: float | None = None,
    raises: tuple[type[Exception], ...] = (OSError,),
) -> T:
    """The value that `call` returns. Raises the errors of `raises` that it raises, and TimeoutError after `within`
    seconds. The call is not ended then, since nothing can end it, but nobody waits for it, not even the end of the
    process."""
    answer = begin_in_thread(lambda: call(*arguments), raises)
    async with asyncio.timeout(within):
        return await asyncio.wrap_future(answer)


async def to_its_end(call: Callable[[*A], T], *arguments: *A) -> T:
    """`in_thread`, also for a caller that is cancelled: the call has ended then too, and what it wrote is whole."""
    task = asyncio.ensure_future(in_thread(call, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


def begin_in_thread(call: Callable[[], T], raises: tuple[type[Exception], ...]) -> concurrent.futures.Future[T]:
    """Begin the call; its value or error comes in the future. An error that is not of `raises` is a bug: it is also
    raised in the thread, so that the thread's end shows the place."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()  # from now on no waiter's cancellation touches it
    # A daemon, not an executor's thread: those are joined when the process ends.
    threading.Thread(target=_answer, args=(call, answer, raises), name="blocking-call", daemon=True).start()
    return answer


def _answer(call: Callable[[], T], answer: concurrent.futures.Future[T], raises: tuple[type[Exception], ...]) -> None:
    try:
        answer.set_result(call())
    except raises as error:
        answer.set_exception(error)
    except BaseException as error:  # a bug: whoever waits is told, and the thread's end shows where
        answer.set_exception(error)
        raise
