"""Estimates of whole profiles: the flags that change what a model keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.shared.files.units import GIB
from sidecar.core.profile import Profile
from sidecar.sizing.estimate import KnownModel, estimate
from sidecar.sizing.model_config import shape_from
from sidecar.sizing.weights import StoredWeights

CONFIGS = Path(__file__).parents[1] / "configs"


def kv_of(name: str, **flags: Any) -> int:
    """Bytes of KV cache that one whole context takes on a GPU of 80 GiB."""
    profile = Profile(model_path="/m", flags={flag.replace("_", "-"): value for flag, value in flags.items()})
    shape = shape_from((CONFIGS / f"{name}.json").read_bytes())
    return estimate(profile, KnownModel(shape, StoredWeights(14 * GIB)), 80 * GIB, 1).least.kv


def test_without_the_hybrid_cache_manager_every_layer_keeps_every_token() -> None:
    assert kv_of("gemma-3-27b", disable_hybrid_kv_cache_manager=True) > 2 * kv_of("gemma-3-27b")
    assert kv_of("llama-3-8b", disable_hybrid_kv_cache_manager=True) == kv_of("llama-3-8b")
