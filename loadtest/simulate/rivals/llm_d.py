"""Rule of llm-d's scheduler and of the Gateway API inference extension, which it is built on: a weighted sum of scores.

    3 x share of the prompt's first blocks that were routed there
    2 x (most waiting - waiting) / (most waiting - least waiting), 1 where all have as many
    2 x (1 - KV cache in use)

The highest sum, of several any. Waiting requests and KV use are the engines' metrics, polled every 50 ms. Blocks have
16 tokens, as the engines' have. Only the first MATCHED of a prompt count. As many are remembered of an engine as its
cache has (`autoTune`).
Source: kubernetes-sigs/gateway-api-inference-extension, pkg/epp/scheduling/framework/plugins (prefix, queue and
kv-cache-utilization scorers, max-score picker); weights of its Helm chart's default-plugins.yaml.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from loadtest.simulate.rivals.router import Prompt, Worker

PREFIX, QUEUE, KV = 3.0, 2.0, 2.0
MATCHED = 256  # blocks


class LlmD:
    """`seed`: of the draw between equal sums."""

    reads = True
    polls = 0.05

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)  # noqa: S311 # a simulation
        self._routed: dict[int, Worker] = {}  # records of its own size, by engine

    def choose(self, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        blocks = prompt.blocks[:MATCHED]
        most = max(worker.waiting for worker in workers)
        spread = most - min(worker.waiting for worker in workers)
        scores = []
        for worker in workers:
            routed = self._routed.setdefault(worker.number, Worker(worker.number, worker.size))
            prefix = routed.cached(blocks) / len(blocks) if blocks else 0.0
            queue = (most - worker.waiting) / spread if spread else 1.0
            scores.append(PREFIX * prefix + QUEUE * queue + KV * (1.0 - worker.kv))
        best = max(scores)
        chosen = self._rng.choice([worker for worker, score in zip(workers, scores, strict=True) if score == best])
        self._routed[chosen.number].keep(blocks, chosen.size)
        return chosen
