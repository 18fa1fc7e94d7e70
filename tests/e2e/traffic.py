"""Parts for tests of the traffic policy: a gateway whose policy is edited while it runs, and its clients.

A policy here is the tree that its YAML holds; JSON is YAML.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import socket
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import yaml

from loadtest.processes import Gateway, get, until
from tests.e2e.children import SimEngine

Tree = dict[str, Any]
Headers = Iterable[tuple[bytes, bytes]]

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Why is the river level?"}]
QUICK = {"poll": "50ms", "health": "20s"}  # fleet: an engine that waits for a core for seconds is no dead one


def body(**fields: Any) -> Tree:
    """A chat call of three tokens that do not end early; `fields` are added or replace."""
    return {"model": "sim", "messages": MESSAGES, "max_tokens": 3, "ignore_eos": True} | fields


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Site:
    """A gateway on `engine`, which the policy may name itself, and the policy file it watches; `with` ends it."""

    def __init__(self, folder: Path, policy: Tree, engine: SimEngine) -> None:
        self.engine = engine
        self.file = folder / "policy.yaml"
        self.save(policy)
        arguments = ["--policy", str(self.file), "--log", "none"]
        if engine.url not in self.file.read_text():
            arguments += ["--engine", engine.url]
        self.gateway = Gateway(folder / "gateway.log", *arguments)
        self.http = httpx.Client(base_url=self.gateway.url, timeout=60.0, trust_env=False)
        self._clients = ExitStack()

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._clients.close()
        alive, told = self.gateway.child.alive, self.gateway.child.output()
        self.gateway.child.stop()
        assert alive, told
        assert "Traceback" not in told, told

    # -- the policy -----------------------------------------------------------------------------------------------

    def save(self, policy: Tree | str) -> None:
        """Put a policy in the file's place, as editors do it: another file, renamed over it."""
        text = policy if isinstance(policy, str) else _text(policy)
        new = self.file.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.replace(self.file)

    def version(self) -> int:
        """The number of the active policy. Its line in the output comes later, by a thread."""
        return int(json.loads(get(f"{self.gateway.control}/status")[1])["policy"]["version"])

    def use(self, policy: Tree) -> None:
        """Save a policy and wait until it is active; where the file says it already, nothing would be applied."""
        if self.file.exists() and self.file.read_text() == _text(policy):
            return
        before = self.version()
        self.save(policy)
        self.hang_up()
        assert until(lambda: self.version() > before, 60.0) is not None, self.gateway.child.output()

    def hang_up(self) -> None:
        """SIGHUP: read the file now."""
        os.kill(self.gateway.child.pid, signal.SIGHUP)

    def status(self) -> Any:
        """What `/status` says of the active policy and of the file, with the policy itself as `policy`."""
        policy = yaml.load(get(f"{self.gateway.control}/policy")[1], yaml.CSafeLoader)
        return json.loads(get(f"{self.gateway.control}/status")[1])["policy"] | {"policy": policy}

    # -- clients --------------------------------------------------------------------------------------------------

    def ask(self, fields: Tree | None = None, key: str | None = None, **headers: str) -> httpx.Response:
        """One chat call. Underscores in the names of headers are dashes."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            given["authorization"] = f"Bearer {key}"
        return self.http.post(CHAT, json=body(**(fields or {})), headers=given)

    def ask_at_once(self, fields: Tree, key: str | None = None, **headers: str) -> httpx.Response:
        """As `ask`, with head and body in one write: a deadline counts from the head, and httpx may be held up before
        it sends the body."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            given["authorization"] = f"Bearer {key}"
        lines = [(name.encode(), value.encode()) for name, value in given.items()]
        with Wire(self.gateway.url) as wire:
            status, told, data = wire.ask(json.dumps(body(**fields)).encode(), lines)
        return httpx.Response(status, headers=told, content=data)

    def openai(self, key: str = "none", *, retries: int = 0) -> openai.OpenAI:
        url = f"{self.gateway.url}/v1"
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=retries, timeout=60.0)
        return self._clients.enter_context(client)

    def empty(self) -> bool:
        """Whether nothing is held, running or queued any more."""
        fleet = self.gateway.fleet()
        queued = any(queue["calls"] or queue["tokens"] for queue in fleet["queues"])
        return self.gateway.idle() and not queued and not any(fleet["running"].values())


class Wire:
    """One connection to a data port that sends exactly the bytes it is told to."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes, headers: Headers = (), path: str = CHAT) -> None:
        """A POST whose answer nobody reads yet."""
        if not any(name == b"content-type" for name, _ in headers):
            headers = (*headers, (b"content-type", b"application/json"))
        lines = [
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % (path.encode(), len(data)),
            *(b"%b: %b\r\n" % line for line in headers),
        ]
        self._socket.sendall(b"".join(lines) + b"\r\n" + data)

    def ask(self, data: bytes, headers: Headers = (), path: str = CHAT) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the answer to a POST on this connection."""
        self.send(data, headers, path)
        answer = http.client.HTTPResponse(self._socket)
        answer.begin()
        return answer.status, dict(answer.headers.items()), answer.read()


def _text(policy: Tree) -> str:
    return json.dumps(policy, ensure_ascii=False, indent=1)
