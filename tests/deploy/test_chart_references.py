"""References within the rendered chart: ports, mounted files, keys of Secrets and selectors name what there is.

Kubernetes takes a name that nobody has without a word: a probe of an undeclared port kills the container, a file that
is not mounted ends the program, and a selector that finds nothing lets nobody in. Needs helm (`make test-deploy`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.chart import one, rendered

RENDERED = ["smallest", "everything", "cluster"]
MOUNTED = re.compile(r"/etc/weir/[\w./-]+")  # files that programs are told to read
WRITTEN = re.compile(r"^(?:state_file|log_dir): (\S+)$", re.MULTILINE)
UNKNOWN = None  # keys of a Secret that the chart does not make


def pods(documents: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each pod template and its container."""
    for document in documents:
        if document["kind"] in {"DaemonSet", "Deployment"}:
            template = document["spec"]["template"]
            (container,) = template["spec"]["containers"]
            yield template, container


def keys(documents: list[dict[str, Any]], volume: dict[str, Any]) -> set[str] | None:
    """Names of the files of a volume that is made of a ConfigMap or a Secret."""
    if "configMap" in volume:
        return set(one(documents, "ConfigMap", volume["configMap"]["name"])["data"])
    secret = volume["secret"]
    there = {it["metadata"]["name"]: set(it["data"]) for it in documents if it["kind"] == "Secret"}
    known = there.get(secret["secretName"], UNKNOWN)
    picked = {item["path"]: item["key"] for item in secret.get("items", [])}
    if known is not None:
        assert set(picked.values()) <= known, "kubelet does not start a pod whose Secret lacks a key"
    return set(picked) if picked else known


def told(documents: list[dict[str, Any]], template: dict[str, Any], container: dict[str, Any]) -> str:
    """All that a program is told: its arguments and the files of its ConfigMaps."""
    maps = [volume["configMap"]["name"] for volume in template["spec"]["volumes"] if "configMap" in volume]
    files = [text for name in maps for text in one(documents, "ConfigMap", name)["data"].values()]
    return "\n".join([*container["args"], *files])


@pytest.mark.parametrize("case", RENDERED)
def test_files_that_programs_read_are_mounted(case: str) -> None:
    documents = rendered(case)
    read = 0
    for template, container in pods(documents):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        for path in set(MOUNTED.findall(told(documents, template, container))):
            folder, _, name = path.rpartition("/")
            assert folder in mounts, path
            there = keys(documents, mounts[folder])
            assert there is UNKNOWN or name in there, path
            read += 1
    assert read >= 2
    assert case != "everything" or read == 8, "policy.yaml, sidecar.yaml, admin token, keys, both tokens twice"


@pytest.mark.parametrize("case", RENDERED)
def test_folders_that_programs_write_are_writable(case: str) -> None:
    documents = rendered(case)
    for template, container in pods(documents):
        empty = {volume["name"] for volume in template["spec"]["volumes"] if "emptyDir" in volume}
        writable = [
            mount["mountPath"]
            for mount in container["volumeMounts"]
            if mount["name"] in empty and not mount.get("readOnly")
        ]
        assert "/tmp" in writable  # noqa: S108 # of the container
        written = WRITTEN.findall(told(documents, template, container))
        assert len(written) == (2 if container["name"] == "sidecar" else 0)
        for path in written:
            assert any(f"{path}/".startswith(f"{folder}/") for folder in writable), path


@pytest.mark.parametrize("case", RENDERED)
def test_probes_ask_ports_that_are_declared_and_listened_on(case: str) -> None:
    documents = rendered(case)
    for template, container in pods(documents):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [container[name] for name in container if name.endswith("Probe")]
        assert len(probes) >= 2
        for probe in probes:
            (way,) = (probe[name] for name in ("httpGet", "tcpSocket") if name in probe)
            assert way["port"] in ports
        text = told(documents, template, container)
        listened = {int(port) for port in re.findall(r"(?:0\.0\.0\.0|\$\(POD_IP\)):(\d+)", text)}
        declared = set(ports.values())
        assert listened <= declared
        assert declared - listened <= ({8010} if case != "cluster" else set()), "members' port: of a cluster alone"


@pytest.mark.parametrize("case", RENDERED)
def test_network_policies_let_in_pods_that_there_are(case: str) -> None:
    documents = rendered(case)
    labels = [template["metadata"]["labels"] for template, _ in pods(documents)]
    sidecars = any(each["app.kubernetes.io/component"] == "sidecar" for each in labels)
    for document in documents:
        if document["kind"] != "NetworkPolicy":
            continue
        for rule in document["spec"]["ingress"]:
            for peer in rule.get("from", []):
                wanted = peer.get("podSelector", {}).get("matchLabels", {})
                if wanted.get("app.kubernetes.io/name") != "weir":
                    continue  # somebody else's, by the values
                found = [each for each in labels if wanted.items() <= each.items()]
                expected = 1 if sidecars or wanted["app.kubernetes.io/component"] != "sidecar" else 0
                assert len(found) == expected, wanted


def test_what_scales_and_what_watches_finds_one_thing() -> None:
    cluster = rendered("cluster")
    target = one(cluster, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    scaled = one(cluster, target["kind"], target["name"])
    assert scaled["apiVersion"] == target["apiVersion"]
    assert "replicas" not in scaled["spec"], "each `helm upgrade` would set back what the autoscaler has set"
    (container,) = scaled["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"], "a share of the CPU is of what is requested"
    everything = rendered("everything")
    wanted = one(everything, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    services = [it for it in everything if it["kind"] == "Service"]
    found = [it["metadata"]["name"] for it in services if wanted.items() <= it["metadata"]["labels"].items()]
    assert found == ["weir-control"], "each sample once"


def test_sidecars_report_to_the_control_port() -> None:
    documents = rendered("everything")
    (gateway,) = yaml.safe_load(one(documents, "ConfigMap", "weir-sidecar")["data"]["sidecar.yaml"])["gateways"]
    host, port = re.fullmatch(r"http://([\w-]+):(\d+)", gateway).groups()  # type: ignore[union-attr]
    assert int(port) in [each["port"] for each in one(documents, "Service", host)["spec"]["ports"]]
