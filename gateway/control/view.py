"""Fleet as JSON, for GET /fleet: a snapshot of the core's own numbers, read in one synchronous step.

Tokens are KV-cache tokens, ages and waits seconds, rates tokens per second. An upper tier (a load balancer, another
gateway) routes by `models`: what is spare, what waits, for how long, and how soon a call would be answered. Looking
changes nothing. An engine whose breaker is open counts as no room, though dispatch goes on using it in a panic.
"""

from __future__ import annotations

import math

import msgspec

from gateway.core.admission.mode import Mode
from gateway.core.engines.announcer import state_of
from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.choice import predicted_ttft
from gateway.core.engines.engine import Engine
from gateway.core.request.call import Call
from gateway.core.request.routes import ROUTES
from gateway.core.sidecars.sidecar import Sidecar, awake
from gateway.decider.dispatch import Dispatch

# The call for which predictions are made.
PROMPT = 500  # tokens
COST = 2 * PROMPT  # KV tokens, with as many of output


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """Model. `engines`: the engines that serve the model and may receive calls.

    For a call of 500 prompt tokens and 500 output tokens: `predicted_ttft_s` is the time to its first token once it is
    sent, null without an engine; `headroom_calls` is how many such calls could be sent now. `engines_wanted`: the
    scaling signal. `wait_s`: until every call that waits now has been served. `wait_s_by_class`: until a new call of
    that class is sent, from the tenant whose waiting call came last. Both include the time until a sidecar has the
    model ready.
    """

    id: str
    max_model_len: int | None
    mode: str
    engines: list[str]
    predicted_ttft_s: float | None
    headroom_calls: int
    engines_wanted: int = 0
    spare_tokens: int
    queued_calls: int
    queued_tokens: int
    wait_s: float
    wait_s_by_class: dict[str, float]


def fleet_view(dispatch: Dispatch, now: float) -> dict[str, object]:
    """View for /fleet; `now` in monotonic seconds."""
    return {
        "draining": dispatch.leaving,
        "engines": [_engine(engine, now) for engine in dispatch.fleet],
        "models": model_views(dispatch, now),
        "queues": [
            {"model": model, "class": name, "calls": queues.length(name), "tokens": queues.tokens(name)}
            for model, queues in sorted(dispatch.queues.items())
            for name in dispatch.policy.classes
        ],
        "running": dict(dispatch.running),  # calls that hold a grant, by class
        "sidecars": [sidecar_view(each, now) for _, each in sorted(dispatch.sidecars.sidecars.items())],
    }


def model_views(dispatch: Dispatch, now: float) -> list[ModelView]:
    """Views of all models; `now` in monotonic seconds."""
    wanted, cards = dispatch.estimates.engines_wanted(), sorted(dispatch.fleet.models.items())
    return [_model(id, card.max_model_len, dispatch, wanted.get(id, 0), now) for id, card in cards]


def ready_in(sidecar: Sidecar, profile: str, now: float) -> float | None:
    """Seconds until a sidecar's profile could serve; None: it cannot be made ready."""
    outlook = sidecar.outlook(profile, now)
    return 0.0 if awake(sidecar.models[profile]) else None if outlook is None else outlook.ready_in


def sidecar_view(sidecar: Sidecar, now: float) -> dict[str, object]:
    """View of a sidecar; `now` in monotonic seconds."""
    report = sidecar.report
    engines = {member.profile: member.id for member in sidecar.members.values()}
    times = {profile: ready_in(sidecar, profile, now) for profile in sidecar.models}
    return {
        "id": report.sidecar,
        "control": report.control,
        "heard_s": round(now - sidecar.reported_at, 2),  # since its last report
        "stale": sidecar.stale(now),  # then its models get no requests
        "gpus": [
            {
                "index": gpu.index,
                "total": gpu.total,
                "used": gpu.used,
                "free": gpu.free,
                # Bytes that are accounted to engines, by their profiles.
                "held": {each.profile: each.held for each in report.models if each.held and gpu.index in each.gpus},
                "refused": gpu.refused,  # why no engine is started there
            }
            for gpu in report.gpus
        ],
        "models": [
            {
                "profile": profile,
                "model": model.model,
                "state": model.state,
                "pending": model.pending,
                "engine": engines.get(profile),  # in the fleet
                "ready_in_s": None if (seconds := times[profile]) is None else round(seconds, 2),
                "why": model.message or model.why,  # it cannot be made ready
                "last_error": model.last_error,
                "phase": model.phase,
            }
            for profile, model in sidecar.models.items()
        ],
        "refused": sidecar.refused,  # addresses in its report that may not be used, and why
    }


