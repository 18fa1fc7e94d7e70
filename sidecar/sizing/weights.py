"""Bytes of a model's weights: in its files, and on each GPU.

Safetensors: the index beside several files, or the header of one (github.com/huggingface/safetensors, "Format": 8
bytes, little-endian, the length of a JSON object that gives each tensor's offsets). GGUF and everything else: the size
of the files, as `StoredWeights(bytes=...)`. Without files: the number of parameters.
"""

from __future__ import annotations

import re

import msgspec

from sidecar.sizing.model_config import ModelShape, element_bytes
from sidecar.sizing.model_fields import Fields, ModelError, json_object, shown, within

# The format allows headers of 100 MB. Kimi K2's index, one of the longest, has 16 MB. What is longer than twice that
# would take a GiB of memory and stall the sidecar for seconds.
MAX_INDEX = MAX_HEADER = 32 * 1024**2
MAX_STORED = 2**50  # bytes
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}\.(?:safetensors|bin|pt)")
# Bits per parameter that vLLM quantises to by itself, when it is told to.
_WHILE_LOADING = {"fp8": 8, "bitsandbytes": 5, "inc": 8, "rtn": 8, "ptpc_fp8": 8, "fp_quant": 5}
MXFP4 = 1.085  # times its files: the kernels want it padded and its scales swizzled (7 to 8.5 % were measured)
_WIDE = frozenset(("F32", "F64"))


class StoredWeights(msgspec.Struct, frozen=True):
    """Bytes of weights in files. `wide`: of them in 32 bits or more, which vLLM brings down to what it computes in.
    `absent`: of them in files that are not here yet."""

    bytes: int
    wide: int = 0
    absent: int = 0


class Index(msgspec.Struct, frozen=True):
    """A safetensors index: the sum of its tensors in bytes (None: not told) and its files, which lie beside it."""

    total: int | None
    files: tuple[str, ...]


def index_from(data: bytes) -> Index:
    """Content of a model.safetensors.index.json. Raises ModelError."""
    fields = json_object(data, "the safetensors index", MAX_INDEX)
    total = within(fields, "metadata").get("total_size")
    if total is not None and (type(total) not in {int, float} or not 0 < total <= MAX_STORED):
        raise ModelError(f"metadata.total_size is {shown(total)}, expected bytes from 1 to {MAX_STORED}")
    files = sorted({str(file) for file in within(fields, "weight_map").values()})
    for file in files:
        # A name is joined to the model's folder by whoever sums the sizes.
        if _FILE.fullmatch(file) is None:
            raise ModelError(f"the safetensors index names the file {shown(file)}, expected a name beside it")
    if total is None and not files:
        raise ModelError("the safetensors index has neither metadata.total_size nor a weight_map")
    return Index(None if total is None else int(total), tuple(files))


def header_length(start: bytes) -> int:
    """Bytes of a safetensors file that its header takes, the 8 of its length included. Raises ModelError."""
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= length <= MAX_HEADER:
        raise ModelError(f"a safetensors header of {length} bytes, expected 2 to {MAX_HEADER}: is the file complete?")
    return 8 + length


def stored_from(header: bytes) -> StoredWeights:
    """The tensors of one safetensors file, from its first `header_length` bytes. Raises ModelError."""
    end = header_length(header)
    if len(header) < end:
        raise ModelError(f"{len(header)} bytes of a safetensors header of {end}")
    total = wide = 0
    for name, tensor in json_object(header[8:end], "the safetensors header", MAX_HEADER).items():
        if name != "__metadata__":
            size = _size(name, tensor)
            total += size
            wide += size if tensor["dtype"] in _WIDE else 0
    return StoredWeights(total, wide)


def _size(name: str, tensor: object) -> int:
    fields: Fields = tensor if isinstance(tensor, dict) else {}
    match fields:
        case {"dtype": str(), "data_offsets": [int(start), int(end)]} if 0 <= start <= end <= MAX_STORED:
            return end - start
    raise ModelError(f"the tensor {shown(name)} is {shown(tensor)}, expected a dtype and data_offsets in order")


def on_each_gpu(
    stored: StoredWeights, shape: ModelShape, gpus: int, dtype: str = "auto", quantized: str | None = None
) -> int:
    """Bytes of weights per GPU under tensor parallelism over `gpus`, computing in `dtype`. Raises ModelError.

    They are brought to `dtype`, unless they are quantised; or are `quantized` while they load, all but embeddings.
    Embeddings are divided too; norms are not, and are too small to count, as are KV heads held twice where there are
    fewer than GPUs.
    """
    size = stored.bytes
    if shape.quantization is None:
        # An index does not say how wide its tensors are; the config does.
        wide = stored.bytes if shape.dtype in {"float32", "float"} else stored.wide
        element = element_bytes(dtype)
        size = wide * element // 4 + (stored.bytes - wide) * element // 2
        if quantized in _WHILE_LOADING:
            kept = min(size, shape.embedding * element)
            size = kept + (size - kept) * _WHILE_LOADING[quantized] // (8 * element)
    elif shape.quantization.method == "mxfp4":
        size = int(size * MXFP4)
    return -(-size // gpus)
