"""Metric families that are read at scrape and counted elsewhere: engines, models, the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.core.admission.quotas import QuotaBook
from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.lengths import LengthModel
from gateway.decider.dispatch import Dispatch
from gateway.decider.relays.totals import added_up
from gateway.shared.files.file_status import FileStatus

BREAKER = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}
Families: TypeAlias = Callable[[], Iterable[Metric]]


def cluster_families(
    *, leads: bool, granting: bool, epoch: int, since: float, store_up: bool, here: int, silent: int
) -> Iterable[Metric]:
    """The metric families at this moment. `since`: seconds since the leader was elected; `here`, `silent`: members."""
    yield GaugeMetricFamily("weir_cluster_leader", "1: this gateway's decider leads.", value=leads)
    yield GaugeMetricFamily("weir_cluster_granting", "1: it leads, and may grant.", value=granting)
    yield GaugeMetricFamily("weir_cluster_epoch", "The highest epoch of a leader that is known.", value=epoch)
    yield GaugeMetricFamily(
        "weir_cluster_term_seconds", "Seconds since the election; 0: there is no leader.", value=since
    )
    yield GaugeMetricFamily("weir_cluster_store_up", "1: the store has answered last.", value=store_up)
    members = GaugeMetricFamily("weir_cluster_members", "Members, by whether they are silent.", labels=("state",))
    members.add_metric(("here",), here)
    members.add_metric(("silent",), silent)
    yield members


class BatchCounts(Protocol):
    """Counts of one process: `lines` by what became of them; `line_calls`: lines that wait or run now; `batch_states`:
    batches by state, empty where another process works them."""

    @property
    def lines(self) -> Mapping[str, int]: ...

    @property
    def line_calls(self) -> int: ...

    @property
    def batch_states(self) -> Mapping[str, int]: ...


def batch_families(counts: Sequence[BatchCounts]) -> Iterable[Metric]:
    """The metric families at this moment; none, where no process has counted a line, not even to 0."""
    lines = added_up(*(each.lines for each in counts))
    if not lines:
        return
    calls = sum([each.line_calls for each in counts])
    states = added_up(*(each.batch_states for each in counts))
    batches = GaugeMetricFamily("weir_batch_jobs", "Batches of the Batch API, by state.", labels=("status",))
    for status, count in states.items():
        batches.add_metric((status,), count)
    yield batches
    of_batches = CounterMetricFamily(
        "weir_batch_lines", "Lines of batches that got a result, and that were sent once more.", labels=("result",)
    )
    for result, count in lines.items():
        of_batches.add_metric((result,), count)
    yield of_batches
    yield GaugeMetricFamily("weir_batch_calls", "Lines of batches that wait or run now.", calls)


def quota_families(quotas: QuotaBook, clock: Callable[[], float]) -> Iterable[Metric]:
    """The metric families at this moment: of tenants that have a quota."""
    labels = ("tenant", "window")
    used = GaugeMetricFamily("weir_quota_used_tokens", "Tokens used in the calendar window, UTC.", labels=labels)
    amount = GaugeMetricFamily("weir_quota_tokens", "The tenant's quota of the calendar window.", labels=labels)
    for window in quotas:
        if window.amount is not None:
            used.add_metric((window.tenant, window.span), window.used(clock()))
            amount.add_metric((window.tenant, window.span), window.amount)
    yield from (used, amount)


def policy(status: FileStatus) -> Iterable[Metric]:
    yield GaugeMetricFamily("weir_policy_version", "Policies applied since the start.", status.version)
    yield CounterMetricFamily("weir_policy_reloads", "Policies applied while running.", status.reloads)
    yield CounterMetricFamily("weir_policy_failures", "Policy files that could not be used.", status.failures)
    yield GaugeMetricFamily("weir_policy_bad", "1 while the file cannot be used.", float(status.error is not None))


def targets(dispatch: Dispatch) -> Iterable[Metric]:
    """Targets of each class: alerts and boards compare measured times with it."""
    ttft = GaugeMetricFamily(
        "weir_class_ttft_seconds", "Target of the policy for the time to the first token.", labels=("class",)
    )
    for name, traffic_class in dispatch.policy.classes.items():
        if traffic_class.ttft is not None:
            ttft.add_metric((name,), traffic_class.ttft)
    yield ttft


def models(dispatch: Dispatch, fleet: Fleet) -> Iterable[Metric]:
    mode = GaugeMetricFamily("weir_mode", "0 normal, 1 tight, 2 brownout, 3 closed.", labels=("model",))
    steps = CounterMetricFamily("weir_mode_changes", "Steps between modes.", labels=("model", "from", "to"))
    bookings = GaugeMetricFamily("weir_bookings", "Bookings kept for refused calls.", labels=("model", "class"))
    drain = GaugeMetricFamily("weir_drain_tokens_per_second", "Tokens that come back.", labels=("model",))
    now = dispatch.clock()
    for model, traffic in dispatch.traffic.items():
        mode.add_metric((model,), traffic.level)
        for (before, after), count in traffic.state.transitions.items():
            steps.add_metric((model, str(before), str(after)), count)
        for name, kept in traffic.bookings.items():
            bookings.add_metric((model, name), len(kept))
        drain.add_metric((model,), traffic.drain.rate(now))
    wanted = GaugeMetricFamily(
        "weir_engines_wanted", "Engines for what is offered now, by the policy's `scaling`.", labels=("model",)
    )
    for model, count in dispatch.estimates.engines_wanted().items():
        wanted.add_metric((model,), count)
    changes = CounterMetricFamily("weir_breaker_changes", "States a breaker has entered.", labels=("engine", "to"))
    for engine in fleet:
        for state, count in engine.breaker.transitions.items():
            changes.add_metric((engine.label, state), count)
    yield from (mode, steps, bookings, drain, wanted, changes)


def engines(fleet: Fleet) -> Iterable[Metric]:
    gauges: list[tuple[str, str, Callable[[Engine], float]]] = [
        ("up", "1 while the engine answers its health checks.", lambda e: e.health.up),
        ("capacity_tokens", "KV-cache tokens of the engine.", lambda e: e.ledger.capacity),
        ("budget_tokens", "KV-cache tokens that may be promised now.", lambda e: e.ledger.budget),
        ("held_tokens", "KV-cache tokens promised: the ledger.", lambda e: e.ledger.held),
        ("in_flight", "Calls that hold a grant on the engine.", lambda e: e.ledger.in_flight),
        ("slots", "Calls that may be in flight: learned or set.", lambda e: e.ledger.slots),
        ("trim_ratio", "How far the budget is scaled to what holds turn into.", lambda e: e.ledger.trim),
        ("kv_usage_ratio", "KV-cache usage at the last sample.", lambda e: e.sample.kv_usage if e.sample else 0),
        ("prefill_tokens_per_second", "Learned prefill rate.", lambda e: e.speed.prefill_rate),
        ("seconds_per_output_token", "Learned time per output token.", lambda e: e.speed.tpot),
        ("draining", "1 while the engine gets no new calls.", lambda e: e.draining),
        ("breaker_open", "1 while the breaker is open, 0.5 half open.", lambda e: BREAKER[e.breaker.state]),
    ]
    for name, text, read in gauges:
        family = GaugeMetricFamily(f"weir_engine_{name}", text, labels=("engine",))
        for engine in fleet:
            family.add_metric((engine.label,), float(read(engine)))
        yield family
    failures = CounterMetricFamily(
        "weir_engine_check_failures", "Checks of an engine that failed, by why.", labels=("engine", "reason")
    )
    for engine in fleet:
        for reason, count in engine.health.check_failures.items():
            failures.add_metric((engine.label, reason), count)
    yield failures


def lengths(model: LengthModel) -> Iterable[Metric]:
    """Without labels: tenants are many, and one number tells whether predictions are worth having."""
    answers, beyond, influence = "weir_length_answers", "weir_length_beyond_quantile", "weir_length_influence_ratio"
    yield CounterMetricFamily(answers, "Answers of which a length was learned.", model.answers)
    yield CounterMetricFamily(beyond, "Those of them longer than their predicted 0.9 quantile.", model.beyond)
    yield GaugeMetricFamily(influence, "Measured rank correlation of predictions, 0 where too low.", model.influence)
    yield GaugeMetricFamily("weir_length_weights", "Weights that are remembered.", model.weights)
