"""Limits of one engine: batch, KV cache, context length; a profile's own where none are given."""

from __future__ import annotations

import msgspec

from loadtest.engine.latency import Profile
from loadtest.engine.scheduler import Policy
from loadtest.engine.sequence import BLOCK


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Engine of a profile, with the profile's limits. Raises ValueError where these contradict each other."""

    profile: Profile
    policy: Policy = "fcfs"
    caching: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        limits = self.profile
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(limits, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(limits, name)}")
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({limits.max_num_batched_tokens}) is less than max_num_seqs "
                f"({limits.max_num_seqs}): every running sequence needs a token per step"
            )
        room = (limits.num_gpu_blocks - 1) * BLOCK
        if room < limits.max_model_len:
            raise ValueError(
                f"max_model_len ({limits.max_model_len}) is more than the {room} tokens the KV cache holds: "
                "raise num_gpu_blocks or lower max_model_len"
            )


def engine_config(
    profile: Profile,
    *,
    num_gpu_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    policy: Policy = "fcfs",
    caching: bool = True,
    seed: int = 0,
) -> EngineConfig:
    """A profile's own limits where none are given. A `max_model_len` nobody asked for shrinks to what the cache holds,
    and a batch size nobody asked for to the token budget.
    """
    blocks = profile.num_gpu_blocks if num_gpu_blocks is None else num_gpu_blocks
    budget = profile.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
    if max_num_batched_tokens is None and max_num_seqs is not None:
        budget = max(budget, max_num_seqs)
    limited = msgspec.structs.replace(
        profile,
        num_gpu_blocks=blocks,
        max_num_seqs=min(profile.max_num_seqs, budget) if max_num_seqs is None else max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=min(profile.max_model_len, (blocks - 1) * BLOCK) if max_model_len is None else max_model_len,
    )
    return EngineConfig(profile=limited, policy=policy, caching=caching, seed=seed)
