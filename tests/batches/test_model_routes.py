"""Lines of batches that ask for model routes: answered, counted and logged by the model that they went to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from loadtest.processes import Gateway, until
from tests.batches.test_batches import begun, line, lines_of, over, uploaded
from tests.e2e.children import SimEngine, gateway

pytestmark = pytest.mark.slow  # it starts processes

POLICY = """
storage: kept
batches: {}
fleet: {poll: 200ms, health: 500ms}
classes: {interactive: {ttft: 2s}, default: {}, batch: {deadline: 1h}}
models:
  support: {members: [sim], fallback: [other]}
  asleep: {members: [nobody-has-it], fallback: [other]}
"""


@pytest.fixture(scope="module", params=[(), ("--workers", "2")], ids=["one process", "relays"])
def routed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("routes")
    engine = SimEngine(folder / "engine.log", "--model", "sim", "--model", "other", "--speed", "20")
    with engine.child, gateway(folder, engine, POLICY, *request.param) as running:
        yield running


@pytest.fixture
def client(routed: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0, timeout=60.0) as ready:
        yield ready


def calls(of: Gateway, asked_model: str) -> list[dict[str, Any]]:
    written = Path(of.child.log).read_text().splitlines()
    lines = [json.loads(each) for each in written if each.startswith("{")]  # the others are what a start prints
    return [each for each in lines if each.get("event") == "call" and each.get("asked_model") == asked_model]


def test_lines_of_a_batch_go_by_routes(routed: Gateway, client: openai.OpenAI) -> None:
    names = ["support", "asleep", "sim"] * 2
    file = uploaded(client, [line(str(number), model=name) for number, name in enumerate(names)])
    ended = over(client, begun(client, file))
    assert (ended.status, ended.request_counts.completed) == ("completed", 6)
    results = lines_of(client, ended.output_file_id)
    assert [results[str(number)]["response"]["body"]["model"] for number in range(6)] == names
    for name in ("asleep", "support"):
        assert until(lambda name=name: len(calls(routed, name)) == 2, 60.0) is not None  # type: ignore[misc]
    assert {(each["model"], each["class_name"]) for each in calls(routed, "asleep")} == {("other", "batch")}
    assert {(each["model"], each["class_name"]) for each in calls(routed, "support")} == {("sim", "batch")}
    counted = lambda **labels: routed.total("weir_model_route_calls_total", **labels) == 2  # noqa: E731
    for name, model, how in (("asleep", "other", "fallback"), ("support", "sim", "member")):
        assert until(partial(counted, asked_model=name, model=model, how=how), 60.0) is not None
