"""Prefix-cache events of simulated engines, as vLLM sends them by ZeroMQ. Some are lost on the way.

What the gateway then takes for cached is compared with what is. Nothing that decides is looked at here: which blocks an
engine stores and evicts is the engine's own doing.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from gateway.core.engines.cache_age import CacheAge
from gateway.core.engines.engine import Engine
from loadtest.engine.cache_log import WORD, CacheLog
from loadtest.simulate.memory_engine import MemoryEngine


class KvEventFeed:
    """Events of one engine on their way to the gateway. `lost`: the share of messages that do not come."""

    def __init__(
        self, engine: Engine, memory: MemoryEngine, lost: float, seed: str, wrong: Callable[[str], None]
    ) -> None:
        self._cache_age = engine.cache.age = CacheAge()
        self._id = engine.id
        self._memory = memory
        self._lost = lost
        self._rng = random.Random(seed)  # noqa: S311 # faults of a simulation
        self._wrong = wrong
        self._number = 0
        self._linked = False
        self._missed = False  # something that its process told before this
        self._heard = False  # something of this process
        self._process: object = None
        self._began = 0.0
        self._log = CacheLog()

    def deliver(self, now: float) -> None:
        """Send what has happened in the engine until now. Called once everything at this moment has happened."""
        up = self._memory.condition != "dead"
        if up and self._process is not self._memory.engine:
            self._begins(now)
        if up != self._linked:
            self._linked = up
            self._cache_age.link(up)
        batch = self._log.batch(now) if up else None
        if batch is None:
            return
        number, self._number = self._number, self._number + 1
        # A new process whose first message to come has by chance the number that the last one's next would have had is
        # not told apart, here or anywhere.
        if self._rng.random() < self._lost or (not self._heard and number == self._cache_age.expected):
            self._missed = True
            return
        seen_again = number < self._cache_age.expected
        self._heard = True
        self._cache_age.take((b"", number.to_bytes(8, "big"), batch), now)
        if seen_again and self._cache_age.cut < self._began:
            self._wrong(f"{self._id} is another process, and what its last one has read is taken for cached")
        self._compare(now)

    def _begins(self, now: float) -> None:
        """Run as another process: numbers from 0, and an empty cache unless it is only now listened to."""
        self._process = engine = self._memory.engine
        blocks = engine.scheduler.blocks
        self._log = blocks.log = CacheLog()
        self._number = 0
        self._heard = False
        self._began = now
        self._missed = bool(blocks.cached)

    def _compare(self, now: float) -> None:
        cache_age, blocks = self._cache_age, self._memory.engine.scheduler.blocks
        cached = {block & WORD for block in blocks.cached}
        believed = set(cache_age.stored)
        if not believed <= cached:
            self._wrong(f"{len(believed - cached)} blocks that {self._id} has evicted are taken for cached")
        if not self._missed and believed != cached:
            self._wrong(f"{len(cached - believed)} blocks that {self._id} has cached are not known to be")
        if not cache_age.live or cache_age.problem or cache_age.cut > now:
            self._wrong(f"after a message of {self._id}: {cache_age!r}, problem {cache_age.problem!r}")
