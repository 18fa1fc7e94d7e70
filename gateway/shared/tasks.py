"""Background tasks that run until they are cancelled: any other end of one is a bug, and is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def telling(message: str) -> Callable[[asyncio.Task[Any]], None]:
    """For `add_done_callback`: tells the loop's exception handler, with `message`, of a task that has failed."""

    def told(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": message, "exception": error, "task": task})

    return told
