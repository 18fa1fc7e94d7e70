"""JSON Schema of the policy file."""

from __future__ import annotations

from gateway.core.policy.policy import Policy
from gateway.shared.files.schema import Schema, schema_of, text_of


def schema_text() -> str:
    """The schema as the text of policies/schema.json."""
    return text_of(schema())


def schema() -> Schema:
    """The schema of a whole policy file."""
    return schema_of(Policy, "Weir policy")
