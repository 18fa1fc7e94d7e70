"""Turns of a file's models on the GPUs of one machine: where each runs, who sleeps or stops for it, how long it takes.

The GPUs need not be here, and no engine is started. Sizes come from the models' files.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sidecar.cli.plan_on import Gpu
from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import Unusable
from sidecar.core.inventory import Size
from sidecar.core.model_state import ModelState
from sidecar.core.sleep import POOL, chosen_level, levels
from sidecar.core.step_times import StepTimes
from sidecar.sizing.claim import UNIFIED_MOST
from sidecar.sizing.context import context_words
from sidecar.sizing.estimate import Estimate, Sizing
from sidecar.sizing.host_pools import host_pool_bytes
from sidecar.sizing.memory import gib
from sidecar.sizing.model_fields import ModelError
from sidecar.sizing.model_files import NotKnown

OF_HOST = 2  # `host_memory_for_sleep: auto` is one such part of the machine's memory


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A profile among others that sleep, as `sidecar plan --all --json` prints it. Bytes are on each GPU."""

    profile: str
    fits: bool
    why: str  # it does not fit, or others have to be stopped for it
    gpus: tuple[int, ...] = ()  # where it runs, by number
    claim_bytes: int = 0
    asleep_bytes: int = 0
    host_bytes: int = 0  # of the machine, asleep at level 1
    context_length: int = 0  # tokens that one call can have
    model_context_length: int = 0
    context_chosen: bool = False  # since the model's own does not fit
    may_stop: bool = False  # it is stopped though it may sleep: GPU or host memory has no room for it asleep
    wait_s: float = 0.0  # of a call for it, others asleep or stopped first
    first_wait_s: float = 0.0  # where it was never started


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """Whether all profiles of a file can take turns on the GPUs of a machine."""

    take_turns: bool
    why: str
    host_bytes: int
    host_limit_bytes: int | None  # by the file or the command line; None: neither says
    unified: bool  # the GPU's memory is the host's
    models: tuple[Turn, ...]
    proposal: str = ""  # a sidecar's file with which they take turns, none of them stopped; empty: none is needed

    @property
    def asleep(self) -> bool:
        """Whether all take turns and none is stopped that may sleep."""
        return self.take_turns and not any(each.may_stop for each in self.models)


class Machine:
    """The GPUs of one machine, and the models of a file on them.

    `host_memory`: bytes of the machine's own memory; None: not told.
    """

    def __init__(self, config: SidecarConfig, folder: Path, gpus: Sequence[Gpu], host_memory: int | None) -> None:
        self.gpus = gpus
        self.config = config
        self.unified = any(each.unified for each in gpus)
        self._sizing = Sizing(config, folder, os.environ, sizes_only=True)
        told = config.host_memory_for_sleep
        half = None if host_memory is None else host_memory // OF_HOST
        self.limit = half if told == "auto" else told

    def apply(self, config: SidecarConfig) -> None:
        """Plan for this file from now on."""
        self.config = config
        self._sizing.apply(config)

    def estimate(self, name: str) -> Estimate | str:
        """The estimate of a profile on the largest GPUs of which there are enough; or why there is none."""
        wanted = self.config.models[name].tensor_parallel
        if wanted > len(self.gpus):
            return f"needs {wanted} GPUs (tensor_parallel), there are {len(self.gpus)}"
        on = sorted(self.gpus, key=lambda each: -each.total)[wanted - 1]
        try:
            found = asyncio.run(self._sizing.planned(name, on.total, on.cuda, unified=on.unified))
        except (NotKnown, ModelError, Unusable) as error:
            return f"no estimate: {error}"
        return found if found.why is None else found.why

    def room(self, number: int) -> int:
        """Bytes of a GPU for engines, awake and asleep."""
        each = self.gpus[number]
        spared = (1000 + UNIFIED_MOST) // 2  # the host's own programs get half of what no engine may claim
        return each.cuda * spared // 1000 if each.unified else each.cuda

    def homes(self, sizes: Mapping[str, Estimate]) -> dict[str, tuple[int, ...]]:
        """GPUs by number for each profile, largest claim first, where the least is claimed already."""
        claimed = [0] * len(self.gpus)
        homes: dict[str, tuple[int, ...]] = {}
        for name, found in sorted(sizes.items(), key=lambda item: -item[1].claim.bytes):
            wanted = self.config.models[name].tensor_parallel
            fitting = [number for number, each in enumerate(self.gpus) if each.cuda >= found.claim.bytes]
            home = sorted(fitting, key=lambda number: (claimed[number] / self.gpus[number].total, number))[:wanted]
            homes[name] = tuple(sorted(home)) if len(home) == wanted else ()
            for number in homes[name]:
                claimed[number] += found.claim.bytes
        return homes

    def asleep(self, name: str, found: Estimate) -> int:
        """Bytes that a profile keeps of each GPU while it sleeps; 0: it is stopped."""
        sleeps = levels(self.config.models[name], None, unified=self.unified)
        return min(found.residue.device, found.claim.bytes) if sleeps else 0

    def host(self, name: str, found: Estimate) -> int:
        """Bytes of the machine's memory that a profile fills while it sleeps at level 1 or keeps as pools."""
        profile = self.config.models[name]
        asleep = found.residue.host if 1 in levels(profile, None, unified=self.unified) else 0
        return asleep + host_pool_bytes(profile, found.claim.kv)

    def short(self, name: str, sizes: Mapping[str, Estimate], homes: Mapping[str, Sequence[int]]) -> dict[int, int]:
        """Bytes that a profile lacks on each of its GPUs while all others sleep; those alone where it lacks some."""
        lacks = {}
        for number in homes[name]:
            asleep = [self.asleep(other, sizes[other]) for other in sizes if other != name and number in homes[other]]
            lacks[number] = sizes[name].claim.bytes + sum(asleep) - self.room(number)
        return {number: size for number, size in lacks.items() if size > 0}


