"""Configuration of one simulated engine: its limits, its names, its address."""

from __future__ import annotations

from typing import Any

import msgspec

from loadtest.engine.engine_config import EngineConfig, engine_config
from loadtest.engine.engine_memory import GpuShare
from loadtest.engine.kv_transfer import OnFailure
from loadtest.engine.profile_file import profile_of


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`speed` 2.0: everything takes half the time. `port` 0: any free one of `host`; `uds`: a unix socket instead.
    `kv_events`: a ZeroMQ endpoint on which the cache's events are published. `share`: of simulated GPUs; None: it takes
    none, and no time to start, sleep and wake. `adapters`: names of LoRA adapters of the first model, of which
    `max_loras` are loaded at once. `kv_transfer`: prompts can be read for other engines, and by them. `on_kv_failure`:
    what becomes of a call whose prompt cannot be fetched."""

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
    kv_transfer: bool = False
    on_kv_failure: OnFailure = "fail"

    def __post_init__(self) -> None:
        if self.speed <= 0.0:
            raise ValueError(f"speed must be above 0, found {self.speed}")
        if not 0 <= self.port <= 65535:  # uvloop would take it modulo 65,536
            raise ValueError(f"port must be 0 to 65535, found {self.port}")


LIMITS = frozenset(engine_config.__kwdefaults__ or {})


def sim_config(profile: str = "h100-8b", *, models: tuple[str, ...] = (), **given: Any) -> SimConfig:
    """The limits of the profile (a known one's name, or a file) where none are given; the model is called `sim` where
    it has no name. `given`: arguments of `engine_config`, and fields of SimConfig.

    Raises ValueError for an unknown profile, and for limits that contradict each other.
    """
    limits = {name: given.pop(name) for name in LIMITS & given.keys()}
    return SimConfig(engine=engine_config(profile_of(profile), **limits), models=models or ("sim",), **given)
