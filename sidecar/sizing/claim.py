"""Claim: the bytes of each GPU that vLLM takes for a model, which is a share of the GPU and not the model's need.

`--gpu-memory-utilization` is that share. The part that the model leaves becomes KV cache, unless
`--kv-cache-memory-bytes` (vLLM 0.10.2) caps that. A ledger of the GPU must hold the claim, and vLLM does not start
unless the whole share is free, capped or not.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.shared.files.units import MIB
from sidecar.core.profile import KvMemory
from sidecar.sizing.memory import FLOOR, Need, arithmetic, gib
from sidecar.sizing.model_config import ModelShape

MOST = 970  # thousandths of a GPU that are claimed unless the operator says more: the driver keeps some
UNIFIED_MOST = 900  # the same where the memory is the host's, whose system and programs need the rest


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Claim on each GPU of `total`: `bytes`, `kv` of them KV cache. `utilization` is the flag to start it
    with. `said`: by whom the amount was chosen."""

    bytes: int
    kv: int
    total: int
    thousandths: int
    said: Literal["auto", "utilization", "kv"]

    @property
    def utilization(self) -> float:
        """For `--gpu-memory-utilization`."""
        return self.thousandths / 1000

    @property
    def start_needs(self) -> int:
        """Free bytes that vLLM asks for before it loads anything, even where its KV cache is capped."""
        return _share(self.total, self.thousandths)


def claim(
    need: Need, total: int, *, utilization: float | None = None, kv: int | None = None, most: int | None = None
) -> Claim:
    """Claim on a GPU of `total` bytes; never more than it has.

    `total` is CUDA's, of which vLLM takes shares; NVML's is larger (`cuda_total`). `utilization` (0..1): that share of
    it. `kv` bytes: the KV cache is capped at them. Neither: the least share in which the need and its margin fit, up to
    MOST, or up to `most` bytes, where the sidecar chooses. `refuse_reason` says whether it fits.
    """
    limit = _limit(total, utilization, most)
    said: Literal["auto", "utilization", "kv"]
    if utilization is not None:
        said, thousandths, taken = "utilization", limit, _share(total, limit)
    else:
        wanted = need.margin + (need.total if kv is None else need.without_kv + kv)
        thousandths = min(limit, _thousandths(wanted, total))
        share = _share(total, thousandths)
        said, taken = ("auto", share) if kv is None else ("kv", min(wanted, share))
    free = max(0, taken - need.without_kv)
    return Claim(bytes=taken, kv=free, total=total, thousandths=thousandths, said=said)


def largest_claim(total: int, memory: Literal["auto"] | float | KvMemory, most: int) -> int:
    """Bytes of the largest claim for a profile's `gpu_memory`, where the sidecar claims `most` bytes at most."""
    return _share(total, _limit(total, memory if isinstance(memory, float) else None, most))


def cuda_total(total: int) -> int:
    """Bytes of a GPU as CUDA reports them, from NVML's, where they are not known: rather too few.

    Published pairs in GiB: A100 80.0 and 79.25, H100 79.65 and 79.19, L40S 44.99 and 44.39, 4090 23.99 and 23.52, T4
    15.0 and 14.56.
    """
    return total - min(768 * MIB, total // 32)


def refuse_reason(shape: ModelShape, need: Need, claim: Claim, present: int) -> str | None:
    """The reason why the model can never run so on a machine of `present` GPUs, for its operator; None: it can."""
    gpus = need.gpus
    if gpus > present:
        return f"needs {gpus} GPUs (tensor_parallel), the sidecar has {present}"
    if shape.heads % gpus:
        fit = ", ".join(str(count) for count in range(1, present + 1) if shape.heads % count == 0)
        return f"tensor_parallel {gpus} does not divide the model's {shape.heads} attention heads: use one of {fit}"
    # An operator's own share is tried: what an estimate finds too small may be measured otherwise. But not where the
    # weights cannot fit, however they are quantised, and not again where a start told what it needs.
    tried = claim.said == "utilization" and not need.learnt
    if need.total <= claim.bytes or (tried and int(need.weights * FLOOR) < claim.bytes):
        return None
    least = _thousandths(need.total, claim.total)
    if claim.said == "kv" and least <= MOST:
        return (
            f"needs a KV cache of {gib(need.kv)} GiB for {need.tokens:,} tokens, and gpu_memory caps it at "
            f"{gib(claim.kv)}: raise the cap or lower context_length"
        )
    where, has = ("its GPU", "which has") if gpus == 1 else (f"each of {gpus} GPUs", "each has")
    told = f"needs {gib(need.total)} GiB on {where} ({arithmetic(need)}), {has} {gib(claim.total)}"
    if least <= MOST:
        return f"{told} and gpu_memory gives {gib(claim.bytes)} of them: give it {least / 1000:g} or more"
    return (
        f"{told}, of which an engine can have {gib(_share(claim.total, MOST))}: use more GPUs (tensor_parallel), "
        "a lower context_length, an fp8 KV cache or a quantised model"
    )


def _limit(total: int, utilization: float | None, most: int | None) -> int:
    """The largest share, in thousandths."""
    if utilization is not None:
        return min(1000, max(1, round(utilization * 1000)))
    return MOST if most is None else max(1, min(MOST, most * 1000 // total))


def _share(total: int, thousandths: int) -> int:
    return -(-total * thousandths // 1000)


def _thousandths(wanted: int, total: int) -> int:
    """The least share of `total` that holds `wanted`."""
    return max(1, -(-wanted * 1000 // total))
