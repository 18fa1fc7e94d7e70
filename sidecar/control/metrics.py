"""Prometheus metrics of the sidecar, read from the manager and the reporter at each scrape.

Names that begin with `vllm_` are those that operators of vLLM proxies have dashboards for. Memory there is in MiB,
though the names say mb. Weir's own names begin with `weir_sidecar_`. Labels come from the sidecar's file, never from a
caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.shared.files.units import MIB
from gateway.shared.metrics import counter, gauge
from gateway.shared.protocol import State
from sidecar.core.status import Status
from sidecar.residency.manager import Manager


class Metrics(Collector):
    """`exposition` is the body of /metrics. `view` gives the status at a scrape."""

    def __init__(self, manager: Manager, view: Callable[[], Status]) -> None:
        self._manager, self._view = manager, view

    def exposition(self) -> bytes:
        """The Prometheus text."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """Every family, as it is now."""
        status = self._view()
        yield from _gpus(status)
        yield from self._models(status)
        yield from self._memory()
        yield from self._done()
        yield from _reports(status)
        if status.relay is not None:
            text = "Requests at the relay, by outcome: ordered, refused, left, answered, failed, broken."
            yield counter("weir_sidecar_relay_requests", text, "outcome", of=status.relay.outcomes)
            yield gauge("weir_sidecar_relay_connections", "Connections of gateways.", of=status.relay.connections)

    def _models(self, status: Status) -> Iterable[Metric]:
        models = status.models
        serving, calls = Counter[str](), Counter[str]()  # several profiles may be of one model
        for model in models:
            serving[model.model] += model.state == "running"
            calls[model.model] += status.calls[model.profile]
        loaded = {name: serving[name] > 0 for name in calls}
        states = {(model.profile, each): model.state == each for model in models for each in get_args(State)}
        levels = {model.profile: model.sleep_level for model in models}
        off = {model.profile: self._manager.entries[model.profile].off for model in models}
        yield gauge("vllm_model_loaded", "1 while an engine of it serves.", "model_id", of=loaded)
        yield gauge("vllm_model_requests_active", "Its calls in flight, at all gateways.", "model_id", of=calls)
        yield gauge("weir_sidecar_model_state", "1 for the state it is in.", "profile", "state", of=states)
        yield gauge("weir_sidecar_model_sleep_level", "How deep it sleeps; 0: awake.", "profile", of=levels)
        yield gauge("weir_sidecar_model_off", "1 while an operator has switched it off.", "profile", of=off)

    def _memory(self) -> Iterable[Metric]:
        machine, entries = self._manager.machine, self._manager.entries
        booked = {profile: model.host_held for profile, model in entries.items()}
        residue = {profile: model.size.residue for profile, model in entries.items()}
        kept = "What it keeps of each of its GPUs asleep, as known now."
        yield gauge("weir_sidecar_host_memory_limit_bytes", "What sleep at level 1 may fill.", of=machine.host_bound)
        yield gauge("weir_sidecar_host_memory_bytes", "Host memory booked for sleep at level 1.", "profile", of=booked)
        yield gauge("weir_sidecar_residue_bytes", kept, "profile", of=residue)
        yield gauge("weir_sidecar_gpu_processes_hidden", "1 while NVML does not list the engines.", of=machine.blind)

    def _done(self) -> Iterable[Metric]:
        done = "How often it got ready, slept, woke, stopped, failed; began as a copy, gave its place to another model."
        evicted = "How often it was put to sleep or stopped, and why: room for another, idle, an order, off."
        failed = "Starts that failed, by the kind that `sidecar diagnose` names; other: its output tells nothing."
        claim = "What it claims of each of its GPUs while it is awake."
        models = self._manager.entries.items()
        counts = {(name, event): n for name, model in models for event, n in sorted(model.counts.items())}
        evictions = {(name, *why): n for name, model in models for why, n in sorted(model.evictions.items())}
        failures = {(name, kind): n for name, model in models for kind, n in sorted(model.failed_starts.items())}
        starts = {name: model.starts for name, model in models}
        claims = {name: model.size.claim for name, model in models}
        yield counter("weir_sidecar_events", done, "profile", "event", of=counts)
        yield counter("weir_sidecar_evictions", evicted, "profile", "kind", "reason", of=evictions)
        yield counter("weir_sidecar_starts", "Starts of its engine.", "profile", of=starts)
        yield counter("weir_sidecar_start_failures", failed, "profile", "kind", of=failures)
        yield gauge("weir_sidecar_claim_bytes", claim, "profile", of=claims)


def _gpus(status: Status) -> Iterable[Metric]:
    gpus = {str(gpu.index): gpu for gpu in status.gpus}
    busy = {index: gpu.utilization * 100 for index, gpu in gpus.items() if gpu.utilization is not None}
    total = {index: gpu.total / MIB for index, gpu in gpus.items()}
    used = {index: gpu.used / MIB for index, gpu in gpus.items()}
    refused = {index: bool(gpu.refused) for index, gpu in gpus.items()}
    why = "1 while nothing is started on it: quarantine, MIG, an error."
    yield gauge("vllm_gpu_memory_total_mb", "Memory of the GPU in MiB.", "gpu_id", of=total)
    yield gauge("vllm_gpu_memory_used_mb", "Memory in use in MiB, whoever uses it.", "gpu_id", of=used)
    yield gauge("vllm_gpu_utilization_percent", "How busy it was, 0 to 100.", "gpu_id", of=busy)
    yield gauge("weir_sidecar_gpu_refused", why, "gpu_id", of=refused)


def _reports(status: Status) -> Iterable[Metric]:
    taken = {gateway.url: gateway.taken is True for gateway in status.gateways}
    failures = {gateway.url: gateway.failures for gateway in status.gateways}
    yield gauge("weir_sidecar_gateway_up", "1 while it takes reports.", "gateway", of=taken)
    yield counter("weir_sidecar_report_failures", "Reports that it did not take.", "gateway", of=failures)
    yield gauge("weir_sidecar_state_file_bad", "1 while it cannot be written.", of=bool(status.state_error))
    bad = status.file.error is not None
    yield gauge("weir_sidecar_file_bad", "1 while its file cannot be used.", of=bad)
