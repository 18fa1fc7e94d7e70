"""Host memory that an engine takes at its start and keeps: offloaded weights and pools of KV cache beside the GPU's.

`--cpu-offload-gb` is for each GPU. `--kv-offloading-size` is for all GPUs together (vLLM 0.32, `config/cache.py`).
Connectors of `--kv-transfer-config` have pools of their own: OffloadingConnector `cpu_bytes_to_use`, LMCache
`max_local_cpu_size` in GB for each GPU, 5 unless told; NixlConnector a copy of the KV cache with `kv_buffer_device:
cpu`, else none, because NIXL then moves the GPU's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.shared.files.units import GIB
from sidecar.core.profile import Profile

LMCACHE = 5.0  # GB for each GPU, LMCache's own default
_LMCACHE_SIZES = ("lmcache.max_local_cpu_size", "max_local_cpu_size")
DEEPEST = 4  # connectors within connectors


def host_pool_bytes(profile: Profile, kv: int = 0) -> int:
    """Bytes of host memory that an engine of the profile keeps, awake or asleep. `kv`: bytes of its KV cache on each
    GPU."""
    flags, gpus = profile.flags, profile.tensor_parallel
    size = amount(flags.get("cpu-offload-gb")) * gpus + amount(flags.get("kv-offloading-size"))
    connectors = list(_connectors(flags.get("kv-transfer-config"), DEEPEST))
    size += sum(_pool(each) * gpus for each in connectors)
    offloaded = sum(amount(_extra(each).get("cpu_bytes_to_use")) for each in connectors)
    copies = kv * gpus if any(map(_copies_cache, connectors)) else 0
    return int(size * GIB + offloaded) + copies


def _connectors(given: object, deepest: int) -> Iterator[Mapping[str, Any]]:
    """A connector's settings, and those of the connectors in it."""
    if not isinstance(given, Mapping) or not deepest:
        return
    yield given
    inner = _extra(given).get("connectors")
    for each in inner if isinstance(inner, list) else ():
        yield from _connectors(each, deepest - 1)


def _extra(given: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = given.get("kv_connector_extra_config")
    return extra if isinstance(extra, Mapping) else {}


def _copies_cache(given: Mapping[str, Any]) -> bool:
    """Whether NIXL fetches and sends KV cache by a copy of it in host memory."""
    return "nixl" in str(given.get("kv_connector", "")).lower() and given.get("kv_buffer_device") == "cpu"


def _pool(given: Mapping[str, Any]) -> float:
    """GB of LMCache's pool for each GPU."""
    if "lmcache" not in str(given.get("kv_connector", "")).lower():
        return 0.0
    told = (_extra(given).get(name) for name in _LMCACHE_SIZES)
    return next((amount(each) for each in told if each is not None), LMCACHE)


def amount(value: object) -> float:
    """A number of flags or JSON that is not negative; 0: it is none, or none that can be."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < 2**50 else 0.0  # type: ignore[operator, arg-type] # it is a number
