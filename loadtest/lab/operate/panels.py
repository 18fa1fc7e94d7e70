"""Panels of the Grafana boards: one list, of which the boards' JSON is made and by which their queries are tested."""

from __future__ import annotations

from typing import Literal

import msgspec

Unit = Literal["short", "reqps", "s", "percentunit", "bytes"]  # Grafana's


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """`queries`: PromQL by legend. `says`: what a reader looks for in it. `wide`: over both columns. `stat`: a number
    instead of a graph."""

    title: str
    says: str
    queries: dict[str, str]
    unit: Unit = "short"
    wide: bool = False
    stat: bool = False


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """A Grafana board. `uid` stays the same over versions, so that links and provisioning hold."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


RATE = "$__rate_interval"


def _rate(metric: str, by: str) -> str:
    """A counter's growth a second, by these labels."""
    return f"sum by ({by}) (rate({metric}[{RATE}]))"


def _quantile(share: float, metric: str) -> str:
    """The quantile of a histogram of seconds, for each class."""
    name, brace, labels = metric.partition("{")
    buckets = f"{name}_bucket{brace}{labels}"
    return f"histogram_quantile({share:g}, sum by (class, le) (rate({buckets}[{RATE}])))"


FLEET = (
    Panel(
        title="Engines up",
        says="Fewer than there are: see the alert WeirEngineDown.",
        queries={"up": "sum(weir_engine_up)", "all": "count(weir_engine_up)"},
        stat=True,
    ),
    Panel(
        title="Calls running and waiting",
        says="Waiting is where overload shows. Engines run what they can.",
        queries={
            "running, {{class}}": "sum by (class) (weir_running_calls)",
            "waiting, {{class}}": "sum by (class) (weir_queued_calls)",
        },
    ),
    Panel(
        title="KV cache used",
        says="As the engines say: near the target under load, never at 1.",
        queries={"{{engine}}": "weir_engine_kv_usage_ratio"},
        unit="percentunit",
    ),
    Panel(
        title="KV cache promised",
        says="The gateway's ledger, as a share of its budget.",
        queries={"{{engine}}": "weir_engine_held_tokens / weir_engine_budget_tokens"},
        unit="percentunit",
    ),
    Panel(
        title="Calls in flight, and places",
        says="Flight at the places: concurrency is the limit, not memory.",
        queries={"{{engine}}": "weir_engine_in_flight", "places of {{engine}}": "weir_engine_slots"},
    ),
    Panel(
        title="Time per output token",
        says="Learned of each engine; it rises with load.",
        queries={"{{engine}}": "weir_engine_seconds_per_output_token"},
        unit="s",
    ),
    Panel(
        title="Prefill rate",
        says="Prompt tokens a second, learned.",
        queries={"{{engine}}": "weir_engine_prefill_tokens_per_second"},
    ),
    Panel(
        title="Tokens a second",
        says="What the engines read, wrote, and had cached.",
        queries={"{{kind}}": _rate("weir_tokens_total", "kind")},
    ),
    Panel(
        title="Breakers",
        says="1 open, 0.5 trying again, 0 closed.",
        queries={"{{engine}}": "weir_engine_breaker_open"},
    ),
    Panel(
        title="Failed checks",
        says="Since the start, by engine and reason.",
        queries={"{{engine}}: {{reason}}": "sum by (engine, reason) (weir_engine_check_failures_total)"},
    ),
    Panel(
        title="Mode",
        says="0 normal, 1 tight, 2 brownout, 3 closed.",
        queries={"{{model}}": "weir_mode"},
    ),
    Panel(
        title="Engines wanted",
        says="For the tokens offered now; what an autoscaler follows.",
        queries={"{{model}}": "weir_engines_wanted"},
    ),
    Panel(
        title="Second attempts",
        says="Calls that another engine had to serve, and how many more may be.",
        queries={"a second": f"sum(rate(weir_retries_total[{RATE}]))", "left": "sum(weir_retry_budget_left)"},
    ),
    Panel(
        title="Models of sidecars",
        says="Profiles of each model, by state.",
        queries={"{{model}}: {{state}}": "sum by (model, state) (weir_sidecar_models)"},
    ),
    Panel(
        title="Waits for a model, p95",
        says="Calls held while their model was made ready, since the start.",
        queries={"{{class}}": "histogram_quantile(0.95, sum by (class, le) (weir_wake_wait_seconds_bucket))"},
        unit="s",
    ),
    Panel(
        title="GPU memory",
        says="In use, whoever uses it.",
        queries={
            "GPU {{gpu_id}}": "vllm_gpu_memory_used_mb * 1048576",
            "GPU {{gpu_id}}, all": "vllm_gpu_memory_total_mb * 1048576",
        },
        unit="bytes",
    ),
    Panel(
        title="Starts, and starts that failed",
        says="Of each model's engine, since the sidecar's start.",
        queries={
            "{{profile}}": "weir_sidecar_starts_total",
            "{{profile}} failed: {{kind}}": "weir_sidecar_start_failures_total",
        },
    ),
)

