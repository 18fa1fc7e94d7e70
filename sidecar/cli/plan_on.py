"""Plans for GPUs that are named on the command line, from the sizes of the models' files."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import msgspec

from gateway.shared.files.units import GIB, MIB
from sidecar.core.config import SidecarConfig
from sidecar.core.sleep import POOL
from sidecar.sizing.claim import context_words, cuda_total
from sidecar.sizing.estimate import Sizing
from sidecar.sizing.memory import gib
from sidecar.sizing.model_fields import ModelError
from sidecar.sizing.model_files import NotKnown

LEAST, MOST = GIB, 2**50  # bytes of a GPU
UNIFIED = "unified"  # in place of CUDA's total: the memory is the host's
# What GB10 and Jetson Thor have, and no GPU with memory of its own.
SHARED = range(115 * GIB, 126 * GIB)
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([GM])(?:i?B)?", re.ASCII | re.IGNORECASE)


class Gpu(msgspec.Struct, frozen=True):
    """A GPU."""

    total: int  # bytes, by NVML
    cuda: int  # of them, what CUDA reports
    unified: bool = False  # the memory is the host's


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A profile on GPUs of one size, in bytes on each of them. `rest`: beside weights and KV cache. `context_length`:
    tokens that one call can have, of `model_context_length`; `context_chosen`: since these do not fit. `why`: why it
    does not fit. None: there is no estimate."""

    profile: str
    gpu_bytes: int
    cuda_bytes: int
    unified: bool
    gpus: int
    fits: bool
    why: str = ""
    share: float | None = None
    claim_bytes: int | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    rest_bytes: int | None = None
    kv_tokens: int | None = None
    context_length: int | None = None
    model_context_length: int | None = None
    context_chosen: bool = False
    max_num_seqs: int | None = None
    asleep_bytes: int | None = None


def gpu(text: str) -> Gpu:
    """Read a GPU: `80GiB`, `80GiB:79.25GiB` with CUDA's total, or `64GiB:unified`. Raises ValueError."""
    total, colon, cuda = text.partition(":")
    first, unified = _size(total), cuda == UNIFIED
    second = _size(cuda) if colon and not unified else None if first is None else cuda_total(first)
    if first is None or second is None or not LEAST <= first <= MOST or second < LEAST:
        raise ValueError(
            "a GPU is its size, as 80GiB or 24GB, or with what CUDA has of it, as 80GiB:79.25GiB, or as 64GiB:unified "
            f"where its memory is the host's; not {text!r}"
        )
    if second > first:
        raise ValueError(f"CUDA has no more of a GPU than there is: {text!r}")
    return Gpu(first, second, unified or first in SHARED)


def size(text: str) -> int:
    """Read a size. Raises ValueError."""
    if (found := _size(text)) is None:
        raise ValueError(f"a size is as 512GiB or 512GB, not {text!r}")
    return found


def _size(text: str) -> int | None:
    """Bytes, to the byte below; None: `text` is no size. Makers of GPUs write GB and mean GiB."""
    match = _SIZE.fullmatch(text)
    return None if match is None else int(Decimal(match[1]) * (GIB if match[2] in "gG" else MIB))


def planned(config: SidecarConfig, folder: Path, profile: str, gpus: Sequence[Gpu]) -> list[Planned]:
    """Return one plan for each distinct size of GPU, in the order given. Each plan assumes as many GPUs of that size as
    the profile wants. Raises Unusable if the model's files cannot be read."""
    sizing = Sizing(config, folder, os.environ, sizes_only=True)
    return [_planned(sizing, config, profile, each) for each in dict.fromkeys(gpus)]


def _planned(sizing: Sizing, config: SidecarConfig, profile: str, on: Gpu) -> Planned:
    settings = config.models[profile]
    plan = Planned(
        profile=profile,
        gpu_bytes=on.total,
        cuda_bytes=on.cuda,
        unified=on.unified,
        gpus=settings.tensor_parallel,
        fits=False,
    )
    try:
        found = asyncio.run(sizing.planned(profile, on.total, on.cuda, unified=on.unified))
    except (NotKnown, ModelError) as error:
        return msgspec.structs.replace(plan, why=f"no estimate: {error}")
    least, claim = found.least, found.claim
    return msgspec.structs.replace(
        plan,
        fits=found.why is None,
        why=found.why or "",
        share=claim.utilization,
        claim_bytes=claim.bytes,
        weights_bytes=least.weights,
        kv_bytes=claim.kv,
        rest_bytes=least.activations + least.overhead,
        kv_tokens=found.tokens,
        context_length=least.tokens,
        model_context_length=found.own_context,
        context_chosen=found.context_length is not None,
        max_num_seqs=found.sequences or found.batch.sequences,
        asleep_bytes=min(found.residue.device, claim.bytes) if settings.sleeps is not None else 0,
    )


def table(plans: Sequence[Planned]) -> Iterator[str]:
    """Plans for a person."""
    for each in plans:
        on = f"{each.profile} on {each.gpus} x {gib(each.gpu_bytes)} GiB"
        if each.claim_bytes is None:
            yield f"{on}: {each.why}"
            continue
        fits = "fits" if each.fits else "does not fit"
        yield f"{on}: {fits}, {gib(each.claim_bytes)} GiB of each, share {each.share}"
        yield (
            f"  weights {gib(each.weights_bytes or 0)}, KV {gib(each.kv_bytes or 0)} for {each.kv_tokens:,} tokens, "
            f"the rest {gib(each.rest_bytes or 0)}, asleep {gib(each.asleep_bytes or 0)}; at most {each.max_num_seqs} "
            "sequences at once"
        )
        if each.context_chosen:
            yield f"  {context_words(each.context_length or 0, each.model_context_length or 0)}"
        if each.unified:
            yield f"  {POOL}"
        if each.why:
            yield f"  {each.why}"
