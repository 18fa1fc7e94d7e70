"""Money that calls on own engines cost: the time of an engine with calls, shared by them.

Each call pays for the time in proportion to the KV-cache tokens that it holds. So together they pay for all the time in
which the engine had calls, and exactly once. Time without calls is charged to nobody.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from gateway.core.money.tariff import HourlyPrice
from gateway.core.request.call import Call

Payer = tuple[str, str, str]  # provider, tenant, model
Count = Callable[[Payer, int, int, float], None]  # takes micro-units and tokens

HOME = "own engines"  # in the place of a provider's name, which has no space
HOUR = 3600.0


class Meter:
    """Meter of one engine. `reading`: micro-units that each held token has cost since the engine had no call."""

    __slots__ = ("_at", "held", "reading")

    def __init__(self) -> None:
        self._at = -math.inf
        self.reading = 0.0
        self.held = 0

    def change(self, tokens: int, price: float, now: float) -> float:
        """Hold so many tokens more or less from now on. Return the reading. `price`: micro-units an hour."""
        if now > self._at:  # a grant's time may be a little older than the last end's
            if self.held:
                self.reading += price * (now - self._at) / HOUR / self.held
            self._at = now
        self.held += tokens
        return self.reading


class EngineMeters:
    """Meters of the engines that have calls. `price`: of an engine's hour; None: none. Another price holds from the
    next call that an engine gets or ends."""

    def __init__(self) -> None:
        self.price: HourlyPrice | None = None
        self._meters: dict[str, Meter] = {}
        self._rests: defaultdict[Payer, float] = defaultdict(float)  # of a micro-unit, not counted yet

    @property
    def held(self) -> dict[str, int]:
        """Tokens that calls hold on each engine that has any."""
        return {engine: meter.held for engine, meter in self._meters.items()}

    def change(self, engine: str, tokens: int, now: float) -> float:
        """Hold so many tokens more or less on an engine. Return what each held token has cost there."""
        meter = self._meters.get(engine)
        if meter is None:
            meter = self._meters[engine] = Meter()
        reading = meter.change(tokens, 0 if self.price is None else self.price.micro, now)
        if not meter.held:
            del self._meters[engine]
        return reading

    def rounded(self, payer: Payer, micro: float) -> int:
        """Return the nearest whole number. What is missing or too much goes on to the payer's next call."""
        exact = self._rests[payer] + micro
        whole = round(exact)
        self._rests[payer] = exact - whole
        return whole


class EngineTime:
    """Share of one call in an engine's time. It is paid once, by `end`, whether the call is answered or fails.

    `usage`, `tokens` and `unbilled` are those of Spending, and say which tokens count.
    """

    __slots__ = (
        "_count", "_engine", "_held", "_meters", "_reading", "live", "payer", "tokens", "unbilled", "usage"
    )  # fmt: skip

    def __init__(self, count: Count, call: Call, meters: EngineMeters, engine: str, tokens: int, now: float) -> None:
        self._count = count
        self._meters = meters
        self._engine = engine
        self._held = max(1, tokens)
        self._reading = meters.change(engine, self._held, now)
        self.payer = (HOME, call.tenant, call.model)
        self.usage: tuple[int, int, int] | None = None
        self.tokens: int | None = None
        self.unbilled = False
        self.live = True

    def end(self, now: float) -> None:
        """Count what the call has cost. A second time changes nothing."""
        if not self.live:
            return
        self.live = False
        micro = self._held * (self._meters.change(self._engine, -self._held, now) - self._reading)
        prompt, _, completion = self.usage or (self.tokens or 0, 0, 0)
        tokens = 0 if self.unbilled else max(0, prompt + completion)
        self._count(self.payer, self._meters.rounded(self.payer, micro), tokens, now)
