"""View of a gateway, computed from samples: plain values, without a clock, a terminal or a colour.

`--json` prints a view as it is.

Times in seconds, memory in bytes, tokens of KV cache or of texts, rates per second over the last `rates.WINDOW`
seconds; a rate is None until there are two samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from gateway.control.calls import CallView
from gateway.control.view import EngineView, FleetView, SidecarModelView, SidecarView
from gateway.core.engines.breaker import BreakerState
from gateway.core.request.outcome import STATUS, Outcome
from gateway.top.rates import Grown
from gateway.top.sample import Point, Sample

KEPT = 121  # points: two minutes of the default interval, and WINDOW of the shortest
NO_CLASS = "(none)"  # calls that ended before they had one
KINDS = ("ok", "refused", "failed", "caller")  # of outcomes: kind_of says which is what
AWAKE = "running"  # the state of a sidecar's model that may get calls


class Flow(msgspec.Struct, frozen=True):
    """One thing that is counted. `history`: its rate in every step between two samples, the newest last."""

    name: str
    kind: str
    rate: float | None
    history: list[float]


class ClassRow(msgspec.Struct, frozen=True, kw_only=True):
    """One class. `streaming` of those running, and the `oldest` in the queue, are None where there are more calls than
    the gateway lists. Waits are of calls that were sent to an engine; `newcomer`: what one would wait now, at worst
    over models. `refused`, `failed` by outcome: those whose rate is not zero."""

    name: str
    queued: int
    running: int
    streaming: int | None
    oldest: float | None
    wait_p50: float | None
    wait_p99: float | None
    newcomer: float
    target: float | None
    ok: float | None
    refused: dict[str, float]
    failed: dict[str, float]


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model and its queues: calls by class, those that are not empty. `wanted`: engines, by the scaling signal."""

    id: str
    mode: str
    engines: int
    wanted: int
    queued: dict[str, int]
    queued_tokens: int
    wait: float
    predicted_ttft: float | None
    headroom: int
    spare_tokens: int


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. `state`: down, draining, breaker open, half open (its breaker), up. `used`: measured KV tokens,
    `age`: of that sample; None where there is none yet."""

    id: str
    state: str
    breaker: str
    models: list[str]
    in_flight: int
    slots: int
    running: int | None
    waiting: int | None
    capacity: int
    budget: int
    held: int
    used: int | None
    age: float | None
    trim: float
    prefill_rate: float
    tpot: float


class TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant. Calls now are None where there are more than the gateway lists."""

    name: str
    queued: int | None
    running: int | None
    calls: float | None
    tokens: float | None


class View(msgspec.Struct, frozen=True, kw_only=True):
    """All of one frame. `seconds`: how long the rates looked back. `notes`: what an operator should know, in lines.
    `asleep`: models of sidecars that get no calls now, with the sidecar's id."""

    gateway: str
    policy: str
    seconds: float
    notes: list[str]
    flows: list[Flow]
    tokens: list[Flow]
    classes: list[ClassRow]
    tenants: list[TenantRow]
    models: list[ModelRow]
    engines: list[EngineRow]
    sidecars: list[SidecarView]
    asleep: list[tuple[str, SidecarModelView]]


def view_of(sample: Sample, points: Sequence[Point]) -> View:
    """The newest sample, and the points of the last ones, its own the last."""
    grown = Grown(points)
    fleet, status = sample.fleet, sample.summary.policy
    where = status.file or "the defaults"
    return View(
        gateway=sample.summary.gateway,
        policy=f"policy {status.version}, {where}",
        seconds=grown.seconds,
        notes=_notes(sample, grown),
        flows=_flows(grown),
        tokens=[
            Flow(kind, "tokens", grown.rate(("tokens", kind)), grown.history(("tokens", kind)))
            for kind in ("prompt", "cached", "completion")
        ],
        classes=_classes(sample, grown),
        tenants=_tenants(sample, grown),
        models=_models(fleet),
        engines=[_engine(engine) for engine in fleet.engines],
        sidecars=fleet.sidecars,
        asleep=[
            (sidecar.id, model)
            for sidecar in fleet.sidecars
            for model in sidecar.models
            if model.state != AWAKE or model.pending is not None
        ],
    )


def kind_of(outcome: str) -> str:
    """ok; refused: this gateway's decision; failed: an engine's or our fault; caller: the caller's doing."""
    if outcome == Outcome.OK.value:
        return "ok"
    statuses = {known.value: advice.status for known, advice in STATUS.items()}
    match statuses.get(outcome):
        case 429 | 503 | 504:
            return "refused"
        case 500 | 502:
            return "failed"
        case _:
            return "caller"


def _notes(sample: Sample, grown: Grown) -> list[str]:
    notes = []
    if sample.fleet.draining:
        notes.append("draining: it takes no new calls")
    if sample.summary.policy.error is not None:
        first = sample.summary.policy.error.partition("\n")[0]
        notes.append(f"the policy file cannot be used, and the one before is active: {first}")
    if grown.restarted:
        notes.append("its counters began again: it was restarted")
    return notes


