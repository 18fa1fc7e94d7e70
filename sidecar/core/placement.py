"""A model as the plan sees it: what it holds, and what it is to have.

Bytes are per GPU, times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.shared.fields import made_of
from sidecar.core.inventory import Resident, Target
from sidecar.core.model_state import ModelState


def as_resident(model: ModelState, now: float, ref_count: int, unseen: int) -> Resident:
    """Return what the model holds. `ref_count`: calls in flight; `unseen`: bytes that NVML does not show yet."""
    return made_of(
        Resident,
        model,
        profile=model.name,
        state=model.lifecycle.state,
        claim=model.size.claim,
        residue=model.size.residue,
        unseen=unseen,
        ref_count=ref_count + model.busy,
        busy_for=0.0 if model.busy_since is None else now - model.busy_since,
        pinned=model.profile.pin,
        pending=model.lifecycle.pending,
        model=model.served_name,
        copy=model.copy and not model.profile.pin,
        since=model.lifecycle.since,
        sleep_levels=model.sleep_levels(),
        host_bytes=model.size.host,
    )


def as_targets(
    model: ModelState, now: float, totals: Mapping[int, int], *, room: bool = True, copy: bool = False
) -> list[tuple[int, Target]]:
    """Return what the model is to have on GPUs of each size: their bytes, and the target. With one size of GPU there is
    one target, for 0 bytes. `totals`: bytes by GPU. `copy`: as a copy.

    After a start that found too little memory the model needs more than the start had; `room` False: no more than that.
    An engine on several GPUs is sized for the smallest, because each has the KV cache of the smallest. The engine goes
    to GPUs that are alike if there are enough.
    """
    least, several = model.least_room + 1 if model.least_room and room else 0, model.profile.tensor_parallel > 1
    whole = Target(
        profile=model.name,
        need=max(model.size.start_needs, least),
        since=model.wanted_since if model.wanted_since is not None else now,
        tensor_parallel=model.profile.tensor_parallel,
        gpus=model.profile.gpus,
        last_used=model.last_used,
        model=model.served_name,
        copy=copy,
    )
    if len(set(totals.values())) < 2 or not model.sizes:
        return [(0, whole)]
    found = []
    for total, size in sorted(model.sizes.items()):
        larger = several and sum(each == total for each in totals.values()) < model.profile.tensor_parallel
        fits = (gpu for gpu, each in totals.items() if each == total or (larger and each > total))
        gpus = tuple(gpu for gpu in fits if whole.gpus is None or gpu in whole.gpus)
        found.append((total, msgspec.structs.replace(whole, need=max(size.start_needs, least), gpus=gpus)))
    return found
