"""Reading of a gateway for the console: one entry for each thing that is shown, by key.

Times are seconds since 1970, not ages: an entry changes when something happens, and not because time passes. What
jitters at rest is rounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gateway import __version__
from gateway.control.console.conditions import Conditions
from gateway.control.console.figures import WINDOW, ClassFigures, Open, class_figures
from gateway.control.console.headline import MINUTE, headline
from gateway.control.console.mirrors import mirror_entries
from gateway.control.console.remedy import ModelState
from gateway.control.parts import ControlParts, Used
from gateway.control.policy_view import HASH_SHOWN
from gateway.control.view import ModelView, model_views, sidecar_view
from gateway.core.admission.bucket import Bucket
from gateway.core.engines.announcer import state_of
from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.engine import Engine
from gateway.core.engines.hold import Hold
from gateway.core.money.book import MoneyBook
from gateway.core.money.engine_time import HOME
from gateway.core.money.tariff import MICRO
from gateway.core.policy.traffic import Tenant
from gateway.core.request.outcome import Outcome
from gateway.core.request.tenants import MIRROR
from gateway.core.sidecars.sidecar import Sidecar
from gateway.shared.files.units import GIB

LATE = 3  # samples that an engine may miss before its sample is said to be old
OLD = 5.0  # seconds, at least


def sidecar_entry(sidecar: Sidecar, now: float, began: Callable[[str, str], float | None]) -> Mapping[str, object]:
    """Console entry of a sidecar: its view for /fleet, with sizes in GiB and times that stand still. `began`: Unix
    seconds when a sidecar's profile entered its state."""
    view: dict[str, Any] = sidecar_view(sidecar, now)
    id = view.pop("id")
    del view["heard_s"]
    for gpu in view["gpus"]:
        gpu.update({size: _gib(gpu[size]) for size in ("total", "used", "free")})
        gpu["held"] = [[profile, _gib(held)] for profile, held in gpu["held"].items()]
    for model in view["models"]:
        ready_in, last_error = model.pop("ready_in_s"), model.pop("last_error")
        model["ready_in"] = None if ready_in is None else round(ready_in)
        model["began"] = began(id, model["profile"]) if model["state"] == "starting" else None
        model["why"] = model["why"] or last_error
    return view


def _gib(size: int) -> float:
    return round(size / GIB, 1)