def turns(machine: Machine) -> Turns:
    """Whether each profile can run while all others sleep or are stopped."""
    names = machine.config.models
    known = {name: machine.estimate(name) for name in names}
    sizes = {name: found for name, found in known.items() if isinstance(found, Estimate)}
    homes = machine.homes(sizes)
    lacking = {name: machine.short(name, sizes, homes) for name in sizes}
    host = sum(machine.host(name, found) for name, found in sizes.items())
    full = machine.limit is not None and host > machine.limit
    models = []
    for name, found in known.items():
        if isinstance(found, str):
            models.append(Turn(profile=name, fits=False, why=found))
            continue
        stops = any(number in homes[name] for other in lacking if other != name for number in lacking[other])
        models.append(_turn(machine, name, sizes, homes, lacks=lacking[name], stops=stops, full=full))
    return Turns(
        take_turns=all(each.fits for each in models),
        why=_why(models, host, machine.limit if full else None),
        host_bytes=host,
        host_limit_bytes=machine.limit,
        unified=machine.unified,
        models=tuple(models),
    )


def _why(models: Sequence[Turn], host: int, limit: int | None) -> str:
    """`limit`: of host memory, where they fill more."""
    if why := next((f"{each.profile}: {each.why}" for each in models if not each.fits), ""):
        return why
    if limit is not None:
        stops = [each.profile for each in models if each.may_stop]
        how = f"{', '.join(stops)} may be stopped" if stops else "some sleep at level 2"
        return f"asleep they fill {gib(host)} GiB of host memory, and host_memory_for_sleep is {gib(limit)}: {how}"
    return next((f"{each.profile}: {each.why}" for each in models if each.why), "")


def _turn(
    machine: Machine,
    name: str,
    sizes: Mapping[str, Estimate],
    homes: Mapping[str, Sequence[int]],
    *,
    lacks: Mapping[int, int],
    stops: bool,
    full: bool,
) -> Turn:
    """`lacks`: bytes by GPU that others' sleep leaves it too few; `stops`: another lacks some on its GPUs; `full`: host
    memory does not do for all at level 1."""
    found, profile = sizes[name], machine.config.models[name]
    why = "" if homes[name] else "no GPU has room for its claim"
    for number, short in list(lacks.items())[:1]:
        why = f"asleep, others keep {gib(short)} GiB too much of GPU {number}: some are stopped instead"
    times, size = _times(machine, name), _bytes(found)
    loading = times.load_seconds(size)
    victims = [other for other in sizes if other != name and set(homes[other]) & set(homes[name])]
    asleep = (_times(machine, each).sleep_seconds(_bytes(sizes[each]), 1, first=True) for each in victims)
    away = max(asleep, default=0.0)
    may_sleep = levels(profile, None, unified=machine.unified)
    level = None if stops else chosen_level(may_sleep, host_fits=not full)
    may_stop = bool(may_sleep) and level is None
    return Turn(
        profile=name,
        gpus=tuple(homes[name]),
        fits=bool(homes[name]),
        why=why,
        claim_bytes=found.claim.bytes,
        asleep_bytes=machine.asleep(name, found),
        host_bytes=machine.host(name, found),
        context_length=found.least.tokens,
        model_context_length=found.own_context,
        context_chosen=found.context_length is not None,
        may_stop=may_stop,
        wait_s=round(away + (loading if level is None else times.wake_seconds(size)[level - 1]), 1),
        first_wait_s=round(away + loading, 1),
    )


def _times(machine: Machine, name: str) -> StepTimes:
    """Return the times of a profile that was never started."""
    return ModelState(name, machine.config.models[name], 0.0).times


def _bytes(found: Estimate) -> Size:
    return Size(weights=found.least.weights, stored=found.stored.bytes, encoder=not found.least.kv)


def turn_table(found: Turns) -> Iterator[str]:
    """Turns for a person."""
    stopped = [each.profile for each in found.models if each.may_stop]
    how = f", {', '.join(stopped)} stopped instead of put to sleep" if stopped else ""
    yield f"all {len(found.models)} can take turns{how}" if found.take_turns else "they cannot all take turns"
    for each in found.models:
        where = f"GPU {', '.join(map(str, each.gpus))}" if each.gpus else "no GPU"
        waits = f"a call waits about {each.wait_s:.0f} s for it, {each.first_wait_s:.0f} s the first time"
        held = f"{gib(each.claim_bytes)} GiB awake, {gib(each.asleep_bytes)} asleep"
        if each.context_chosen:
            held = f"{held}; {context_words(each.context_length, each.model_context_length)}"
        yield f"  {each.profile} on {where}: {held}; {waits}" if each.fits else f"  {each.profile}: {each.why}"
        if each.fits and each.why:
            yield f"    {each.why}"
    yield _host_words(found)
    if found.why:
        yield found.why


def _host_words(found: Turns) -> str:
    if found.unified:
        return f"GPU and host share one memory: {POOL}, so models sleep at level 2"
    told = f"host memory while they sleep: {gib(found.host_bytes)} GiB"
    if found.host_limit_bytes is None:
        return (
            f"{told}; a sidecar uses half of its machine's (--host-memory SIZE, or host_memory_for_sleep in the file)"
        )
    return f"{told} of {gib(found.host_limit_bytes)}"
