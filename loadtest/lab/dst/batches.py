"""What must hold of merged calls: nobody waits too long, only what is alike is merged, each token is told once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.core.policy.policy import Policy
from gateway.relay.batcher import Batcher
from loadtest.lab.dst.answers import prompt_tokens

SLACK = 1e-6  # seconds
ALIKE = 1.1  # times another's time until its deadline that a merged call's may be
FOR_WHAT_WAS_SENT = (400, 404, 413, 422, 500)


class Batches:
    """Watches one batcher. `wrong` is told, in words, of what is not as it must be."""

    def __init__(self, batcher: Batcher, wrong: Callable[[str], None]) -> None:
        self._batcher = batcher
        self._wrong = wrong
        self._loop = asyncio.get_running_loop()
        self._joined: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._window = 0.0
        self._items = 0
        for name in ("_join", "_run", "_together"):
            vars(batcher)[name] = getattr(self, name)

    def apply(self, policy: Policy) -> None:
        """A reload: what was begun under another policy goes on."""
        for rule in (policy.batching.embeddings, policy.batching.rerank):
            if rule is not None:
                self._window = max(self._window, rule.window)
                self._items = max(self._items, rule.max_items)

    def _join(self, piece: Any) -> Any:
        self._joined[piece.call.request_id] = self._loop.time()
        self._tokens[piece.call.request_id] = prompt_tokens(piece.call.body)  # which is gone when its client is
        return type(self._batcher)._join(self._batcher, piece)

    async def _run(self, batch: Any) -> None:
        now = self._loop.time()
        for place in batch.places:
            waited = now - self._joined[place.piece.call.request_id]
            if waited > self._window + SLACK:
                self._wrong(f"call {place.piece.call.request_id} has waited {waited:.4f} s for company")
        await type(self._batcher)._run(self._batcher, batch)

    async def _together(self, merged: Any, pieces: list[Any]) -> Any:
        calls = [piece.call for piece in pieces]
        kinds = {(call.route.path, call.model, call.class_name, call.tenant) for call in calls}
        items = sum(piece.items for piece in pieces)
        times = [call.deadline - call.arrived for call in calls]
        if len(kinds) > 1 or items > self._items or max(times) > ALIKE * min(times):
            self._wrong(f"{items} items of {kinds} are merged, with {min(times):.4f} to {max(times):.4f} s of time")
        parts = await type(self._batcher)._together(self._batcher, merged, pieces)
        if parts is not None and parts[0].exchanged.status in FOR_WHAT_WAS_SENT:
            self._wrong(f"{len(calls)} calls are told what may be the fault of one: {parts[0].exchanged.status}")
        if parts is not None and parts[0].exchanged.status == 200:
            told = sum([part.prompt_tokens or 0 for part in parts])
            read = sum([self._tokens[call.request_id] for call in calls])
            if told != read:
                self._wrong(f"{told} tokens were told to calls that were merged and have {read}")
        return parts

    def idle(self) -> None:
        """Nothing is asked any more, and nothing may be left."""
        batcher = self._batcher
        left = [line.batch for line in batcher._lines.values() if line.batch is not None]
        if left or batcher.tasks:
            self._wrong(f"left behind: batches {left}, tasks {batcher.tasks}")
