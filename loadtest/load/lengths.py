"""Length distributions that a scenario names: prompts and answers in tokens, sessions in turns.

The Structs are sections of scenario files (`scenario.py`), so their annotations are the gateway's kinds of values.
"""

from __future__ import annotations

import math
import random
from typing import Annotated, ClassVar

import msgspec

from gateway.shared.files.units import Count, Factor

Tokens = Annotated[Count, msgspec.Meta(ge=1, le=10_000_000)]


class Uniform(msgspec.Struct, frozen=True, rename={"least": "from", "most": "to"}):
    """Every whole number between two, both included, is as likely as another.

    `from`: Smallest number.
    `to`: Largest number.
    """

    least: Tokens
    most: Tokens


class LogNormal(msgspec.Struct, frozen=True):
    """Length whose logarithm is normal: as prompts and answers of people are, a few very long.

    `median`: Median.
    `sigma`: Standard deviation of the logarithm.
    """

    median: Tokens
    sigma: Annotated[Factor, msgspec.Meta(ge=0, le=5)] = 0.6


class Length(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of whole numbers: one of `constant` to `empirical`. A bare number is constant.

    `constant`: One number.
    `uniform`: Between two numbers.
    `log_normal`: A median and few very long.
    `geometric`: Mean of a geometric distribution.
    `empirical`: List to draw from, each entry as likely.
    `least`: Smallest number; smaller draws become this.
    `most`: Largest number; larger draws become this.
    """

    shorthand: ClassVar[str] = "constant"

    constant: Tokens | None = None
    uniform: Uniform | None = None
    log_normal: LogNormal | None = None
    geometric: Annotated[Factor, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    empirical: tuple[Tokens, ...] | None = None
    least: Tokens = 1
    most: Tokens = 1_000_000

    def draw(self, rng: random.Random) -> int:
        """Draw a length, `least` to `most`. Raises ValueError where no distribution is given."""
        if self.constant is not None:
            drawn = self.constant
        elif self.log_normal is not None:
            drawn = round(self.log_normal.median * math.exp(self.log_normal.sigma * rng.gauss(0.0, 1.0)))
        elif self.empirical:
            drawn = self.empirical[int(rng.random() * len(self.empirical))]
        elif self.uniform is not None:
            drawn = rng.randint(self.uniform.least, self.uniform.most)
        elif self.geometric is not None:
            drawn = _geometric(self.geometric, rng)
        else:
            raise ValueError("a length of no distribution")
        return min(self.most, max(self.least, drawn))


def _geometric(mean: float, rng: random.Random) -> int:
    """1, 2, ...: the tries until the first success where each succeeds with 1/mean, by inversion."""
    return 1 if mean == 1.0 else 1 + int(rng.expovariate(1.0) / -math.log1p(-1.0 / mean))
