"""Runs of many seeds on every core, each with a verdict of its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice
from typing import TypeVar

from loadtest.die_with_parent import tie

CHUNK = 20  # seeds a worker takes at a time

T = TypeVar("T")


def explore(
    seeds: range, workers: int, run: Callable[[range], T], proceeds: Callable[[], bool] = lambda: True
) -> Iterator[tuple[int, T]]:
    """`run` (a module's function) of all these seeds, in so many processes; yields the number of seeds that are done
    more, and its result for them. Once `proceeds` says no, none are begun: those that were are the first of `seeds`."""
    chunks = iter([seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)])
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_begun, initargs=(os.getpid(),)) as pool:
        running = {pool.submit(run, chunk): chunk for chunk in islice(chunks, 2 * workers)}
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for done in ended:
                yield len(running.pop(done)), done.result()
            if proceeds():
                running |= {pool.submit(run, chunk): chunk for chunk in islice(chunks, len(ended))}


def _begun(parent: int) -> None:
    """A worker ends with its parent, and looks for garbage seldom: a simulation makes little."""
    tie(parent)
    gc.set_threshold(50_000, 20, 50)
