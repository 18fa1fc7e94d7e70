"""Exposure of a machine with a sidecar, seen from another network namespace: the relay's port, the allowed paths, with
the order token, and nothing else.

Two namespaces stand for two machines, with a veth pair for the network between them. One has the sidecar and its
engines, the other the gateway. It takes root and `ip`; nothing leaves this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import Child, until
from sidecar.relay.relay import CALLS, LOOKS
from tests.sidecar.relay.test_targets import NEVER
from tests.sidecar.served import Box, box

PROBER = Path(__file__).with_name("prober.py")
MACHINE, ELSEWHERE = "10.213.77.1", "10.213.77.2"
REPORT, ORDER, ADMIN = "report-token-of-a-test", "order-token-of-a-test", "admin-token-of-a-test"
SIDECAR = f"""
gateways: ["http://{ELSEWHERE}:8001"]
token_file: report.token
order_token_file: order.token
relay: 0.0.0.0:8003
models:
  a: {{model_path: /m/a, gpu_memory: 40%}}
  b: {{model_path: /m/b, gpu_memory: 40%, pin: true}}
"""
POLICY = f"""
fleet: {{poll: 100ms, health: 200ms, sidecars: {{
  token_file: report.token, order_token_file: order.token, allow: [{MACHINE}]}}}}
classes: {{default: {{ttft: 60s}}}}
"""

pytestmark = pytest.mark.slow


def run(*argv: str, given: str = "") -> str:
    done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


def absent(why: str) -> None:
    """Skip, but where the test is required (WEIR_REQUIRE_NETNS)."""
    assert "WEIR_REQUIRE_NETNS" not in os.environ, why
    pytest.skip(why)


class Namespaces:
    """`machine` and `elsewhere`, joined by a veth pair; each is the beginning of a command that runs there."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.machine, self.elsewhere = (["ip", "netns", "exec", name] for name in names)

    def ask(self, **asked: Any) -> Any:
        """What the prober finds from elsewhere."""
        return json.loads(run(*self.elsewhere, sys.executable, str(PROBER), given=json.dumps(asked)))

    def statuses(self, *requests: str) -> list[int]:
        """Of the relay's answers to requests, from elsewhere."""
        return [int(line.split()[1]) for line in self.ask(send=(MACHINE, 8003, requests))]


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    ip = shutil.which("ip")
    if os.geteuid() != 0 or ip is None:
        absent("needs root and `ip` (iproute2) to make network namespaces")
        return
    names = f"weir-{os.getpid()}-m", f"weir-{os.getpid()}-e"
    with contextlib.ExitStack() as stack:
        for name in names:
            argv = (ip, "netns", "add", name)
            made = subprocess.run(argv, capture_output=True, text=True, check=False)
            if made.returncode:
                absent(f"this machine allows no network namespaces: {made.stderr.strip()}")
            stack.callback(run, "ip", "netns", "del", name)
        run("ip", "-n", names[0], "link", "add", "v0", "type", "veth", "peer", "name", "v0", "netns", names[1])
        for name, address in zip(names, (MACHINE, ELSEWHERE), strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/30", "dev", "v0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "v0", "up")
        yield Namespaces(names)


def secured(folder: Path) -> tuple[str, str, list[str]]:
    """The sidecar's file, the policy and the gateway's flags, with TLS both ways by certificates that are made here."""
    for name, of in (("relay", "DNS:weir-sidecar"), ("control", f"IP:{ELSEWHERE}")):
        argv = [
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=weir",
        ]
        key = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        run("openssl", *argv, "-addext", f"subjectAltName={of}", *key)
    relay = "relay: {listen: 0.0.0.0:8003, certificate_file: relay.pem, key_file: relay.key}\nca_file: control.pem"
    sidecar = SIDECAR.replace("relay: 0.0.0.0:8003", relay).replace("http://", "https://")
    policy = POLICY.replace("allow:", "tls: {ca_file: relay.pem, name: weir-sidecar}, allow:")
    flags = [f"--control-tls-{kind}={folder}/control.{ending}" for kind, ending in (("cert", "pem"), ("key", "key"))]
    return sidecar, policy, flags


@contextlib.contextmanager
def both(namespaces: Namespaces, folder: Path, *, tls: bool = False) -> Iterator[Box]:
    """A sidecar on the machine, and a gateway elsewhere that has heard of it."""
    sidecar_file, policy, flags = secured(folder) if tls else (SIDECAR, POLICY, [])
    (folder / "policy.yaml").write_text(policy)
    for name, token in (("report", REPORT), ("order", ORDER), ("admin", ADMIN)):
        (folder / f"{name}.token").write_text(token)
        (folder / f"{name}.token").chmod(0o600)
    gateway = [
        *(*namespaces.elsewhere, sys.executable, "-m", "gateway.cli", "serve", "--policy", str(folder / "policy.yaml")),
        *("--listen", "127.0.0.1:8000", "--control", f"{ELSEWHERE}:8001", "--log", "none"),
        *("--admin-token-file", str(folder / "admin.token"), *flags),
    ]
    with box(folder, sidecar_file) as found, Child("gateway", gateway, folder / "gateway.log") as child:
        child.line(r"^control port (https?://\S+)", 60.0)
        argv = [*namespaces.machine, *found.argv("serve", "--gpus-from", str(found.gpus))]
        with Child("sidecar", argv, folder / "sidecar.log", env=found.env) as sidecar:
            sidecar.line(r"^control API (\S+)", 60.0)
            yield found


