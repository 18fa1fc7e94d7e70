"""TLS of a gateway of several processes: each relay shows the certificate, a newer one too, and upgrades keep it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from loadtest.processes import Child, until
from tests.e2e.children import SimEngine
from tests.e2e.test_connections import certificate, put, shown

pytestmark = pytest.mark.slow

POLICY = "fleet: {poll: 100ms, health: 20s}\ntimeouts: {drain: 20s}\n"
MESSAGES: list[Any] = [{"role": "user", "content": "Why is the river level?"}]
TRIES = 12  # connections, of which each relay gets some


class Secure:
    """A gateway of two relays whose ports both have TLS."""

    def __init__(self, folder: Path) -> None:
        self.engine = SimEngine(folder / "engine.log")
        self.used = (folder / "used.pem", folder / "used.key")
        put(certificate(folder, "first"), self.used)
        (folder / "policy.yaml").write_text(POLICY)
        words = [sys.executable, "-m", "gateway.cli", "serve", "--workers", "2", "--engine", self.engine.url]
        words += ["--policy", str(folder / "policy.yaml"), "--log", "none"]
        words += ["--listen", "127.0.0.1:0", "--control", "127.0.0.1:0"]
        words += ["--tls-cert", str(self.used[0]), "--tls-key", str(self.used[1])]
        words += ["--control-tls-cert", str(self.used[0]), "--control-tls-key", str(self.used[1])]
        self.child = Child("gateway", words, folder / "log")
        self.url = self.child.line(r"^data port (https://\S+)", 60.0)
        self.control = self.child.line(r"^control port (https://\S+)", 60.0)
        self.child.line(r"^(models sim)", 60.0)

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.used[0])
        context.check_hostname = False  # it is for localhost
        return context

    def processes(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.control}/processes", verify=self.context(), timeout=60.0)
        found: list[dict[str, Any]] = json.loads(answer.content)["processes"]
        return found

    def certificates(self) -> set[bytes]:
        """What is shown on many connections, so by both relays."""
        return {shown(self.port) for _ in range(TRIES)}

    async def stream(self, tokens: int) -> str | None:
        """The last finish reason of a stream on a connection of its own."""
        async with (
            httpx.AsyncClient(verify=self.context(), timeout=60.0) as http,
            openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
        ):
            made = await client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=tokens, stream=True)
            return [choice.finish_reason async for chunk in made for choice in chunk.choices][-1]


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Secure]:
    made = Secure(tmp_path)
    try:
        yield made
        assert "Traceback" not in made.child.output(), made.child.output()
    finally:
        made.child.kill()
        made.engine.child.stop()


def test_every_relay_shows_a_newer_certificate_on_a_hangup(secure: Secure, tmp_path: Path) -> None:
    before = secure.certificates()
    assert len(before) == 1
    put(certificate(tmp_path, "second"), secure.used)
    os.kill(secure.child.pid, signal.SIGHUP)
    assert until(lambda: secure.certificates().isdisjoint(before), 60.0) is not None
    assert until(lambda: len(secure.certificates()) == 1, 60.0) is not None, "the other relay has it too"
    assert until(lambda: _others(secure, []), 60.0) is not None, "the decider's control port may have it later"
    assert [each["role"] for each in secure.processes()] == ["parent", "decider", "relay", "relay"], (
        "with the newer one"
    )


def test_processes_that_are_started_again_show_the_certificate_before_while_its_files_are_faulty(
    secure: Secure, tmp_path: Path
) -> None:
    before = secure.certificates()
    secure.used[1].write_text("no key")
    assert until(lambda: secure.child.output().count("the file cannot be used") == 3, 60.0) is not None
    killed = [each["pid"] for each in secure.processes() if each["role"] != "parent"]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: _others(secure, killed), 60.0) is not None, secure.child.output()
    assert secure.certificates() == before
    assert until(lambda: secure.child.output().count("the file cannot be used") == 6, 60.0) is not None, "told again"
    assert asyncio.run(secure.stream(2)) is not None
    put(certificate(tmp_path, "second"), secure.used)
    assert until(lambda: secure.certificates().isdisjoint(before), 60.0) is not None
    assert until(lambda: _others(secure, []), 60.0) is not None, "the control port has the newer one too"


def _others(secure: Secure, killed: list[int]) -> bool:
    """Whether other processes are there in place of these."""
    with contextlib.suppress(httpx.TransportError):
        found = secure.processes()
        return len(found) == 4 and not any(each["pid"] in killed for each in found)
    return False


def test_an_upgrade_cuts_no_stream_and_no_handshake(secure: Secure) -> None:
    async def main() -> list[str | None]:
        streams = [asyncio.create_task(secure.stream(150)) for _ in range(4)]
        before = (await asyncio.to_thread(secure.processes))[0]["pid"]
        half = [socket.create_connection(("127.0.0.1", secure.port)) for _ in range(4)]  # about to shake hands
        os.kill(before, signal.SIGUSR2)
        later = []
        async with asyncio.timeout(60):
            while await asyncio.to_thread(_main, secure) in {before, 0}:
                later.append(await secure.stream(2))
        later.append(await secure.stream(2))
        for each in half:
            each.setblocking(True)
            with secure.context().wrap_socket(each, server_hostname="localhost") as wrapped:
                wrapped.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert wrapped.recv(100).startswith(b"HTTP/1.1 200")
        return [*await asyncio.gather(*streams), *later]

    reasons = asyncio.run(main())
    assert None not in reasons


def _main(secure: Secure) -> int:
    with contextlib.suppress(httpx.TransportError):
        return int(secure.processes()[0]["pid"])
    return 0
