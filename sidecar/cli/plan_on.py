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
from sidecar.core.engine_records import Unusable
from sidecar.core.inventory import Size
from sidecar.core.model_state import ModelState
from sidecar.core.sleep import levels
from sidecar.core.step_times import StepTimes
from sidecar.sizing.claim import cuda_total
from sidecar.sizing.context import context_words
from sidecar.sizing.estimate import Estimate, Sizing
from sidecar.sizing.memory import gib
from sidecar.sizing.model_fields import ModelError
from sidecar.sizing.model_files import NotKnown

LEAST, MOST = GIB, 2**50  # bytes of a GPU
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([GM])(?:i?B)?", re.ASCII | re.IGNORECASE)


class Gpu(msgspec.Struct, frozen=True):
    """A GPU of `total` bytes, of which CUDA reports `cuda`."""

    total: int
    cuda: int


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A profile on GPUs of one size, in bytes on each of them. `rest`: beside weights and KV cache. `context_length`:
    tokens that one call can have, of `model_context_length`; `context_chosen`: since these do not fit. `why`: why it
    does not fit. None: there is no estimate."""

    profile: str
    gpu_bytes: int
    cuda_bytes: int
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


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A profile among others that sleep. `gpus`: by number, where it runs; `wait_s`: seconds that a call waits for it,
    others asleep or stopped first, about; `first_wait_s`: where it was never started. `context_length`: tokens that one
    call can have, of `model_context_length`; `context_chosen`: since these do not fit. `may_stop`: it is stopped though
    it may sleep, where host memory has no room: it has no level 2; `wait_s` is then that of a start."""

    profile: str
    fits: bool
    why: str
    gpus: tuple[int, ...] = ()
    claim_bytes: int = 0
    asleep_bytes: int = 0
    host_bytes: int = 0
    context_length: int = 0
    model_context_length: int = 0
    context_chosen: bool = False
    may_stop: bool = False
    wait_s: float = 0.0
    first_wait_s: float = 0.0


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """Whether all profiles of a file can take turns on some GPUs. `host_limit_bytes`: what the file says, None: it
    says nothing, and the machine that it is for is not this one."""

    take_turns: bool
    why: str
    host_bytes: int
    host_limit_bytes: int | None
    models: tuple[Turn, ...]


def gpu(text: str) -> Gpu:
    """A GPU as it is written: `80GiB`, or `80GiB:79.25GiB` with CUDA's total. Raises ValueError."""
    total, colon, cuda = text.partition(":")
    first = _size(total)
    second = _size(cuda) if colon else None if first is None else cuda_total(first)
    if first is None or second is None or not LEAST <= first <= MOST or second < LEAST:
        raise ValueError(
            f"a GPU is its size, as 80GiB or 24GB, or with what CUDA has of it, as 80GiB:79.25GiB; not {text!r}"
        )
    if second > first:
        raise ValueError(f"CUDA has no more of a GPU than there is: {text!r}")
    return Gpu(first, second)


def _size(text: str) -> int | None:
    """Bytes, to the byte below; None: `text` is no size. Makers of GPUs write GB and mean GiB."""
    match = _SIZE.fullmatch(text)
    return None if match is None else int(Decimal(match[1]) * (GIB if match[2] in "gG" else MIB))


def planned(config: SidecarConfig, folder: Path, profile: str, gpus: Sequence[Gpu]) -> list[Planned]:
    """One plan for each size of GPU, in the order given, each size once. There are as many of it as the profile wants.
    Raises Unusable where the model's files cannot be read."""
    sizing = Sizing(config, folder, os.environ, sizes_only=True)
    return [_planned(sizing, config, profile, each) for each in dict.fromkeys(gpus)]


def _planned(sizing: Sizing, config: SidecarConfig, profile: str, on: Gpu) -> Planned:
    gpus = config.models[profile].tensor_parallel
    try:
        found = asyncio.run(sizing.planned(profile, on.total, on.cuda))
    except (NotKnown, ModelError) as error:
        why = f"no estimate: {error}"
        return Planned(profile=profile, gpu_bytes=on.total, cuda_bytes=on.cuda, gpus=gpus, fits=False, why=why)
    least, claim = found.least, found.claim
    return Planned(
        profile=profile,
        gpu_bytes=on.total,
        cuda_bytes=on.cuda,
        gpus=gpus,
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
        asleep_bytes=min(found.residue.device, claim.bytes) if config.models[profile].sleeps is not None else 0,
    )


def turns(config: SidecarConfig, folder: Path, gpus: Sequence[Gpu]) -> Turns:
    """Whether each profile can run while all others that may sleep do, each GPU of the machine named once."""
    sizing = Sizing(config, folder, os.environ, sizes_only=True)
    known = {name: _estimated(sizing, config, name, gpus) for name in config.models}
    homes = _homes(config, known, gpus)
    told = config.host_memory_for_sleep
    host, limit = sum(_host(config, name, known) for name in known), None if told == "auto" else told
    full = limit is not None and host > limit
    models = tuple(_turn(config, name, known, homes, gpus, full=full) for name in config.models)
    why = next((f"{each.profile}: {each.why}" for each in models if not each.fits), "")
    if not why and limit is not None and full:
        stops = [each.profile for each in models if each.may_stop]
        how = f"{', '.join(stops)} may be stopped" if stops else "some sleep at level 2"
        why = f"asleep they fill {gib(host)} GiB of host memory, and host_memory_for_sleep is {gib(limit)}: {how}"
    return Turns(
        take_turns=not any(not each.fits for each in models),
        why=why,
        host_bytes=host,
        host_limit_bytes=limit,
        models=models,
    )