def chat(namespaces: Namespaces, model: str) -> str:
    """The stream of a call to the gateway."""
    body = json.dumps(
        {"model": model, "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    )
    program = (
        "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', 8000, timeout=50);"
        "c.request('POST', '/v1/chat/completions', sys.stdin.read(), {'content-type': 'application/json'});"
        "print(c.getresponse().read().decode())"
    )
    return run(*namespaces.elsewhere, sys.executable, "-c", program, given=body)


def request(line: str, token: str | None = ORDER, body: str = "") -> str:
    shown = "" if token is None else f"authorization: Bearer {token}\r\n"
    length = f"content-length: {len(body)}\r\n" if body else ""
    return f"{line} HTTP/1.1\r\nhost: {MACHINE}:8003\r\n{shown}{length}connection: close\r\n\r\n{body}"


def listeners(namespaces: Namespaces) -> set[str]:
    """Addresses and ports, in the kernel's hexadecimal, at which anybody on the machine listens for TCP."""
    table = run(*namespaces.machine, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    rows = [line.split() for line in table.splitlines()]
    return {row[1] for row in rows if row[3] == "0A"}


def test_from_another_machine_nothing_is_reached_but_allowed_paths_with_the_token(
    namespaces: Namespaces, tmp_path: Path
) -> None:
    with both(namespaces, tmp_path) as found:
        for model in ("a", "b"):  # the gateway has it made ready, and calls it, through the relay
            assert until(lambda model=model: "[DONE]" in chat(namespaces, model), 60.0) is not None
        assert found.serves("a")
        assert found.serves("b")
        outside = {each for each in listeners(namespaces) if not each.startswith("0100007F:")}  # 127.0.0.1
        assert outside == {"00000000:1F43"}, "only the relay, 0.0.0.0:8003, is no loopback address"
        assert namespaces.ask(scan=MACHINE) == [8003]
        paths = sorted(path.decode() for path in CALLS | LOOKS)
        allowed = [request(f"{'POST' if path.encode() in CALLS else 'GET'} /engines/a{path}", None) for path in paths]
        assert set(namespaces.statuses(*allowed)) == {401}
        of_reports = [text.replace("connection", f"authorization: Bearer {REPORT}\r\nconnection") for text in allowed]
        assert set(namespaces.statuses(*of_reports)) == {401}, "who may report may not call"
        assert set(namespaces.statuses(*(request(f"GET /engines/a{path.decode()}") for path in LOOKS))) == {200}
        forbidden = [
            f"{method} {prefix}{path}"
            for path in NEVER
            for method in ("GET", "POST")
            for prefix in (
                *("/engines/a", "/engines/b", "", "/engines/a/", "/engines/a/v1/..", "/engines/a/%2e%2e/a", "/engines"),
                *(f"http://{MACHINE}:8003/engines/a", f"http://{MACHINE}:8003", "/engines/a/health/.."),
            )
        ]
        forbidden += [f"POST /models/a/{order}" for order in ("sleep", "wake", "stop", "drain")]
        forbidden += [
            "POST /stop",
            "GET /status",
            "GET /metrics",
            "GET /models/a/logs",
            "POST /models/a/logs?lines=5",
            "GET /models/a/logs?lines=2001",
            "POST /engines/a/sleep?level=2",
        ]
        statuses = namespaces.statuses(*map(request, forbidden))
        assert set(statuses) == {404}, dict(zip(forbidden, statuses, strict=True))
        methods = [f"{method} /engines/a/v1/completions" for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")]
        assert set(namespaces.statuses(*map(request, methods))) <= {400, 404}
        assert "[DONE]" in chat(namespaces, "a"), "and nothing of that has put it to sleep"
        for log in ("sidecar.log", "gateway.log"):
            said = (tmp_path / log).read_text()
            assert "in the clear" in said, "tokens over plain HTTP are warned of"
            assert not any(token in said for token in (REPORT, ORDER, ADMIN))


def test_with_tls_both_ways_nothing_crosses_in_the_clear_and_nothing_is_warned_of(
    namespaces: Namespaces, tmp_path: Path
) -> None:
    with both(namespaces, tmp_path, tls=True):
        assert until(lambda: "[DONE]" in chat(namespaces, "a"), 60.0) is not None
        (plain,) = namespaces.statuses(request("GET /engines/a/health"))
        assert plain == 400, "a relay with a certificate speaks nothing but TLS"
        for log in ("sidecar.log", "gateway.log"):
            assert "in the clear" not in (tmp_path / log).read_text()
