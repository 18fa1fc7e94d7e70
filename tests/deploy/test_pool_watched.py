"""Engines that are pods of an InferencePool, in a Kubernetes API server, with the rights that the chart gives.

Skips without a server (KUBEBUILDER_ASSETS, see kubernetes.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.decider.kubernetes.api import KubernetesApi, ServiceAccount, Unreachable
from gateway.decider.kubernetes.pool import Gone, Pods
from gateway.decider.kubernetes.source import PodEngines
from tests.deploy.chart import rendered
from tests.deploy.kubernetes import ADMIN, Kubernetes, started

pytestmark = pytest.mark.slow

SPACE = "/api/v1/namespaces/default"
PODS = f"{SPACE}/pods"
GROUP = "inference.networking.k8s.io"
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": f"inferencepools.{GROUP}",
        # A group of Kubernetes' own wants the decision that approved it.
        "annotations": {"api-approved.kubernetes.io": f"https://github.com/{GROUP}/pull/1173"},
    },
    "spec": {
        "group": GROUP,
        "names": {"kind": "InferencePool", "plural": "inferencepools", "singular": "inferencepool"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


def installed(kubernetes: Kubernetes) -> None:
    """Install what the chart makes for its gateway's account, and its pool."""
    kubernetes.define(DEFINITION)
    paths: dict[tuple[str, str], str] = {}
    while (f"{GROUP}/v1", "InferencePool") not in paths:
        paths = kubernetes.paths()
    for document in rendered("pool"):
        if document["kind"] in ("ServiceAccount", "Role", "RoleBinding", "InferencePool"):
            path = paths[document["apiVersion"], document["kind"]].format("default")
            kubernetes.post(path, document)


def account(kubernetes: Kubernetes, folder: Path) -> ServiceAccount:
    """The service account of the chart's gateway, as a pod of it has it."""
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    folder.mkdir()
    (folder / "token").write_text(kubernetes.post(f"{SPACE}/serviceaccounts/weir/token", asked)["status"]["token"])
    (folder / "namespace").write_text("default")
    (folder / "ca.crt").write_bytes(kubernetes.certificate.read_bytes())
    return ServiceAccount(kubernetes.url, folder)


def patched(kubernetes: Kubernetes, path: str, body: Any) -> None:
    status, said = kubernetes.ask("PATCH", path, body, kind="application/merge-patch+json")
    assert status == 200, said


def add(kubernetes: Kubernetes, name: str, app: str, ip: str) -> None:
    """Make a pod and say, as its node would, that it is ready at this address."""
    metadata = {"name": name, "labels": {"app": app}, "finalizers": ["weir.example/kept"]}
    spec = {"containers": [{"name": "engine", "image": "engine"}]}
    kubernetes.post(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    ready(kubernetes, name, ip, "True")


def ready(kubernetes: Kubernetes, name: str, ip: str, status: str) -> None:
    condition = {"type": "Ready", "status": status}
    told = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [condition]}
    patched(kubernetes, f"{PODS}/{name}/status", {"status": told})


async def watched(kubernetes: Kubernetes, given: ServiceAccount) -> None:
    said: list[str] = []
    engines = PodEngines(lambda: None, said.append, random.Random(1), lambda: given)

    async def until(condition: Callable[[set[str | None]], bool]) -> None:
        async with asyncio.timeout(60.0):
            while not condition({entry.name for entry in engines.entries.values()}):
                await asyncio.sleep(0.01)

    engines.apply("llama")
    try:
        await until(lambda names: names == {"a-8000", "a-8001"})
        assert "http://10.1.0.1:8000" in {entry.url for entry in engines.entries.values()}
        add(kubernetes, "other", "another", "10.1.0.9")
        add(kubernetes, "b", "vllm-llama", "10.1.0.2")
        await until(lambda names: names == {"a-8000", "a-8001", "b-8000", "b-8001"})
        ready(kubernetes, "a", "10.1.0.1", "False")
        await until(lambda names: names == {"b-8000", "b-8001"})
        kubernetes.ask("DELETE", f"{PODS}/b")  # its finalizer keeps it: it is being deleted
        await until(lambda names: not names)
        patched(kubernetes, f"{PODS}/b", {"metadata": {"finalizers": None}})
        ready(kubernetes, "a", "10.1.0.1", "True")
        await until(lambda names: names == {"a-8000", "a-8001"})
        assert said == []
    finally:
        await engines.aclose()
    api = KubernetesApi(given)
    try:
        with pytest.raises(Unreachable, match="403"):
            await api.get(f"{SPACE}/secrets")
        (given.folder / "token").write_text(ADMIN)  # who may watch pools, whose first version was before their kind
        with pytest.raises((Gone, Unreachable), match="410"):
            await from_the_first_version(api)
    finally:
        await api.aclose()


async def from_the_first_version(api: KubernetesApi) -> None:
    """Watch from a version that the server has forgotten."""
    pods = Pods(await api.get(PODS))
    async for line in api.watch(f"/apis/{GROUP}/v1/namespaces/default/inferencepools", 5.0, resourceVersion="1"):
        pods.take(line)


def test_pods_come_and_go_as_the_api_server_tells(tmp_path: Path) -> None:
    with started(tmp_path) as kubernetes:
        installed(kubernetes)
        add(kubernetes, "a", "vllm-llama", "10.1.0.1")
        asyncio.run(watched(kubernetes, account(kubernetes, tmp_path / "account")))