def _flows(grown: Grown) -> list[Flow]:
    """What calls end as: ok, then whatever else was counted since the first point: refused, failed, the caller's."""
    seen = {key for _, counts in grown.steps for key, count in counts.items() if key[0] == "calls" and count > 0.0}
    outcomes = dict.fromkeys([Outcome.OK.value, *sorted(key[2] for key in seen)])
    keys = {outcome: [key for key in seen if key[2] == outcome] for outcome in outcomes}
    flows = [Flow(name, kind_of(name), grown.rate(*own), grown.history(*own)) for name, own in keys.items()]
    return sorted(flows, key=lambda flow: KINDS.index(flow.kind))


def _classes(sample: Sample, grown: Grown) -> list[ClassRow]:
    fleet, listed = sample.fleet, _listed(sample)
    ended = {key[1] for key, count in grown.counts.items() if key[0] == "calls" and count > 0.0}
    names = dict.fromkeys([*sample.targets, *fleet.running, *sorted(ended)])
    return [_class(name, sample, listed, grown) for name in names]


def _class(name: str, sample: Sample, listed: Sequence[CallView] | None, grown: Grown) -> ClassRow:
    fleet = sample.fleet
    rates = {key[2]: grown.rate(key) or 0.0 for key in grown.counts if key[:2] == ("calls", name)}
    kinds = {outcome: kind_of(outcome) for outcome, rate in rates.items() if rate > 0.0}
    own = None if listed is None else [call for call in listed if call.class_name == name]
    asked = [model for model in fleet.models if model.engines or model.queued_calls]  # the others sleep, unwanted
    return ClassRow(
        name=name or NO_CLASS,
        queued=sum(queue.calls for queue in fleet.queues if queue.class_name == name),
        running=fleet.running.get(name, 0),
        streaming=None if own is None else sum(call.state == "streaming" for call in own),
        oldest=None if own is None else max((call.age_s for call in own if call.state == "queued"), default=None),
        wait_p50=grown.quantile(0.5, "wait", name),
        wait_p99=grown.quantile(0.99, "wait", name),
        newcomer=max((model.wait_s_by_class.get(name, 0.0) for model in asked), default=0.0),
        target=sample.targets.get(name),
        ok=rates.get(Outcome.OK.value, 0.0) if grown.seconds else None,
        refused={outcome: rates[outcome] for outcome, kind in sorted(kinds.items()) if kind == "refused"},
        failed={outcome: rates[outcome] for outcome, kind in sorted(kinds.items()) if kind in {"failed", "caller"}},
    )


def _listed(sample: Sample) -> Sequence[CallView] | None:
    """All calls there are, None where only the newest are listed."""
    return sample.calls.calls if sample.calls.total == len(sample.calls.calls) else None


def _tenants(sample: Sample, grown: Grown) -> list[TenantRow]:
    """Those with calls now or lately, whoever uses most first; none where there is but one."""
    listed = _listed(sample)
    queued = Counter(call.tenant for call in sample.calls.calls if call.state == "queued")
    running = Counter(call.tenant for call in sample.calls.calls if call.state != "queued")
    lately = {key[1] for key, count in grown.counts.items() if key[0] == "tenant calls" and count > 0.0}
    rows = [
        TenantRow(
            name=name or NO_CLASS,
            queued=None if listed is None else queued[name],
            running=None if listed is None else running[name],
            calls=grown.rate(("tenant calls", name)),
            tokens=grown.rate(("tenant tokens", name)),
        )
        for name in {*queued, *running, *lately}
    ]
    rows.sort(key=lambda row: (-(row.tokens or 0.0), -(row.calls or 0.0), row.name))
    return rows if len(rows) > 1 else []


def _models(fleet: FleetView) -> list[ModelRow]:
    return [
        ModelRow(
            id=model.id,
            mode=model.mode,
            engines=len(model.engines),
            wanted=model.engines_wanted,
            queued={q.class_name: q.calls for q in fleet.queues if q.model == model.id and q.calls},
            queued_tokens=model.queued_tokens,
            wait=model.wait_s,
            predicted_ttft=model.predicted_ttft_s,
            headroom=model.headroom_calls,
            spare_tokens=model.spare_tokens,
        )
        for model in fleet.models
    ]


def _engine(engine: EngineView) -> EngineRow:
    state = "up"
    if not engine.up:
        state = "down"
    elif engine.draining:
        state = "draining"
    elif engine.breaker != BreakerState.CLOSED.value:
        state = "breaker open" if engine.breaker == BreakerState.OPEN.value else "half open"
    return EngineRow(
        id=engine.id,
        state=state,
        breaker=engine.breaker,
        models=engine.models,
        in_flight=engine.in_flight,
        slots=engine.slots,
        running=engine.running,
        waiting=engine.waiting,
        capacity=engine.capacity_tokens,
        budget=engine.budget_tokens,
        held=engine.held_tokens,
        used=None if engine.kv_usage is None else round(engine.kv_usage * engine.capacity_tokens),
        age=engine.sample_age_s,
        trim=engine.trim,
        prefill_rate=engine.prefill_rate,
        tpot=engine.tpot_s,
    )
