"""Memory of what a profile adds to its model: LoRA adapters, a draft model, pools of host memory.

vLLM allocates, for each of `--max-loras` adapters that one batch may use, two matrices of `--max-lora-rank` for every
linear layer, whatever the rank of each. An upper bound on each GPU, as most of it is not divided among GPUs:

    max-loras x rank x 2 bytes x layers x (11 x hidden + 3 x intermediate)

which has four square projections of attention and three of the MLP. Adapters that are not in use are in host memory.

`--speculative-config` names a method, or a draft model. n-grams and suffixes keep nothing. A draft model's files tell
its weights and its KV cache; EAGLE's heads are one too. Layers of multi-token prediction (MTP) are in the model's own
files and keep as much as a layer of the model. Of a drafter that is not known half of the model's KV cache is assumed:
a published start with one kept 0.43.

Offloaded weights and pools of KV cache take host memory from the engine's start to its end. `--cpu-offload-gb` is for
each GPU. `--kv-offloading-size` is for all GPUs together (vLLM 0.32, `config/cache.py`). Connectors of
`--kv-transfer-config` have pools of their own: OffloadingConnector `cpu_bytes_to_use`, LMCache `max_local_cpu_size` in
GB for each GPU, 5 unless told; NixlConnector a copy of the KV cache with `kv_buffer_device: cpu`, else none, because
NIXL then moves the GPU's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.units import GIB
from sidecar.core.engine_records import Unusable
from sidecar.core.profile import Profile
from sidecar.sizing.memory import kv_per_token
from sidecar.sizing.model_config import ModelShape
from sidecar.sizing.model_fields import Fields, ModelError, json_object, shown

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # the names that vLLM looks for
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for
MAX_BYTES = 1024 * 1024
ELEMENT = 2  # bytes: as the model computes
FLAG = "speculative-config"
NOTHING = frozenset(("ngram", "suffix", "medusa", "mlp_speculator"))
OTHER = 0.5
LMCACHE = 5.0  # GB for each GPU, LMCache's own default
_LMCACHE_SIZES = ("lmcache.max_local_cpu_size", "max_local_cpu_size")
DEEPEST = 4  # connectors within connectors


# -- adapters ---------------------------------------------------------------------------------------------------------


def adapter_rank(folder: Path, adapters: Mapping[str, str]) -> int:
    """`--max-lora-rank` for these adapters, by name, whose folders are relative to `folder`; 0 for none. Blocks. Raises
    Unusable, which names the adapter."""
    largest = 0
    for name, path in adapters.items():
        try:
            largest = max(largest, _rank(folder / path))
        except OSError as error:
            raise Unusable(f"its adapter {name} cannot be read: {error.filename}: {error.strerror}") from None
        except ModelError as error:
            raise Unusable(f"its adapter {name} cannot be used: {folder / path}: {error}") from None
    return next(rank for rank in RANKS if rank >= largest) if largest else 0


def slot_bytes(shape: ModelShape, rank: int, at_once: int) -> int:
    """Bytes on each GPU of the slots for `at_once` adapters of this rank."""
    widths = 11 * shape.hidden + 3 * (shape.intermediate or 4 * shape.hidden)
    return at_once * rank * ELEMENT * shape.layers * widths


def _rank(folder: Path) -> int:
    with open_plain(folder / CONFIG) as file:
        fields = json_object(file.read(MAX_BYTES + 1), CONFIG, MAX_BYTES)
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"peft_type is {shown(kind)}, expected LORA: vLLM takes no other adapters")
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise ModelError(f"it has no weights, expected {' or '.join(WEIGHTS[:2])}")
    return max([_whole("r", fields.get("r")), *_pattern(fields)])


def _pattern(fields: Fields) -> list[int]:
    """Ranks of layers that have their own."""
    given = fields.get("rank_pattern") or {}
    if not isinstance(given, dict):
        raise ModelError(f"rank_pattern is {shown(given)}, expected an object")
    return [_whole("rank_pattern", rank) for rank in given.values()]


def _whole(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= RANKS[-1]:
        raise ModelError(f"{name} is {shown(value)}, expected a whole number from 1 to {RANKS[-1]}")
    return value


# -- draft model ------------------------------------------------------------------------------------------------------


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


# -- host memory ------------------------------------------------------------------------------------------------------


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
