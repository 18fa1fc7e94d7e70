"""Rules of rivals by the names that `gateway simulate --compare` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loadtest.simulate.rivals.cache_aware import CacheAware
from loadtest.simulate.rivals.llm_d import LlmD
from loadtest.simulate.rivals.load import Direct, LeastRequests, RoundRobin
from loadtest.simulate.rivals.prefill_work import LeastPrefillWork, LMetric
from loadtest.simulate.rivals.router import Rule

RULES: Mapping[str, Callable[[], Rule]] = {
    "direct": Direct,
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "cache_aware": CacheAware,
    "llm_d": LlmD,
    "lmetric": LMetric,
    "lpwl": LeastPrefillWork,
}
