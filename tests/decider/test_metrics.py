"""Prometheus exposition: a server reads what was recorded, and no client chooses a label."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.admission.retries import AT_LEAST, RetryBudget
from gateway.core.call_counts import CallCounts
from gateway.core.engines.breaker import Ending
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.trouble import Trouble
from gateway.core.histogram import BOUNDS
from gateway.core.policy.policy import Policy
from gateway.core.policy.snapshot import Current, Snapshot
from gateway.core.request.body_memory import BodyLease, BodyMemory
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.decider.dispatch import Dispatch
from gateway.decider.metrics.collector import Metrics
from gateway.frames.messages import RelayCounts
from gateway.shared.files.file_status import FileStatus
from gateway.shared.vllm.answers import EngineSample, ModelCard
from tests.calls import a_call

Labels = dict[str, str]


class World:
    """Metrics over one engine, `e0`, that is up with the model `m`."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.engine = Engine("e0", "http://127.0.0.1:1", Policy(), capacity=1000)
        self.fleet.add(self.engine)
        self.fleet.has_models(self.engine, [ModelCard(id="m", max_model_len=4096)])
        self.engine.check(True, 0.0)
        self.dispatch = Dispatch(
            self.fleet, Policy(), random.Random(1), lambda: 0.0, RetryBudget(Current(Snapshot(Policy())))
        )
        self.retries = RetryBudget(Current(Snapshot(Policy())))
        self.bodies = BodyMemory(1000, 0.5)
        self.relays: list[RelayCounts] = []
        self.metrics = Metrics(
            self.dispatch,
            self.retries,
            lambda: RelayCounts(
                b"", 0, 7, self.bodies.held, {400: 3, 503: 2}, self.bodies.refused, {"window": 2}, 5, 1, 0
            ),
            policy_status=lambda: FileStatus(version=3, error="line 1"),
            relays=lambda: self.relays,
        )

    def samples(self) -> list[tuple[str, Labels, float]]:
        families = text_string_to_metric_families(self.metrics.exposition()().decode())
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        return sum(v for n, has, v in self.samples() if n == name and all(has[key] == labels[key] for key in labels))


def play(scene: Callable[[World], None]) -> None:
    async def main() -> None:
        scene(World())

    asyncio.run(main())


def record(**more: object) -> Record:
    known = {"request_id": "r", "route": "/v1/chat/completions", "class_name": "default", "model": "m", "engine": "e0"}
    return Record(**{**known, "outcome": Outcome.OK, "attempts": 1, **more})  # type: ignore[arg-type]  # by name


def test_counters_are_the_records() -> None:
    rng = random.Random(5)
    outcomes = [Outcome.OK, Outcome.OK, Outcome.UPSTREAM, Outcome.QUEUE_FULL, Outcome.CLIENT_GONE]
    records = [
        record(
            outcome=rng.choice(outcomes),
            class_name=rng.choice(["default", "batch"]),
            engine=rng.choice(["e0", "e0", ""]),
            attempts=rng.randrange(4),
            stream=rng.random() < 0.5,
            settled=rng.random() < 0.7,
            prompt_tokens=rng.randrange(500),
            completion_tokens=rng.randrange(500),
            cached_tokens=rng.randrange(50),
            queue=rng.uniform(0, 400),
            ttft=rng.uniform(0, 1),
            total=rng.uniform(0, 400),
        )
        for _ in range(500)
    ]

    def scene(world: World) -> None:
        for each in records:
            world.metrics.observe(each)
        counted = {
            (labels["outcome"], labels["class"]): value
            for name, labels, value in world.samples()
            if name == "weir_requests_total"
        }
        assert counted == Counter((each.outcome.value, each.class_name) for each in records)
        served = [each for each in records if each.engine]
        settled = [each for each in served if each.settled]
        streams = [each for each in served if each.stream]
        for kind in ("prompt", "completion", "cached"):
            told = world.total("weir_tokens_total", kind=kind)
            assert told == sum(getattr(each, f"{kind}_tokens") for each in settled)
        assert world.total("weir_retries_total") == sum(max(0, each.attempts - 1) for each in records)
        for name, told in (("request", records), ("queue", served), ("ttft", streams)):
            assert world.total(f"weir_{name}_seconds_count") == len(told)
        assert round(world.total("weir_request_seconds_sum") - sum(each.total for each in records), 6) == 0
        for bound in (*map(str, BOUNDS), "+Inf"):
            below = sum(each.total <= float(bound) for each in records)
            assert world.total("weir_request_seconds_bucket", le=bound) == below
        ended = Counter(each.outcome.value for each in records)
        assert world.metrics.outcomes() == ended

    play(scene)


