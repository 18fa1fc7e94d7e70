"""Memory of speculative decoding: weights of a draft model, and what the layers that draft keep of each token.

`--speculative-config` names a method, or a draft model. n-grams and suffixes keep nothing. A draft model's files tell
its weights and its KV cache; EAGLE's heads are one too. Layers of multi-token prediction (MTP) are in the model's own
files and keep as much as a layer of the model. Of a drafter that is not known half of the model's KV cache is assumed:
a published start with one kept 0.43.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidecar.sizing.memory import kv_per_token
from sidecar.sizing.model_config import ModelShape

FLAG = "speculative-config"
NOTHING = frozenset(("ngram", "suffix", "medusa", "mlp_speculator"))
OTHER = 0.5


def draft_model(flags: Mapping[str, Any]) -> tuple[str, str] | None:
    """The draft model's folder or id, and its revision; None: there is none with files of its own."""
    fields = flags.get(FLAG, {})
    model = fields.get("model")
    if not isinstance(model, str) or not model or str(fields.get("method", "")) in NOTHING:
        return None
    return model, str(fields.get("revision") or "main")


def draft_gpus(flags: Mapping[str, Any], gpus: int) -> int:
    """GPUs that share the draft model: as many as the model's unless told."""
    told = flags.get(FLAG, {}).get("draft_tensor_parallel_size")
    return told if isinstance(told, int) and 1 <= told <= gpus else gpus


def drafted_share(flags: Mapping[str, Any], shape: ModelShape, draft: ModelShape | None = None) -> float:
    """KV cache of the drafter, as a share of the model's; `draft`: its shape, where it has files of its own."""
    if FLAG not in flags:
        return 0.0
    method = str(flags[FLAG].get("method", ""))
    if method in NOTHING:
        return 0.0
    if draft is not None and (own := kv_per_token(shape)):
        return kv_per_token(draft) / own
    if "mtp" in method or "eagle" in method:
        layers = sum(cache.layers for cache in shape.caches)
        return 1 / layers if layers else 0.0
    return OTHER
