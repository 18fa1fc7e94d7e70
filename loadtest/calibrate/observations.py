"""Observations of an engine under calibration: requests, their tokens' times, limits, rows of the fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

Tell = Callable[[float, str], None]  # how much of it is done, and what is being done


class ObservedRequest(msgspec.Struct, frozen=True):
    """Request that was timed. `computed`: tokens of its prompt that were not cached; `prompt`: all tokens of it. `sent`
    and `tokens` are times on `time.monotonic`: of sending, and of each arrival of tokens. `together`: tokens per
    arrival, 1 unless several came in one event."""

    computed: int
    prompt: int
    sent: float
    tokens: tuple[float, ...]
    together: float = 1.0

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.sent

    @property
    def pairs(self) -> float:
        """Pairs of a computed token of its prompt and a token before it."""
        return self.computed * (self.prompt - self.computed / 2)


class WorkRow(msgspec.Struct, frozen=True):
    """`seconds` for so much work. `pairs`: of a prompt token and one before it; `ways`: through the server, which a
    first token has behind it."""

    seconds: float
    steps: float
    prompt: float = 0.0
    decoded: float = 0.0
    context: float = 0.0
    pairs: float = 0.0
    ways: float = 0.0

    @property
    def work(self) -> tuple[float, ...]:
        return self.steps, self.prompt, self.decoded, self.context, self.pairs, self.ways


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an engine by their names in a profile, as far as they are known; 0: not known yet."""

    max_model_len: int = 0
    num_gpu_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Requests: when each was sent, in seconds from the first; their sizes (prompt, answer); the seconds from then to
    each one's first token, and from the first request to the last token of all."""

    at: list[float]
    sizes: list[tuple[int, int]]
    first: list[float]
    seconds: float


class Observed(msgspec.Struct, kw_only=True):
    """All that was seen. `bursts` came at once, `traffic` did not. `notes`: what could not be seen, in words."""

    rows: list[WorkRow]
    jitter: float
    limits: EngineLimits
    bursts: list[Burst]
    traffic: list[Burst]
    check: Burst | None = None
    notes: list[str]


class Asks(Protocol):
    """Requests to observe: of about so many tokens, for exactly so many."""

    async def ask(self, prompt: int, output: int) -> ObservedRequest: ...
    async def together(self, sizes: Sequence[tuple[int, int]]) -> list[ObservedRequest]: ...
