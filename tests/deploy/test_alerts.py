"""Alerts as they are shipped: unit-tested by promtool where it is, each with its runbook and its drill."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.operate.drills import DRILLS, UNDRILLED
from tests.operate.prometheus import RULES, compressed, names
from tests.programs import PROMETHEUS, required

RUNBOOKS = Path(__file__).parents[2] / "docs/runbooks.md"
UNIT_TESTS = RULES.with_name("alerts.test.yaml")


def test_every_alert_has_a_drill_or_a_reason_for_none_and_nothing_else_has() -> None:
    drilled = [drill.alert for drill in DRILLS]
    assert sorted([*drilled, *UNDRILLED]) == sorted(names())


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    assert re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.MULTILINE) == names()


@pytest.mark.parametrize("group", yaml.safe_load(RULES.read_text())["groups"], ids=lambda group: group["name"])
def test_an_alert_says_how_bad_it_is_what_it_is_and_where_to_read_on(group: dict[str, list[dict[str, object]]]) -> None:
    for rule in group["rules"]:
        assert rule["labels"] in ({"severity": "page"}, {"severity": "ticket"})
        annotations = rule["annotations"]
        assert isinstance(annotations, dict)
        assert annotations.keys() == {"summary", "description", "runbook_url"}
        assert annotations["runbook_url"] == f"{{{{ $externalLabels.weir_runbooks }}}}#{str(rule['alert']).lower()}"


@pytest.mark.parametrize("file", ["prometheus/prometheus.yaml", "compose/prometheus.yaml"])
def test_a_runbooks_address_is_said_once_where_prometheus_is_set_up(file: str) -> None:
    configuration = yaml.safe_load((RULES.parents[1] / file).read_text())
    assert configuration["global"]["external_labels"] == {"weir_runbooks": "http://127.0.0.1:8001/"}


def test_every_alert_is_unit_tested() -> None:
    text = UNIT_TESTS.read_text()
    assert [name for name in names() if name not in text] == []


@pytest.mark.slow
def test_the_unit_tests_pass() -> None:
    promtool = required(PROMETHEUS, "promtool")
    ran = subprocess.run([*promtool, "test", "rules", UNIT_TESTS], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_example_of_a_prometheus_names_no_file_that_is_not_there() -> None:
    """`promtool check config` is the first thing that one runs on it."""
    example = UNIT_TESTS.with_name("prometheus.yaml")
    jobs = yaml.safe_load(example.read_text())
    assert all(example.with_name(file).is_file() for file in jobs["rule_files"])
    assert [job for job in jobs["scrape_configs"] if "authorization" in job] == []


def test_compressed_rules_are_sixty_times_faster_and_otherwise_the_same() -> None:
    assert compressed("expr: rate(a[5m]) > 1\nfor: 10m\n") == "expr: rate(a[5000ms]) > 1\nfor: 10000ms\n"
    assert compressed("a[1h] b[15s]") == "a[60000ms] b[250ms]"
