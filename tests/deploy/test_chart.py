"""The Helm chart: strict values; what Helm renders is of Kubernetes' schemas, consistent, and read by our programs.

`make test-deploy` has helm and the schemas; without them the values alone are looked at. Custom resources
(PrometheusRule, ScaledObject, ServiceMonitor) have no schema here: their fields that matter are asserted.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway import __version__
from gateway.cli import parser_for
from gateway.cli.files import read_bytes
from gateway.decider.loading import load
from sidecar.cli import parser_for as sidecar_parser_for
from sidecar.core.config import decode
from tests.deploy.chart import CASES, CHART, helm, one, rendered
from tests.deploy.images import of, words
from tests.deploy.tools import imported
from tests.operate.prometheus import RULES, names

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
KUBERNETES = ("1.27", "1.33", "1.37")  # the oldest of Chart.yaml, and what the package has beside it
CUSTOM = {"PrometheusRule", "ScaledObject", "ServiceMonitor"}
MEMBER = "--set=policy.cluster.url=valkey://valkey:6379/0"  # of a cluster
FREE = {"/affinity", "/policy", "/file", "/global", "/items"}  # read by Kubernetes or by us


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of a schema that is an object, by its path."""
    if schema.get("type") == "object":
        yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from objects(part, f"{path}/{name}")
    if isinstance(schema.get("items"), dict):
        yield from objects(schema["items"], f"{path}/items")


# -- values -----------------------------------------------------------------------------------------------------------


def test_the_schema_takes_the_defaults_and_knows_every_one() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)

    def named(schema: dict[str, Any], values: Any, path: str) -> Iterator[str]:
        for name, part in schema.get("properties", {}).items():
            if name not in values:
                yield f"{path}/{name}"
            elif isinstance(values[name], dict):
                yield from named(part, values[name], f"{path}/{name}")

    assert list(named(SCHEMA, VALUES, "")) == ["/global", "/sidecar/resources/requests", "/sidecar/resources/limits"]


def test_the_schema_refuses_names_that_it_does_not_know() -> None:
    loose = {
        path
        for path, schema in objects(SCHEMA)
        if "additionalProperties" not in schema and not any(path.endswith(free) for free in FREE)
    }
    assert loose == set()


@pytest.mark.parametrize("case", sorted(CASES.glob("*.yaml")), ids=lambda case: case.stem)
def test_the_examples_are_of_the_schema(case: Path) -> None:
    jsonschema.validate(yaml.safe_load(case.read_text()), SCHEMA)


def test_the_image_is_of_the_version_that_is_here() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


def test_templates_use_values_that_there_are() -> None:
    used = {
        found
        for template in (CHART / "templates").iterdir()
        for found in re.findall(r"\.Values((?:\.\w+)+)", template.read_text())
    }
    assert len(used) > 40
    for dotted in used:
        part: Any = VALUES
        for name in dotted[1:].split("."):
            if part is VALUES["policy"] or part is VALUES["sidecar"]["file"]:
                break
            assert name in part, dotted
            part = part[name]


# -- what is rendered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["smallest", "everything", "cluster", "pool"])
def test_it_is_of_kubernetes_schemas(case: str) -> None:
    validator = imported("kubernetes_validate")
    documents = rendered(case)
    for document in documents:
        if document["kind"] not in CUSTOM | {"InferencePool"}:
            for version in KUBERNETES:
                validator.validate(document, version, strict=True)
    assert (CUSTOM & {it["kind"] for it in documents} == CUSTOM) == (case == "everything")