class ConsoleReading:
    """Reader of everything that the console shows. Changes nothing."""

    def __init__(self, parts: ControlParts) -> None:
        self._parts = parts
        self._fleet = parts.dispatch.fleet
        self._dispatch = parts.dispatch
        self.ended = parts.ended
        self.unix = parts.unix
        self._conditions = Conditions(parts)
        self._since = round(time.time(), 3)  # serial numbers of calls count from then on

    @property
    def names(self) -> dict[str, str]:
        """Names of the engines, by their ids."""
        return {engine.id: engine.label for engine in self._fleet}

    def entries(self) -> dict[str, object]:
        """All there is to show now."""
        dispatch, parts = self._dispatch, self._parts
        now = dispatch.clock()
        views = model_views(dispatch, now)
        status = parts.policy_status()
        entries: dict[str, object] = {
            "gateway": {
                "version": __version__,
                "began": self._since,
                "draining": dispatch.leaving,
                "engines": len(self._fleet.engines),
                "board": dispatch.policy.console,
            },
            "policy": status,
        }
        entries |= {f"model/{model.id}": self._model(model) for model in views}
        entries |= self._classes(views, now)
        entries |= {f"engine/{engine.id}": self._engine(engine, now) for engine in self._fleet}
        sidecars = sorted(dispatch.sidecars.sidecars.items())
        entries |= {f"sidecar/{id}": sidecar_entry(each, now, parts.state_since) for id, each in sidecars}
        entries |= tenant_entries(dispatch.policy.tenants, parts.used(), parts.limits.buckets(), now)
        entries |= money_entries(dispatch.control.money, now)
        entries |= mirror_entries(dispatch.policy.models, dispatch.routes.mirrored)
        seconds = self.ended.reach(now, MINUTE)
        room = self._room()
        classes = dispatch.policy.classes
        entries["headline"] = headline(
            self.ended.callers(now - seconds),
            {model.id: self._state(model, room.get(model.id, {})) for model in views},
            list(self._conditions.lines(views, status)),
            seconds,
            sum(map(len, dispatch.queues.values())),
            {name for name, each in classes.items() if dispatch.running.get(name, 0) == each.max_concurrency},
            lately=now - WINDOW,
            classes=classes,
            names=self.names,
            since=self._began,
        )
        return entries

    def _began(self, tenant: str, outcome: Outcome, first: float) -> float | None:
        """Unix seconds when a tenant's calls began to end with `outcome`; None if unknown. `first`: monotonic time of
        the first such end of the last minute."""
        known, shown = self._parts.observer.began.get((tenant, outcome)), self.unix(first)
        return shown if known is None or shown is None else min(known, shown)

    def _classes(self, models: Sequence[ModelView], now: float) -> Iterator[tuple[str, object]]:
        seconds = self.ended.reach(now, WINDOW)
        dispatch = self._dispatch
        classes = dispatch.policy.classes
        figures = class_figures(self.ended.callers(now - seconds), self._open(), classes, seconds, now)
        asked = [model for model in models if model.engines or model.queued_calls]
        for order, (name, target) in enumerate(classes.items()):
            yield (
                f"class/{name}",
                {
                    "order": order,
                    "running": dispatch.running.get(name, 0),
                    "most_running": target.max_concurrency,
                    "queued": sum([queues.length(name) for queues in dispatch.queues.values()]),
                    "wait": max([_rounded(model.wait_s_by_class.get(name, 0.0)) for model in asked], default=0.0),
                    "target": target.ttft,
                    "weight": target.weight,
                    "now": figures.get(name) or ClassFigures(),
                },
            )

    def _open(self) -> Iterator[Open]:
        """Callers' calls that wait or have an engine."""
        dispatch = self._dispatch
        for queues in dispatch.queues.values():
            for ticket in queues:
                yield Open(ticket.call.class_name, ticket.call.arrived, None)
        first: dict[int, Hold] = {}  # a call that is hedged has two
        for hold, grant in dispatch.holds.items():
            call = grant.call
            if first.setdefault(id(call), hold) is hold and call.tenant != MIRROR:
                yield Open(call.class_name, call.arrived, hold.taken_at)

    def _model(self, model: ModelView) -> dict[str, Any]:
        traffic, queues = self._dispatch.traffic.get(model.id), self._dispatch.queues.get(model.id)
        waiting = queues and [
            [name, queues.length(name), queues.tokens(name), _rounded(model.wait_s_by_class.get(name, 0.0))]
            for name in self._dispatch.policy.classes
            if queues.length(name)
        ]
        return {
            "mode": model.mode,
            "why": "" if traffic is None else traffic.state.why,
            "since": None if traffic is None else self.unix(traffic.state.since),
            "engines": len(model.engines),
            "wanted": model.engines_wanted,
            "ttft": None if model.predicted_ttft_s is None else _rounded(model.predicted_ttft_s),
            "headroom": model.headroom_calls,
            "spare": model.spare_tokens,
            "queued": model.queued_calls,
            "wait": _rounded(model.wait_s),
            "queues": waiting or [],
        }

    def _room(self) -> dict[str, Counter[str]]:
        """Tokens of KV cache that are held, by model and class."""
        room: dict[str, Counter[str]] = {}
        for hold, grant in self._dispatch.holds.items():
            room.setdefault(grant.call.model, Counter())[grant.call.class_name] += hold.tokens
        return room

    def _state(self, model: ModelView, room: Mapping[str, int]) -> ModelState:
        """State of a model for the headline."""
        traffic, full = self._dispatch.traffic.get(model.id), ""
        if model.engines_wanted > len(model.engines):
            ids = set(model.engines)
            ledgers = [engine.ledger for engine in self._fleet.serving(model.id) if engine.label in ids]
            calls, slots = sum([each.in_flight for each in ledgers]), sum([each.slots for each in ledgers])
            held = sum([each.held for each in ledgers]) / (sum([each.budget for each in ledgers]) or 1)
            full = f"they run {calls} of at most {slots} calls, {held:.0%} of their KV-cache budget is held"
        return ModelState(
            mode=model.mode,
            why="" if traffic is None else traffic.state.why,
            engines=len(model.engines),
            wanted=model.engines_wanted,
            full=full,
            queued=model.queued_calls,
            room=room,
        )

    def _engine(self, engine: Engine, now: float) -> dict[str, object]:
        breaker, sample, trouble = engine.breaker, engine.sample, engine.health.trouble
        closed = breaker.state is BreakerState.CLOSED
        told: dict[str, object] = {
            "name": engine.label,
            "url": engine.url,
            "state": "up" if engine.health.up else state_of(engine).partition(":")[0],
            "models": sorted(engine.models)[:20],
            "capacity": engine.ledger.capacity,
            "budget": engine.ledger.budget,
            "held": engine.ledger.held,
            "calls": engine.ledger.in_flight,
            "slots": engine.ledger.slots,
            "fixed": engine.ledger.max_slots is not None,
        }
        if engine.draining:
            told["draining"] = True
        if not closed:
            told["breaker"] = breaker.state.value
            told["why"] = engine.health.failed_call
            told["since"] = self.unix(breaker.broken_at)
        if trouble is not None and not engine.health.up:
            told["why"], told["since"] = trouble.words, self.unix(engine.health.outage_at)
        if sample is not None:
            told["used"] = round(sample.kv_usage * engine.ledger.capacity)
            told["inside"] = [sample.running, sample.waiting]
            if now - engine.sampled_at > max(OLD, LATE * self._dispatch.policy.fleet.poll):
                told["sampled"] = self.unix(engine.sampled_at)
        return told


