"""compose.yaml: of the Compose specification, its files are there, its command lines are the gateway's."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import parser_for
from tests.deploy.images import DOCKERFILE, instructions
from tests.deploy.tools import ROOT, imported
from tests.programs import PROMETHEUS, required

FILE = ROOT / "deploy/compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
RULES_OF = "weir"  # the job that alerts.yaml goes by


def filled(text: str) -> str:
    """The file with its variables' defaults, and 10001 for one that has none."""
    return VARIABLE.sub(lambda found: found[3] if found[2] == "-" else "10001", text)


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(filled(FILE.read_text()))["services"]
    return found


def test_it_is_of_the_specification() -> None:
    spec = imported("compose_spec")
    text = filled(FILE.read_text())
    spec.PyCompose.from_yaml(text)
    with pytest.raises(ValueError, match="readonly"):
        spec.PyCompose.from_yaml(text.replace("read_only", "readonly"))


def test_every_file_it_mounts_is_there() -> None:
    document = yaml.safe_load(filled(FILE.read_text()))
    mounts = [mount.split(":") for service in services().values() for mount in service["volumes"]]
    named = [source for source, *_ in mounts if not source.startswith(".")]
    assert set(named) == document["volumes"].keys()
    files = [source for source, *_ in mounts if source.startswith(".")]
    assert len(files) >= 6
    assert [file for file in files if not (FILE.parent / file).exists()] == []
    assert all(mount[2:] == ["ro"] for mount in mounts if mount[0].startswith("."))
    assert document["secrets"].keys() == {"admin_token"}
    assert "deploy/admin.token" in (ROOT / ".gitignore").read_text().split()


def test_its_policy_is_shipped_and_its_command_is_the_gateways() -> None:
    gateway = services()["gateway"]
    arguments = parser_for(gateway["command"]).parse_args(gateway["command"])
    mounted = dict(mount.split(":")[:2][::-1] for mount in gateway["volumes"])
    policy = Path(arguments.policy)
    assert (FILE.parent / mounted[str(policy.parent)] / policy.name).is_file()
    assert arguments.admin_token_file == "/run/secrets/admin_token"  # noqa: S105 # a path
    build = gateway["build"]
    assert (FILE.parent / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    assert instructions(build["target"]) != []


@pytest.mark.parametrize("name", ["gateway", "prometheus", "grafana"])
def test_a_service_may_do_little_and_is_reached_from_this_machine_alone(name: str) -> None:
    service = services()[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_prometheus_asks_the_gateway_by_the_name_that_the_rules_know(tmp_path: Path) -> None:
    config = FILE.parent / "compose/prometheus.yaml"
    (job,) = yaml.safe_load(config.read_text())["scrape_configs"]
    assert job["job_name"] == RULES_OF
    assert job["static_configs"] == [{"targets": ["gateway:8001"]}]
    promtool = required(PROMETHEUS, "promtool")
    shutil.copy(config, tmp_path)
    shutil.copy(FILE.parent / "prometheus/alerts.yaml", tmp_path)
    check = [*promtool, "check", "config", "--syntax-only", tmp_path / "prometheus.yaml"]
    ran = subprocess.run(check, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_grafana_finds_the_boards_and_their_source() -> None:
    folder = FILE.parent / "compose/grafana"
    (provider,) = yaml.safe_load((folder / "boards.yaml").read_text())["providers"]
    mounted = dict(mount.split(":")[:2][::-1] for mount in services()["grafana"]["volumes"])
    boards = FILE.parent / mounted[provider["options"]["path"]]
    assert {file.name for file in boards.glob("*.json")} == {"fleet.json", "tenants.json"}
    (source,) = yaml.safe_load((folder / "datasources.yaml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    host = source["url"].removeprefix("http://").partition(":")[0]
    assert host in services()
