"""Sidecars as the console shows them: the memory of their GPUs, and their models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.control.view import SidecarView
from gateway.shared.files.units import GIB


def sidecar_entry(sidecar: SidecarView, began: Callable[[str, str], float | None]) -> Mapping[str, object]:
    """Console entry of a sidecar, sizes in GiB. `began`: Unix seconds when a sidecar's profile entered its state."""
    return {
        "control": sidecar.control,
        "stale": sidecar.stale,
        "gpus": [
            {
                "index": gpu.index,
                "total": _gib(gpu.total),
                "used": _gib(gpu.used),
                "free": _gib(gpu.free),
                "held": [[profile, _gib(held)] for profile, held in gpu.held.items()],
                "refused": gpu.refused,
            }
            for gpu in sidecar.gpus
        ],
        "refused": sidecar.refused,
        "models": [
            {
                "profile": model.profile,
                "model": model.model,
                "state": model.state,
                "pending": model.pending,
                "phase": model.phase,
                "engine": model.engine,
                "began": began(sidecar.id, model.profile) if model.state == "starting" else None,
                "ready_in": None if model.ready_in_s is None else round(model.ready_in_s),
                "why": model.why or model.last_error,
            }
            for model in sidecar.models
        ],
    }


def _gib(size: int) -> float:
    return round(size / GIB, 1)
