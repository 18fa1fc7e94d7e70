"""Latency model of an engine's step, and the profile of its constants.

    step = base + prefill x prompt tokens + decode x sequences that decode + context x KV tokens they read   [seconds]
           + attention x pairs of a prompt token and one before it

and a seeded jitter of a few per cent. Before that a request is with the server around the engine (HTTP, tokenizer, the
way to EngineCore), which the step cannot express: `front` seconds in turn, for it is one thread, so that a burst queues
there; and `delay` seconds more, of both ways and all spent on the way in, in which others are served as well. These two
and `attention` are 0 unless they were fitted. With a tiny model on a CPU they are most of an idle engine's TTFT.

`profiles.yaml` has the profiles of known engines, and the derivation of their constants.
"""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Annotated

import msgspec

from gateway.shared.files.units import Count, Share, Unit

MOMENT = Unit(
    what="a time such as 86ns, 32.5us, 7.4ms",
    scales=(("ns", Decimal("1e-9")), ("us", Decimal("1e-6")), ("ms", Decimal("1e-3")), ("s", Decimal(1))),
)
Moment = Annotated[float, MOMENT, msgspec.Meta(ge=0, le=60)]
Limit = Annotated[Count, msgspec.Meta(ge=1, le=1_000_000_000)]

MOST_JITTER = 3.0  # standard deviations


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Time constants of an engine, and its limits where the command line says nothing. In memory in seconds.

    `base`: of every step; `prefill`: of each prompt token in it; `decode`: of each sequence that decodes in it;
    `context`: of each KV token that these read; `attention`: of each prompt token and each one before it; `jitter`:
    standard deviation, as a share of the step; `front`: of each request before the scheduler has it, one after the
    other; `delay`: of each request, beside others; `num_gpu_blocks`: of 16 tokens; `weights`: bytes on each GPU.
    """

    base: Moment
    prefill: Moment
    decode: Moment
    context: Moment
    attention: Moment = 0.0
    jitter: Annotated[Share, msgspec.Meta(ge=0, le=0.3)] = 0.02  # steps take time, whatever is drawn
    front: Moment = 0.0
    delay: Moment = 0.0
    num_gpu_blocks: Annotated[Count, msgspec.Meta(ge=2, le=1_000_000_000)]
    max_num_seqs: Limit
    max_num_batched_tokens: Limit
    max_model_len: Limit
    weights: Annotated[Count, msgspec.Meta(ge=0, le=10_000_000_000_000)] = 0

    def exact(self, prompt: int, decoded: int, context: int, pairs: int = 0) -> float:
        """Seconds one step takes, without jitter: with so many prompt tokens, sequences that decode, KV tokens these
        read, and pairs of a prompt token and one before it. A step that computed nothing costs `base`."""
        fixed = self.base + self.prefill * prompt + self.attention * pairs
        return fixed + self.decode * decoded + self.context * context

    def factor(self, rng: random.Random) -> float:
        """Draw the jitter of one step."""
        if not self.jitter:
            return 1.0
        return 1.0 + self.jitter * min(MOST_JITTER, max(-MOST_JITTER, rng.gauss(0.0, 1.0)))


class Front:
    """The server around one engine, on the way in. Times are the driver's clock."""

    def __init__(self, profile: Profile, speed: float = 1.0) -> None:
        self._front = profile.front / speed
        self._delay = profile.delay / speed
        self._free = 0.0

    def reaches(self, now: float) -> float:
        """Return the time at which the scheduler has a request that came at `now`. Call this in the order in which
        requests came."""
        self._free = max(self._free, now) + self._front
        return self._free + self._delay
