"""Invariants of merged calls: no wait is too long, only calls that are alike are merged, each token is told once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Merge
from gateway.core.request.call import Call
from gateway.relay.batcher import Batcher
from loadtest.lab.dst.answers import prompt_tokens

SLACK = 1e-6  # seconds
ALIKE = 1.1  # times another's time until its deadline that a merged call's may be
FOR_WHAT_WAS_SENT = (400, 404, 413, 422, 500)


class Batches:
    """Witness of one batcher. `wrong` is told, in words, of what is not as it must be."""

    def __init__(self, wrong: Callable[[str], None]) -> None:
        self._wrong = wrong
        self._loop = asyncio.get_running_loop()
        self._joined: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._window = 0.0

    def apply(self, policy: Policy) -> None:
        """A reload: what was begun under another policy goes on."""
        self._window = max(self._window, *policy.batching.values(), 0.0)

    def joining(self, call: Call) -> None:
        """The time and the prompt of a call that may be merged."""
        self._joined[call.request_id] = self._loop.time()
        self._tokens[call.request_id] = prompt_tokens(call.body)  # which is gone when its client is

    def sending(self, calls: Sequence[Call]) -> None:
        """Check that no call has waited for company longer than a window."""
        now = self._loop.time()
        for call in calls:
            waited = now - self._joined[call.request_id]
            if waited > self._window + SLACK:
                self._wrong(f"call {call.request_id} has waited {waited:.4f} s for company")

    def merging(self, calls: Sequence[Call], items: int) -> None:
        """Only what is alike is merged."""
        kinds = {(call.route.path, call.model, call.class_name, call.tenant) for call in calls}
        times = [call.deadline - call.arrived for call in calls]
        if len(kinds) > 1 or items > Merge().max_items or max(times) > ALIKE * min(times):
            self._wrong(f"{items} items of {kinds} are merged, with {min(times):.4f} to {max(times):.4f} s of time")

    def merged(self, calls: Sequence[Call], status: int, prompt_tokens: Sequence[int | None]) -> None:
        """No call is told another's fault, and each token is told once."""
        if status in FOR_WHAT_WAS_SENT:
            self._wrong(f"{len(calls)} calls are told what may be the fault of one: {status}")
        if status == 200:
            told = sum([tokens or 0 for tokens in prompt_tokens])
            read = sum([self._tokens[call.request_id] for call in calls])
            if told != read:
                self._wrong(f"{told} tokens were told to calls that were merged and have {read}")

    def idle(self, batcher: Batcher) -> None:
        """Nothing is asked any more, and nothing may be left."""
        left = batcher.left_over()
        if left:
            self._wrong(f"left behind: batches and their requests: {left}")
