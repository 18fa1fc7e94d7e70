"""Engines that are pods of an InferencePool: against an API server of the tests' own over TLS, which lists and
watches."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.core.policy.auth import AuthPolicy
from gateway.core.policy.policy import FleetPolicy, Policy
from gateway.decider.kubernetes import source
from gateway.decider.kubernetes.api import ServiceAccount, Unreachable
from gateway.decider.kubernetes.pool import BadObject, Pods, Pool
from gateway.decider.kubernetes.source import PodEngines
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from gateway.serve.starting import ApplyError
from loadtest.processes import free_port
from tests.certificates import certificate

TOKEN = "a-service-account"  # noqa: S105 # of the test
POOL = "/apis/inference.networking.k8s.io/v1/namespaces/models/inferencepools/llama"
PODS = "/api/v1/namespaces/models/pods"


def pod(name: str, ip: str, *, ready: bool = True, version: int = 1, **metadata: str) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": {"name": name, "resourceVersion": str(version), **metadata},
        "status": {"podIP": ip, "phase": "Running", "conditions": conditions},
    }


class ApiServer:
    """API server with one pool. `asked` are the paths and versions of its requests; `gone`: the next watch is 410."""

    def __init__(self, folder: Path) -> None:
        cert, key = certificate(folder)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(cert, key)
        (folder / "ca.crt").write_bytes(cert.read_bytes())
        (folder / "token").write_text(TOKEN)
        (folder / "namespace").write_text("models")
        self.folder = folder
        self.ports = [8000]
        self.app = "llama"  # that the pool selects
        self.unlisted = 0  # lists that are refused next
        self.token = TOKEN
        self.refuse = 0  # a status for all requests
        self.gone = 0
        self.asked: list[tuple[str, str]] = []
        self.pods: dict[str, dict[str, Any]] = {}
        self.version = 10
        self._log: list[tuple[int, bytes]] = []  # events by version
        self._watchers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> ServiceAccount:
        self.port = self.port or free_port()  # one that nobody else is given where it is stopped
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._context)
        return ServiceAccount(f"https://localhost:{self.port}", self.folder)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.drop()
        await self._server.wait_closed()

    def drop(self) -> None:
        """Cut all watches."""
        for writer in self._watchers:
            writer.transport.abort()
        self._watchers.clear()

    def event(self, kind: str, object: dict[str, Any]) -> None:
        """Change a pod, and tell the watchers."""
        self.version += 1
        object["metadata"]["resourceVersion"] = str(self.version)
        name = object["metadata"].get("name", "")
        if kind == "DELETED":
            self.pods.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self.pods[name] = object
        line = json.dumps({"type": kind, "object": object}).encode() + b"\n"
        self._log.append((self.version, line))
        self.raw(line)

    def raw(self, line: bytes) -> None:
        for writer in self._watchers:
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                target = urlsplit(head.split(" ")[1])
                query = {name: values[0] for name, values in parse_qs(target.query).items()}
                self.asked.append((target.path, query.get("resourceVersion", "") if "watch" in query else "-"))
                status, body = self._answer(head, target.path, query)
                if status == 200 and "watch" in query:
                    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                    self._watchers.append(writer)
                    since = int(query["resourceVersion"])
                    for line in [line for version, line in self._log if version > since]:
                        writer.write(b"%x\r\n%b\r\n" % (len(line), line))
                    return
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, head: str, path: str, query: Mapping[str, str]) -> tuple[int, bytes]:
        if self.refuse:
            return self.refuse, b"{}"
        if f"authorization: Bearer {self.token}\r\n" not in head:
            return 401, b"{}"
        if path == POOL:
            selector, ports = {"matchLabels": {"app": self.app}}, [{"number": port} for port in self.ports]
            return 200, json.dumps({"spec": {"selector": selector, "targetPorts": ports}}).encode()
        if path != PODS or query.get("labelSelector") != f"app={self.app}":
            return 404, b"{}"
        if "watch" not in query and self.unlisted:
            self.unlisted -= 1
            return 503, b"{}"
        if "watch" in query and self.gone:
            self.gone -= 1
            return 410, b"{}"
        listed = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.pods.values())}
        return 200, json.dumps(listed).encode()


class World:
    """A watch of the API server's pool. `urls` are the engines that it tells, `said` its troubles."""

    def __init__(self, api: ApiServer, account: ServiceAccount) -> None:
        self.api = api
        self.told = 0
        self.said: list[str] = []
        self.engines = PodEngines(self._changed, self.said.append, random.Random(1), lambda: account)

    @property
    def urls(self) -> dict[str, str | None]:
        return {entry.url: entry.name for entry in self.engines.entries.values()}

    def _changed(self) -> None:
        self.told += 1

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60.0):
            while not condition():
                await asyncio.sleep(0.01)

    async def watched(self) -> None:
        """Wait until a watch is open."""
        await self.until(lambda: self.api._watchers)


