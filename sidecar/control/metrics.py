"""Prometheus metrics of the sidecar, read from the manager and the reporter at each scrape.

Names that begin with `vllm_` are those that operators of vLLM proxies have dashboards for. Memory there is in MiB,
though the names say mb. Weir's own names begin with `weir_sidecar_`. Labels come from the sidecar's file, never from a
caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.shared.files.file_status import FileStatus
from gateway.shared.files.units import MIB
from gateway.shared.protocol import GPUReport, State
from sidecar.core.status import GatewayStatus, RelayUse
from sidecar.residency.manager import Manager


class Metrics(Collector):
    """`exposition` is the body of /metrics. `gateways` gives how each takes reports, `state_error` why the state file
    cannot be written, empty while it can; `file` is of the reloads of the sidecar's file, `relay` of
    its relay, None where there is none."""

    def __init__(
        self,
        manager: Manager,
        *,
        gateways: Callable[[], Iterable[GatewayStatus]],
        state_error: Callable[[], str],
        file: Callable[[], FileStatus],
        relay: Callable[[], RelayUse | None] = lambda: None,
    ) -> None:
        self._manager = manager
        self._gateways = gateways
        self._state_error = state_error
        self._file = file
        self._relay = relay
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """The Prometheus text."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read the manager."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Every family, as it is now."""
        yield from self._gpus()
        yield from self._models()
        yield from self._memory()
        yield from self._done()
        yield from self._reports()
        yield from self._reloads()
        yield from self._relayed()

    def _gpus(self) -> Iterable[Metric]:
        gauges: list[tuple[str, str, Callable[[GPUReport], float | None]]] = [
            ("vllm_gpu_memory_total_mb", "Memory of the GPU in MiB.", lambda gpu: gpu.total / MIB),
            ("vllm_gpu_memory_used_mb", "Memory in use in MiB, whoever uses it.", lambda gpu: gpu.used / MIB),
            (
                "vllm_gpu_utilization_percent",
                "How busy it was, 0 to 100.",
                lambda gpu: None if gpu.utilization is None else gpu.utilization * 100,
            ),
            ("weir_sidecar_gpu_refused", "1 while nothing is started on it: quarantine, MIG, an error.",
             lambda gpu: float(bool(gpu.refused))),
        ]  # fmt: skip
        gpus = self._manager.gpus()
        for name, text, read in gauges:
            family = GaugeMetricFamily(name, text, labels=("gpu_id",))
            for gpu in gpus:
                value = read(gpu)
                if value is not None:
                    family.add_metric((str(gpu.index),), value)
            yield family

    def _models(self) -> Iterable[Metric]:
        loaded = GaugeMetricFamily("vllm_model_loaded", "1 while an engine of it serves.", labels=("model_id",))
        active = GaugeMetricFamily(
            "vllm_model_requests_active", "Its calls in flight, at all gateways.", labels=("model_id",)
        )
        state = GaugeMetricFamily("weir_sidecar_model_state", "1 for the state it is in.", labels=("profile", "state"))
        doing = GaugeMetricFamily(
            "weir_sidecar_model_pending", "1 for what is being done about it.", labels=("profile", "pending")
        )
        level = GaugeMetricFamily(
            "weir_sidecar_model_sleep_level", "How deep it sleeps; 0: awake.", labels=("profile",)
        )
        copy = GaugeMetricFamily(
            "weir_sidecar_model_copy", "1 while gateways have another engine of its model.", labels=("profile",)
        )
        off = GaugeMetricFamily(
            "weir_sidecar_model_off", "1 while an operator has switched it off.", labels=("profile",)
        )
        models = self._manager.models()
        serving, calls = Counter[str](), Counter[str]()  # several profiles may be of one model
        for model in models:
            serving[model.model] += model.state == "running"
            calls[model.model] += self._manager.requests_active(model.profile)
        for name in calls:
            loaded.add_metric((name,), float(serving[name] > 0))
            active.add_metric((name,), calls[name])
        for model in models:
            off.add_metric((model.profile,), float(self._manager.entries[model.profile].off))
            for each in get_args(State):
                state.add_metric((model.profile, each), float(model.state == each))
            if model.pending is not None:
                doing.add_metric((model.profile, model.pending), 1.0)
            level.add_metric((model.profile,), model.sleep_level)
            copy.add_metric((model.profile,), float(model.copy))
        yield from (loaded, active, state, doing, level, off, copy)

    def _memory(self) -> Iterable[Metric]:
        host = self._manager.host
        yield GaugeMetricFamily("weir_sidecar_host_memory_limit_bytes", "What sleep at level 1 may fill.", host.bound)
        booked = GaugeMetricFamily(
            "weir_sidecar_host_memory_bytes", "Host memory booked for sleep at level 1.", labels=("profile",)
        )
        residue = GaugeMetricFamily(
            "weir_sidecar_residue_bytes", "What it keeps of each of its GPUs asleep, as known now.", labels=("profile",)
        )
        for profile, model in self._manager.entries.items():
            booked.add_metric((profile,), host.held(profile))
            residue.add_metric((profile,), model.size.residue)
        blind = GaugeMetricFamily("weir_sidecar_gpu_processes_hidden", "1 while NVML does not list the engines.")
        blind.add_metric((), float(self._manager.steps.memory.blind))
        yield from (booked, residue, blind)

    def _done(self) -> Iterable[Metric]:
        done = CounterMetricFamily(
            "weir_sidecar_events",
            "How often it got ready, slept, woke, stopped, failed; began as a copy, gave its place to another model.",
            labels=("profile", "event"),
        )
        for labels, count in sorted(self._manager.steps.counts.items()):
            done.add_metric(labels, count)
        evictions = CounterMetricFamily(
            "weir_sidecar_evictions",
            "How often it was put to sleep or stopped, and why: room for another, idle, an order, off.",
            labels=("profile", "kind", "reason"),
        )
        for key, count in sorted(self._manager.steps.evictions.items()):
            evictions.add_metric(key, count)
        starts = CounterMetricFamily("weir_sidecar_starts", "Starts of its engine.", labels=("profile",))
        for profile, count in sorted(self._manager.steps.starts.items()):
            starts.add_metric((profile,), count)
        failures = CounterMetricFamily(
            "weir_sidecar_start_failures",
            "Starts that failed, by the kind that `sidecar diagnose` names; other: its output tells nothing.",
            labels=("profile", "kind"),
        )
        for failed, count in sorted(self._manager.steps.start_failures.items()):
            failures.add_metric(failed, count)
        claims = GaugeMetricFamily(
            "weir_sidecar_claim_bytes", "What it claims of each of its GPUs while it is awake.", labels=("profile",)
        )
        seconds = GaugeMetricFamily(
            "weir_sidecar_load_seconds",
            "How long a start is foretold to take, by those before or by its bytes.",
            labels=("profile",),
        )
        for profile, model in self._manager.entries.items():
            seconds.add_metric((profile,), model.load_seconds)
            claims.add_metric((profile,), model.size.claim)
        yield from (done, evictions, starts, failures, claims, seconds)

    def _reports(self) -> Iterable[Metric]:
        taken = GaugeMetricFamily("weir_sidecar_gateway_up", "1 while it takes reports.", labels=("gateway",))
        failures = CounterMetricFamily(
            "weir_sidecar_report_failures", "Reports that it did not take.", labels=("gateway",)
        )
        for gateway in self._gateways():
            taken.add_metric((gateway.url,), float(gateway.taken is True))
            failures.add_metric((gateway.url,), gateway.failures)
        bad = GaugeMetricFamily("weir_sidecar_state_file_bad", "1 while it cannot be written.")
        bad.add_metric((), float(bool(self._state_error())))
        yield from (taken, failures, bad)

    def _reloads(self) -> Iterable[Metric]:
        file = self._file()
        yield GaugeMetricFamily("weir_sidecar_file_version", "Versions of its file since the start.", file.version)
        yield CounterMetricFamily("weir_sidecar_file_reloads", "Files applied while running.", file.reloads)
        yield CounterMetricFamily("weir_sidecar_file_failures", "Files that could not be used.", file.failures)
        yield GaugeMetricFamily(
            "weir_sidecar_file_bad", "1 while its file cannot be used.", float(file.error is not None)
        )

    def _relayed(self) -> Iterable[Metric]:
        use = self._relay()
        if use is None:
            return
        requests = CounterMetricFamily(
            "weir_sidecar_relay_requests",
            "Requests at the relay, by outcome: ordered, refused, left, answered, failed, broken.",
            labels=("outcome",),
        )
        for outcome, count in use.outcomes.items():
            requests.add_metric((outcome,), count)
        yield requests
        yield GaugeMetricFamily("weir_sidecar_relay_connections", "Connections of gateways.", use.connections)
