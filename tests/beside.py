"""Work in threads beside a test, whose errors are the test's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def beside(*works: Callable[[], T]) -> Iterator[list[Future[T]]]:
    """Call each in a thread of its own beside the block, and wait for their ends at the block's.

    Raises the first of their errors; where the block has one too, that, with theirs as notes. The block tells endless
    ones to end, also where it fails."""
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(work) for work in works]
        try:
            yield running
        except BaseException as error:
            wait(running)
            for each in running:
                if (theirs := each.exception()) is not None:
                    error.add_note(f"beside it: {theirs!r}")
            raise
    for each in running:
        each.result()
