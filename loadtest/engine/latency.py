"""How long a step takes, and the engines it is known for.

    step = base + prefill x prompt tokens + decode x sequences that decode + context x KV tokens they read   [seconds]
           + attention x pairs of a prompt token and one before it

and a seeded jitter of a few per cent. Before that a request is with the server around the engine (HTTP, tokenizer, the
way to EngineCore), which the step cannot express: `front` seconds in turn, for it is one thread, so that a burst queues
there; and `delay` seconds more, of both ways and all spent on the way in, in which others are served as well. These two
and `attention` are 0 unless they were fitted. With a tiny model on a CPU they are most of an idle engine's TTFT.

Derivation of a profile, for a model of P parameters in 2 bytes and L layers of
h KV heads of size d, on N GPUs with memory bandwidth B (bytes/s, 75 % of the data sheet is reached) and F (FLOP/s):

    base     2P / (N x 0.75B) to read every weight once, + 1 ms of launch, sampling and scheduling (+ all-reduce)
    prefill  2P / (N x 0.5F): compute bound, half of peak is what chunked prefill of a few thousand tokens reaches
    decode   10-20 us a sequence: sampling, scheduler and detokeniser work that grows with the batch
    context  2 x L x h x d x 2 bytes / (N x 0.75B): attention reads the KV of every token once

Blocks: (80 GB x 0.92, vLLM's default share - weights - 4 GiB for activations and CUDA graphs) / (16 tokens of KV).
Batch limits are vLLM's defaults for its API server: 1,024 sequences and 8,192 tokens on GPUs of 70 GiB and more,
256 and 2,048 on the A100 and on small ones. `max_model_len` is what operators commonly cap these models at, not what
they could do.
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
    """What an engine's time goes into, and its limits where the command line says nothing. In memory in seconds.

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
        """One step's jitter."""
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
        """When the scheduler has a request that came at `now`; requests are told in the order in which they came."""
        self._free = max(self._free, now) + self._front
        return self._free + self._delay


def profiles() -> dict[str, Profile]:
    """The known engines by name."""
    return {
        # Llama 3.1 8B, 16.1 GB of weights, 128 KiB of KV per token. A100 SXM 80 GB: 2.04 TB/s, 312 TFLOP/s.
        "a100-8b": Profile(
            base=0.0115,
            prefill=103e-6,
            decode=15e-6,
            context=86e-9,
            num_gpu_blocks=25_600,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_model_len=32_768,
            weights=16_100_000_000,
        ),
        # The same model. H100 SXM 80 GB: 3.35 TB/s, 989 TFLOP/s.
        "h100-8b": Profile(
            base=0.0074,
            prefill=32.5e-6,
            decode=12e-6,
            context=52e-9,
            num_gpu_blocks=25_600,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            max_model_len=32_768,
            weights=16_100_000_000,
        ),
        # Llama 3.1 70B on four: 35.3 GB of weights and 80 KiB of KV per token on each; 160 all-reduces of 15 us a step;
        # prefill at 40 % of peak, for the same all-reduces.
        "h100-70b-tp4": Profile(
            base=0.0174,
            prefill=89e-6,
            decode=20e-6,
            context=33e-9,
            num_gpu_blocks=28_672,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            max_model_len=32_768,
            weights=35_300_000_000,
        ),
        # The two-layer Qwen3 the real vLLM is tested with, on two CPU cores; 1 GiB of KV at 512 bytes a token. Fitted
        # by `gateway calibrate --budget 60s`, which explains 92 % of what it saw: Python's part of a step varies.
        "cpu-tiny": Profile(
            base=0.0024,
            prefill=9.0e-6,
            decode=106e-6,
            context=87e-9,
            attention=11e-9,
            jitter=0.14,
            front=0.0023,
            delay=0.0055,
            num_gpu_blocks=131_072,
            max_num_seqs=128,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            weights=500_000,
        ),
        # For `--engine demo`. NVIDIA L4, 24 GB: 0.3 TB/s, 121 TFLOP/s and twice that in 8 bits. Llama 3.1 8B in 8 bits,
        # 9.1 GB of weights, in 55 % of the GPU: 14.2 GB - weights - 2 GiB for activations and CUDA graphs.
        "l4-8b-fp8": Profile(
            base=0.0414,
            prefill=133e-6,
            decode=15e-6,
            context=583e-9,
            num_gpu_blocks=1390,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_model_len=8192,
            weights=9_100_000_000,
        ),
        # The same GPU. Phi-3-mini in 8 bits, 3.8B, 384 KiB of KV per token, in 30 % of the GPU.
        "l4-4b-fp8": Profile(
            base=0.0183,
            prefill=63e-6,
            decode=15e-6,
            context=1.75e-6,
            num_gpu_blocks=273,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            weights=3_900_000_000,
        ),
    }
