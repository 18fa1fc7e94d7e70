"""What calibration asks of an engine and what it is told: the words its parts speak to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from loadtest.calibrate_fit import Row

Tell = Callable[[float, str], None]  # how much of it is done, and what is being done


class Seen(msgspec.Struct, frozen=True):
    """One request: tokens of its prompt that were not cached, and all; when it was sent, and when each of its tokens
    came, on `time.monotonic`. `together`: tokens for each of these times, 1 but where some came in one event."""

    computed: int
    prompt: int
    sent: float
    tokens: tuple[float, ...]
    together: float = 1.0

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.sent


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an engine's limits; 0: not known yet. `blocks`: of 16 tokens."""

    max_model_len: int
    blocks: int
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0


class Burst(msgspec.Struct, frozen=True):
    """Requests that came together: their sizes (prompt, answer), the seconds to each one's first token, and to the last
    token of all."""

    sizes: list[tuple[int, int]]
    first: list[float]
    seconds: float


class Observed(msgspec.Struct, kw_only=True):
    """All that was seen. `notes`: what could not be, in words."""

    rows: list[Row]
    jitter: float
    limits: Limits
    bursts: list[Burst]
    check: Burst | None = None
    notes: list[str]


class Asks(Protocol):
    """What is observed: requests of about so many tokens, for exactly so many."""

    async def ask(self, prompt: int, output: int) -> Seen: ...
    async def together(self, sizes: Sequence[tuple[int, int]]) -> list[Seen]: ...
