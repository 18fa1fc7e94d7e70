"""Sleep and wake of the simulated engine as vLLM does it; and every fault, injected and healed, over raw sockets."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

Start = Callable[..., Any]
WITHIN = 60.0
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "ignore_eos": True}


def ask(server: Any, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=WITHIN)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data.startswith((b"{", b"[")) else data
    finally:
        connection.close()


def send(server: Any, **more: Any) -> socket.socket:
    sock: socket.socket = server.raw()
    data = json.dumps(CHAT | more)
    sock.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n{data}".encode())
    return sock


def everything(sock: socket.socket, data: bytearray | None = None) -> bytes:
    """All bytes until the server closes; raises ConnectionResetError where it resets, what came before is in `data`."""
    data = bytearray() if data is None else data
    while more := sock.recv(65536):
        data += more
    return bytes(data)


def head(sock: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(65536)
        assert more, data
        data += more
    return data


def faults(server: Any, **fields: Any) -> None:
    assert ask(server, "POST", "/_faults", fields) == (200, fields)
    assert ask(server, "GET", "/_faults") == (200, fields)


def works(server: Any) -> bool:
    return ask(server, "POST", "/v1/chat/completions", CHAT)[0] == 200


def text(answer: Any) -> str:
    said: str = answer[1]["choices"][0]["message"]["content"]
    return said


def test_a_request_to_a_sleeping_engine_hangs_until_it_wakes(sim: Start) -> None:
    server = sim()
    assert ask(server, "POST", "/sleep") == (200, {"status": "sleeping", "level": 1})
    assert ask(server, "GET", "/is_sleeping") == (200, {"is_sleeping": True})
    assert ask(server, "GET", "/health")[0] == 200
    with send(server, stream=True) as stream, send(server) as whole:
        assert head(stream).endswith(b"\r\n\r\n"), "200 and headers, then nothing"
        server.until(lambda it: len(it.engine.unfinished()) == 2)
        metrics = ask(server, "GET", "/metrics")[1].decode()
        assert 'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0' in metrics
        assert 'sleep_state="weights_offloaded"} 1.0' in metrics
        stream.settimeout(0.1)
        with pytest.raises(TimeoutError):
            stream.recv(1)
        stream.settimeout(WITHIN)
        assert ask(server, "POST", "/wake_up") == (200, {"status": "awake", "tags": None})
        assert b"data: {" in stream.recv(100)
        assert head(whole).startswith(b"HTTP/1.1 200 OK")
    server.until(lambda it: not it.engine.unfinished())
    assert server.idle()


def test_one_that_gives_up_on_a_sleeping_engine_is_forgotten(sim: Start) -> None:
    server = sim()
    ask(server, "POST", "/sleep")
    with send(server):
        server.until(lambda it: len(it.engine.unfinished()) == 1)
    server.until(lambda it: not it.engine.unfinished())


def test_level_2_without_its_weights_answers_garbage_with_200(sim: Start) -> None:
    server = sim()
    right = text(ask(server, "POST", "/v1/chat/completions", CHAT))
    assert ask(server, "POST", "/sleep?level=2") == (200, {"status": "sleeping", "level": 2})
    assert ask(server, "POST", "/wake_up?tags=kv_cache") == (200, {"status": "sleeping", "tags": ["kv_cache"]})
    assert ask(server, "POST", "/wake_up")[1]["status"] == "awake"
    answer = ask(server, "POST", "/v1/chat/completions", CHAT)
    assert (answer[0], text(answer) != right, len(text(answer))) == (200, True, len(right))
    with send(server, stream=True) as sock:
        assert right[:4].encode() not in head(sock)


def test_level_2_as_it_should_be_woken(sim: Start) -> None:
    server = sim()
    right = text(ask(server, "POST", "/v1/chat/completions", CHAT))
    ask(server, "POST", "/sleep?level=2")
    assert ask(server, "POST", "/collective_rpc", {"method": "reload_weights"})[0] == 500
    assert ask(server, "POST", "/wake_up?tags=weights")[1]["status"] == "sleeping"
    assert ask(server, "POST", "/collective_rpc", {"method": "reload_weights"}) == (200, {"results": [None]})
    assert ask(server, "POST", "/wake_up?tags=kv_cache")[1]["status"] == "awake"
    assert ask(server, "POST", "/reset_prefix_cache") == (200, {"success": True})
    assert text(ask(server, "POST", "/v1/chat/completions", CHAT)) == right


def test_a_json_body_does_not_set_the_level(sim: Start) -> None:
    server = sim()
    assert ask(server, "POST", "/sleep", {"level": 2})[1]["level"] == 1


@pytest.mark.parametrize("query", ["level=3", "level=x", "mode=never"])
def test_a_bad_sleep_is_refused(sim: Start, query: str) -> None:
    server = sim()
    assert ask(server, "POST", f"/sleep?{query}")[0] == 400
    assert ask(server, "GET", "/is_sleeping")[1] == {"is_sleeping": False}


@pytest.mark.parametrize("body", [{}, [], {"method": "unknown"}])
def test_a_bad_rpc_is_refused(sim: Start, body: Any) -> None:
    assert ask(sim(), "POST", "/collective_rpc", body)[0] in (400, 500)


def test_sleep_ends_what_runs_with_abort(sim: Start) -> None:
    server = sim(speed=1.0)
    with send(server, max_tokens=5000, stream=True) as stream, send(server, max_tokens=5000) as whole:
        server.until(lambda it: len(it.engine.scheduler.decoding()) == 2)
        ask(server, "POST", "/sleep")
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += stream.recv(65536)
        assert b'"finish_reason":"abort"' in data
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b'"finish_reason":"abort"' in head(whole)
    assert server.idle()


@pytest.mark.slow
def test_sleep_may_wait_for_what_runs(sim: Start) -> None:
    server = sim(speed=1.0)
    faults(server, slow=50.0)  # what runs is not over before the others are there
    with send(server, max_tokens=300) as running:
        server.until(lambda it: bool(it.engine.scheduler.running))
        with server.raw() as sleep:
            sleep.sendall(b"POST /sleep?mode=wait HTTP/1.1\r\nhost: x\r\n\r\n")
            server.until(lambda it: bool(it.sleeping.when_idle))
            with send(server) as late:
                faults(server)
                assert b'"finish_reason":"length"' in head(running)
                assert head(sleep).startswith(b"HTTP/1.1 200 OK")
                server.until(lambda it: it.engine.asleep == 1 and len(it.engine.unfinished()) == 1)
                ask(server, "POST", "/wake_up")
                assert head(late).startswith(b"HTTP/1.1 200 OK")


def test_an_unknown_fault_is_refused(sim: Start) -> None:
    server = sim()
    assert ask(server, "POST", "/_faults", {"eroors": 1.0})[0] == 400
    assert ask(server, "POST", "/_faults", {"errors": 2.0})[0] == 400
    assert ask(server, "GET", "/_faults") == (200, {})


def test_slow(sim: Start) -> None:
    server = sim()
    faults(server, slow=100.0)
    with send(server) as sock:
        server.until(lambda it: bool(it.engine.scheduler.running))
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)


def test_hang(sim: Start) -> None:
    server = sim()
    faults(server, hang=True)
    with send(server) as sock:
        server.until(lambda it: len(it.engine.unfinished()) == 1)
        assert ask(server, "GET", "/health")[0] == 200
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(WITHIN)
        faults(server)
        assert head(sock).startswith(b"HTTP/1.1 200 OK")


def test_hang_while_it_works(sim: Start) -> None:
    server = sim(speed=1.0)
    with send(server, max_tokens=300) as sock:
        server.until(lambda it: bool(it.engine.scheduler.decoding()))
        faults(server, hang=True)
        server.until(lambda it: it._timer is None)
        faults(server)
        assert head(sock).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("status", [500, 503, 429, 599])
def test_errors(sim: Start, status: int) -> None:
    server = sim()
    ask(server, "POST", "/_faults", {"errors": 1.0, "status": status})
    told, body = ask(server, "POST", "/v1/chat/completions", CHAT)
    assert (told, body["error"]["code"]) == (status, status)
    assert ask(server, "GET", "/health")[0] == 200


def test_errors_at_a_rate_come_from_the_seed(sim: Start) -> None:
    def seen(seed: int) -> list[int]:
        server = sim(seed=seed)
        faults(server, errors=0.5)
        return [ask(server, "POST", "/v1/embeddings", {"input": "x"})[0] for _ in range(20)]

    first = seen(1)
    assert first == seen(1)
    assert set(first) == {200, 500}


def test_stale_metrics(sim: Start) -> None:
    server = sim()
    before = ask(server, "GET", "/metrics")
    faults(server, stale_metrics=True)
    assert works(server)
    assert ask(server, "GET", "/metrics") == before
    faults(server)
    assert ask(server, "GET", "/metrics") != before


def test_random_leaving_leaves_nothing(sim: Start) -> None:
    """Thirty clients, a third of which leave mid-stream, on an engine that must preempt."""
    server = sim(num_gpu_blocks=60, max_num_seqs=8, speed=100.0)
    sockets = [send(server, stream=True, max_tokens=50 + 20 * number) for number in range(30)]
    for sock in sockets[::3]:
        sock.close()
    for number, sock in enumerate(sockets):
        if number % 3:
            with sock:
                data = head(sock)
                while not data.endswith(b"0\r\n\r\n"):
                    data += sock.recv(65536)
                assert data.count(b'"content":" ') == 50 + 20 * number
    server.until(lambda it: not it.engine.unfinished())
    assert server.idle()
    assert server.do(lambda it: it.engine.stats.preemptions) > 0
