"""Outcome help, docs/outcomes.md: an entry for every outcome, and true statements in each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.core.admission.refusals import MODEL_OFF, NO_MEMORY
from gateway.core.policy.schema import schema_text
from gateway.core.request.outcome import ISSUER_KEYS, MODEL_AWAY, STATUS, Outcome
from gateway.relay.heads import outcome_help

HELP = outcome_help()
ROOT = Path(__file__).parents[2]
OF_THE_WIRE = ("connections", "bodies")
SOURCES = [file.read_text() for file in (ROOT / "gateway").rglob("*.py")]
LITERAL = re.compile(r"x-weir-reason: ([a-z_]+)")


def entry(reason: str) -> str:
    return HELP[b"/outcomes/" + reason.encode()].decode()


def test_every_outcome_and_reason_has_an_entry_and_there_are_no_others() -> None:
    reasons = {outcome.value for outcome in Outcome} | {NO_MEMORY, MODEL_OFF, MODEL_AWAY, ISSUER_KEYS, *OF_THE_WIRE}
    assert {path.decode() for path in HELP} == {f"/outcomes/{reason}" for reason in reasons} | {"/outcomes"}
    assert {found for source in SOURCES for found in LITERAL.findall(source)} <= reasons


@pytest.mark.parametrize("outcome", STATUS)
def test_an_entry_has_the_status_and_code_of_its_outcome(outcome: Outcome) -> None:
    advice, text = STATUS[outcome], entry(outcome.value)
    assert text.startswith(f"{outcome.value}\n\n{advice.status}, code `{advice.code}`")
    assert "- Client: " in text
    assert "- Operator: " in text
    no_retry = "No retry helps" in text or advice.status in (404, 413, 499)
    assert no_retry is not advice.retry or outcome is Outcome.RATE_LIMITED


def test_every_field_of_the_policy_that_is_named_exists() -> None:
    schema = schema_text()
    for name in re.findall(r"`((?:[a-z_]+|CLASS)(?:\.(?:[a-z_]+|CLASS))+)`", HELP[b"/outcomes"].decode()):
        assert f'"{name.split(".")[-1]}":' in schema, name


def test_the_whole_page_is_the_file() -> None:
    assert HELP[b"/outcomes"] == (ROOT / "docs" / "outcomes.md").read_bytes()
