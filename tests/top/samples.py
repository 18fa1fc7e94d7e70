"""Samples for the tests of `gateway top`, as a gateway would answer."""

from __future__ import annotations

from typing import Any

from gateway.control.calls import CallsView, CallView
from gateway.control.view import EngineView, FleetView, ModelView, QueueView, SidecarModelView, SidecarView
from gateway.shared.files.file_status import FileStatus
from gateway.top.sample import Counts, Point, Sample, Summary


def engine(id: str = "a:1", **fields: Any) -> EngineView:
    given = {
        "url": f"http://{id}",
        "up": True,
        "draining": False,
        "breaker": "closed",
        "state": "up",
        "checked_s": 0.1,
        "last_error": None,
        "last_error_s": None,
        "models": ["m"],
        "capacity_tokens": 1000,
        "budget_tokens": 800,
        "held_tokens": 600,
        "trim": 1.0,
        "in_flight": 3,
        "slots": 8,
        "prefill_rate": 5000.0,
        "tpot_s": 0.02,
    }
    return EngineView(id=id, name="engine-1", **(given | fields))


def model(id: str = "m", **fields: Any) -> ModelView:
    given = {
        "max_model_len": 4096,
        "mode": "normal",
        "engines": ["a:1"],
        "predicted_ttft_s": 0.1,
        "headroom_calls": 4,
        "spare_tokens": 200,
        "queued_calls": 0,
        "queued_tokens": 0,
        "wait_s": 0.0,
        "wait_s_by_class": {},
    }
    return ModelView(id=id, **(given | fields))


def call(**fields: Any) -> CallView:
    given = {
        "request_id": "r",
        "tenant": "acme",
        "class_name": "default",
        "model": "m",
        "engine": None,
        "state": "queued",
        "age_s": 1.0,
        "deadline_s": 9.0,
        "held_tokens": 10,
        "attempts": 0,
    }
    return CallView(**(given | fields))


def sleeper(profile: str = "big", **fields: Any) -> SidecarModelView:
    given = {
        "model": profile,
        "state": "sleeping",
        "pending": None,
        "engine": None,
        "ready_in_s": 2.5,
        "why": "",
        "last_error": "",
    }
    return SidecarModelView(profile=profile, **(given | fields))


def sidecar(id: str = "box", *models: SidecarModelView, **fields: Any) -> SidecarView:
    given = {
        "control": "http://box:1",
        "heard_s": 0.2,
        "stale": False,
        "memory_total": 80 << 30,
        "memory_used": 20 << 30,
        "refused": {},
    }
    return SidecarView(id=id, models=list(models), **(given | fields))


def fleet(**fields: Any) -> FleetView:
    given = {
        "draining": False,
        "engines": [engine()],
        "models": [model()],
        "queues": [QueueView(model="m", class_name="default", calls=0, tokens=0)],
        "running": {"default": 0, "batch": 0},
        "sidecars": [],
    }
    return FleetView(**(given | fields))


def sample(
    at: float = 0.0,
    counts: Counts | None = None,
    *,
    calls: tuple[CallView, ...] = (),
    total: int | None = None,
    status: FileStatus | None = None,
    targets: dict[str, float | None] | None = None,
    **fields: Any,
) -> Sample:
    return Sample(
        Point(at, counts or {}),
        Summary("1.2.3", status or FileStatus()),
        fleet(**fields),
        CallsView(total=len(calls) if total is None else total, calls=list(calls)),
        {"default": 5.0, "batch": None} if targets is None else targets,
    )
