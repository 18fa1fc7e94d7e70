"""Rules of rivals by the names that `gateway simulate --compare` takes; `cache_aware.py` has that of vllm-router.

`direct`, `round_robin` and `least_requests` look at no prompt. LMetric and LPWL go by the prompt tokens that an engine
has still to read. What an engine has cached is what was routed to it, as much as its cache holds, those blocks used
last; the tokens of a prompt beyond that are new. An engine's pending tokens are the new ones of prompts it has not
answered yet.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from itertools import count

from loadtest.engine.sequence import BLOCK
from loadtest.simulate.rivals.cache_aware import CacheAware
from loadtest.simulate.rivals.router import Choose, Prompt, Rule, Worker

PREFIX, QUEUE, KV = 3.0, 2.0, 2.0  # of llm-d
MATCHED = 256  # blocks
SPILL_ON_LOAD = "spill_on_load"  # no rule of a router: each policy with providers, by `inprocess.spill_on_load`


def direct(prompt: Prompt, workers: Sequence[Worker]) -> Worker:
    """No router, and nobody who takes turns: each conversation, and each call that is none, goes to the engine that
    chance has given it, as where clients are told one address each."""
    return workers[zlib.crc32(prompt.who.encode()) % len(workers)]


def round_robin() -> Choose:
    """The next engine's turn, as nginx and a Kubernetes Service do it."""
    turns = count()
    return lambda prompt, workers: workers[next(turns) % len(workers)]


def least_requests() -> Choose:
    """The engine with the fewest unanswered requests, as nginx's least_conn and HAProxy's leastconn; of several the one
    that was chosen longest ago."""
    last: dict[int, int] = {}
    calls = count()

    def choose(prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        worker = min(workers, key=lambda one: (one.requests, last.get(one.number, -1)))
        last[worker.number] = next(calls)
        return worker

    return choose


def work(prompt: Prompt, worker: Worker) -> int:
    """Prompt tokens that the engine has to read before this one's first token."""
    return worker.pending + max(0, prompt.tokens - BLOCK * worker.cached(prompt.blocks))


def lmetric(prompt: Prompt, workers: Sequence[Worker]) -> Worker:
    """Least new prefill tokens, those pending among them, times the requests there; of several the first.

    An idle engine counts nothing, whatever it would have to read. Source: Zhang et al., "Simple is Better:
    Multiplication May Be All You Need for LLM Request Scheduling", OSDI '26, arXiv 2603.15202.
    """
    return min(workers, key=lambda worker: work(prompt, worker) * worker.requests)


def lpwl() -> Choose:
    """Least prefill work left: pending tokens and the new ones; of several the one with the fewest requests, then each
    in turn. Source: gahow/agentic-kvc, analysis/lpwl_5policy_600s.md."""
    turns = count(1)

    def choose(prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        turn = next(turns)

        def left(worker: Worker) -> tuple[int, int, int]:
            return work(prompt, worker), worker.requests, (worker.number - turn) % len(workers)

        return min(workers, key=left)

    return choose


def llm_d(seed: int = 0) -> Choose:
    """llm-d's scheduler, and the Gateway API inference extension on which it is built: a weighted sum of scores.

        3 x share of the prompt's first blocks that were routed there
        2 x (most waiting - waiting) / (most waiting - least waiting), 1 where all have as many
        2 x (1 - KV cache in use)

    The highest sum, of several any; `seed` draws. Waiting requests and KV use are the engines' metrics, polled every
    50 ms. Blocks have 16 tokens, as the engines' have. Only the first MATCHED of a prompt count. As many are remembered
    of an engine as its cache has (`autoTune`).
    Source: kubernetes-sigs/gateway-api-inference-extension, pkg/epp/scheduling/framework/plugins (prefix, queue and
    kv-cache-utilization scorers, max-score picker); weights of its Helm chart's default-plugins.yaml.
    """
    rng = random.Random(seed)  # noqa: S311 # a simulation
    records: dict[int, Worker] = {}  # of its own size, by engine

    def choose(prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        blocks = prompt.blocks[:MATCHED]
        most = max(worker.waiting for worker in workers)
        spread = most - min(worker.waiting for worker in workers)
        scores = []
        for worker in workers:
            routed = records.setdefault(worker.number, Worker(worker.number, worker.size))
            prefix = routed.cached(blocks) / len(blocks) if blocks else 0.0
            queue = (most - worker.waiting) / spread if spread else 1.0
            scores.append(PREFIX * prefix + QUEUE * queue + KV * (1.0 - worker.kv))
        best = max(scores)
        chosen = rng.choice([worker for worker, score in zip(workers, scores, strict=True) if score == best])
        records[chosen.number].keep(blocks, chosen.size)
        return chosen

    return choose


RULES: Mapping[str, Rule] = {
    "direct": Rule(lambda: direct, reads=False),
    "round_robin": Rule(round_robin, reads=False),
    "least_requests": Rule(least_requests, reads=False),
    "cache_aware": Rule(lambda: CacheAware().choose),
    "llm_d": Rule(llm_d, polls=0.05),
    "lmetric": Rule(lambda: lmetric),
    "lpwl": Rule(lpwl),
}
