"""LoRA adapters of a profile, as vLLM is told of them.

Flags of the profile win: `max-loras` and `max-lora-rank` say what is otherwise worked out, `max-cpu-loras` the rest.
"""

from __future__ import annotations

import msgspec

from sidecar.core.profile import Profile

AT_ONCE = 4  # adapters that one batch may use, unless told: each has a slot of its own in GPU memory


def lora_slots(profile: Profile) -> int:
    """`--max-loras`: adapters that one batch may use."""
    given = profile.flags.get("max-loras")
    return int(given) if given else min(AT_ONCE, len(profile.adapters))


def largest_rank(profile: Profile, rank: int) -> int:
    """`--max-lora-rank`; `rank`: that of the profile's adapters."""
    return int(profile.flags.get("max-lora-rank") or rank)


def lora_arguments(profile: Profile, rank: int) -> list[str]:
    """Arguments for a profile with adapters whose largest rank is `rank`; 0: not known, vLLM's own."""
    if not profile.adapters:
        return []
    found = ["--enable-lora"]
    if "max-loras" not in profile.flags:
        found += ["--max-loras", str(lora_slots(profile))]
    if rank and "max-lora-rank" not in profile.flags:
        found += ["--max-lora-rank", str(rank)]
    modules = ({"name": name, "path": path} for name, path in profile.adapters.items())
    return [*found, "--lora-modules", *(msgspec.json.encode(each).decode() for each in modules)]
