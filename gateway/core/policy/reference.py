"""Reference of the policy file."""

from __future__ import annotations

from gateway.core.policy.file import explain
from gateway.core.policy.policy import Policy
from gateway.shared.files.reference import reference_of

_LEAD = """\
Every field of a policy file, with what it may hold and its default. Written by `gateway check --reference`.

An empty file is a policy: what is absent has its default. `gateway init` writes a commented policy to begin with,
`gateway check FILE` finds every mistake, and `gateway check FILE --explain` prints a policy with all its defaults.
[policies/default.yaml](../policies/default.yaml) has the same fields with longer comments."""


def reference_text() -> str:
    """The reference as docs/policy.md holds it."""
    return reference_of(Policy, "Policy reference", _LEAD, explain(Policy()))
