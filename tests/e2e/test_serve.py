"""Gateway process: its headers to engines, its addresses, its output."""

from __future__ import annotations

import http.client
import http.server
import json
import resource
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from loadtest.processes import Child, Gateway, answers, get, until
from tests.certificates import certificate as made_certificate
from tests.e2e.children import ONE_AT_A_TIME, SimEngine, gateway, post
from tests.raw_calls import chat

pytestmark = pytest.mark.slow  # a second for each process started

INTERACTIVE = {"x-weir-class": "interactive"}

# -- the first call ---------------------------------------------------------------------------------------------------


def test_the_first_calls_of_a_fresh_gateway_are_answered(tmp_path: Path) -> None:
    """The printed curl line once, and then several at once of the class with the shortest deadline: no client tries
    again."""
    with Gateway(tmp_path / "log", "--engine", "sim:2", "--log", "none") as running:
        body = json.loads(running.child.line(r"^  -d '(\{.*\})'$", 60.0))
        url = running.child.line(r"^curl -N (\S+) ", 60.0)
        status, _, answer = post(url, body)
        assert (status, answer.endswith(b"data: [DONE]\n\n")) == (200, True), answer
    with Gateway(tmp_path / "again", "--engine", "sim:2", "--log", "none") as running:
        with ThreadPoolExecutor(8) as clients:
            asked = clients.map(lambda _: post(running.url + urlsplit(url).path, body, **INTERACTIVE), range(8))
            answers = [(status, answer[-200:]) for status, _, answer in asked]
        assert [status for status, _ in answers] == [200] * 8, answers


# -- engines' keys ----------------------------------------------------------------------------------------------------


class Recorder(http.server.BaseHTTPRequestHandler):
    """An engine that writes down the headers of every request."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, dict[str, str]]]

    def do_GET(self) -> None:
        self.seen.append((self.path, dict(self.headers.items())))
        models = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}
        self.reply(models if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.seen.append((self.path, dict(self.headers.items())))
        self.reply({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})

    def reply(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("set-cookie", "engine=secret")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Not to standard error."""


def test_an_engine_gets_its_own_key_and_never_the_clients(tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, str]]] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Recorder,), {"seen": seen}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    (tmp_path / "engine.key").write_text("engine-key\n")
    url = f"http://127.0.0.1:{server.server_port}"
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"fleet: {{poll: 50ms, health: 50ms, engines: [{{url: '{url}', api_key_file: engine.key}}]}}\n")
    try:
        with Gateway(tmp_path / "log", "--policy", str(policy)) as running:
            asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            secrets = {
                "authorization": "Bearer client-secret",
                "x-api-key": "client-secret",
                "cookie": "session=client-secret",
                "proxy-authorization": "Basic client-secret",
                "openai-organization": "client-secret",
            }
            status, headers, body = post(running.url + "/v1/chat/completions", asked, **secrets)
            assert status == 200
            assert headers["set-cookie"] is None
            assert b"engine-key" not in body
            assert until(lambda: any(path == "/metrics" for path, _ in seen), 60.0) is not None
            told = running.child.output() + get(f"{running.control}/fleet")[1].decode()
            assert "engine-key" not in told
            assert "client-secret" not in told
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
    assert {path for path, _ in seen} >= {"/health", "/v1/models", "/metrics", "/v1/chat/completions"}
    for path, headers in seen:
        lowered = {name.lower(): value for name, value in headers.items()}
        assert lowered["authorization"] == "Bearer engine-key", path
        assert not [value for value in headers.values() if "client-secret" in value], path


def test_a_wrong_key_leaves_the_engine_out(tmp_path: Path) -> None:
    engine = SimEngine(tmp_path / "engine.log", "--api-key", "right")
    with engine.child:
        for key, status in (("wrong", 503), ("right", 200)):
            (tmp_path / "key").write_text(key)
            policy = tmp_path / "policy.yaml"
            policy.write_text(f"fleet: {{engines: [{{url: '{engine.url}', api_key_file: key}}]}}\n")
            with Gateway(tmp_path / "log", "--policy", str(policy), ready=False) as running:
                assert until(lambda: get(f"{running.control}/readyz")[0] == status, 60.0) is not None  # noqa: B023


# -- listeners --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made_certificate(tmp_path_factory.mktemp("tls"))


def started(tmp_path: Path, *arguments: str) -> tuple[Child, str]:
    """A gateway on one simulated engine, and what it prints as its data port."""
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--engine", "sim:1", "--control", "127.0.0.1:0", *arguments]
    child = Child("gateway", argv, tmp_path / "log")
    with child.starting():
        return child, child.line(r"^data port (\S+)", 60.0)


