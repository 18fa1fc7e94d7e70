"""Statistics of the engine in the shape of its /metrics: counters and fixed-bucket histograms.

Times are seconds of the driver's clock. `Histogram.observe` is on the path of every request and is one bisection.
"""

from __future__ import annotations

from bisect import bisect_left

TIMES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
BATCH = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts per bucket (the last one is +Inf) and the sum of what was observed."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


def token_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_model_len`, as vLLM buckets token counts."""
    steps = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    return tuple(step for step in steps if step <= max_model_len)


class Stats:
    """Everything since the engine started."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.success = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.first_token = Histogram(FIRST)
        self.between_tokens = Histogram(BETWEEN)
        self.end_to_end = Histogram(TIMES)
        self.queue = Histogram(TIMES)
        self.inference = Histogram(TIMES)
        self.prefill = Histogram(TIMES)
        self.decode = Histogram(TIMES)
        self.iteration_tokens = Histogram(BATCH)
        self.request_prompt = Histogram(tokens)
        self.request_generation = Histogram(tokens)
