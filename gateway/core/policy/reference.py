"""Reference of the policy file."""

from __future__ import annotations

from gateway.core.policy.file import explain
from gateway.core.policy.policy import Policy
from gateway.shared.files.reference import reference_of

_LEAD = """\
Every field of a policy file, with what it may hold and its default. Written by `gateway check --reference`.

An empty file is a policy: what is absent has its default. `gateway init` writes a commented policy to begin with,
`gateway check FILE` finds every mistake, and `gateway check FILE --explain` prints a policy with all its defaults.
[policies/default.yaml](../policies/default.yaml) has the same fields with longer comments.

## What is refused by default

Without a policy calls wait, in the order of their classes, until their deadline. These are refused;
[outcomes.md](outcomes.md) has what each is answered.

| which | when | field |
| --- | --- | --- |
| `interactive` | its first token would come after 2 s, or its last after 1 min, and no engine is idle | `classes` |
| `default` | its last token would come after 5 min; 512 calls wait for the model | `classes` |
| `long_context`: prompts over 8,000 tokens | its last token would come after 10 min; 512 wait | `classes` |
| `batch` | its last token would come after 1 h; 4,096 wait; engines' KV caches are 96 % full | `classes`, `modes` |
| all but `interactive` | engines' KV caches are 99 % full, or fail half of the calls | `modes` |
| any | it needs more than 92 % of an engine's KV cache; its body is too large (2 MiB of text) | `budget`, `body` |
| any | no engine has had its model for a minute, and no sidecar can have it | `routing.hold_unserved` |

A call that is refused for want of time or of a place is told when to come back, and has a place then. Nobody is refused
for how many calls he sends: `limits` are empty."""


def reference_text() -> str:
    """The reference as docs/policy.md holds it."""
    return reference_of(Policy, "Policy reference", _LEAD, explain(Policy()))