def _rounded(seconds: float) -> float:
    """To two digits: what is predicted is no more exact, and jitters less."""
    return float(f"{seconds:.2g}")


# -- tenants and money ------------------------------------------------------------------------------------------------

TENANTS = 500  # shown: those that used most
KEYS = 20  # shown of each
LIMITS = 50  # shown of each
ROWS = 200  # of tenants and models that are shown of a provider: those that cost most


def tenant_entries(
    tenants: Mapping[str, Tenant], used: Mapping[str, Used], buckets: Iterable[Bucket], now: float
) -> Iterator[tuple[str, object]]:
    """Yield the entry of each tenant, of TENANTS at most: its rights, its usage, and what its limits have left."""
    limits: dict[str, list[object]] = {}
    for bucket in buckets:
        kind, tenant, class_name, model = bucket.key
        own = limits.setdefault(tenant, [])
        if len(own) < LIMITS:
            what = f"class {class_name}" if class_name else ""
            what = f"model {model}" if model else what
            own.append([kind, what, str(bucket.quota.rate), bucket.burst, bucket.left(now)])
    nothing: Used = (0, 0, 0)
    names = sorted(tenants, key=lambda name: (-used.get(name, nothing)[2], -used.get(name, nothing)[0], name))
    weights = sum([tenant.weight for tenant in tenants.values()])
    for order, name in enumerate(names[:TENANTS]):
        found = tenants[name]
        ended, answered, tokens = used.get(name, nothing)
        told = {
            "order": order,
            "weight": found.weight,
            "share": round(found.weight / weights, 4),
            "class": found.class_,
            "best_class": found.best_class,
            "models": list(found.models),
            "keys": [key[:HASH_SHOWN] for key in found.keys[:KEYS]],
            "all_keys": len(found.keys),
            "ended": ended,
            "answered": answered,
            "tokens": tokens,
            "limits": limits.get(name, []),
        }
        yield f"tenant/{name}", told
    yield "limits", limits.get("", [])


def money_entries(money: MoneyBook, now: float) -> Iterator[tuple[str, object]]:
    """Yield the entry of each provider, and of own engines with a price: its budgets, and what each tenant's calls for
    each model have cost since the start."""
    found: dict[str, dict[str, list[list[object]]]] = {}
    if money.meters.price is not None:
        found[HOME] = {"budgets": [], "spent": []}
    for provider, tenant, purse in money.purses():
        if not tenant:
            window = purse.window
            amounts = (window.used(now), window.reserved, window.amount or 0)
            entry = found.setdefault(provider, {"budgets": [], "spent": []})
            entry["budgets"].append([window.span, *(amount / MICRO for amount in amounts)])
    for (provider, tenant, model), (micro, tokens) in sorted(money.totals.items(), key=lambda each: -each[1][0]):
        if provider in found and len(found[provider]["spent"]) < ROWS:
            found[provider]["spent"].append([tenant, model, tokens, micro / MICRO])
    for provider, entry in found.items():
        yield f"provider/{provider}", entry
