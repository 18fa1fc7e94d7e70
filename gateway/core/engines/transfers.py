"""Transfers of KV cache to and from one engine: what it may do, how fast it fetches, whether it failed lately.

The rate is in prompt tokens a second, because no engine says how many bytes a token has. `now` is monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque

from gateway.shared.protocol import Role

RATE = 50_000.0  # prompt tokens/s until fetches teach better: 8 GB/s of 160 KiB a token
REMEMBERED = 16  # fetches
LEAST_TOKENS = 256  # a smaller fetch says more of the step that it waits for
BELIEVED = 30.0  # seconds after which a low rate is doubted, and an engine that failed may be asked again


class Transfers:
    """`role`: whether the engine reads prompts for others, answers calls, or both. `group`: name of the engines that
    can exchange KV caches with it; empty: it exchanges none."""

    __slots__ = ("_failed_at", "_learned_at", "_rate", "_rates", "group", "role")

    def __init__(self) -> None:
        self.role: Role = "both"
        self.group = ""
        self._rate = RATE
        self._rates: deque[float] = deque(maxlen=REMEMBERED)
        self._learned_at = -math.inf
        self._failed_at = -math.inf

    @property
    def answers(self) -> bool:
        """Whether calls are sent to it while it has room; else only where nobody who answers has."""
        return self.role != "prefill" or not self.group

    @property
    def reads_for_others(self) -> bool:
        """Whether it may read prompts whose answers another engine writes."""
        return bool(self.group) and self.role != "decode"

    def rate(self, now: float) -> float:
        """Prompt tokens a second that it fetches: the median of the last fetches. A low rate is forgotten after a
        while, because no call would fetch again and show that the network is better."""
        return self._rate if now - self._learned_at < BELIEVED else max(self._rate, RATE)

    def fetched(self, tokens: int, seconds: float, now: float) -> None:
        """Learn from a fetch of so many prompt tokens."""
        if tokens >= LEAST_TOKENS:
            self._rates.append(tokens / max(seconds, 1e-4))
            self._rate = sorted(self._rates)[len(self._rates) // 2]
            self._learned_at = now

    def failed(self, now: float) -> None:
        """Note that the engine did not read a prompt for another engine."""
        self._failed_at = now

    def shunned(self, now: float) -> bool:
        """Whether it failed so lately that no prompt is sent to it."""
        return now - self._failed_at < BELIEVED
