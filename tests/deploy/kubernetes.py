"""Kubernetes API server with its etcd: validation, defaults and admission as in a cluster, without nodes.

The programs are those of envtest: KUBEBUILDER_ASSETS is the folder that has `kube-apiserver` and `etcd`, as the command
`setup-envtest use` prints it. WEIR_CRDS is a folder of CustomResourceDefinitions, of KEDA and prometheus-operator.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.processes import Child, answers, free_port
from tests.certificates import certificate

ADMIN = "of-an-administrator"  # the bearer token of its one user
FLAGS = (
    *("--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24", "--bind-address=127.0.0.1"),
    *("--service-account-issuer=https://localhost/", "--disable-admission-plugins=ServiceAccount"),
)


def programs() -> tuple[str, str]:
    """Paths of kube-apiserver and etcd, else a skip."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if folder is None:
        pytest.skip("no Kubernetes API server here: KUBEBUILDER_ASSETS names no folder with kube-apiserver and etcd")
    found = (Path(folder) / "kube-apiserver", Path(folder) / "etcd")
    assert all(program.exists() for program in found), f"KUBEBUILDER_ASSETS={folder} lacks kube-apiserver or etcd"
    return str(found[0]), str(found[1])


def definitions() -> list[dict[str, Any]]:
    """The CustomResourceDefinitions of WEIR_CRDS; none where it is not set."""
    folder = os.environ.get("WEIR_CRDS")
    return [] if folder is None else [yaml.safe_load(file.read_text()) for file in sorted(Path(folder).glob("*.yaml"))]


class Kubernetes:
    """An API server that answers as an administrator asks."""

    def __init__(self, port: int, cert: Path, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.certificate = cert
        self.url = f"https://localhost:{port}"
        self._port = port
        self._context = ssl.create_default_context(cafile=cert)
        cluster = {"server": self.url, "certificate-authority": str(cert)}
        kubeconfig.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": ADMIN}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }))  # fmt: skip
        kubeconfig.chmod(0o600)

    def ask(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> tuple[int, Any]:
        """Status and JSON of one request."""
        connection = http.client.HTTPSConnection("localhost", self._port, context=self._context, timeout=60.0)
        with contextlib.closing(connection):
            headers = {"authorization": f"Bearer {ADMIN}", "content-type": kind, "accept": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        return answer.status, json.loads(text) if text.startswith(b"{") else text.decode()

    def get(self, path: str) -> Any:
        status, found = self.ask("GET", path)
        assert status == 200, found
        return found

    def post(self, path: str, body: Any) -> Any:
        status, made = self.ask("POST", path, body)
        assert status == 201, made
        return made

    def ready(self) -> bool:
        try:
            return self.ask("GET", "/readyz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def paths(self) -> dict[tuple[str, str], str]:
        """The path of each kind's objects, `{}` for the namespace, by API version and kind."""
        groups = [
            f"/apis/{version['groupVersion']}" for group in self.get("/apis")["groups"] for version in group["versions"]
        ]
        return {
            (found["groupVersion"], it["kind"]): f"{base}/namespaces/{{}}/{it['name']}"
            for base in ("/api/v1", *groups)
            for found in [self.get(base)]
            for it in found["resources"]
            if it["namespaced"] and "/" not in it["name"]
        }

    def define(self, definition: dict[str, Any]) -> None:
        self.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)

    def defined(self) -> bool:
        """Whether every CustomResourceDefinition is served."""
        found = self.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")["items"]
        served = [it["status"]["conditions"] or [] for it in found]
        return all(any(c["type"] == "Established" and c["status"] == "True" for c in it) for it in served)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Kubernetes]:
    """An API server of its own, with the CustomResourceDefinitions there are. Skips where there is no server."""
    server, store = programs()
    cert, key = certificate(folder)
    (folder / "tokens.csv").write_text(f"{ADMIN},admin,1,system:masters\n")
    kept, peers, port = free_port(), free_port(), free_port()
    url = f"http://127.0.0.1:{kept}"
    etcd = [store, f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={url}", f"--advertise-client-urls={url}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}", "--unsafe-no-fsync"]  # fmt: skip
    argv = [server, *FLAGS, f"--etcd-servers={url}", f"--secure-port={port}", f"--tls-cert-file={cert}",
            f"--tls-private-key-file={key}", f"--service-account-key-file={cert}",
            f"--service-account-signing-key-file={key}", f"--token-auth-file={folder / 'tokens.csv'}"]  # fmt: skip
    with Child("etcd", etcd, folder / "etcd.log") as database:
        database.wait(lambda: answers(f"{url}/health"), 60.0, "health of etcd")
        kubernetes = Kubernetes(port, cert, folder / "kubeconfig")
        with Child("kube-apiserver", argv, folder / "kube-apiserver.log") as child:
            child.wait(kubernetes.ready, 60.0, "readiness of the API server")
            for definition in definitions():
                kubernetes.define(definition)
            child.wait(kubernetes.defined, 60.0, "the CustomResourceDefinitions")
            yield kubernetes
