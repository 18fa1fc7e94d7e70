"""Metric families that are read at scrape and counted elsewhere: engines, models, model routes, the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from prometheus_client.core import Metric

from gateway.core.admission.quotas import QuotaBook
from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.money.book import MoneyBook
from gateway.core.money.tariff import MICRO
from gateway.decider.dispatch import Dispatch
from gateway.decider.model_routes import ModelRoutes
from gateway.frames.messages import RelayCounts
from gateway.shared.files.file_status import FileStatus
from gateway.shared.metrics import counter, gauge

BREAKER = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}
Families: TypeAlias = Callable[[], Iterable[Metric]]


def cluster_families(*, granting: bool, store_up: bool) -> Iterable[Metric]:
    """The metric families at this moment."""
    yield gauge("weir_cluster_granting", "1: it leads, and may grant.", of=granting)
    yield gauge("weir_cluster_store_up", "1: the store has answered last.", of=store_up)


def batches(told: RelayCounts) -> Iterable[Metric]:
    """The metric families of the batcher and, where a process has counted a line of it (also to 0), the Batch API."""
    yield counter("weir_batches", "Requests of the batcher, by what sent them.", "reason", of=told.batches)
    yield counter("weir_batched_calls", "Calls answered by a shared request.", of=told.merged)
    yield counter("weir_batch_resends", "Calls of a refused batch, sent singly.", of=told.again)
    if told.lines:
        yield gauge("weir_batch_jobs", "Batches of the Batch API, by state.", "status", of=told.batch_states)
        text = "Lines of batches that got a result, and that were sent once more."
        yield counter("weir_batch_lines", text, "result", of=told.lines)
        yield gauge("weir_batch_calls", "Lines of batches that wait or run now.", of=told.line_calls)


def quota_families(quotas: QuotaBook, clock: Callable[[], float]) -> Iterable[Metric]:
    """The metric families at this moment: of tenants that have a quota."""
    windows = {(window.tenant, window.span): window for window in quotas if window.amount is not None}
    used = {key: window.used(clock()) for key, window in windows.items()}
    amounts = {key: window.amount or 0 for key, window in windows.items()}
    text = "Tokens used in the calendar window, UTC."
    yield gauge("weir_quota_used_tokens", text, "tenant", "window", of=used)
    text = "The tenant's quota of the calendar window."
    yield gauge("weir_quota_tokens", text, "tenant", "window", of=amounts)


def money_families(money: MoneyBook, clock: Callable[[], float]) -> Iterable[Metric]:
    """The metric families at this moment; none where no call costs money. Labels are of the policy, and of own engines'
    models."""
    if not money:
        return
    now = clock()
    purses = {(provider, purse.window.span): purse for provider, tenant, purse in money.purses() if not tenant}
    spent = {key: purse.window.used(now) / MICRO for key, purse in purses.items()}
    reserved = {key: purse.window.reserved / MICRO for key, purse in purses.items()}
    budgets = {key: (purse.window.amount or 0) / MICRO for key, purse in purses.items()}
    yield gauge("weir_money_spent", "Money spent in the calendar window, UTC.", "provider", "window", of=spent)
    yield gauge("weir_money_reserved", "Money reserved for calls under way.", "provider", "window", of=reserved)
    yield gauge("weir_money_budget", "Budget of the calendar window.", "provider", "window", of=budgets)
    labels = ("provider", "tenant", "model")
    costs = {payer: micro / MICRO for payer, (micro, _) in money.totals.items()}
    tokens = {payer: count for payer, (_, count) in money.totals.items()}
    yield counter("weir_money", "Money that calls have cost.", *labels, of=costs)
    yield counter("weir_money_tokens", "Tokens of calls that cost money.", *labels, of=tokens)


def route_families(routes: ModelRoutes) -> Iterable[Metric]:
    """The metric families of model routes at this moment; none before the first call for a route."""
    if routes.resolved:
        text = "Calls for a route, by the model they got."
        yield counter("weir_model_route_calls", text, "asked_model", "model", "how", of=routes.resolved)
    canaries = [((name, model), bool(why)) for name, model, why in routes.canaries()]
    if canaries:
        text = "1 where a canary was taken out of its model route."
        yield gauge("weir_canary_out", text, "asked_model", "model", of=canaries)
    if routes.mirrored:
        yield from _mirrors(routes)


def _mirrors(routes: ModelRoutes) -> Iterable[Metric]:
    """Both sides of each mirror: the members' answers to calls that were copied, and those to the copies."""
    sides, mirrored = ("asked_model", "side"), routes.mirrored.items()
    results = [((*side, result), count) for side, each in mirrored for result, count in each.results.items()]
    ends = [((*side, reason), count) for side, each in mirrored for reason, count in each.finishes.items()]
    tokens, ttft = {side: each.tokens for side, each in mirrored}, {side: each.ttft for side, each in mirrored}
    yield counter("weir_mirror_calls", "Calls that were copied, and copies.", *sides, "result", of=results)
    yield counter("weir_mirror_tokens", "Completion tokens of their answers.", *sides, of=tokens)
    yield counter("weir_mirror_ttft_seconds", "Their times to first token, added up.", *sides, of=ttft)
    yield counter("weir_mirror_finishes", "Their finish reasons.", *sides, "reason", of=ends)


