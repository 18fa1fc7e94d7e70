"""Configuration of one simulated engine: its limits, its names, its address."""

from __future__ import annotations

import msgspec

from loadtest.engine.engine_config import EngineConfig, engine_config
from loadtest.engine.engine_memory import GpuShare
from loadtest.engine.profile_file import profile_of
from loadtest.engine.scheduler import Policy


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`speed` 2.0: everything takes half the time. `port` 0: any free one of `host`; `uds`: a unix socket instead.
    `kv_events`: a ZeroMQ endpoint on which the cache's events are published. `share`: of simulated GPUs; None: it takes
    none, and no time to start, sleep and wake. `adapters`: names of LoRA adapters of the first model, of which
    `max_loras` are loaded at once."""

    engine: EngineConfig
    models: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 0
    uds: str | None = None
    speed: float = 1.0
    api_key: str | None = None
    prompt_details: bool = False
    kv_events: str | None = None
    share: GpuShare | None = None
    adapters: tuple[str, ...] = ()
    max_loras: int = 1

    def __post_init__(self) -> None:
        if self.speed <= 0.0:
            raise ValueError(f"speed must be above 0, found {self.speed}")
        if not 0 <= self.port <= 65535:  # uvloop would take it modulo 65,536
            raise ValueError(f"port must be 0 to 65535, found {self.port}")


def sim_config(
    profile: str = "h100-8b",
    *,
    models: tuple[str, ...] = (),
    num_gpu_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    policy: Policy = "fcfs",
    caching: bool = True,
    seed: int = 0,
    host: str = "127.0.0.1",
    port: int = 0,
    uds: str | None = None,
    speed: float = 1.0,
    api_key: str | None = None,
    prompt_details: bool = False,
    kv_events: str | None = None,
    share: GpuShare | None = None,
    adapters: tuple[str, ...] = (),
    max_loras: int = 1,
) -> SimConfig:
    """The limits of the profile (a known one's name, or a file) where none are given; the model is called `sim` where
    it has no name.

    Raises ValueError for an unknown profile, and for limits that contradict each other.
    """
    engine = engine_config(
        profile_of(profile),
        num_gpu_blocks=num_gpu_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=policy,
        caching=caching,
        seed=seed,
    )
    return SimConfig(
        engine=engine,
        models=models or ("sim",),
        host=host,
        port=port,
        uds=uds,
        speed=speed,
        api_key=api_key,
        prompt_details=prompt_details,
        kv_events=kv_events,
        share=share,
        adapters=adapters,
        max_loras=max_loras,
    )
