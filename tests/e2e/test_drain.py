"""Graceful shutdown on SIGTERM: streams finish, waiting calls are refused, and a cut stream says so."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from loadtest.processes import Gateway, get, until
from tests.e2e.children import ONE_AT_A_TIME, Call, SimEngine, gateway

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them


def refuses(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def draining(gateway: Gateway) -> bool:
    return get(f"{gateway.control}/readyz") == (503, b"shutting down\n")


def stopped_in_the_middle(gateway: Gateway, engine: SimEngine) -> Call:
    """A stream that has begun and does not go on."""
    engine.faults(slow=4.0)  # 12 s for the answer, so that it stands still in its middle
    call = Call(gateway.url, stream=True, max_tokens=400)
    call.answer.begin()
    assert call.answer.readline().startswith(b"data: {")
    engine.faults(hang=True)
    return call


def test_what_streams_finishes_what_waits_is_refused_and_nothing_new_gets_in(tmp_path: Path, engine: SimEngine) -> None:
    with gateway(tmp_path, engine) as running:
        stream = stopped_in_the_middle(running, engine)
        waiting = Call(running.url, stream=False)
        assert until(lambda: running.total("weir_queued_calls") == 1, 60.0) is not None
        running.child.process.send_signal(signal.SIGTERM)
        status, body = waiting.read()
        assert (status, json.loads(body)["error"]["code"]) == (503, "server_is_overloaded")
        assert (waiting.answer.getheader("x-weir-reason"), waiting.answer.getheader("connection")) == (
            "draining",
            "close",
        )
        assert 1 <= int(waiting.answer.getheader("retry-after") or 0) <= 60
        assert draining(running), "load balancers are told at once"
        assert running.fleet()["draining"] is True
        assert until(lambda: refuses(running.url), 60.0) is not None
        assert running.child.alive
        engine.faults()
        status, body = stream.read()
        assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert body.count(b"data: {") >= 398
        assert running.child.process.wait(60) == 0


@pytest.mark.parametrize("hurried", [True, False], ids=["a second SIGTERM", "the end of timeouts.drain"])
def test_what_cannot_finish_is_told_so(tmp_path: Path, engine: SimEngine, hurried: bool) -> None:
    policy = ONE_AT_A_TIME if hurried else ONE_AT_A_TIME + "timeouts: {drain: 300ms}\n"
    with gateway(tmp_path, engine, policy) as running:
        stream = stopped_in_the_middle(running, engine)
        running.child.process.send_signal(signal.SIGTERM)
        if hurried:
            assert until(lambda: draining(running), 60.0) is not None
            running.child.process.send_signal(signal.SIGTERM)
        status, body = stream.read()
        assert status == 200
        assert b"[DONE]" not in body
        last = json.loads(body.rstrip().rsplit(b"\n\n", 1)[-1].removeprefix(b"data: "))
        assert last["error"]["code"] == "server_is_overloaded"
        assert "shutting down" in last["error"]["message"]
        assert running.child.process.wait(60) == 0
        engine.faults()
        assert until(lambda: engine.running() == 0, 60.0) is not None, "the engine is freed"


def test_in_the_grace_period_balancers_are_told_and_calls_are_taken(tmp_path: Path, engine: SimEngine) -> None:
    with gateway(tmp_path, engine, ONE_AT_A_TIME + "timeouts: {drain_grace: 1m}\n") as running:
        running.child.process.send_signal(signal.SIGTERM)
        assert until(lambda: draining(running), 60.0) is not None
        assert get(f"{running.url}/health")[0] == 503
        assert Call(running.url, stream=False).read()[0] == 200
        running.child.process.send_signal(signal.SIGTERM)
        assert running.child.process.wait(60) == 0


def test_a_plain_answer_that_cannot_finish_is_a_503(tmp_path: Path, engine: SimEngine) -> None:
    with gateway(tmp_path, engine, ONE_AT_A_TIME + "timeouts: {drain: 100ms}\n") as running:
        engine.faults(hang=True)
        call = Call(running.url, stream=False)
        assert until(lambda: running.total("weir_running_calls") == 1, 60.0) is not None
        running.child.process.send_signal(signal.SIGTERM)
        status, body = call.read()
        assert (status, json.loads(body)["error"]["code"]) == (503, "server_is_overloaded")
        assert running.child.process.wait(60) == 0