def _engine(engine: Engine, now: float) -> dict[str, object]:
    health, ledger, sample = engine.health, engine.ledger, engine.sample
    trouble = health.trouble  # of the last failed check, or of the last call that could not connect
    return {
        "id": engine.id,
        "name": engine.label,  # in the console, the log and the metrics
        "alias": engine.name,  # for clients
        "url": engine.url,
        "up": health.up,
        "draining": engine.draining,
        "breaker": engine.breaker.state.value,
        "state": state_of(engine),  # up, or why the engine is down
        "checked_s": None if math.isinf(health.checked_at) else round(now - health.checked_at, 3),
        "outage_s": None if math.isinf(health.outage_at) else round(now - health.outage_at, 3),
        "last_error": None if trouble is None else trouble.words,
        "last_error_s": None if trouble is None else round(now - trouble.at, 3),
        "models": sorted(engine.models),
        "capacity_tokens": ledger.capacity,
        "budget_tokens": ledger.budget,
        "held_tokens": ledger.held,
        "trim": round(ledger.trim, 3),  # learned ratio of the budget to capacity x target
        "in_flight": ledger.in_flight,
        "slots": ledger.slots,
        "prefill_rate": round(engine.speed.prefill_rate, 1),
        "tpot_s": round(engine.speed.tpot, 5),  # learned seconds per output token
        "running": None if sample is None else sample.running,
        "waiting": None if sample is None else sample.waiting,
        "kv_usage": None if sample is None else round(sample.kv_usage, 4),
        "sample_age_s": None if sample is None else round(now - engine.sampled_at, 3),
    }


def _model(id: str, context: int | None, dispatch: Dispatch, wanted: int, now: float) -> ModelView:
    engines = [engine for engine in dispatch.fleet.serving(id) if engine.health.up and not engine.draining]
    engines = [engine for engine in engines if engine.breaker.state is not BreakerState.OPEN]
    engines = [engine for engine in engines if engine.transfers.answers] or engines
    queues, traffic = dispatch.queues.get(id), dispatch.traffic.get(id)
    outlook = None if engines else dispatch.sidecars.outlook(id, now)
    ready_in = (outlook.ready_in or 0.0) if outlook is not None else 0.0
    return ModelView(
        id=id,
        max_model_len=context,
        mode=str(Mode.NORMAL if traffic is None else traffic.state.mode),
        engines=[engine.label for engine in engines],
        predicted_ttft_s=min((round(predicted_ttft(engine, PROMPT, now), 3) for engine in engines), default=None),
        headroom_calls=sum(
            max(
                0,
                min(engine.ledger.slots - engine.ledger.in_flight, (engine.ledger.budget - engine.ledger.load) // COST),
            )
            for engine in engines
        ),
        engines_wanted=wanted,
        spare_tokens=sum(max(0, engine.ledger.budget - engine.ledger.load) for engine in engines),
        queued_calls=len(queues) if queues is not None else 0,
        queued_tokens=queues.total_tokens if queues is not None else 0,
        wait_s=round(ready_in + dispatch.estimates.wait(id), 3) if queues else 0.0,
        wait_s_by_class={name: round(ready_in + _wait(id, name, dispatch, now), 3) for name in dispatch.policy.classes},
    )


def _wait(model: str, class_name: str, dispatch: Dispatch, now: float) -> float:
    """Seconds until a newcomer is sent, of the tenant that came last; 0 as long as no rate is known."""
    queues = dispatch.queues.get(model)
    if not queues:
        return 0.0
    ends = queues.ends(class_name)
    tenant = "" if ends is None else ends[1].call.tenant
    return dispatch.traffic[model].wait(queues, _newcomer(model, class_name, tenant, dispatch, now), now)


def _newcomer(model: str, class_name: str, tenant: str, dispatch: Dispatch, now: float) -> Call:
    return Call(
        request_id="",
        route=ROUTES[b"/v1/chat/completions"],
        model=model,
        tenant=tenant,
        class_name=class_name,
        arrived=now,
        deadline=now + dispatch.policy.classes[class_name].deadline,
        stream=True,
        messages=1,
        prompt_tokens=PROMPT,
        output_tokens=COST - PROMPT,
    )
