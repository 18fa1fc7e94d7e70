"""Signal handlers for a while, restored afterwards."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Have `handler` take these signals."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def hastened(numbers: Iterable[int], first: Callable[[], None]) -> Iterator[None]:
    """Have the first of these signals call `first` and do no more; the next one is KeyboardInterrupt."""
    came = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True
        first()

    with handled(numbers, hold):
        yield