def policy(status: FileStatus) -> Iterable[Metric]:
    yield gauge("weir_policy_version", "Policies applied since the start.", of=status.version)
    yield gauge("weir_policy_bad", "1 while the file cannot be used.", of=status.error is not None)


def targets(dispatch: Dispatch) -> Iterable[Metric]:
    """Targets of each class: alerts and boards compare measured times with it."""
    classes = dispatch.policy.classes.items()
    ttft = {name: traffic_class.ttft for name, traffic_class in classes if traffic_class.ttft is not None}
    yield gauge("weir_class_ttft_seconds", "Target of the policy for the time to the first token.", "class", of=ttft)


def models(dispatch: Dispatch) -> Iterable[Metric]:
    traffic, fleet = dispatch.traffic, dispatch.fleet
    modes = {model: each.level for model, each in traffic.items()}
    booked = {(model, name): len(kept) for model, each in traffic.items() for name, kept in each.bookings.items()}
    states = {(engine.label, state): count for engine in fleet for state, count in engine.breaker.transitions.items()}
    wanted = "Engines for what is offered now, by the policy's `scaling`."
    yield gauge("weir_mode", "0 normal, 1 tight, 2 brownout, 3 closed.", "model", of=modes)
    yield gauge("weir_bookings", "Bookings kept for refused calls.", "model", "class", of=booked)
    yield gauge("weir_engines_wanted", wanted, "model", of=dispatch.estimates.engines_wanted())
    yield counter("weir_breaker_changes", "States a breaker has entered.", "engine", "to", of=states)


def engines(fleet: Fleet) -> Iterable[Metric]:
    """The metric families at this moment. Of two engines of one name the newer counts: the other ends its calls."""
    gauges: list[tuple[str, str, Callable[[Engine], float]]] = [
        ("up", "1 while the engine answers its health checks.", lambda e: e.health.up),
        ("capacity_tokens", "KV-cache tokens of the engine.", lambda e: e.ledger.capacity),
        ("budget_tokens", "KV-cache tokens that may be promised now.", lambda e: e.ledger.budget),
        ("held_tokens", "KV-cache tokens promised: the ledger.", lambda e: e.ledger.held),
        ("in_flight", "Calls that hold a grant on the engine.", lambda e: e.ledger.in_flight),
        ("slots", "Calls that may be in flight: learned or set.", lambda e: e.ledger.slots),
        ("trim_ratio", "How far the budget is scaled to what holds turn into.", lambda e: e.ledger.trim),
        ("prefill_tokens_per_second", "Learned prefill rate.", lambda e: e.speed.prefill_rate),
        ("seconds_per_output_token", "Learned time per output token.", lambda e: e.speed.tpot),
        ("draining", "1 while the engine gets no new calls.", lambda e: e.draining),
        ("breaker_open", "1 while the breaker is open, 0.5 half open.", lambda e: BREAKER[e.breaker.state]),
    ]
    for name, text, read in gauges:
        yield gauge(f"weir_engine_{name}", text, "engine", of={engine.label: read(engine) for engine in fleet})
    usage = {each.label: each.sample.kv_usage for each in fleet if each.health.up and each.sample is not None}
    text = "KV-cache usage at the last sample; none of an engine that is down, or tells none."
    yield gauge("weir_engine_kv_usage_ratio", text, "engine", of=usage)
    failures = {(each.label, why): count for each in fleet for why, count in each.health.check_failures.items()}
    text = "Checks of an engine that failed, by why."
    yield counter("weir_engine_check_failures", text, "engine", "reason", of=failures)
