"""HTTP behaviour of the simulated engine on sockets: bytes and their order, connections, other routes, the CLI."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.engine.__main__ import main

Start = Callable[..., Any]
WITHIN = 60.0


def request(body: dict[str, Any], path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    data = json.dumps({"model": "m"} | body)
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(data)}\r\n\r\n{data}".encode()


def ask(
    server: Any, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=WITHIN)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        response = connection.getresponse()
        data = response.read()
        json_body = (response.getheader("content-type") or "").startswith("application/json")
        return response.status, json.loads(data) if json_body else data
    finally:
        connection.close()


def receive(sock: socket.socket, until: bytes) -> bytes:
    data = b""
    while not data.endswith(until):
        more = sock.recv(65536)
        assert more, data
        data += more
    return data


def chat(content: str = "hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


def test_a_stream_byte_by_byte(sim: Start) -> None:
    server = sim()
    body = chat(stream=True, max_tokens=3, ignore_eos=True, stream_options={"include_usage": True})
    with server.raw() as sock:
        sock.sendall(request(body, headers="X-Request-Id: abc\r\n"))
        data = receive(sock, b"0\r\n\r\n")
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 200 OK",
        b"server: uvicorn",
        b"content-type: text/event-stream; charset=utf-8",
        b"x-request-id: abc",
        b"transfer-encoding: chunked",
    ]
    events = []
    while rest != b"0\r\n\r\n":
        size, _, rest = rest.partition(b"\r\n")
        event, rest = rest[: int(size, 16)], rest[int(size, 16) :]
        assert rest.startswith(b"\r\n")
        rest = rest[2:]
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        events.append(event[6:-2])
    assert events.pop() == b"[DONE]"
    created = json.loads(events[0])["created"]
    start = {"id": "chatcmpl-abc", "object": "chat.completion.chunk", "created": created, "model": "m"}

    def piece(delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        return start | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}

    words = [json.loads(event)["choices"][0]["delta"]["content"] for event in events[1:4]]
    assert [json.loads(event) for event in events] == [
        piece({"role": "assistant", "content": ""}, None),
        piece({"content": words[0]}, None),
        piece({"content": words[1]}, None),
        piece({"content": words[2]}, "length"),
        start
        | {
            "choices": [],
            "usage": {"prompt_tokens": 10, "total_tokens": 13, "completion_tokens": 3, "prompt_tokens_details": None},
        },
    ]


def test_a_stream_without_usage_has_none(sim: Start) -> None:
    server = sim()
    with server.raw() as sock:
        sock.sendall(request(chat(stream=True, max_tokens=2)))
        data = receive(sock, b"0\r\n\r\n")
    assert b"usage" not in data
    assert data.count(b"data: {") == 3


def test_a_client_that_leaves_frees_its_blocks_at_once(sim: Start) -> None:
    server = sim(speed=1.0)
    with server.raw() as one, server.raw() as two:
        one.sendall(request(chat(stream=True, max_tokens=10_000, ignore_eos=True)))
        two.sendall(request(chat(max_tokens=10_000, ignore_eos=True, n=3)))
        server.until(lambda it: len(it.engine.scheduler.running) == 4)
        one.close()
        server.until(lambda it: len(it.engine.scheduler.running) == 3)
        two.close()
        server.until(lambda it: not it.engine.scheduler.running)
    assert server.idle()
    assert server.do(lambda it: it.connections == set())


def test_a_client_that_leaves_while_it_waits(sim: Start) -> None:
    server = sim(max_num_seqs=1, speed=1.0)
    with server.raw() as one, server.raw() as two:
        one.sendall(request(chat(max_tokens=10_000, ignore_eos=True)))
        server.until(lambda it: len(it.engine.scheduler.running) == 1)
        two.sendall(request(chat(max_tokens=5)))
        server.until(lambda it: it.engine.scheduler.waiting == 1)
        two.close()
        server.until(lambda it: it.engine.scheduler.waiting == 0)
    server.until(lambda it: not it.engine.unfinished())
    assert server.idle()


def test_connections_are_kept(sim: Start) -> None:
    server = sim()
    with server.raw() as sock:
        for _ in range(2):
            sock.sendall(request(chat(max_tokens=2)))
            assert receive(sock, b"}").startswith(b"HTTP/1.1 200 OK\r\n")
    with server.raw() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"connection: close" in sock.recv(1000)
        assert sock.recv(1000) == b""


@pytest.mark.slow
def test_an_idle_connection_is_closed_after_five_seconds(sim: Start) -> None:
    server = sim()
    with server.raw() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        receive(sock, b"\r\n\r\n")
        assert sock.recv(1000) == b""


def test_what_is_not_http_is_refused(sim: Start) -> None:
    with sim().raw() as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        data = b"".join(iter(lambda: sock.recv(1000), b""))
    assert data.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert data.endswith(b"Invalid HTTP request received.")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("POST", "/ping", 200),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/metrics", 405),
        ("DELETE", "/health", 405),
    ],
)
def test_routes(sim: Start, method: str, path: str, status: int) -> None:
    assert ask(sim(), method, path)[0] == status


def test_small_routes(sim: Start) -> None:
    server = sim(models=("m", "alias"))
    assert ask(server, "GET", "/version") == (200, {"version": "0.32.0"})
    assert [model["id"] for model in ask(server, "GET", "/v1/models")[1]["data"]] == ["m", "alias"]
    assert ask(server, "POST", "/reset_prefix_cache") == (200, {"success": True})


def test_pooling_routes(sim: Start) -> None:
    server = sim()
    documents = ["one", "two", "three"]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        status, ranked = ask(server, "POST", path, {"model": "m", "query": "q", "documents": documents, "top_n": 2})
        scores = [row["relevance_score"] for row in ranked["results"]]
        assert (status, len(scores), sorted(scores, reverse=True)) == (200, 2, scores)
        assert ranked["results"][0]["document"]["text"] == documents[ranked["results"][0]["index"]]
    for path in ("/v1/score", "/score"):
        status, scored = ask(server, "POST", path, {"model": "m", "text_1": "q", "text_2": documents})
        assert (status, [row["index"] for row in scored["data"]]) == (200, [0, 1, 2])
    assert ask(server, "POST", "/score", {"text_1": ["a", "b"], "text_2": documents})[0] == 400
    assert ask(server, "POST", "/v1/embeddings", {"model": "m"})[0] == 400
    assert server.idle()


def test_bad_json_names_what_is_wrong(sim: Start) -> None:
    server = sim()
    with server.raw() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{'not': 1")
        data = receive(sock, b"}}")
    assert data.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"JSON decode error" in data
    status, body = ask(server, "POST", "/v1/completions", {"prompt": {"a": 1}})
    assert (status, body["error"]["param"]) == (400, "prompt")


def test_the_key_guards_v1_and_nothing_else(sim: Start) -> None:
    server = sim(api_key="secret")
    assert ask(server, "GET", "/v1/models") == (401, {"error": "Unauthorized"})
    assert ask(server, "GET", "/v1/models", headers={"Authorization": "Bearer wrong"})[0] == 401
    assert ask(server, "GET", "/v1/models", headers={"Authorization": "Bearer secret"})[0] == 200
    assert ask(server, "POST", "/sleep")[0] == 200, "as vLLM: /sleep is open to everybody"


def test_metrics(sim: Start) -> None:
    has = ["vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits", "vllm:iteration_tokens_total"]
    server = sim(num_gpu_blocks=101, speed=1.0)
    ask(server, "POST", "/v1/chat/completions", chat(max_tokens=3, ignore_eos=True))
    with server.raw() as sock:
        sock.sendall(request(chat("word " * 100, max_tokens=1000, ignore_eos=True)))
        server.until(lambda it: bool(it.engine.scheduler.decoding()))
        text = ask(server, "GET", "/metrics")[1].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(has) <= set(families)

    def value(name: str, sample: str = "", **labels: str) -> float:
        wanted = {"engine": "0", "model_name": "m"} | labels
        return next(
            one.value for one in families[name].samples if one.name == (sample or name) and one.labels == wanted
        )

    assert value("vllm:num_requests_running") == 1.0
    assert value("vllm:num_requests_waiting") == 0.0
    assert value(has[0]) == pytest.approx(0.09, abs=0.02)
    assert value("vllm:prompt_tokens", "vllm:prompt_tokens_total") == 10 + 133
    assert value("vllm:generation_tokens", "vllm:generation_tokens_total") >= 4
    assert value("vllm:request_success", "vllm:request_success_total", finished_reason="length") == 1.0
    assert value(has[2], f"{has[2]}_count") >= 4.0
    info = families["vllm:cache_config_info"].samples[0].labels
    assert (info["block_size"], info["num_gpu_blocks"]) == ("16", "101")


@pytest.mark.slow
def test_step_times_are_real(sim: Start) -> None:
    """50 tokens of an idle H100 at its own speed take 50 times 7.4 ms or more."""
    server, began = sim(speed=1.0), time.monotonic()
    assert ask(server, "POST", "/v1/completions", {"prompt": "hi", "max_tokens": 50, "ignore_eos": True})[0] == 200
    assert time.monotonic() - began > 0.35


SIM = [sys.executable, "-m", "loadtest.engine"]


@pytest.mark.slow
def test_the_program_says_where_it_listens_and_dies_with_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with subprocess.Popen(
        [*SIM, "--uds", str(path), "--model", "m", "--die-with-parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline().decode() == f"ready unix://{path}\n"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(WITHIN)
            sock.connect(str(path))
            sock.sendall(request(chat(max_tokens=2)))
            assert receive(sock, b"}").startswith(b"HTTP/1.1 200 OK")
        child.stdin.close()
        assert child.wait(WITHIN) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--speed", "0"], "speed must be above 0"),
        (["--num-gpu-blocks", "10", "--max-model-len", "1000"], "more than the 144 tokens"),
        (["--profile", "abacus"], "no profile 'abacus'"),
        (["--uds", "/nowhere/at/all"], "No such file"),
        (["--port", "99999"], "port must be 0 to 65535"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
