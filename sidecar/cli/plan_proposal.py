"""Proposal of a sidecar's file whose models take turns on given GPUs, each asleep while others run.

A model gets less of its GPU, so that what others keep asleep has room; more GPUs, or weights in 8 bits, where it does
not fit otherwise. The smallest models are stopped instead of put to sleep where nothing else helps. What fits in no way
is left out. The proposal is planned before it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from gateway.shared.files.yaml_file import written
from sidecar.cli.plan_turns import Machine, turns
from sidecar.core.config import SidecarConfig
from sidecar.core.profile import KvMemory, Profile
from sidecar.sizing.estimate import Estimate
from sidecar.sizing.memory import LITTLE

QUANTIZED = "fp8"  # what vLLM makes of 16 bits while it loads, on every GPU since Ampere


class Proposal:
    """A file in the making: `profiles` by name, and `notes`: what was changed, or why a model was left out."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._given = machine.config
        self.profiles: dict[str, Profile] = {}
        self.notes: dict[str, str] = {}

    def text(self) -> str:
        """The file as YAML; empty where no model is left, or its models would still not take turns."""
        for name, profile in self._given.models.items():
            self._admit(name, profile)
        while (crowded := self._crowded()) is not None:
            self._make_room(crowded)
        if not self.profiles:
            return ""
        config = self._config(self.profiles)
        self._machine.apply(config)
        if not turns(self._machine).asleep:
            return ""
        plain = {name: Profile(model_path="") for name in config.models}
        notes = "".join(f"# {name}: {note}\n" for name, note in self.notes.items() if note)
        return notes + written(config, SidecarConfig, beside=SidecarConfig(models=plain))

    def _config(self, profiles: Mapping[str, Profile]) -> SidecarConfig:
        return msgspec.structs.replace(self._given, models=dict(profiles))

    def _estimate(self, name: str, profile: Profile) -> Estimate | str:
        self._machine.apply(self._config({**self.profiles, name: profile}))
        return self._machine.estimate(name)

    def _admit(self, name: str, profile: Profile) -> None:
        """Take a model in as it is, or in the first form in which it fits."""
        for changed, note in _forms(profile, len(self._machine.gpus)):
            found = self._estimate(name, changed)
            if isinstance(found, Estimate):
                self.profiles[name] = changed
                self.notes[name] = note
                return
            self.notes[name] = f"left out: {found}"

    def _crowded(self) -> str | None:
        """The first model for which those that sleep leave too little; None: there is none."""
        sizes = self._sizes()
        homes = self._machine.homes(sizes)
        return next((name for name in sizes if not homes[name] or self._machine.short(name, sizes, homes)), None)

    def _sizes(self) -> dict[str, Estimate]:
        known = {name: self._estimate(name, profile) for name, profile in self.profiles.items()}
        return {name: found for name, found in known.items() if isinstance(found, Estimate)}

    def _make_room(self, name: str) -> None:
        """Give a model less of its GPUs; else have the smallest that sleeps beside it stopped; else leave it out."""
        sizes = self._sizes()
        homes = self._machine.homes(sizes)
        lacks = max(self._machine.short(name, sizes, homes).values(), default=0)
        profile, claim = self.profiles[name], sizes[name].claim
        share = (claim.bytes - lacks) * 100 // claim.total / 100
        if homes[name] and share >= 0.02 and not isinstance(profile.gpu_memory, KvMemory):
            less = msgspec.structs.replace(profile, gpu_memory=share)
            found = self._estimate(name, less)
            if isinstance(found, Estimate) and found.least.total + LITTLE <= found.claim.bytes:
                self.profiles[name] = less
                return
        beside = [other for other in sizes if other != name and set(homes[other]) & set(homes[name])]
        sleepers = [other for other in beside if self._machine.asleep(other, sizes[other])]
        if sleepers:
            smallest = min(sleepers, key=lambda other: sizes[other].least.weights)
            self.profiles[smallest] = msgspec.structs.replace(self.profiles[smallest], sleep=None)
            self.notes[smallest] = "stopped instead of put to sleep, as nothing is left for it beside the others"
            return
        del self.profiles[name]
        self.notes[name] = "left out: its GPUs have no room for it beside the others"


def _forms(profile: Profile, gpus: int) -> Iterator[tuple[Profile, str]]:
    """A profile as it is and in other forms, the dearest last, each with a note."""
    yield profile, ""
    several = []
    if profile.gpus is None:
        counts = (1 << power for power in range(1, 8))
        several = [count for count in counts if profile.tensor_parallel < count <= gpus]
    for count in several:
        yield msgspec.structs.replace(profile, tensor_parallel=count), f"on {count} GPUs, as it does not fit otherwise"
    if "quantization" in profile.flags:
        return
    smaller = msgspec.structs.replace(profile, flags={**profile.flags, "quantization": QUANTIZED})
    for count in (profile.tensor_parallel, *several):
        where = f", on {count} GPUs" if count > profile.tensor_parallel else ""
        note = f"its weights in 8 bits{where}, as it does not fit otherwise"
        yield msgspec.structs.replace(smaller, tensor_parallel=count), note