def test_all_that_was_asked_for_is_rendered() -> None:
    kinds = {it["kind"] for case in ("everything", "cluster", "pool") for it in rendered(case)}
    assert kinds == {
        *("ConfigMap", "DaemonSet", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget"),
        *("PrometheusRule", "ScaledObject", "Secret", "Service", "ServiceMonitor"),
        *("InferencePool", "Role", "RoleBinding", "ServiceAccount"),
    }


def test_alerts_link_to_the_runbooks_that_a_value_names() -> None:
    shipped = yaml.safe_load(RULES.read_text())
    asked = one(rendered("everything"), "PrometheusRule")
    assert asked["metadata"]["labels"]["release"] == "prometheus"
    links = [rule["annotations"].pop("runbook_url") for group in asked["spec"]["groups"] for rule in group["rules"]]
    assert links == [f"https://wiki.example/weir#{name.lower()}" for name in names()]
    for group in shipped["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]["runbook_url"]
    assert asked["spec"] == shipped
    unsaid = one(rendered("everything", "--set=prometheusRule.runbooks="), "PrometheusRule")
    assert unsaid["spec"] == yaml.safe_load(RULES.read_text())


@pytest.mark.parametrize("runbooks", ["wiki.example", "https://wiki.example/#top", "https://wiki.example/{{ evil }}"])
def test_a_page_of_runbooks_is_a_web_page(runbooks: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(VALUES | {"prometheusRule": {"runbooks": runbooks}}, SCHEMA)


@pytest.mark.parametrize("case", ["smallest", "everything", "cluster", "pool"])
def test_selectors_find_the_pods_and_volumes_are_there(case: str) -> None:
    documents = rendered(case)
    pods = [it["spec"]["template"] for it in documents if it["kind"] in {"DaemonSet", "Deployment"}]
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] in {"Deployment", "DaemonSet", "PodDisruptionBudget"}:
            wanted = spec["selector"]["matchLabels"]
        elif document["kind"] == "Service":
            wanted = spec["selector"]
        elif document["kind"] == "NetworkPolicy" and document["metadata"]["name"] != "weir-engines":
            wanted = spec["podSelector"]["matchLabels"]
        else:
            continue
        found = [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]
        assert len(found) == 1, document["metadata"]["name"]
        ports = {port["name"] for port in found[0]["spec"]["containers"][0]["ports"]}
        named = [port.get("targetPort") for port in spec.get("ports", [])]
        named += [port["port"] for rule in spec.get("ingress", []) for port in rule.get("ports", [])]
        assert {name for name in named if name} <= ports
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
        assert not any("subPath" in mount for mount in container["volumeMounts"])  # which kubelet does not swap
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["spec"]["securityContext"]["runAsUser"] == int(of("gateway", "USER").partition(":")[0])


@pytest.mark.parametrize("case", ["smallest", "everything", "cluster", "pool"])
def test_the_gateway_knows_its_flags_and_reads_its_policy(case: str, tmp_path: Path) -> None:
    documents = rendered(case)
    (container,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    arguments = [word.replace("$(POD_IP)", "10.1.2.3") for word in container["args"]]
    parsed = parser_for(arguments).parse_args(arguments)
    assert parsed.advertise == ("10.1.2.3:8010" if case == "cluster" else None)
    assert parsed.listen == words(of("gateway", "CMD"))[-1]
    file = tmp_path / "policy.yaml"
    file.write_text(one(documents, "ConfigMap", "weir-policy")["data"]["policy.yaml"])
    policy = load(file, lambda path: read_bytes(path, 1 << 20), files=False).policy
    assert policy.body.memory == (512_000_000 if case == "everything" else 512 * 1024**2)  # a whole number stays one


def test_the_sidecar_knows_its_flags_and_reads_its_file(tmp_path: Path) -> None:
    documents = rendered("everything")
    (container,) = one(documents, "DaemonSet", "weir-sidecar")["spec"]["template"]["spec"]["containers"]
    assert sidecar_parser_for(container["args"]).parse_args(container["args"]).end_engines
    text = one(documents, "ConfigMap", "weir-sidecar")["data"]["sidecar.yaml"]
    assert yaml.safe_load(text)["gateways"] == ["http://weir-control:8001"]
    one(documents, "Service", "weir-control")
    config = decode(text.encode())
    assert config.models.keys() == {"llama-3-8b"}
    assert container["resources"] == {"requests": {"cpu": "4"}, "limits": {"nvidia.com/gpu": 1}}


def test_engines_are_reached_by_the_gateway_alone() -> None:
    documents = rendered("everything")
    (rule,) = one(documents, "NetworkPolicy", "weir-engines")["spec"]["ingress"]
    gateways, *others = rule["from"]
    labels = one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert gateways["podSelector"]["matchLabels"].items() <= labels.items()
    assert others == yaml.safe_load((CASES / "everything.yaml").read_text())["networkPolicy"]["engines"]["also"]
    (relay,) = one(documents, "NetworkPolicy", "weir-sidecar")["spec"]["ingress"]
    assert relay == {"ports": [{"port": "relay"}], "from": [gateways]}


def test_secrets_are_in_the_secret_and_nowhere_else() -> None:
    documents = rendered("everything")
    secret = one(documents, "Secret")
    assert base64.b64decode(secret["data"]["admin-token"]).decode() == "0123456789abcdef" * 2
    assert secret["data"].keys() == {"admin-token", "keys", "sidecar-token", "order-token"}
    assert "0123456789abcdef" not in yaml.safe_dump([it for it in documents if it is not secret])
    volumes = one(documents, "DaemonSet", "weir-sidecar")["spec"]["template"]["spec"]["volumes"]
    (given,) = (volume["secret"] for volume in volumes if volume["name"] == "secrets")
    assert [item["key"] for item in given["items"]] == ["sidecar-token", "order-token"]
    assert [it["kind"] for it in rendered("cluster")].count("Secret") == 0


def test_prometheus_and_keda_ask_for_what_there_is() -> None:
    documents = rendered("everything")
    monitor = one(documents, "ServiceMonitor")["spec"]
    control = one(documents, "Service", "weir-control")
    assert monitor["selector"]["matchLabels"].items() <= control["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in control["spec"]["ports"]}
    assert endpoint["authorization"]["credentials"] == {"name": "weir", "key": "admin-token"}
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "weir"}]
    scaled = one(documents, "ScaledObject", "vllm-llama")["spec"]
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["query"] == 'max(weir_engines_wanted{model="llama-3-8b"})'
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 8)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--set=secrets.adminToken="], "secrets.adminToken: the token of the control port"),
        (["--set=gateway.replicas=2"], "2 gateways need policy.cluster"),
        (["--set=gateway.resources.limits.cpu=null"], "auto is all cores of a node"),
        (["--set=autoscaling.enabled=true"], "need policy.cluster"),
        ([MEMBER], "policy.cluster needs 2 or more"),
        ([MEMBER, "--set=gateway.resources.limits.cpu=2900m"], "policy.cluster needs 2 or more"),
        ([MEMBER, "--set=gateway.workers=1"], "policy.cluster needs 2 or more"),
        (["--set=sidecar.enabled=true"], "name the models that may run"),
        (
            ["--set=sidecar.enabled=true", "--set=gateway.replicas=2", "--set=policy.routing.gateways=2"],
            "name the others",
        ),
        (["--set=sidecar.file.listen=x"], "values don't meet the specifications of the schema"),
        (["--set=gateway.replica=2"], "replica"),
        (["--set=policy.version=2"], "version"),
    ],
)
def test_what_would_run_and_be_wrong_is_refused(flags: list[str], said: str) -> None:
    ran = helm(f"--values={CASES / 'smallest.yaml'}", *flags)
    assert ran.returncode != 0
    assert said in ran.stderr


