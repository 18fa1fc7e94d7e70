"""Gateway process whose only engine is a sidecar's: asleep, woken for a call, and removed during one."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from loadtest.processes import Gateway, get, until
from tests.e2e.children import Call, SimEngine
from tests.e2e.small_sidecar import SmallSidecar

TOKEN = "of-sixteen-characters"  # noqa: S105 # a test's own
POLICY = "fleet: {poll: 100ms, health: 200ms, sidecars: {token_file: s.token, allow: [127.0.0.1]}}\n"

pytestmark = pytest.mark.slow


@pytest.fixture
def sidecar(engine: SimEngine) -> Iterator[SmallSidecar]:
    with SmallSidecar(engine.url, takes=1.0, token=TOKEN) as running:
        yield running


@pytest.fixture
def gateway(tmp_path: Path, sidecar: SmallSidecar) -> Iterator[Gateway]:
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "s.token").write_text(TOKEN)
    with Gateway(tmp_path / "log", "--policy", str(tmp_path / "policy.yaml"), ready=False) as running:
        assert get(f"{running.control}/readyz")[0] == 503
        sidecar.gateway = running.control
        sidecar.report()
        yield running
    assert "Traceback" not in running.child.output()


def test_calls_wake_a_model_and_are_answered_as_soon_as_it_is(gateway: Gateway, sidecar: SmallSidecar) -> None:
    assert get(f"{gateway.control}/readyz")[0] == get(f"{gateway.url}/health")[0] == 200
    assert [model["id"] for model in json.loads(get(f"{gateway.url}/v1/models")[1])["data"]] == ["sim"]
    sidecar.takes = 600.0  # until the test wakes it, when all of them wait
    calls = [Call(gateway.url, stream=True, max_tokens=1) for _ in range(20)]
    begun = partial(gateway.total, "weir_sidecar_ensures_total", result="begun")
    assert until(lambda: begun() == 1, 60.0) is not None, "the answer has come, too: once it is awake, none is read"
    assert until(lambda: sidecar.report().waiting == 20, 60.0) is not None, "the last may come after the order"
    sidecar.wake()
    for call in calls:
        status, body = call.read()
        assert (status, b"[DONE]" in body) == (200, True)
    assert sidecar.asked == 1
    demand = sidecar.report()
    assert (demand.in_flight, demand.waiting, demand.withdrawn) == (0, 0, False)
    assert gateway.total("weir_wake_wait_seconds_count", **{"class": "default"}) == 20
    assert begun() == 1
    assert gateway.total("vllm_requests_total", model_id="sim") == 20
    assert gateway.total("vllm_request_duration_seconds_count", model_id="sim") == 20

    def watched() -> bool:
        (engine,) = gateway.fleet()["engines"]
        return bool(engine["up"]) and engine["running"] == 0

    assert until(watched, 60.0) is not None, "telemetry watches it too; held up for a second, the engine is not up"


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_calls_wait_for_the_models_that_a_gateway_had_before_it_was_killed(
    gateway: Gateway, sidecar: SmallSidecar, tmp_path: Path, words: tuple[str, ...]
) -> None:
    assert until((tmp_path / "policy.models.json").exists, 60.0) is not None
    gateway.child.kill()
    with Gateway(tmp_path / "again", "--policy", str(tmp_path / "policy.yaml"), *words, ready=False) as restarted:
        early = [Call(restarted.url, stream=False) for _ in range(8)]
        sidecar.gateway = restarted.control
        assert until(lambda: sidecar.report() is not None, 60.0) is not None
        assert [call.read()[0] for call in early] == [200] * 8


def test_a_gateway_that_was_restarted_does_not_know_a_name_yet_and_says_so(gateway: Gateway, tmp_path: Path) -> None:
    with Gateway(tmp_path / "again", "--policy", str(tmp_path / "policy.yaml"), ready=False) as restarted:
        early = Call(restarted.url, stream=False, model="another")
        assert (early.read()[0], early.answer.getheader("x-weir-reason")) == (503, "no_engine")
        assert 1 <= int(early.answer.getheader("retry-after") or 0) <= 2
        assert early.answer.getheader("x-should-retry") is None


def test_an_engine_is_taken_away_under_a_call_that_ends_there(
    gateway: Gateway, sidecar: SmallSidecar, engine: SimEngine
) -> None:
    sidecar.wake()
    engine.faults(slow=4.0)  # 12 s for the answer, so that it stands still in its middle
    call = Call(gateway.url, stream=True, max_tokens=400)
    call.answer.begin()
    assert call.answer.readline().startswith(b"data: {")
    engine.faults(hang=True)
    demand = sidecar.report(pending="sleep", ready_in=1.0)
    assert (demand.in_flight, demand.withdrawn) == (1, True)
    engine.faults()
    assert b"[DONE]" in call.read()[1]
    assert until(lambda: sidecar.report().in_flight == 0, 60.0) is not None
    sidecar.report(state="stopped", pending=None, url="", ready_in=None, why="no_memory", message="all are busy")
    assert until(lambda: gateway.fleet()["engines"] == [], 60.0) is not None
    refused = Call(gateway.url, stream=False)
    status, body = refused.read()
    assert (status, refused.answer.getheader("x-weir-reason")) == (503, "no_memory")
    assert "all are busy" in json.loads(body)["error"]["message"]
    assert 5 <= int(refused.answer.getheader("retry-after") or 0) <= 7


def test_what_waits_for_a_model_is_told_when_the_gateway_ends(gateway: Gateway, sidecar: SmallSidecar) -> None:
    sidecar.takes = 30.0
    sidecar.report(ready_in=5.0)
    waiting = Call(gateway.url, stream=False)
    assert until(lambda: sidecar.asked > 0, 60.0) is not None
    gateway.child.process.send_signal(signal.SIGTERM)
    assert (waiting.read()[0], waiting.answer.getheader("x-weir-reason")) == (503, "draining")
    assert gateway.child.process.wait(60.0) == 0


def test_a_call_by_an_alias_is_one_for_the_model(gateway: Gateway, sidecar: SmallSidecar) -> None:
    sidecar.model = msgspec.structs.replace(sidecar.model, aliases=("gpt-4", "é"))
    sidecar.report()
    ids = [model["id"] for model in json.loads(get(f"{gateway.url}/v1/models")[1])["data"]]
    assert ids == ["sim", "gpt-4", "é"]
    for name in ("gpt-4", "é"):
        status, body = Call(gateway.url, model=name, stream=True, max_tokens=1).read()
        assert (status, b"[DONE]" in body) == (200, True)
    # 503 for the first seconds after the gateway's start, in which another sidecar might still report it.
    assert until(lambda: Call(gateway.url, model="gpt-5", stream=False).read()[0] == 404, 60.0) is not None
    assert gateway.total("vllm_requests_total", model_id="sim") == 2
    assert gateway.total("vllm_requests_total", model_id="gpt-4") == 0
    sidecar.model = msgspec.structs.replace(sidecar.model, aliases=())
    sidecar.report()
    assert Call(gateway.url, model="gpt-4", stream=False).read()[0] == 404, "at once, without a restart of the engine"
