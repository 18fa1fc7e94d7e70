"""JSON Schema of the policy: it accepts what the gateway accepts, and finds every fault of a single field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.core.policy.file import decode, explain
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.schema import schema, schema_text
from gateway.core.policy.traffic import RateLimit, TrafficClass
from gateway.core.policy.types import Rate
from gateway.shared.files.kinds import Text
from gateway.shared.files.schema import described
from gateway.shared.files.units import ABOVE, BYTES, COUNT, FACTOR, SAMPLE, SECONDS, SHARE, TIMES, Unit

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "policies").glob("*.yaml"))
BAD = ROOT / "tests" / "policies_bad"
VALIDATOR = jsonschema.Draft202012Validator(schema())


class Loader(yaml.SafeLoader):
    """YAML 1.2's words for true and false, as editors read them: `on` is a word."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false"), list("tf"))


def read(text: str) -> Any:
    return yaml.load(text, Loader)  # noqa: S506 # a SafeLoader


def errors(text: str) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(read(text))]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_the_file_is_what_the_code_says() -> None:
    """If not: make generate"""
    assert (ROOT / "policies" / "schema.json").read_text() == schema_text()


@pytest.mark.parametrize("file", SHIPPED, ids=[file.stem for file in SHIPPED])
def test_every_shipped_policy_is_valid_and_tells_editors_so(file: Path) -> None:
    text = file.read_text()
    assert errors(text) == []
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert errors(explain(decode(file.read_bytes()))) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version: 1",
        "budget:\nclasses: {default: }\n",
        "retries: 0.5",
        "timeouts: {stall: 1.5s}\nbody: {max: 4096, max_n: '8'}",
        "logging: {calls: true, prompts: false}",
        "logging: {calls: 10%}",
        "logging: {calls: 0.1}",
        "hedging: 2s",
        "limits: {global: {requests: 1/s, tokens: {rate: 2M/day, burst: 1M}}, models: {a/b: {tokens: unlimited}}}",
        "tenants: {a: {refusal: {status: 503, body: {x: [1, {y: null}], '客': a}}}}",
        "modes: {tight: {enter: {kv: 90%, ttft: 2x}, leave: {}, refuse: least_important}}",
        "classes: {default: {when: {prompt_tokens: '> 8k', routes: [chat]}}}",
    ],
)
def test_what_the_gateway_takes_is_valid(text: str) -> None:
    decode(text.encode())
    assert errors(text) == []


# What it takes a whole file to see, what YAML itself hides, and what YAML's own rules make something else of.
BEYOND = {
    "auth_fragment", "auth_url", "batches", "billion_laughs", "body_memory", "broken_flow", "class_names_elsewhere",
    "class_targets",
    "control_character", "duplicate_keys", "engine_names", "engine_twice", "engines_price", "half_a_character",
    "key_of_nothing",
    "keys_twice", "kv_events", "list_as_key", "merge_key", "mode_thresholds", "needs_quotes", "needs_quotes_in_braces",
    "no_default_class", "not_utf8", "open_quote", "providers_no_storage", "proxies", "recursive_alias",
    "reserves", "service_tiers",
    "sidecars", "star", "tab", "tag", "tenant_class_above_best", "transfer_roles",
    "two_documents", "unknown_alias",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({file.stem for file in BAD.glob("*.yaml")} - BEYOND))
def test_mistakes_of_form_are_found(name: str) -> None:
    assert errors((BAD / f"{name}.yaml").read_text()) != []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("budget: {kv_target: 120}", "$.budget.kv_target: 120 is not valid under any of the given schemas"),
        ("hedging: p50", "$.hedging: 'p50' is not valid under any of the given schemas"),
        ("clases: {}", "$: Additional properties are not allowed ('clases' was unexpected)"),
        ("modes: {tight: {enter: {}}}", "$.modes.tight: 'leave' is a required property"),
        ("timeouts: {stall: 2}", "$.timeouts.stall: 2 is not of type 'string'"),
        ("classes: {Batch: {}}", "$.classes: 'Batch' does not match '^(?:[a-z]"),
        ("logging: {prompts: 1}", "$.logging.prompts: 1 is not of type 'boolean'"),
    ],
)
def test_what_an_editor_underlines(text: str, expected: str) -> None:
    (error,) = errors(text)
    assert error.startswith(expected)


