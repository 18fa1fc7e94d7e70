"""Counts of calls as OpenTelemetry's semantic conventions for generative AI have them, with their exact boundaries.

Of the conventions, status Development, these: `gen_ai.server.request.duration`, `gen_ai.server.time_to_first_token`,
`gen_ai.server.time_per_output_token`, `gen_ai.client.token.usage`.
"""

from __future__ import annotations

from gateway.core.histogram import Histogram
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record

DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = tuple(4.0**power for power in range(14))
BOUNDS = {
    "duration": DURATION, "first_token": FIRST_TOKEN, "per_token": PER_TOKEN, "input": TOKENS, "output": TOKENS,
}  # fmt: skip
OPERATIONS = {  # gen_ai.operation.name of each route that generates or embeds
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
GenAiKey = tuple[str, str, str]  # operation, model, error type


class GenAiRow:
    """Histograms of one (operation, model, error type)."""

    __slots__ = tuple(BOUNDS)

    def __init__(self) -> None:
        for name, bounds in BOUNDS.items():
            setattr(self, name, Histogram(bounds))

    def of(self, name: str) -> Histogram:
        """The histogram of that name, one of BOUNDS."""
        histogram: Histogram = getattr(self, name)
        return histogram


class GenAiCounts:
    """`rows` by their labels. The model is one that the fleet has, or `other`."""

    def __init__(self) -> None:
        self.rows: dict[GenAiKey, GenAiRow] = {}

    def observe(self, record: Record, model: str) -> None:
        """Count one ended call, if its route generates or embeds."""
        operation = OPERATIONS.get(record.route)
        if operation is None:
            return
        fine = record.outcome is Outcome.OK
        row = self.row((operation, model, "" if fine else record.outcome.value))
        row.of("duration").observe(record.total)
        if record.settled:
            row.of("input").observe(record.prompt_tokens)
            row.of("output").observe(record.completion_tokens)
        if fine and record.stream and record.ttft:
            row.of("first_token").observe(record.ttft)
            if record.settled and record.completion_tokens > 1:
                row.of("per_token").observe((record.total - record.ttft) / (record.completion_tokens - 1))

    def row(self, key: GenAiKey) -> GenAiRow:
        """The row of these labels, made if there is none."""
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = GenAiRow()
        return row