@pytest.mark.parametrize("cpu", ["3", "3000m", "4.5"])
def test_a_member_of_a_cluster_has_workers_by_its_cores(cpu: str) -> None:
    assert rendered("smallest", MEMBER, f"--set=gateway.resources.limits.cpu={cpu}")


@pytest.mark.parametrize("release", ["v1.2", "weir.v1.2", "x" * 53])
def test_every_name_of_a_release_makes_names_of_services(release: str) -> None:
    ran = helm(f"--values={CASES / 'everything.yaml'}", release=release)
    names = {it["metadata"]["name"] for it in yaml.safe_load_all(ran.stdout) if it and it["kind"] != "ScaledObject"}
    assert len(names) > 4
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in names), names


def test_gateways_that_know_of_each_other_need_no_cluster() -> None:
    flags = ("--set=gateway.replicas=2", "--set=policy.routing.gateways=2")
    assert one(rendered("smallest", *flags), "Deployment")["spec"]["replicas"] == 2


# -- an InferencePool -------------------------------------------------------------------------------------------------


def test_a_pools_gateway_may_read_the_pool_and_is_its_picker() -> None:
    documents = rendered("pool")
    pool = one(documents, "InferencePool", "llama")["spec"]
    assert pool["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    picker = one(documents, "Service", pool["endpointPickerRef"]["name"])["spec"]
    assert picker["ports"][0]["port"] == pool["endpointPickerRef"]["port"]["number"]
    spec = one(documents, "Deployment")["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"]
    (subject,) = one(documents, "RoleBinding")["subjects"]
    assert spec["serviceAccountName"] == subject["name"] == one(documents, "ServiceAccount")["metadata"]["name"]
    rules = one(documents, "Role")["rules"]
    assert [(rule["resources"], rule["verbs"]) for rule in rules] == [
        (["pods"], ["list", "watch"]),
        (["inferencepools"], ["get"]),
    ]
    arguments = spec["containers"][0]["args"]
    given = parser_for(arguments).parse_args(arguments)
    assert given.epp.rpartition(":")[2] == str(spec["containers"][0]["ports"][-1]["containerPort"])


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("policy.fleet=null", "policy.fleet.inference_pool"),
        ("inferencePool.selector=null", "inferencePool.selector"),
        ("inferencePool.picker=false", "an InferencePool names its endpoint picker"),
        ("policy.cluster.advertise=a:1", "an endpoint picker is for one gateway"),
    ],
)
def test_a_pool_that_would_not_work_is_refused(flag: str, told: str) -> None:
    ran = helm(f"--values={CASES / 'pool.yaml'}", f"--set={flag}")
    assert ran.returncode
    assert told in ran.stderr
