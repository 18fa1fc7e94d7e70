"""LoRA adapters of a profile: what their folders say, and the GPU memory of the slots that vLLM keeps for them.

vLLM allocates, for each of `--max-loras` adapters that one batch may use, two matrices of `--max-lora-rank` for every
linear layer, whatever the rank of each. An upper bound on each GPU, as most of it is not divided among GPUs:

    max-loras x rank x 2 bytes x layers x (11 x hidden + 3 x intermediate)

which has four square projections of attention and three of the MLP. Adapters that are not in use are in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gateway.shared.files.plain_file import open_plain
from sidecar.core.engine_records import Unusable
from sidecar.sizing.model_config import ModelShape
from sidecar.sizing.model_fields import Fields, ModelError, json_object, shown

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # the names that vLLM looks for
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for
MAX_BYTES = 1024 * 1024
ELEMENT = 2  # bytes: as the model computes


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
