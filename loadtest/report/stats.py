"""Latencies of one request, and the statistics of many: definitions, each a formula and its source.

TTFT, TPOT, ITL and E2E are those of `vllm bench serve` (vLLM 0.32), read off its source: the clocks in
`vllm/benchmarks/lib/endpoint_request_func.py` (`async_request_openai_completions`, `..._chat_completions`,
`_run_pooling_request`), the rest in `calculate_metrics` of `vllm/benchmarks/serve.py`. In its words, per request:

- `ttft`: from `start_time`, just before the request is posted, to the first event that carries a choice;
- `itl`: each later such event, since the one before; events without a choice (usage, `[DONE]`) are not timed;
- `latency` (E2EL): from `start_time` to the last event with a choice, not to the end of the answer;
- `tpot`: `(latency - ttft) / (output tokens - 1)`; with one token or none there is no TPOT in the list, and 0 is taken
  where a goodput bound is checked; without a usage and a tokenizer the answer counts as one token;
- embeddings and rerank: `ttft` and `latency` are both the time until the whole answer is here;
- requests that failed have no latencies at all; percentiles are numpy's (linear between closest ranks).

Here every latency counts from the *intended* send time instead, so that a client that could not keep up, or waited for
the server before it sent the next request (coordinated omission), does not hide what its users would have felt.
`latency_of` takes either clock, and reports show vLLM's own figures, from the send time, beside ours. One more
difference: an answer that broke off or carried an error counts as failed here even if tokens had come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from loadtest.report.records import RequestResult, Slo

LAG_BOUND = 0.005  # seconds of sender's lag at p99, above which a run says more about the sender than the server
OK = "ok"


class Latency(msgspec.Struct, frozen=True, gc=False):
    """Seconds. `tpot` None: fewer than two tokens, or no stream. Inter-token latencies are the result's `gaps`."""

    ttft: float
    e2e: float
    tpot: float | None


def latency_of(result: RequestResult, start: float) -> Latency:
    """The latencies of an answer that is ok, counted from `start`: its `at`, or its `sent` for vLLM's own figures."""
    if not result.first_token:
        whole = result.finished - start
        return Latency(whole, whole, None)
    gaps = result.gaps
    decoding = sum(gaps) if isinstance(gaps, tuple) else gaps.total  # latency - ttft, whatever the clock began at
    tokens = result.completion_tokens
    return Latency(
        result.first_token - start,
        result.first_token + decoding - start,
        decoding / (tokens - 1) if tokens > 1 else None,
    )


def consistent(result: RequestResult, latency: Latency) -> bool:
    """Whether the times of an answer that is ok can be true: each token after the one before, the first after the
    request."""
    gaps = result.gaps
    return 0.0 <= latency.ttft <= latency.e2e and (not isinstance(gaps, tuple) or not gaps or min(gaps) >= 0.0)


def met(slo: Slo | None, latency: Latency) -> bool:
    """Whether an answer that is ok is also in time: at its bound counts, as in vLLM's `--goodput`."""
    if slo is None:
        return True
    return (
        (slo.ttft is None or latency.ttft <= slo.ttft)
        and (slo.tpot is None or (latency.tpot or 0.0) <= slo.tpot)
        and (slo.e2e is None or latency.e2e <= slo.e2e)
    )


def slo_of(slos: Sequence[Slo], class_name: str) -> Slo | None:
    """The SLO of a class: its own, else the one for every class, else none."""
    found = None
    for slo in slos:
        if slo.class_name == class_name:
            return slo
        if not slo.class_name:
            found = found or slo
    return found


# -- of many ----------------------------------------------------------------------------------------------------------


class Interval(msgspec.Struct, frozen=True):
    """A mean of `samples` repeats, and half the width of its confidence interval: None of one repeat alone."""

    mean: float
    half: float | None
    samples: int


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's: mean +- t(n - 1) s / sqrt(n), s the sample standard deviation (over n - 1). Right where repeats are
    independent and roughly normal, which means and shares of long runs are. Raises ValueError for no values."""
    count = len(values)
    if not count:
        raise ValueError("an interval of no values")
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Interval(mean, student_t(count - 1, confidence) * deviation / math.sqrt(count), count)


def student_t(freedom: int, confidence: float = 0.95) -> float:
    """The t with P(|T| < t) = `confidence` for `freedom` degrees of freedom (at least 1), to nine digits: bisection
    of the closed form for whole degrees (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if odd:
        return 2.0 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def quantile(values: Iterable[float], q: float) -> float:
    """Return the quantile of a sample, without interpolation; 0 if the sample is empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def jain(shares: Iterable[float]) -> float:
    """Jain's fairness index (Jain, Chiu, Hawe 1984): (sum x)^2 / (n sum x^2), 1 where all have the same, 1/n where one
    has all. 1 of nobody, and where nobody has anything."""
    values = list(shares)
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0
