"""Prices of providers and own engines in integers, so that sums of money are exact."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, ClassVar

import msgspec

if TYPE_CHECKING:
    from gateway.core.request.call import Call

MICRO = 1_000_000  # micro-units in one unit of the currency, and the tokens that a price is for
MOST_PRICE = 10_000 * MICRO  # for a million tokens: a hundred times what the dearest APIs take


class Tariff(msgspec.Struct, frozen=True):
    """Micro-units of money for a million tokens of the prompt, of cached prompt, and of the answer.

    Written `0.15/0.60`, prompt and answer, or `0.15/0.075/0.60` with cached prompt between. `parse` and `str` are each
    other's reverse.
    """

    pattern: ClassVar[str] = r"[0-9]{1,5}(?:\.[0-9]{1,6})?(?:/[0-9]{1,5}(?:\.[0-9]{1,6})?){1,2}"
    what: ClassVar[str] = (
        "prices of a million tokens, 0.000001 to 10000: 0.15/0.60 of prompt/answer, or 0.15/0.075/0.60 with cached "
        "prompt, which costs no more, between"
    )

    prompt: int
    cached: int
    completion: int

    @classmethod
    def parse(cls, text: str) -> Tariff | None:
        """The tariff; None where the text is none, a price is out of bounds, or cached prompt costs more."""
        if re.fullmatch(cls.pattern, text) is None:
            return None
        prompt, *between, completion = [int(Decimal(price) * MICRO) for price in text.split("/")]
        cached = between[0] if between else prompt
        good = 1 <= cached <= prompt <= MOST_PRICE and 1 <= completion <= MOST_PRICE
        return cls(prompt, cached, completion) if good else None

    @classmethod
    def meant(cls, text: str) -> Iterator[str]:
        """Tariffs that a malformed text may mean: with currency signs, or spaces."""
        yield re.sub(r"[\s$€]", "", text)

    def __str__(self) -> str:
        prices = (self.prompt, self.completion) if self.cached == self.prompt else msgspec.structs.astuple(self)
        return "/".join(f"{(Decimal(price) / MICRO).normalize():f}" for price in prices)

    def cost(self, prompt: int, cached: int, completion: int) -> int:
        """Return the micro-units of so many tokens, rounded up. `cached`: those of the prompt that were cached."""
        cached = min(cached, prompt)
        return -(-((prompt - cached) * self.prompt + cached * self.cached + completion * self.completion) // MICRO)

    def each(self, call: Call) -> float:
        """Return the price of a token of the call, as a mean over what is booked for prompt and answer."""
        return (call.prompt_tokens * self.prompt + call.output_tokens * self.completion) / call.cost

    def highest(self, call: Call) -> int:
        """Return the highest cost of a call: each byte of its body as a token, beside the estimate of the rest, and the
        longest answer that it allows. A provider counts fields that are no prompt here, such as `response_format`."""
        prompt = call.prompt_tokens + call.leaves
        completion = (call.shaped or call.asked) * call.n
        return -(-(prompt * self.prompt + completion * self.completion) // MICRO)


class HourlyPrice(msgspec.Struct, frozen=True):
    """Micro-units of money for an hour, written `2.10/hour`. `parse` and `str` are each other's reverse."""

    pattern: ClassVar[str] = r"([0-9]{1,5}(?:\.[0-9]{1,6})?)/hour"
    what: ClassVar[str] = "2.10/hour, a price from 0.000001 to 10000"

    micro: int

    @classmethod
    def parse(cls, text: str) -> HourlyPrice | None:
        """The price; None where the text is none, or is out of bounds."""
        match = re.fullmatch(cls.pattern, text)
        micro = 0 if match is None else int(Decimal(match[1]) * MICRO)
        return cls(micro) if 1 <= micro <= MOST_PRICE else None

    @classmethod
    def meant(cls, text: str) -> Iterator[str]:
        """Prices that a malformed text may mean: with currency signs, spaces, or without the hour."""
        number = re.sub(r"[\s$€]|/\s*h(?:our|r)?$", "", text)
        yield f"{number}/hour"

    def __str__(self) -> str:
        return f"{(Decimal(self.micro) / MICRO).normalize():f}/hour"
