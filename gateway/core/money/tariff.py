"""Prices of a provider in integers, so that sums of money are exact."""

from __future__ import annotations

import msgspec

from gateway.core.policy.providers import Prices
from gateway.core.request.call import Call

MICRO = 1_000_000  # micro-units in one unit of the currency, and the tokens that a price is for


class Tariff(msgspec.Struct, frozen=True):
    """Micro-units of money for a million tokens."""

    prompt: int
    cached: int
    completion: int

    def cost(self, prompt: int, cached: int, completion: int) -> int:
        """Return the micro-units of so many tokens, rounded up. `cached`: those of the prompt that were cached."""
        cached = min(cached, prompt)
        return -(-((prompt - cached) * self.prompt + cached * self.cached + completion * self.completion) // MICRO)

    def highest(self, call: Call) -> int:
        """Return the highest cost of a call: each byte of its body as a token, beside the estimate of the rest, and the
        longest answer that it allows. A provider counts fields that are no prompt here, such as `response_format`."""
        prompt = call.prompt_tokens + call.leaves
        completion = (call.shaped or call.asked) * call.n
        return -(-(prompt * max(self.prompt, self.cached) + completion * self.completion) // MICRO)


def tariff_of(prices: Prices) -> Tariff:
    prompt = round(prices.prompt * MICRO)
    cached = prompt if prices.cached is None else round(prices.cached * MICRO)
    return Tariff(prompt, cached, round(prices.completion * MICRO))
