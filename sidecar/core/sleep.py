"""Sleep of an engine: the levels that a profile may use, and what was measured of its sleep.

Level 1 keeps the weights in pinned host memory. Level 2 drops them and has vLLM load them again, which it does for the
model's own weights alone: a draft model (vllm#52479) or adapters (vllm#39934) would answer nonsense afterwards. Bytes
of GPU memory are on each GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from gateway.shared.files.units import MIB
from sidecar.core.profile import Profile

Level = Literal[1, 2]

DRAFTLESS = frozenset(("ngram", "ngram_gpu", "suffix"))  # methods of speculation that have no weights
LORA_FLAGS = ("enable-lora", "lora-modules")
POOL = "level 1 would free nothing, as this GPU's memory is the host's"
LEAST_RESIDUE = 256 * MIB  # half a CUDA context, which every process that is there at all holds
EXCEEDED = (
    2  # times its first residue, from which on an engine is stopped instead of put to sleep (vllm#36651: it grows)
)
LEAST_GROWTH = 512 * MIB  # of a residue that counts: readings of a busy GPU are not exact

_Memory = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class MeasuredSleep(msgspec.Struct, frozen=True, kw_only=True):
    """Sleep of one profile as it was measured. `settings`: any text that changes when the profile's settings do.

    `residue`: bytes that an engine kept on each GPU at its first sleep. `host`: bytes of host memory in all at level 1.
    0: not measured. `wrong`: after level 2 it answered otherwise than before.
    """

    settings: _Name
    residue: _Memory = 0
    host: _Memory = 0
    wrong: bool = False


def without_level_2(profile: Profile) -> str:
    """The reason why an engine of this profile cannot sleep at level 2, in words; empty: it can."""
    given = profile.flags.get("speculative-config")
    if isinstance(given, Mapping) and given.get("method") not in DRAFTLESS:
        return "vLLM does not load a draft model again (speculative-config)"
    lora = next((flag for flag in LORA_FLAGS if profile.flags.get(flag)), "")
    lora = "adapters" if profile.adapters else lora
    return f"vLLM does not load LoRA adapters again ({lora})" if lora else ""


def levels(profile: Profile, measured: MeasuredSleep | None, *, unified: bool = False) -> tuple[Level, ...]:
    """Levels that an engine may sleep at, the one to be tried first in front; none: it is stopped.

    Where level 2 is not to be had, level 1 is what remains of `sleep: {level: 2}`. `unified`: the GPU's memory is the
    host's, so that level 1 would free nothing and is not used.
    """
    if profile.sleeps is None:
        return ()
    if without_level_2(profile) or (measured is not None and measured.wrong):
        return () if unified else (1,)
    return (1, 2) if profile.sleeps.level == 1 and not unified else (2,)


def chosen_level(allowed: Sequence[Level], *, host_fits: bool, worth: Collection[Level] = (1, 2)) -> Level | None:
    """Return the level at which an engine sleeps, or None if it is better stopped.

    `allowed`: levels in order of preference. `host_fits`: host memory has room for level 1. `worth`: levels from which
    it is back sooner than by a start.
    """
    return next((level for level in allowed if level in worth and (level == 2 or host_fits)), None)


def note(profile: Profile, measured: MeasuredSleep | None, *, unified: bool = False) -> str:
    """Return a note for the operator of a profile that may not sleep as its settings say; empty if it may."""
    if profile.sleeps is None or (profile.sleeps.level != 2 and not unified):
        return ""
    why = without_level_2(profile)
    if not why and measured is not None and measured.wrong:
        why = "once it has answered otherwise after it"
    if unified and why:
        return f"it is stopped instead of put to sleep: no sleep at level 2, since {why}; {POOL}"
    if unified:
        return "" if profile.sleeps.level == 2 else f"it sleeps at level 2: {POOL}"
    return f"no sleep at level 2, since {why}: at level 1 while host memory has room, else it is stopped" if why else ""


def residue_exceeded(first: int, residue: int) -> bool:
    """Whether an engine that kept `first` bytes on each GPU at its first sleep has come to keep too many."""
    return 0 < first * EXCEEDED <= residue and residue - first >= LEAST_GROWTH
