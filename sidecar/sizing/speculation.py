"""KV cache of speculative decoding: what the layers that draft keep of each token.

`--speculative-config` names a method. n-grams and suffixes keep nothing. Layers of multi-token prediction (MTP) and of
EAGLE keep as much as a layer of the model. Of any other draft model nothing is read here, so it is taken to keep half
as much as the model: a published start with one kept 0.43.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sidecar.sizing.model_config import ModelShape

FLAG = "speculative-config"
NOTHING = frozenset(("ngram", "suffix", "medusa", "mlp_speculator"))
OTHER = 0.5


def drafted_share(flags: Mapping[str, Any], shape: ModelShape) -> float:
    """KV cache of the drafter, as a share of the model's."""
    given = flags.get(FLAG)
    if given is None:
        return 0.0
    fields = _object(given)
    method = str(fields.get("method", ""))
    if method in NOTHING:
        return 0.0
    if "mtp" in method or "eagle" in method:
        layers = sum(cache.layers for cache in shape.caches)
        return 1 / layers if layers else 0.0
    return OTHER


def _object(given: object) -> Mapping[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return {}
    return given if isinstance(given, dict) else {}
