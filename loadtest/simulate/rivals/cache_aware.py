"""Rule `cache_aware`, the default of vllm-router 0.1.17: where most of the text was routed before, else least requests.

One tree of all texts that were routed, each part of it owned by the engine that was sent it first. A text of which more
than THRESHOLD was routed before goes to the owner of the last part that matches. Every EVERY seconds the texts of each
engine are cut to MOST bytes, those used last. While the requests of two engines differ by more than ABSOLUTE, and by
more than RELATIVE times, all go to the least. What an engine's cache has kept is not asked.

The tree is kept in blocks of 16 tokens, 64 bytes, where the real one splits at any character.
Source: vllm-project/router, src/policies/cache_aware.rs and src/tree.rs; the numbers are those of its command line.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from loadtest.engine.sequence import BLOCK
from loadtest.engine.tokens import BYTES
from loadtest.simulate.rivals.router import Prompt, Worker

THRESHOLD = 0.3
ABSOLUTE = 64  # requests
RELATIVE = 1.5
EVERY = 120.0  # seconds
MOST = 2**25  # bytes of an engine


class CacheAware:
    """`clock`: seconds, for what is forgotten every EVERY."""

    def __init__(self, clock: Callable[[], float] | None = None, most: int = MOST) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._most = most // (BLOCK * BYTES)  # blocks
        self._owners: dict[int, int] = {}
        self._routed: dict[int, OrderedDict[int, None]] = {}  # blocks by engine, the last used at the end
        self._due = self._clock() + EVERY

    def choose(self, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        if self._clock() >= self._due:
            self._due = self._clock() + EVERY
            self._forget()
        worker = self._chosen(prompt, workers)
        routed = self._routed.setdefault(worker.number, OrderedDict())
        for block in reversed(prompt.blocks):  # leaves are forgotten before what they hang on
            self._owners.setdefault(block, worker.number)
            routed[block] = None
            routed.move_to_end(block)
        return worker

    def _chosen(self, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        least = min(workers, key=lambda worker: worker.requests)  # of several the first
        most = max(worker.requests for worker in workers)
        if most - least.requests > ABSOLUTE and most > RELATIVE * least.requests:
            return least
        matched = next((n for n, block in enumerate(prompt.blocks) if block not in self._owners), len(prompt.blocks))
        if matched * BLOCK > THRESHOLD * prompt.tokens:
            return workers[self._owners[prompt.blocks[matched - 1]]]
        return least

    def _forget(self) -> None:
        for number, routed in self._routed.items():
            while len(routed) > self._most:
                block, _ = routed.popitem(last=False)
                if self._owners[block] == number:
                    others = (other for other, blocks in self._routed.items() if block in blocks)
                    heir = next(others, None)
                    if heir is None:
                        del self._owners[block]
                    else:
                        self._owners[block] = heir
