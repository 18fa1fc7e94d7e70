"""Rules by the prompt tokens that an engine has still to read: LMetric and LPWL.

What an engine has cached is what was routed to it, as much as its cache holds, those blocks used last; the tokens of a
prompt beyond that are new. An engine's pending tokens are the new ones of prompts it has not answered yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.engine.sequence import BLOCK
from loadtest.simulate.rivals.router import Prompt, Worker


def work(prompt: Prompt, worker: Worker) -> int:
    """Prompt tokens that the engine has to read before this one's first token."""
    return worker.pending + max(0, prompt.tokens - BLOCK * worker.cached(prompt.blocks))


class LMetric:
    """Least new prefill tokens, those pending among them, times the requests there; of several the first.

    An idle engine counts nothing, whatever it would have to read. Source: Zhang et al., "Simple is Better:
    Multiplication May Be All You Need for LLM Request Scheduling", OSDI '26, arXiv 2603.15202.
    """

    reads = True
    polls = 0.0

    def choose(self, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        return min(workers, key=lambda worker: work(prompt, worker) * worker.requests)


class LeastPrefillWork:
    """LPWL, least prefill work left: pending tokens and the new ones; of several the one with the fewest requests, then
    each in turn. Source: gahow/agentic-kvc, analysis/lpwl_5policy_600s.md."""

    reads = True
    polls = 0.0

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        self._turn += 1

        def left(worker: Worker) -> tuple[int, int, int]:
            return work(prompt, worker), worker.requests, (worker.number - self._turn) % len(workers)

        return min(workers, key=left)
