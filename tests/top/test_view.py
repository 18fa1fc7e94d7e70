"""Views from samples: tables of examples, without a gateway."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.control.view import QueueView
from gateway.core.request.outcome import Outcome
from gateway.shared.files.file_status import FileStatus
from gateway.shared.vllm.answers import AnswerError
from gateway.top.sample import Counts, Sample, counts_from, targets_from
from gateway.top.view import NO_CLASS, View, kind_of, view_of
from tests.top.samples import call, engine, model, sample, sidecar, sleeper

REFUSED = {
    Outcome.RATE_LIMITED, Outcome.QUEUE_FULL, Outcome.SHED, Outcome.NO_ENGINE, Outcome.DRAINING,
    Outcome.MODEL_UNAVAILABLE, Outcome.HOPELESS, Outcome.EXPIRED,
}  # fmt: skip
FAILED = {Outcome.UPSTREAM, Outcome.TRUNCATED, Outcome.BUG}

METRICS = b"""\
# TYPE weir_requests_total counter
weir_requests_total{class="a",model="m",outcome="ok",route="/x"} 2.0
weir_requests_total{class="a",model="n",outcome="ok",route="/y"} 3.0
weir_requests_total{class="",model="other",outcome="unauthorized",route="/x"} 1.0
weir_requests_created{class="a",model="m",outcome="ok",route="/x"} 99.0
weir_tokens_total{kind="prompt",class="a",model="m",outcome="ok",route="/x"} 40.0
weir_tenant_tokens_total{outcome="ok",tenant="acme"} 50.0
weir_queue_seconds_bucket{class="a",le="0.5",model="m",outcome="ok",route="/x"} 4.0
weir_queue_seconds_bucket{class="a",le="+Inf",model="m",outcome="ok",route="/x"} 5.0
weir_connections 3.0
"""


def between(before: Counts, newest: Sample) -> View:
    """The view two seconds after those counters."""
    return view_of(newest, [sample(newest.point.at - 2.0, before).point, newest.point])


def one(**fields: Any) -> View:
    newest = sample(**fields)
    return view_of(newest, [newest.point])


def test_counters_are_summed_over_all_other_labels() -> None:
    assert counts_from(METRICS) == {
        ("calls", "a", "ok"): 5.0,
        ("calls", "", "unauthorized"): 1.0,
        ("tokens", "prompt"): 40.0,
        ("tenant tokens", "acme"): 50.0,
        ("wait", "a", "0.5"): 4.0,
        ("wait", "a", "+Inf"): 5.0,
    }


@pytest.mark.parametrize("text", [METRICS[:-1], b'weir_requests_total{class="a"} -1.0\n'])
def test_metrics_that_cannot_be_trusted(text: bytes) -> None:
    with pytest.raises(AnswerError):
        counts_from(text)


def test_targets() -> None:
    answer = b'{"version": 3, "policy": {"classes": {"b": {"ttft": "250ms"}, "a": {"ttft": null}}, "more": 1}}'
    assert list(targets_from(answer).items()) == [("b", 0.25), ("a", None)]
    with pytest.raises(AnswerError):
        targets_from(b'{"policy": {}}')


def test_every_outcome_has_its_kind() -> None:
    kinds = {outcome: kind_of(outcome.value) for outcome in Outcome}
    assert {outcome for outcome, kind in kinds.items() if kind == "refused"} == REFUSED
    assert {outcome for outcome, kind in kinds.items() if kind == "failed"} == FAILED
    assert {outcome for outcome, kind in kinds.items() if kind == "ok"} == {Outcome.OK}


def test_one_sample_tells_no_rates() -> None:
    view = one(counts={("calls", "default", "ok"): 7.0, ("wait", "default", "+Inf"): 7.0})
    assert [(flow.name, flow.rate, flow.history) for flow in view.flows] == [("ok", None, [])]
    row = view.classes[0]
    assert (row.ok, row.refused, row.wait_p50) == (None, {}, None)


def test_flows_are_in_order_and_summed_over_classes() -> None:
    after = {
        ("calls", "default", "ok"): 14.0,
        ("calls", "batch", "ok"): 6.0,
        ("calls", "batch", "upstream"): 2.0,
        ("calls", "batch", "client_gone"): 1.0,
        ("calls", "batch", "shed"): 4.0,
        ("calls", "batch", "expired"): 5.0,
        ("tokens", "completion"): 100.0,
    }
    view = between({("calls", "default", "ok"): 4.0, ("calls", "batch", "expired"): 5.0}, sample(10.0, after))
    assert [(flow.name, flow.kind, flow.rate) for flow in view.flows] == [
        ("ok", "ok", 8.0),
        ("shed", "refused", 2.0),
        ("upstream", "failed", 1.0),
        ("client_gone", "caller", 0.5),
    ]
    assert [(flow.name, flow.rate) for flow in view.tokens] == [("prompt", 0.0), ("cached", 0.0), ("completion", 50.0)]


def test_classes() -> None:
    calls = (
        call(class_name="batch", age_s=3.0),
        call(class_name="batch", age_s=8.0),
        call(class_name="batch", state="running", age_s=30.0),
        call(class_name="batch", state="streaming"),
    )
    counts = {
        ("calls", "batch", "ok"): 4.0,
        ("calls", "batch", "hopeless"): 6.0,
        ("calls", "batch", "engine_refused"): 2.0,
        ("calls", "", "unauthorized"): 1.0,
        ("wait", "batch", "1.0"): 0.0,
        ("wait", "batch", "2.0"): 4.0,
        ("wait", "batch", "+Inf"): 4.0,
    }
    newest = sample(
        2.0,
        counts,
        calls=calls,
        targets={"batch": 9.0, "default": None},
        queues=[QueueView(model=name, class_name="batch", calls=1, tokens=9) for name in ("m", "n")],
        running={"default": 0, "batch": 2},
        models=[
            model(wait_s_by_class={"batch": 4.0}),
            model("n", wait_s_by_class={"batch": 1.0}),
            model("asleep", engines=[], queued_calls=0, wait_s_by_class={"batch": 9.0}),
        ],
    )
    rows = {row.name: row for row in between({}, newest).classes}
    assert list(rows) == ["batch", "default", NO_CLASS]
    batch = rows["batch"]
    assert (batch.queued, batch.running, batch.streaming, batch.oldest) == (2, 2, 1, 8.0)
    assert (batch.wait_p50, batch.newcomer, batch.target) == (1.5, 4.0, 9.0)
    assert (batch.ok, batch.refused, batch.failed) == (2.0, {"hopeless": 3.0}, {"engine_refused": 1.0})
    assert (rows["default"].ok, rows["default"].oldest, rows["default"].streaming) == (0.0, None, 0)
    assert rows[NO_CLASS].failed == {"unauthorized": 0.5}


def test_what_a_cut_list_of_calls_does_not_tell_is_not_told() -> None:
    listed = (call(), call(tenant="other", state="running"))
    view = one(calls=listed, total=1001)
    assert (view.classes[0].streaming, view.classes[0].oldest) == (None, None)
    assert [(row.name, row.queued, row.running) for row in view.tenants] == [
        ("acme", None, None),
        ("other", None, None),
    ]


def test_tenants_by_use_and_only_where_there_are_several() -> None:
    counts = {("tenant calls", "a"): 2.0, ("tenant calls", "b"): 4.0, ("tenant tokens", "b"): 10.0}
    view = between({("tenant calls", "gone"): 3.0}, sample(2.0, counts | {("tenant calls", "gone"): 3.0}))
    assert [(row.name, row.calls, row.tokens, row.queued) for row in view.tenants] == [
        ("b", 2.0, 5.0, 0),
        ("a", 1.0, 0.0, 0),
    ]
    assert one(calls=(call(), call(state="running"))).tenants == []


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "up"),
        ({"breaker": "open"}, "breaker open"),
        ({"breaker": "half_open"}, "half open"),
        ({"breaker": "open", "draining": True}, "draining"),
        ({"up": False, "breaker": "open", "draining": True}, "down"),
    ],
)
def test_the_state_of_an_engine(fields: dict[str, Any], state: str) -> None:
    assert one(engines=[engine(**fields)]).engines[0].state == state


@pytest.mark.parametrize(("usage", "used"), [(None, None), (0.0, 0), (0.25, 250)])
def test_measured_tokens(usage: float | None, used: int | None) -> None:
    assert one(engines=[engine(kv_usage=usage)]).engines[0].used == used


def test_queues_of_a_model() -> None:
    queues = [
        QueueView(model="m", class_name="default", calls=2, tokens=9),
        QueueView(model="m", class_name="batch", calls=0, tokens=0),
        QueueView(model="n", class_name="batch", calls=5, tokens=9),
    ]
    assert [row.queued for row in one(models=[model(), model("n")], queues=queues).models] == [
        {"default": 2},
        {"batch": 5},
    ]


def test_models_that_are_not_awake() -> None:
    box = sidecar("box", sleeper("a"), sleeper("b", state="running"), sleeper("c", state="running", pending="drain"))
    view = one(sidecars=[box, sidecar("other", sleeper("d", state="stopped"))])
    assert [(id, each.profile) for id, each in view.asleep] == [("box", "a"), ("box", "c"), ("other", "d")]


def test_notes() -> None:
    assert one().notes == []
    status = FileStatus(error="x.yaml:3: bad\nx.yaml:9: worse")
    assert one(draining=True, status=status).notes == [
        "draining: it takes no new calls",
        "the policy file cannot be used, and the one before is active: x.yaml:3: bad",
    ]
    assert "restarted" in between({("calls", "a", "ok"): 3.0}, sample(2.0, {("calls", "a", "ok"): 1.0})).notes[0]