TENANTS = (
    Panel(
        title="Calls by outcome",
        says="What is not ok is explained, each by its word, in docs/outcomes.md.",
        queries={"{{outcome}}": _rate("weir_requests_total", "outcome")},
        unit="reqps",
        wide=True,
    ),
    Panel(
        title="Served, of what was asked",
        says="The share of calls that ended well.",
        queries={
            "{{class}}": _rate('weir_requests_total{outcome="ok"}', "class")
            + " / "
            + _rate("weir_requests_total", "class")
        },
        unit="percentunit",
    ),
    Panel(
        title="First token, p95, and its target",
        says="Below the target for all that was admitted.",
        queries={
            "{{class}}": _quantile(0.95, 'weir_ttft_seconds{outcome="ok"}'),
            "target of {{class}}": "max by (class) (weir_class_ttft_seconds)",
        },
        unit="s",
    ),
    Panel(
        title="Wait in the queue, p95",
        says="From arrival to an engine.",
        queries={"{{class}}": _quantile(0.95, "weir_queue_seconds")},
        unit="s",
    ),
    Panel(
        title="Predicted wait, p90",
        says="Of refused calls too: what is above the target is refused.",
        queries={"{{class}}": _quantile(0.9, "weir_predicted_wait_seconds")},
        unit="s",
    ),
    Panel(
        title="Error of the predicted wait, p95",
        says="Either way.",
        queries={"{{class}}": _quantile(0.95, "weir_wait_error_seconds")},
        unit="s",
    ),
    Panel(
        title="Whole call, p95",
        says="From arrival to the last byte.",
        queries={"{{class}}": _quantile(0.95, 'weir_request_seconds{outcome="ok"}')},
        unit="s",
    ),
    Panel(
        title="Tokens a second, by tenant",
        says="Who uses the engines.",
        queries={"{{tenant}}": _rate("weir_tenant_tokens_total", "tenant")},
    ),
    Panel(
        title="Calls not served, by tenant and reason",
        says="A limit of the tenant, or want of capacity.",
        queries={"{{tenant}}: {{outcome}}": _rate('weir_tenant_requests_total{outcome!="ok"}', "tenant, outcome")},
        unit="reqps",
    ),
    Panel(
        title="Prompt tokens found cached",
        says="The share of all that the engines read.",
        queries={
            "cached": f'sum(rate(weir_tokens_total{{kind="cached"}}[{RATE}]))'
            f' / sum(rate(weir_tokens_total{{kind="prompt"}}[{RATE}]))'
        },
        unit="percentunit",
    ),
    Panel(
        title="Output tokens cut by shaping",
        says="Of calls whose max_tokens was lowered under load, a second.",
        queries={"{{class}}": _rate("weir_shaped_tokens_total", "class")},
    ),
    Panel(
        title="Bookings",
        says="Places kept for refused calls that were told when to come back.",
        queries={"{{model}}, {{class}}": "weir_bookings"},
    ),
    Panel(
        title="Open connections",
        says="Of clients.",
        queries={"{{instance}}": "weir_connections"},
    ),
    Panel(
        title="Memory of bodies",
        says="Of requests that arrive, wait and are sent.",
        queries={"{{instance}}": "weir_body_bytes"},
        unit="bytes",
    ),
)

BOARDS = (
    Board(uid="weir-fleet", title="Weir: fleet", panels=FLEET),
    Board(uid="weir-tenants", title="Weir: tenants and classes", panels=TENANTS),
)
