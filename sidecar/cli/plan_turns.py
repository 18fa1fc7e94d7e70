"""Turns of a file's models on the GPUs of one machine: where each runs, who sleeps or stops for it, how long it takes.

The GPUs need not be here, and no engine is started. Sizes come from the models' files.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sidecar.cli.plan_on import Gpu
from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import Unusable
from sidecar.core.inventory import Size
from sidecar.core.model_state import ModelState
from sidecar.core.sleep import POOL, Level, chosen_level, levels
from sidecar.core.step_times import StepTimes
from sidecar.sizing.claim import UNIFIED_MOST, context_words
from sidecar.sizing.estimate import Estimate, Sizing
from sidecar.sizing.extras import host_pool_bytes
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


class Layout:
    """Models of a file on the GPUs of one machine, each in turn. `sizes`: estimates of those that fit on GPUs of which
    there are enough; `refused`: why the others do not. `homes`: where each runs, GPUs by number. `lacks`: bytes that
    each has too few while all others sleep, by GPU. `host_memory`: bytes of the machine's own memory; None: not told.
    `limit`: bytes of it for sleep, None: not known."""

    def __init__(self, config: SidecarConfig, folder: Path, gpus: Sequence[Gpu], host_memory: int | None) -> None:
        self._profiles, self._gpus = config.models, gpus
        self.unified = any(each.unified for each in gpus)
        sizing = Sizing(config, folder, os.environ, sizes_only=True)
        known = {name: self._estimate(sizing, name) for name in config.models}
        self.sizes = {name: found for name, found in known.items() if isinstance(found, Estimate)}
        self.refused = {name: why for name, why in known.items() if isinstance(why, str)}
        self.homes = self._homes()
        self.lacks = {name: self._lacking(name) for name in self.sizes}
        told, half = config.host_memory_for_sleep, None if host_memory is None else host_memory // OF_HOST
        self.limit = half if told == "auto" else told
        self._host = sum(map(self._host_bytes, self.sizes))
        self._full = self.limit is not None and self._host > self.limit

    def _estimate(self, sizing: Sizing, name: str) -> Estimate | str:
        """The estimate of a profile on the largest GPUs of which there are enough; or why it does not fit."""
        wanted = self._profiles[name].tensor_parallel
        if wanted > len(self._gpus):
            return f"needs {wanted} GPUs (tensor_parallel), there are {len(self._gpus)}"
        on = sorted(self._gpus, key=lambda each: -each.total)[wanted - 1]
        try:
            found = asyncio.run(sizing.planned(name, on.total, on.cuda, unified=on.unified))
        except (NotKnown, ModelError, Unusable) as error:
            return f"no estimate: {error}"
        return found if found.why is None else found.why

    def _homes(self) -> dict[str, tuple[int, ...]]:
        """GPUs for each profile, largest claim first, where the least is claimed already; none: no GPU has room."""
        claimed = [0] * len(self._gpus)
        homes: dict[str, tuple[int, ...]] = {}
        for name, found in sorted(self.sizes.items(), key=lambda item: -item[1].claim.bytes):
            wanted = self._profiles[name].tensor_parallel
            fitting = [number for number, each in enumerate(self._gpus) if each.cuda >= found.claim.bytes]
            home = sorted(fitting, key=lambda number: (claimed[number] / self._gpus[number].total, number))[:wanted]
            homes[name] = tuple(sorted(home)) if len(home) == wanted else ()
            for number in homes[name]:
                claimed[number] += found.claim.bytes
        return homes

    def _lacking(self, name: str) -> dict[int, int]:
        lacks = {}
        for number in self.homes[name]:
            asleep = [self.asleep(other) for other in self.beside(name) if number in self.homes[other]]
            lacks[number] = self.sizes[name].claim.bytes + sum(asleep) - self._room(number)
        return {number: size for number, size in lacks.items() if size > 0}

    def _room(self, number: int) -> int:
        """Bytes of a GPU for engines, awake and asleep."""
        each = self._gpus[number]
        spared = (1000 + UNIFIED_MOST) // 2  # the host's own programs get half of what no engine may claim
        return each.cuda * spared // 1000 if each.unified else each.cuda

    def beside(self, name: str) -> list[str]:
        """Other profiles that share a GPU with this one."""
        return [other for other in self.sizes if other != name and set(self.homes[other]) & set(self.homes[name])]

    def asleep(self, name: str) -> int:
        """Bytes that a profile keeps of each GPU while it sleeps; 0: it is stopped."""
        found = self.sizes[name]
        return min(found.residue.device, found.claim.bytes) if self._levels(name) else 0

    def _levels(self, name: str) -> tuple[Level, ...]:
        return levels(self._profiles[name], None, unified=self.unified)

    def _host_bytes(self, name: str) -> int:
        """Bytes of the machine's memory that a profile fills while it sleeps at level 1 or keeps as pools."""
        found = self.sizes[name]
        asleep = found.residue.host if 1 in self._levels(name) else 0
        return asleep + host_pool_bytes(self._profiles[name], found.claim.kv)

    def turns(self) -> Turns:
        """Whether each profile can run while all others sleep or are stopped."""
        models = tuple(map(self._turn, self._profiles))
        return Turns(
            take_turns=all(each.fits for each in models),
            why=self._why(models),
            host_bytes=self._host,
            host_limit_bytes=self.limit,
            unified=self.unified,
            models=models,
        )

    def _why(self, models: Sequence[Turn]) -> str:
        if why := next((f"{each.profile}: {each.why}" for each in models if not each.fits), ""):
            return why
        if self.limit is not None and self._full:
            stops = [each.profile for each in models if each.may_stop]
            how = f"{', '.join(stops)} may be stopped" if stops else "some sleep at level 2"
            fill = f"asleep they fill {gib(self._host)} GiB of host memory"
            return f"{fill}, and host_memory_for_sleep is {gib(self.limit)}: {how}"
        return next((f"{each.profile}: {each.why}" for each in models if each.why), "")

    def _turn(self, name: str) -> Turn:
        if name in self.refused:
            return Turn(profile=name, fits=False, why=self.refused[name])
        found, home, beside = self.sizes[name], self.homes[name], self.beside(name)
        why = "" if home else "no GPU has room for its claim"
        for number, short in list(self.lacks[name].items())[:1]:
            why = f"asleep, others keep {gib(short)} GiB too much of GPU {number}: some are stopped instead"
        times, size = self._times(name), _bytes(found)
        loading = times.load_seconds(size)
        away = max(map(self._sleep_seconds, beside), default=0.0)
        stops = any(not self.lacks[other].keys().isdisjoint(home) for other in beside)
        level = None if stops else chosen_level(self._levels(name), host_fits=not self._full)
        return Turn(
            profile=name,
            gpus=home,
            fits=bool(home),
            why=why,
            claim_bytes=found.claim.bytes,
            asleep_bytes=self.asleep(name),
            host_bytes=self._host_bytes(name),
            context_length=found.least.tokens,
            model_context_length=found.own_context,
            context_chosen=found.context_length is not None,
            may_stop=bool(self._levels(name)) and level is None,
            wait_s=round(away + (loading if level is None else times.wake_seconds(size)[level - 1]), 1),
            first_wait_s=round(away + loading, 1),
        )

    def _sleep_seconds(self, name: str) -> float:
        return self._times(name).sleep_seconds(_bytes(self.sizes[name]), 1, first=True)

    def _times(self, name: str) -> StepTimes:
        """The times of a profile that was never started."""
        return ModelState(name, self._profiles[name], 0.0).times


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