def test_tls(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    child, url = started(tmp_path, "--listen", "127.0.0.1:0", "--tls-cert", str(cert), "--tls-key", str(key))
    with child:
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(cert))
        port = urlsplit(url).port or 0
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as secure,
        ):
            assert secure.version() in {"TLSv1.2", "TLSv1.3"}
            secure.sendall(chat("localhost", "sim", "hello", max_tokens=3))
            answer = http.client.HTTPResponse(secure)  # type: ignore[arg-type]  # a socket in all it is used for
            answer.begin()
            assert (answer.status, answer.read().endswith(b"data: [DONE]\n\n")) == (200, True)
        assert not answers(f"http://127.0.0.1:{port}/health"), "no plain HTTP on a TLS port"
        assert child.stop(60.0) == 0


@pytest.mark.parametrize("bad", ["absent", "empty", "another's key"])
def test_tls_files_that_cannot_be_used_are_one_line(tmp_path: Path, certificate: tuple[Path, Path], bad: str) -> None:
    cert, key = certificate
    given = {"absent": (tmp_path / "no.pem", key), "empty": (tmp_path / "e", key), "another's key": (cert, cert)}[bad]
    (tmp_path / "e").touch()
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--engine", "http://127.0.0.1:9", "--control", "127.0.0.1:0"]
    argv += ["--listen", "127.0.0.1:0", "--tls-cert", str(given[0]), "--tls-key", str(given[1])]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    told = [line for line in ended.stderr.splitlines() if "warning" not in line]
    assert len(told) == 1
    assert told[0].startswith("gateway: --tls-cert, --tls-key: ")


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "weir.sock"
    child, address = started(tmp_path, "--listen", f"unix:{path}")
    with child:
        assert address == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(str(path))
            client.sendall(chat("localhost", "sim", "hello", max_tokens=3, stream=False))
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 3)
        assert child.stop(60.0) == 0
    assert not path.exists()


# -- what operators see -----------------------------------------------------------------------------------------------


def test_models_of_the_whole_fleet_are_one_list(tmp_path: Path) -> None:
    one = SimEngine(tmp_path / "1.log", "--model", "a", "--model", "shared", "--max-model-len", "4096")
    with one.child:
        two = SimEngine(tmp_path / "2.log", "--model", "org/b", "--model", "shared", "--max-model-len", "8192")
        with two.child, Gateway(tmp_path / "log", "--engine", one.url, "--engine", two.url) as running:
            both = lambda: get(f"{running.control}/readyz") == (200, b"ok, 2 of 2 engines are up\n")  # noqa: E731
            assert until(both, 60.0) is not None, "one may be slower"
            listed = json.loads(get(running.url + "/v1/models")[1])
            assert listed["object"] == "list"
            assert {card["id"]: card["max_model_len"] for card in listed["data"]} == {
                "a": 4096,
                "org/b": 8192,
                "shared": 8192,
            }
            assert all(card["object"] == "model" for card in listed["data"])
            card = json.loads(get(running.url + "/v1/models/org%2Fb")[1])
            assert (card["id"], card["max_model_len"]) == ("org/b", 8192)
            assert get(running.url + "/v1/models/nobody")[0] == 404
            connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=60)
            connection.request("GET", "/v1/models", headers={"anthropic-version": "2023-06-01"})
            told = json.loads(connection.getresponse().read())
            connection.close()
            assert ({card["type"] for card in told["data"]}, told["has_more"]) == ({"model"}, False)
            models = {model["id"]: len(model["engines"]) for model in running.fleet()["models"]}
            assert models == {"a": 1, "org/b": 1, "shared": 2}
            assert get(f"{running.control}/livez") == (200, b"ok\n")
            assert until(both, 60.0) is not None, "one that is held up is out for a moment"


def test_a_call_is_one_line_of_the_log(tmp_path: Path, engine: SimEngine) -> None:
    log = tmp_path / "calls.jsonl"
    with gateway(tmp_path, engine, ONE_AT_A_TIME, "--log", str(log)) as running:
        asked = {"model": "sim", "messages": [{"role": "user", "content": "do not log me"}], "max_tokens": 5}
        status, headers, _ = post(running.url + "/v1/chat/completions", asked, **{"x-request-id": 'mine"1'})
        assert (status, headers["x-request-id"]) == (200, 'mine"1')
        post(running.url + "/v1/chat/completions", {**asked, "model": "n\no"})
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert (first["request_id"], first["outcome"], first["status"], first["engine"]) == (
        'mine"1',
        "ok",
        200,
        engine.url.removeprefix("http://"),
    )
    assert (first["model"], first["class_name"], first["settled"], first["completion_tokens"]) == (
        "sim",
        "default",
        True,
        5,
    )
    assert 0 < first["ttft"] <= first["total"]
    assert (second["outcome"], second["status"], second["model"]) == ("not_found", 404, "n\no")
    assert "do not log me" not in log.read_text()


def test_all_the_files_the_system_allows_may_be_open(tmp_path: Path, engine: SimEngine) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))  # inherited by the gateway
    try:
        with gateway(tmp_path, engine) as running:
            limits = Path(f"/proc/{running.child.pid}/limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert line.split()[3:5] == [str(hard), str(hard)]
