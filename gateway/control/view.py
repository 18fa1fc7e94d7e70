"""The fleet as JSON: what /fleet answers. A snapshot of the core's own numbers, read in one synchronous step.

Tokens are KV-cache tokens, ages and waits seconds, rates tokens per second. An upper tier (a load balancer, another
gateway) routes by `models`: what is spare, what waits, and for how long.
"""

from __future__ import annotations

import msgspec

from gateway.core.fleet import Engine, Fleet
from gateway.dispatch import Dispatch


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. What only a sample tells is null until there is one; `sample_age_s` says how old it is."""

    id: str
    url: str
    up: bool
    models: list[str]
    capacity_tokens: int
    budget_tokens: int
    held_tokens: int
    in_flight: int
    slots: int
    prefill_rate: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    sample_age_s: float | None = None


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """One model over the engines that serve it and are up. `wait_s`: until what waits now has been served."""

    id: str
    max_model_len: int | None
    engines: list[str]
    spare_tokens: int
    queued_calls: int
    queued_tokens: int
    wait_s: float


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    class_name: str = msgspec.field(name="class")
    calls: int
    tokens: int


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    draining: bool
    engines: list[EngineView]
    models: list[ModelView]
    queues: list[QueueView]
    running: dict[str, int]  # calls that hold a grant, by class


def fleet_view(fleet: Fleet, dispatch: Dispatch, now: float) -> FleetView:
    """Everything /fleet says; `now` in monotonic seconds."""
    return FleetView(
        draining=dispatch.leaving,
        engines=[_engine(engine, now) for engine in fleet],
        models=[_model(id, card.max_model_len, fleet, dispatch) for id, card in sorted(fleet.models.items())],
        queues=[
            QueueView(model=model, class_name=name, calls=queues.length(name), tokens=queues.tokens(name))
            for model, queues in sorted(dispatch.queues.items())
            for name in dispatch.policy.classes
        ],
        running=dict(dispatch.running),
    )


def _engine(engine: Engine, now: float) -> EngineView:
    view = EngineView(
        id=engine.id,
        url=engine.url,
        up=engine.up,
        models=sorted(engine.models),
        capacity_tokens=engine.capacity,
        budget_tokens=engine.budget,
        held_tokens=engine.held,
        in_flight=engine.in_flight,
        slots=engine.slots,
        prefill_rate=round(engine.prefill_rate, 1),
    )
    sample = engine.sample
    if sample is None:
        return view
    return msgspec.structs.replace(
        view,
        running=sample.running,
        waiting=sample.waiting,
        kv_usage=round(sample.kv_usage, 4),
        sample_age_s=round(now - engine.sampled_at, 3),
    )


def _model(id: str, context: int | None, fleet: Fleet, dispatch: Dispatch) -> ModelView:
    engines = [engine for engine in fleet.serving(id) if engine.up and not engine.draining]
    queues = dispatch.queues.get(id)
    return ModelView(
        id=id,
        max_model_len=context,
        engines=[engine.id for engine in engines],
        spare_tokens=sum(max(0, engine.budget - engine.load) for engine in engines),
        queued_calls=len(queues) if queues is not None else 0,
        queued_tokens=queues.total_tokens if queues is not None else 0,
        wait_s=round(dispatch.wait_estimate(queues), 3) if queues else 0.0,
    )