def against(folder: Path, scenario: Callable[[World], Awaitable[None]], *pods: dict[str, Any]) -> None:
    async def main() -> None:
        server = ApiServer(folder)
        server.pods = {each["metadata"]["name"]: each for each in pods}
        world = World(server, await server.start())
        world.engines.apply("llama")
        try:
            await scenario(world)
        finally:
            await world.engines.aclose()
            await server.stop()

    asyncio.run(main())


def test_ready_pods_are_engines_and_come_and_go(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.watched()
        assert world.urls == {"http://10.0.0.1:8000": "a"}
        world.api.event("ADDED", pod("c", "10.0.0.3", ready=False))
        world.api.event("MODIFIED", pod("c", "10.0.0.3"))
        await world.until(lambda: world.urls == {"http://10.0.0.1:8000": "a", "http://10.0.0.3:8000": "c"})
        world.api.event("MODIFIED", pod("a", "10.0.0.1", deletionTimestamp="2026-11-26T00:00:00Z"))
        await world.until(lambda: world.urls == {"http://10.0.0.3:8000": "c"})
        world.api.event("DELETED", pod("c", "10.0.0.3"))
        await world.until(lambda: not world.urls)
        assert world.said == []

    against(tmp_path, scenario, pod("a", "10.0.0.1"), pod("b", "10.0.0.2", ready=False))


def test_a_watch_that_is_cut_goes_on_from_its_bookmark(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.watched()
        world.api.event("BOOKMARK", {"metadata": {}})
        world.api.event("ADDED", pod("b", "10.0.0.2"))
        await world.until(lambda: len(world.urls) == 2)
        told = world.told
        world.api.drop()
        world.api.event("ADDED", pod("c", "10.0.0.3"))  # while nobody watches
        await world.until(lambda: len(world.urls) == 3)
        assert [asked for asked in world.api.asked if asked == (PODS, "-")] == [(PODS, "-")], "it is listed once"
        assert (PODS, str(world.api.version - 1)) in world.api.asked
        assert world.told == told + 1

    against(tmp_path, scenario, pod("a", "10.0.0.1"))


@pytest.mark.parametrize("how", ["status", "event", "garbage"])
def test_a_version_that_is_forgotten_means_to_list_anew(tmp_path: Path, how: str) -> None:
    async def scenario(world: World) -> None:
        await world.watched()
        world.api.pods["b"] = pod("b", "10.0.0.2")  # an event that no watch has had
        if how == "status":
            world.api.gone = 1
            world.api.drop()
        elif how == "event":
            world.api.raw(b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n')
        else:
            world.api.raw(b"{nothing}\n")
        await world.until(lambda: len(world.urls) == 2)
        assert world.api.asked.count((PODS, "-")) == 2
        assert len(world.said) == (how != "event")

    against(tmp_path, scenario, pod("a", "10.0.0.1"))


def test_a_new_selector_is_listed_by_also_if_the_first_list_fails(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.watched()
        world.api.app, world.api.unlisted = "other", 1
        world.api.pods = {"b": pod("b", "10.0.0.2")}
        world.api.drop()
        await world.until(lambda: world.urls == {"http://10.0.0.2:8000": "b"})

    against(tmp_path, scenario, pod("a", "10.0.0.1"))


def test_engines_stay_while_the_server_is_away(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.watched()
        told = world.told
        await world.api.stop()
        await world.until(lambda: world.said)
        assert world.urls == {"http://10.0.0.1:8000": "a"}
        await world.api.start()
        await world.watched()
        assert world.told == told
        world.api.event("ADDED", pod("b", "10.0.0.2"))
        await world.until(lambda: len(world.urls) == 2)

    against(tmp_path, scenario, pod("a", "10.0.0.1"))


def test_a_pod_has_an_engine_on_each_target_port(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.api.ports = [8000, 8001]
        await world.until(lambda: world.urls)
        assert world.urls == {"http://[fd00::1]:8000": "a-8000", "http://[fd00::1]:8001": "a-8001"}

    against(tmp_path, scenario, pod("a", "fd00::1"))


@pytest.mark.parametrize(
    ("status", "words"), [(403, "may not read it"), (404, "is the Gateway API Inference"), (500, "500")]
)
def test_a_refusal_is_told_once_and_tried_again(tmp_path: Path, status: int, words: str) -> None:
    async def scenario(world: World) -> None:
        world.api.refuse = status
        await world.until(lambda: len(world.api.asked) >= 2)
        assert len(world.said) == 1
        assert words in world.said[0]
        world.api.refuse = 0
        await world.watched()
        assert world.urls

    against(tmp_path, scenario, pod("a", "10.0.0.1"))


def test_a_renewed_token_is_used(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.watched()
        world.api.token = "another"  # noqa: S105 # of the test
        (tmp_path / "token").write_text("another\n")
        world.api.drop()
        world.api.event("ADDED", pod("b", "10.0.0.2"))
        await world.until(lambda: len(world.urls) == 2)
        assert not [line for line in world.said if "401" in line]

    against(tmp_path, scenario, pod("a", "10.0.0.1"))


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"spec":{"selector":{"matchLabels":{}},"targetPorts":[{"number":1}]}}',
     b'{"spec":{"selector":{"matchLabels":{"a":"b"}},"targetPorts":[]}}',
     b'{"spec":{"selector":{"matchLabels":{"a":"b"}},"targetPorts":[{"number":70000}]}}'],
)  # fmt: skip
def test_a_pool_that_cannot_be_read_is_named_bad(body: bytes) -> None:
    with pytest.raises(BadObject):
        Pool.read(body)


def test_a_pod_with_a_strange_address_is_no_engine() -> None:
    listed = {"metadata": {"resourceVersion": "1"}, "items": [pod("a", "evil.example/x"), pod("b", "")]}
    assert Pods(json.dumps(listed).encode()).urls((80,)) == {}


# -- a gateway --------------------------------------------------------------------------------------------------------


def test_pods_are_a_gateways_engines_while_the_policy_names_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        server = ApiServer(tmp_path)
        server.pods = {"a": pod("a", "127.0.0.1")}
        account = await server.start()
        monkeypatch.setattr(source, "ServiceAccount", SimpleNamespace(of=lambda _: account))
        with_pool = Policy(fleet=FleetPolicy(inference_pool="llama"))
        gateway = Gateway(Configuration(with_pool), (), None, random.Random(1), say=lambda _: None)
        world = World(server, account)
        try:
            await world.until(lambda: len(gateway.fleet.engines) == 1)
            (engine,) = gateway.fleet
            assert (engine.id, engine.label) == ("127.0.0.1:8000", "a")
            gateway.apply(Configuration(with_pool))
            assert list(gateway.fleet) == [engine]
            await world.watched()
            server.event("DELETED", pod("a", "127.0.0.1"))
            await world.until(lambda: not gateway.fleet.engines)
            server.event("ADDED", pod("b", "127.0.0.1"))
            await world.until(lambda: gateway.fleet.engines)
            gateway.apply(Configuration(Policy()))
            assert not gateway.fleet.engines
        finally:
            await gateway.aclose()
            await server.stop()

    asyncio.run(main())


def test_outside_of_a_pod_the_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    async def main() -> None:
        policy = Policy(fleet=FleetPolicy(inference_pool="llama"))
        with pytest.raises(ApplyError, match="does not run in a pod"):
            Gateway(Configuration(policy), (), None, random.Random(1), say=lambda _: None)

    asyncio.run(main())


def test_a_policy_that_is_refused_for_its_pool_leaves_the_issuer_with_the_keys_that_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    async def main() -> None:
        auth = AuthPolicy(issuer="i", audience="a", jwks="http://127.0.0.1:9/jwks")
        gateway = Gateway(Configuration(Policy(auth=auth)), (), None, random.Random(1), say=lambda _: None)
        try:
            before = gateway.issuer
            with pytest.raises(ApplyError, match="does not run in a pod"):
                gateway.apply(Configuration(Policy(fleet=FleetPolicy(inference_pool="llama"))))
            assert gateway.issuer is before
        finally:
            await gateway.aclose()

    asyncio.run(main())


def test_the_servers_address_is_read_as_kubernetes_tells_it() -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert ServiceAccount.of(environ).url == "https://[fd00::1]:6443"
    with pytest.raises(Unreachable, match="token mounted"):
        ServiceAccount.of(environ).text("no-such-file")