def properties() -> dict[str, dict[str, Any]]:
    """Every field of every Struct, by `Struct.field`."""
    top = schema()
    kinds = {**top["$defs"], "Policy": top}
    return {f"{kind}.{name}": field for kind, made in kinds.items() for name, field in made["properties"].items()}


def test_every_field_is_described() -> None:
    bare = {
        name
        for name, field in properties().items()
        if "$ref" not in field and "$ref" not in field.get("anyOf", [{}])[0]  # a section is described as a whole
        if field.get("description", "Expected").startswith("Expected")
    }
    assert bare == set()
    assert all("description" in made for made in schema()["$defs"].values())


def test_descriptions_say_what_is_expected_and_what_is_the_default() -> None:
    field = properties()["TrafficClass.deadline"]
    assert field == {
        "type": "string",
        "pattern": r"^(?:(?:0|[1-9][0-9]{0,14})([.][0-9]{1,9})?(ms|s|m|h|d))$",
        "description": "Time from arrival to the last token. A client may set another one with x-weir-deadline-ms. "
        "A call that has waited half of it is next, whatever the order. "
        "Expected: a time such as 250ms, 10s, 5m, at least 1ms, at most 1d. Default: 5m.",
        "default": "5m",
    }
    assert properties()["TrafficClass.max_queue"]["default"] == 512
    assert properties()["TrafficClass.strict"]["default"] is False
    assert properties()["TrafficClass.ttft"]["default"] is None
    assert "default" not in properties()["EngineEntry.url"]


def test_docstrings_are_read_field_by_field() -> None:
    general, fields = described(RateLimit)
    assert general == "A rate limit as a token bucket. A bare rate such as 600/min is one too."
    assert fields == {
        "rate": "Amount per time, such as 600/min",
        "burst": "Size of the bucket: the amount that may come at once; null: the amount of one period",
    }
    assert set(described(TrafficClass)[1]) == set(TrafficClass.__struct_fields__)
    assert set(described(EngineEntry)[1]) == set(EngineEntry.__struct_fields__)
    assert set(described(Policy)[1]) < set(Policy.__struct_fields__)


@pytest.mark.parametrize("form", [SECONDS, BYTES, COUNT, SHARE, SAMPLE, FACTOR, TIMES, ABOVE, Rate])
def test_patterns_say_what_the_reader_takes(form: Unit | Rate) -> None:
    texts = (
        "1", "1.5", "1s", "1.5s", "1k", "1KiB", "1B", "80%", "2x", "1.5x", "> 1", "> 1k", ">1", "> 1s", "true", "false",
        "600/min", "1k/h", "1/ms", "", " 1", "1 s", "-1", "1e3", "٣", "1s\n",
    )  # fmt: skip
    for text in texts:
        fits = re.fullmatch(form.pattern, text) is not None
        assert fits or form.parse(text) is None, text
        # A fraction may be none of the whole number that is wanted: 1.5 calls.
        assert form.parse(text) is not None or not fits or "." in text, text


def test_patterns_are_whole_and_known_to_javascript() -> None:
    patterns = set(re.findall(r'"pattern": "(.*)"', schema_text()))
    assert len(patterns) > 15
    for pattern in patterns:
        assert pattern.startswith("^(?:")
        assert pattern.endswith(")$")
        assert not re.search(r"\\[AZzGQE]|\(\?[P<#iLmsux]", pattern)


def test_a_form_without_bounds_needs_none() -> None:
    assert Text("a", "an a").parse("a") == "a"
    assert Text("a", "an a").parse("ab") is None