def test_a_model_that_nobody_serves_is_other() -> None:
    def scene(world: World) -> None:
        hostile = [
            "nobody",
            'x"} 1\nweir_requests_total 9',
            "\\",
            "é\u202e",
            "a" * 10_000,
            *(f"m{i}" for i in range(200)),
        ]
        for model in hostile:
            world.metrics.observe(record(model=model, engine="", outcome=Outcome.NOT_FOUND))
        world.metrics.observe(record(engine="", outcome=Outcome.QUEUE_FULL))
        models = {labels["model"] for _, labels, _ in world.samples() if "model" in labels}
        assert models == {"other", "m"}
        assert world.total("weir_requests_total", model="other") == len(hostile)

    play(scene)


def test_a_call_that_was_served_keeps_its_model_when_the_engine_has_gone() -> None:
    def scene(world: World) -> None:
        world.fleet.has_models(world.engine, [])
        world.metrics.observe(record())
        assert world.total("weir_requests_total", model="m") == 1

    play(scene)


def test_gauges_are_what_the_fleet_holds_now() -> None:
    def scene(world: World) -> None:
        engine = world.engine
        hold = engine.hold(300, 200, 0.0)
        engine.sampled(EngineSample(running=1, waiting=0, kv_usage=0.25, capacity_tokens=1000), 0.0)
        told = {
            name: value
            for name, labels, value in world.samples()
            if labels.get("engine") == "e0" and name.startswith("weir_engine_")
        }
        assert told == {
            "weir_engine_up": 1,
            "weir_engine_capacity_tokens": 1000,
            "weir_engine_budget_tokens": engine.ledger.budget,
            "weir_engine_held_tokens": 300,
            "weir_engine_in_flight": 1,
            "weir_engine_slots": engine.ledger.slots,
            "weir_engine_trim_ratio": engine.ledger.trim,
            "weir_engine_kv_usage_ratio": 0.25,
            "weir_engine_prefill_tokens_per_second": engine.speed.prefill_rate,
            "weir_engine_seconds_per_output_token": engine.speed.tpot,
            "weir_engine_draining": 0,
            "weir_engine_breaker_open": 0,
        }
        assert world.total("weir_connections") == 7
        assert world.total("weir_wire_refusals_total", status="400") == 3
        assert {labels["class"] for name, labels, _ in world.samples() if name == "weir_running_calls"} == set(
            Policy().classes
        )
        hold.release()
        engine.down()
        assert world.total("weir_engine_held_tokens") == world.total("weir_engine_up") == 0

    play(scene)


def test_an_engine_that_is_down_or_tells_no_usage_has_none() -> None:
    """Else alerts take it for an empty cache, or for one that others fill."""

    def scene(world: World) -> None:
        engine = world.engine
        engine.hold(300, 200, 0.0)
        assert "weir_engine_kv_usage_ratio" not in {name for name, _, _ in world.samples()}
        engine.sampled(EngineSample(running=1, waiting=0, kv_usage=0.25, capacity_tokens=1000), 0.0)
        assert world.total("weir_engine_kv_usage_ratio", engine="e0") == 0.25
        engine.down()
        assert "weir_engine_kv_usage_ratio" not in {name for name, _, _ in world.samples()}

    play(scene)


def test_every_metric_has_a_help_text_and_a_type() -> None:
    def scene(world: World) -> None:
        world.metrics.observe(record())
        for family in text_string_to_metric_families(world.metrics.exposition()().decode()):
            assert family.name.startswith(("weir_", "vllm_request"))
            assert family.documentation.endswith(".")
            assert family.type in {"counter", "gauge", "histogram"}

    play(scene)


def test_a_class_tells_its_target_and_one_without_tells_none() -> None:
    def scene(world: World) -> None:
        assert world.total("weir_class_ttft_seconds", **{"class": "interactive"}) == 2.0
        assert "batch" not in {
            labels["class"] for name, labels, _ in world.samples() if name == "weir_class_ttft_seconds"
        }

    play(scene)


def test_every_decision_is_counted() -> None:
    def scene(world: World) -> None:
        metrics = world.metrics
        metrics.observe(record(tenant="acme", predicted_wait=0.5, queue=0.75, shaped_tokens=100, affinity_tokens=64))
        metrics.observe(record(tenant="acme", reason="deadline", outcome=Outcome.EXPIRED, prompt_tokens=7))
        metrics.observe(record(reason="what a client says", engine="", outcome=Outcome.UNAUTHORIZED))
        metrics.observe(record(engine="", outcome=Outcome.DEADLINE_UNREACHABLE, predicted_wait=8.0))
        assert world.total("weir_shaped_tokens_total") == 100
        assert world.total("weir_affinity_tokens_total") == 64
        assert world.total("weir_predicted_wait_seconds_sum", **{"class": "default"}) == 8.5  # the refused one's too
        assert world.total("weir_wait_error_seconds_sum", **{"class": "default"}) == 0.25
        assert world.total("weir_wait_error_seconds_count", **{"class": "default"}) == 1
        assert world.total("weir_tenant_requests_total", tenant="acme", outcome="ok") == 1
        assert world.total("weir_tenant_requests_total", tenant="", outcome="unauthorized") == 1
        assert world.total("weir_tenant_tokens_total", tenant="acme", outcome="expired") == 7
        world.retries.call(0.0)
        world.retries.take(0.0)
        assert world.total("weir_retry_budget_left") == AT_LEAST - 1
        assert world.total("weir_batches_total", reason="window") == 2
        assert (world.total("weir_batched_calls_total"), world.total("weir_batch_resends_total")) == (5, 1)
        policy = [world.total(f"weir_policy_{name}") for name in ("version", "bad")]
        assert policy == [3, 1]

    play(scene)


