"""The Helm chart installed in a Kubernetes API server: nothing refused, warned of, dropped or restarted.

Skips without a server (KUBEBUILDER_ASSETS, see kubernetes.py). Custom resources are installed where WEIR_CRDS has both
their definitions. There are no nodes: what kubelet does is not tried.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CASES, CHART, one, rendered
from tests.deploy.kubernetes import Kubernetes, definitions, started
from tests.deploy.tools import installed

pytestmark = pytest.mark.slow

WITHOUT = ("--set=serviceMonitor.enabled=false", "--set=prometheusRule.enabled=false", "--set=keda.enabled=false")
HOST_PATH = "hostPath"  # the volume with the models that a case gives its sidecars


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    installed("helm")
    with started(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server


@pytest.fixture
def namespace(kubernetes: Kubernetes, request: pytest.FixtureRequest) -> str:
    """One whose pods have to be of the standard `restricted`; workloads that would not be are warned of."""
    name = request.node.name.replace("[", "-").replace("]", "").replace("_", "-")[-60:].strip("-")
    modes = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    metadata = {"name": name, "labels": modes}
    kubernetes.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    return name


def flags() -> tuple[str, ...]:
    """Values beside those of a case: no custom resources where they are not defined."""
    return (
        () if {it["spec"]["names"]["kind"] for it in definitions()} >= {"ScaledObject", "ServiceMonitor"} else WITHOUT
    )


def helm(kubernetes: Kubernetes, namespace: str, verb: str, *more: str) -> str:
    """Warnings of Helm."""
    words = [
        installed("helm"),
        f"--kubeconfig={kubernetes.kubeconfig}",
        f"--namespace={namespace}",
        verb,
        "weir",
        *more,
    ]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def live(kubernetes: Kubernetes, namespace: str, document: dict[str, Any]) -> tuple[int, Any]:
    path = kubernetes.paths()[document["apiVersion"], document["kind"]].format(namespace)
    return kubernetes.ask("GET", f"{path}/{document['metadata']['name']}")


def lost(given: Any, found: Any, path: str = "") -> Iterator[str]:
    """Paths of what was given and is not there, or is another."""
    if isinstance(given, dict) and isinstance(found, dict):
        for name, part in given.items():
            if name in found:
                yield from lost(part, found[name], f"{path}.{name}")
            elif part not in ({}, [], None):
                yield f"{path}.{name}"
    elif isinstance(given, list) and isinstance(found, list) and len(given) == len(found):
        for number, (part, other) in enumerate(zip(given, found, strict=True)):
            yield from lost(part, other, f"{path}[{number}]")
    elif given != found and str(given) != found:  # a quantity is kept as a text
        yield f"{path}: {given!r} became {found!r}"


@pytest.mark.parametrize("case", ["smallest", "everything", "cluster"])
def test_what_is_installed_is_what_was_rendered(kubernetes: Kubernetes, namespace: str, case: str) -> None:
    documents = rendered(case, *flags())
    warned = helm(kubernetes, namespace, "install", str(CHART), f"--values={CASES / case}.yaml", *flags())
    assert [line for line in warned.splitlines() if HOST_PATH not in line] == []
    assert (HOST_PATH in warned) == (case == "everything")
    for document in documents:
        status, found = live(kubernetes, namespace, document)
        assert status == 200, found
        assert list(lost(document, found)) == [], document["kind"]
    helm(kubernetes, namespace, "uninstall")
    assert {live(kubernetes, namespace, document)[0] for document in documents} == {404}


@pytest.mark.parametrize("case", ["smallest", "cluster"])
def test_its_pods_are_admitted_where_only_restricted_ones_are(
    kubernetes: Kubernetes, namespace: str, case: str
) -> None:
    template = one(rendered(case), "Deployment")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "weir", **template["metadata"]}}
    kubernetes.post(f"/api/v1/namespaces/{namespace}/pods", pod | {"spec": template["spec"]})


def test_another_policy_starts_nothing_anew(kubernetes: Kubernetes, namespace: str) -> None:
    values = f"--values={CASES / 'smallest.yaml'}"
    deployment, policy = (one(rendered("smallest"), kind, name) for kind, name in (
        ("Deployment", "weir"), ("ConfigMap", "weir-policy"),
    ))  # fmt: skip
    helm(kubernetes, namespace, "install", str(CHART), values)
    before = live(kubernetes, namespace, deployment)[1]
    helm(kubernetes, namespace, "upgrade", str(CHART), values, "--set=policy.fleet.poll=250ms")
    after, text = (
        live(kubernetes, namespace, deployment)[1],
        live(kubernetes, namespace, policy)[1]["data"]["policy.yaml"],
    )
    assert yaml.safe_load(text)["fleet"]["poll"] == "250ms"
    assert after["metadata"]["generation"] == before["metadata"]["generation"] == 1
    helm(kubernetes, namespace, "rollback", "1")
    assert live(kubernetes, namespace, policy)[1]["data"] == policy["data"]


def test_an_upgrade_keeps_the_number_that_the_autoscaler_chose(kubernetes: Kubernetes, namespace: str) -> None:
    more = (f"--values={CASES / 'cluster.yaml'}", *flags())
    deployment = one(rendered("cluster"), "Deployment")
    helm(kubernetes, namespace, "install", str(CHART), *more)
    scale = f"/apis/apps/v1/namespaces/{namespace}/deployments/weir/scale"
    kubernetes.ask("PATCH", scale, {"spec": {"replicas": 5}}, kind="application/merge-patch+json")
    helm(kubernetes, namespace, "upgrade", str(CHART), *more, "--set=image.tag=next")
    found = live(kubernetes, namespace, deployment)[1]["spec"]
    assert found["replicas"] == 5
    assert found["template"]["spec"]["containers"][0]["image"] == "weir-gateway:next"
