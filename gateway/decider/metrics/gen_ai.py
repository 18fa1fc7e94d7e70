"""Metric families of OpenTelemetry's conventions for generative AI, by the names that they have in Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from gateway.core.gen_ai import GenAiCounts
from gateway.shared.metrics import histogram

PROVIDER = "vllm"
LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "error_type")
FAMILIES = {
    "gen_ai_server_request_duration_seconds": ("duration", "From arrival to the end."),
    "gen_ai_server_time_to_first_token_seconds": ("first_token", "From arrival to the first token of a stream."),
    "gen_ai_server_time_per_output_token_seconds": ("per_token", "For each token of a stream after the first."),
}


def gen_ai(counts: GenAiCounts) -> Iterable[Metric]:
    rows = [((operation, PROVIDER, model, error), row) for (operation, model, error), row in counts.rows.items()]
    for name, (kind, text) in FAMILIES.items():
        found = [(labels, row.of(kind)) for labels, row in rows]
        yield histogram(name, text, *LABELS, of=[(labels, each.buckets(), each.sum) for labels, each in found])
    tokens = [((*labels, kind), row.of(kind)) for labels, row in rows for kind in ("input", "output")]
    text, labels = "Tokens as the engines reported them.", (*LABELS, "gen_ai_token_type")
    used = [(key, each.buckets(), each.sum) for key, each in tokens]
    yield histogram("gen_ai_client_token_usage", text, *labels, of=used)