@pytest.mark.parametrize(("failures", "told"), [(0, 0.0), (5, 1.0)])
def test_breakers_and_modes_are_told(failures: int, told: float) -> None:
    async def scene(world: World) -> None:
        breaker = world.engine.breaker
        for _ in range(failures):
            breaker.ended(breaker.sent(0.0), Ending.FAILURE, 0.0)
        assert world.total("weir_engine_breaker_open") == told
        assert world.total("weir_breaker_changes_total", to="open") == told
        with await world.dispatch.ask(a_call(prompt_tokens=10)):
            assert world.total("weir_mode", model="m") == 0
            assert {labels["class"] for name, labels, _ in world.samples() if name == "weir_bookings"} == set(
                Policy().classes
            )

    async def main() -> None:
        await scene(World())

    asyncio.run(main())


def test_bodies() -> None:
    def scene(world: World) -> None:
        BodyLease(world.bodies, "a").resize(400)
        BodyLease(world.bodies, "a").resize(200)
        assert world.total("weir_body_bytes") == 400
        assert world.total("weir_body_refusals_total", full="share") == 1
        assert world.total("weir_body_refusals_total", full="memory") == 0

    play(scene)


def test_every_series_of_ours_is_called_weir() -> None:
    def scene(world: World) -> None:
        assert {name.partition("_")[0] for name, _, _ in world.samples()} <= {"weir", "process", "python"}

    play(scene)


def test_batches_of_all_relays_are_added_up() -> None:
    def counted(**of_batches: Any) -> RelayCounts:
        return RelayCounts(CallCounts().told(), 0, 0, 0, {}, {}, {}, 0, 0, 0, **of_batches)

    def scene(world: World) -> None:
        world.relays = [counted(), counted()]
        assert not [name for name, _, _ in world.samples() if name.startswith("weir_batch_lines")], "none are offered"
        world.relays = [
            counted(lines={"completed": 2, "again": 0}, line_calls=3, batch_states={"in_progress": 1, "failed": 0}),
            counted(lines={"completed": 5, "again": 0}, line_calls=1),
        ]
        assert world.total("weir_batch_lines_total", result="completed") == 7
        assert world.total("weir_batch_calls") == 4
        jobs = {labels["status"]: value for name, labels, value in world.samples() if name == "weir_batch_jobs"}
        assert jobs == {"in_progress": 1, "failed": 0}

    play(scene)


def test_the_loop_reads_thousands_of_tenants_and_a_thread_writes_them_as_they_were() -> None:
    def scene(world: World) -> None:
        tenants = world.metrics.counts.tenants
        tenants |= {(f"t{number}", outcome): [1, 0] for number in range(2000) for outcome in (Outcome.OK, Outcome.SHED)}
        reading, writing = list[float](), list[float]()
        for _ in range(3):
            began = time.thread_time()
            write = world.metrics.exposition()
            read = time.thread_time()
            world.metrics.observe(record(tenant="new"))
            text = write()
            reading.append(read - began)
            writing.append(time.thread_time() - read)
            assert text.count(b'weir_tenant_requests_total{outcome="ok"') == 2000
            del tenants["new", Outcome.OK]
        assert min(reading) < min(writing) / 5

    play(scene)


def test_a_name_that_has_gone_to_another_engine_has_one_series() -> None:
    """A pod of a StatefulSet comes back under its name at another address, while calls of before still run."""

    def scene(world: World) -> None:
        newer = Engine("e1", "http://127.0.0.1:2", Policy(), capacity=2000)
        world.fleet.add(newer)
        newer.label = "e0"
        world.engine.check(False, 1.0, Trouble("refused", "refused"))
        newer.check(False, 1.0, Trouble("refused", "refused"))
        of_engines = [(name, *sorted(labels.items())) for name, labels, _ in world.samples() if "engine" in labels]
        assert len(of_engines) == len(set(of_engines))
        assert world.total("weir_engine_capacity_tokens", engine="e0") == 2000

    play(scene)
