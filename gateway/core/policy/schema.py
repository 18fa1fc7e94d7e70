"""JSON Schema of the policy file."""

from __future__ import annotations

from gateway.core.policy.policy import Policy
from gateway.shared.files.reference import reference_of
from gateway.shared.files.schema import Schema, schema_of, text_of

_LEAD = """\
Every field of a policy file, its values and its default. `gateway check --reference` writes this page.

An absent field has its default, so an empty file is a policy. File names are relative to the policy file.
`gateway check FILE` finds every mistake, `gateway check FILE --explain` prints all values, and
[policies/default.yaml](../policies/default.yaml) explains the fields at length.

## What is refused by default

Without a policy calls wait by class until their deadline. These are refused ([outcomes.md](outcomes.md)):

| which | when | field |
| --- | --- | --- |
| `interactive` | its first token would come after 2 s or its last after 1 min, and no engine is idle | `classes` |
| `default` | its last token would come after 5 min; 512 calls wait for the model | `classes` |
| `long_context`: prompts over 8,000 tokens | its last token would come after 10 min; 512 wait | `classes` |
| `batch` | its last token would come after 1 h; 4,096 wait; engines' KV caches are 96 % full | `classes`, `modes` |
| all but `interactive` | engines' KV caches are 99 % full, or fail half of the calls | `modes` |
| any | it needs more than 92 % of an engine's KV cache; its body is too large (2 MiB of text) | `budget`, `body` |
| any | no engine has had its model for a minute, and no sidecar can start it | `routing.hold_unserved` |

A call refused for lack of time or room gets a Retry-After, and capacity is reserved for its retry. No `limits` hold."""


def reference_text() -> str:
    """The reference as docs/policy.md holds it."""
    return reference_of(Policy, "Policy reference", _LEAD, "[there](../policies/default.yaml)")


def schema_text() -> str:
    """The schema as the text of policies/schema.json."""
    return text_of(schema())


def schema() -> Schema:
    """The schema of a whole policy file."""
    return schema_of(Policy, "Weir policy")
