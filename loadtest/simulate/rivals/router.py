"""Router of a rival: its rule chooses an engine for each call, which is sent there at once and waits inside the engine.

A rule sees what the real one sees and no more: its own records of what it has routed, and the engines' metrics where it
polls them, as old as the last poll. No router here refuses, holds back, or tries again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from loadtest.clients.calls import ClientCall, Try
from loadtest.engine.api.checks import ApiError, Limits
from loadtest.engine.sequence import BLOCK
from loadtest.load.workload import Planned
from loadtest.report.records import TokenGaps
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.memory_requests import Taker, nothing, read


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """Prompt as a router sees it: chained hashes of its full blocks of BLOCK tokens, its length in tokens; `who`: the
    conversation it is part of, or its number."""

    blocks: Sequence[int]
    tokens: int
    who: str = ""


class Worker:
    """Record of one engine, as a router keeps it. `requests`: sent there and unanswered; `pending`: uncached prompt
    tokens of those without a first token; `size`: blocks of KV cache; `kv` (0..1) and `waiting`: the engine's metrics
    at the last poll."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.requests = 0
        self.pending = 0
        self.kv = 0.0
        self.waiting = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, blocks: Sequence[int]) -> int:
        """Count the first blocks that the records have."""
        # What comes after a block is always forgotten before it, so those that are known are the first ones.
        return bisect_left(blocks, True, key=lambda block: block not in self._blocks)

    def keep(self, blocks: Sequence[int], most: int) -> None:
        """Record what was routed here, `most` blocks in all, those used last."""
        kept = self._blocks
        for block in reversed(blocks):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > most:
            kept.popitem(last=False)


Choose = Callable[[Prompt, Sequence[Worker]], Worker]  # chooses an engine for a prompt, which is sent there


class Rule(msgspec.Struct, frozen=True):
    """Rule of a router. `begin`: gives a function that chooses, with records of its own. `reads`: whether it looks at
    prompts; `polls`: seconds between two polls of the engines' metrics, 0: it does not look at them."""

    begin: Callable[[], Choose]
    reads: bool = True
    polls: float = 0.0


class Router:
    """A rule before engines, in the gateway's place."""

    def __init__(self, engines: Sequence[MemoryEngine], rule: Rule) -> None:
        self._engines = engines
        self._rule, self._choose = rule, rule.begin()
        self._workers = [Worker(number, engine.config.profile.num_gpu_blocks) for number, engine in enumerate(engines)]
        self._loop = asyncio.get_running_loop()
        if rule.polls:
            self._poll()

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        who = call.conversation or str(call.index)
        prompt = prompt_of(call, who, self._engines[0].limits) if self._rule.reads else Prompt((), 0, who)
        worker = self._choose(prompt, self._workers)
        tried.upstream = 1
        answer = RoutedAnswer(client_call, worker, prompt)
        try:
            leave = self._engines[worker.number].post(call.path, call.body, answer)
        except ConnectionRefusedError:
            answer.failed("reset", "connection refused")
            return nothing

        def left() -> None:
            answer.close()
            leave()

        return left

    def paced(self, taker: Taker, gaps: TokenGaps) -> None:
        """For the engines' `Pace`: what a stream's inter-token latencies were goes to the try it answers."""
        if isinstance(taker, RoutedAnswer):
            taker.client_call.tried.gaps = gaps

    def _poll(self) -> None:
        for worker, engine in zip(self._workers, self._engines, strict=True):
            worker.kv, _, worker.waiting = engine.reading()
        self._loop.call_later(self._rule.polls, self._poll)


def prompt_of(call: Planned, who: str, limits: Limits) -> Prompt:
    """The prompt of a call; of several texts the blocks are those of the first. One that engines refuse has none."""
    try:
        sequences = read(call.path, call.body, limits).sequences
    except ApiError:
        return Prompt((), 0, who)
    first = sequences[0]
    return Prompt(first.hashes[: first.prompt // BLOCK], sum([each.prompt for each in sequences]), who)


class RoutedAnswer:
    """An engine's answer on its way to the client, and what the router holds for it."""

    __slots__ = ("_held", "_pending", "client_call")

    def __init__(self, client_call: ClientCall, worker: Worker, prompt: Prompt) -> None:
        self.client_call = client_call
        self._held: Worker | None = worker
        self._pending = max(0, prompt.tokens - BLOCK * worker.cached(prompt.blocks))
        worker.requests += 1
        worker.pending += self._pending
        worker.keep(prompt.blocks, worker.size)

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None:
        self._read()
        self.client_call.head(status, {b"content-type": content_type})
        self.client_call.body(data)

    def data(self, data: bytes) -> None:
        self.client_call.body(data)

    def end(self) -> None:
        self.close()
        self.client_call.over(True)

    def failed(self, kind: Literal["reset", "truncated"], message: str) -> None:
        self.close()
        self.client_call.over(False)

    def close(self) -> None:
        """The engine has it no longer; what is held for it is given back, once."""
        self._read()
        worker, self._held = self._held, None
        if worker is not None:
            worker.requests -= 1

    def _read(self) -> None:
        """Note that its prompt has been read."""
        if self._held is not None:
            self._held.pending -= self._pending
            self._pending = 0
