"""Metric families of OpenTelemetry's conventions for generative AI, by the names that they have in Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import HistogramMetricFamily, Metric

from gateway.core.gen_ai import GenAiCounts

PROVIDER = "vllm"
LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "error_type")
FAMILIES = {
    "gen_ai_server_request_duration_seconds": ("duration", "From arrival to the end."),
    "gen_ai_server_time_to_first_token_seconds": ("first_token", "From arrival to the first token of a stream."),
    "gen_ai_server_time_per_output_token_seconds": ("per_token", "For each token of a stream after the first."),
}


def gen_ai(counts: GenAiCounts) -> Iterable[Metric]:
    for name, (histogram, text) in FAMILIES.items():
        family = HistogramMetricFamily(name, text, labels=LABELS)
        for (operation, model, error), row in counts.rows.items():
            found = row.of(histogram)
            family.add_metric((operation, PROVIDER, model, error), found.buckets(), found.sum)
        yield family
    usage = HistogramMetricFamily(
        "gen_ai_client_token_usage", "Tokens as the engines reported them.", labels=(*LABELS, "gen_ai_token_type")
    )
    for (operation, model, error), row in counts.rows.items():
        for kind in ("input", "output"):
            found = row.of(kind)
            usage.add_metric((operation, PROVIDER, model, error, kind), found.buckets(), found.sum)
    yield usage