def _estimated(sizing: Sizing, config: SidecarConfig, name: str, gpus: Sequence[Gpu]) -> Estimate | str:
    """On the largest GPUs of which there are enough; or why there is no estimate."""
    wanted = config.models[name].tensor_parallel
    if wanted > len(gpus):
        return f"needs {wanted} GPUs (tensor_parallel), there are {len(gpus)}"
    on = sorted(gpus, key=lambda each: -each.total)[wanted - 1]
    try:
        found = asyncio.run(sizing.planned(name, on.total, on.cuda))
    except (NotKnown, ModelError, Unusable) as error:
        return f"no estimate: {error}"
    return found if found.why is None else found.why


def _homes(config: SidecarConfig, known: dict[str, Estimate | str], gpus: Sequence[Gpu]) -> dict[str, tuple[int, ...]]:
    """GPUs by number for each profile, the largest first, where the least is claimed already."""
    claimed = [0] * len(gpus)
    homes: dict[str, tuple[int, ...]] = {}
    sizes = {name: found for name, found in known.items() if isinstance(found, Estimate)}
    for name, found in sorted(sizes.items(), key=lambda item: -item[1].claim.bytes):
        wanted = config.models[name].tensor_parallel
        fitting = [number for number, each in enumerate(gpus) if each.cuda >= found.claim.bytes]
        home = sorted(fitting, key=lambda number: (claimed[number] / gpus[number].total, number))[:wanted]
        homes[name] = tuple(sorted(home)) if len(home) == wanted else ()
        for number in homes[name]:
            claimed[number] += found.claim.bytes
    return homes


def _turn(
    config: SidecarConfig,
    name: str,
    known: dict[str, Estimate | str],
    homes: dict[str, tuple[int, ...]],
    gpus: Sequence[Gpu],
    *,
    full: bool,
) -> Turn:
    """`full`: host memory does not do for all at level 1."""
    found = known[name]
    if isinstance(found, str):
        return Turn(profile=name, fits=False, why=found)
    others = [other for other in homes if other != name]
    why = "" if homes[name] else "no GPU has room for its claim"
    for number in homes[name]:
        asleep = sum(_asleep(config, other, known) for other in others if number in homes[other])
        short = found.claim.bytes + asleep - gpus[number].cuda
        if short > 0 and not why:
            kept = f"others keep {gib(asleep)} GiB of GPU {number} while they sleep"
            why = f"{kept}, {gib(short)} GiB too much: give it less gpu_memory, or let some stop (sleep: null)"
    times, size = _times(config, name), _bytes(found)
    loading = times.load_seconds(size)
    victims = {other: known[other] for other in others if set(homes[other]) & set(homes[name])}
    sleeping = {other: _bytes(each) for other, each in victims.items() if isinstance(each, Estimate)}
    away = max((_times(config, other).sleep_seconds(each, 1) for other, each in sleeping.items()), default=0.0)
    may_sleep = levels(config.models[name], None)
    may_stop = full and may_sleep == (1,)
    level = may_sleep[-1 if full else 0] if may_sleep and not may_stop else None
    return Turn(
        profile=name,
        gpus=homes[name],
        fits=not why,
        why=why,
        claim_bytes=found.claim.bytes,
        asleep_bytes=_asleep(config, name, known),
        host_bytes=_host(config, name, known),
        context_length=found.least.tokens,
        model_context_length=found.own_context,
        context_chosen=found.context_length is not None,
        may_stop=may_stop,
        wait_s=round(away + (loading if level is None else times.wake_seconds(size)[level - 1]), 1),
        first_wait_s=round(away + loading, 1),
    )


def _times(config: SidecarConfig, name: str) -> StepTimes:
    """Of a profile that was never started."""
    return ModelState(name, config.models[name], 0.0).times


def _bytes(found: Estimate) -> Size:
    return Size(weights=found.least.weights, stored=found.stored.bytes, encoder=not found.least.kv)


def _host(config: SidecarConfig, name: str, known: dict[str, Estimate | str]) -> int:
    """Bytes of the machine's memory that it fills at level 1, if it sleeps there."""
    found = known[name]
    return 0 if isinstance(found, str) or 1 not in levels(config.models[name], None) else found.residue.host


def _asleep(config: SidecarConfig, name: str, known: dict[str, Estimate | str]) -> int:
    found = known[name]
    if isinstance(found, str) or config.models[name].sleeps is None:
        return 0
    return min(found.residue.device, found.claim.bytes)


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
        if each.why:
            yield f"  {each.why}"


def turn_table(found: Turns) -> Iterator[str]:
    """Turns for a person."""
    yield f"all {len(found.models)} can take turns" if found.take_turns else "they cannot all take turns"
    for each in found.models:
        where = f"GPU {', '.join(map(str, each.gpus))}" if each.gpus else "no GPU"
        waits = f"a call waits about {each.wait_s:.0f} s for it, {each.first_wait_s:.0f} s the first time"
        held = f"{gib(each.claim_bytes)} GiB awake, {gib(each.asleep_bytes)} asleep"
        if each.context_chosen:
            held = f"{held}; {context_words(each.context_length, each.model_context_length)}"
        yield f"  {each.profile}: {each.why}" if each.why else f"  {each.profile} on {where}: {held}; {waits}"
    limit = "" if found.host_limit_bytes is None else f" of {gib(found.host_limit_bytes)}"
    yield f"host memory while they sleep: {gib(found.host_bytes)} GiB{limit}"
    if found.why:
        yield found.why
