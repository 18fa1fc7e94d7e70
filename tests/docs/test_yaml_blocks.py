"""YAML that a page shows: whoever reads such a file takes it; a mistake or an unknown field is refused.

A block is known by its fields: a policy, a sidecar file, a scenario or values of the Helm chart, each whole or in part.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml

from gateway.core.policy.file import decode as decode_policy
from gateway.core.policy.policy import Policy
from gateway.shared.files.checked import InvalidFile
from loadtest.load.scenario import Scenario
from loadtest.load.scenario import decode as decode_scenario
from sidecar.core.config import SidecarConfig
from sidecar.core.config import decode as decode_sidecar
from tests.docs.markdown import ROOT, fenced, pages

CHART = json.loads((ROOT / "deploy/chart/values.schema.json").read_text())
SOME_MODEL = "models: {m: {model_path: /m}}\n"  # a part of a sidecar file may leave out what every file needs
READERS = (
    (Policy, lambda text: decode_policy(text.encode())),
    (SidecarConfig, lambda text: decode_sidecar((text if "models:" in text else text + SOME_MODEL).encode())),
    (Scenario, lambda text: decode_scenario(text.encode())),
)
BLOCKS = [
    (page, at, text)
    for page in pages()
    for at, (language, text) in enumerate(fenced(page.read_text()))
    if language == "yaml"
]


@cache
def take(text: str) -> str:
    """Have the reader of such a file read it; its name. Raises InvalidFile, ValidationError."""
    tree = yaml.safe_load(text)
    models = tree.get("models") or {}
    for kind, reader in READERS:
        if kind is Policy and models and not any("members" in (each or ()) for each in models.values()):
            continue  # models of a sidecar, not model routes
        if tree.keys() <= set(kind.__struct_encode_fields__):
            reader(text)
            return kind.__name__
    jsonschema.validate(tree, CHART)
    return "values"


@pytest.mark.parametrize(
    ("page", "text"),
    [(page, text) for page, _, text in BLOCKS],
    ids=[f"{page.relative_to(ROOT)}-{at}" for page, at, _ in BLOCKS],
)
def test_a_file_that_a_page_shows_is_taken(page: Path, text: str) -> None:
    take(text)


def test_every_kind_is_shown_and_a_mistake_is_found() -> None:
    assert {take(text) for _, _, text in BLOCKS} == {"Policy", "SidecarConfig", "Scenario", "values"}
    with pytest.raises(InvalidFile):
        take("classes: {batch: {max_cuncurrency: 4}}")
    with pytest.raises(InvalidFile):
        take("models: {m: {model_path: /m, slep: {level: 1}}}")
    with pytest.raises(jsonschema.ValidationError):
        take("policy: {version: 1}\nsecret: {adminToken: x}")
