"""The policy's file: YAML in, the frozen `Policy` or every problem found out.

Every problem of the file is gathered, since an operator wants to mend them in one edit.
"""

from __future__ import annotations

import msgspec

from gateway.core.checked import Value, refuse
from gateway.core.policy import Policy
from gateway.core.policy_rules import faults
from gateway.core.yaml_file import read_file, written


def decode(data: bytes, name: str = "policy") -> Policy:
    """The policy in a YAML file. `name` is how messages call the file. Raises InvalidFile."""
    return decode_with_lines(data, name)[0]


def decode_with_lines(data: bytes, name: str = "policy") -> tuple[Policy, Value]:
    """The policy, and the file's tree, whose `line_of` says where something is written. Raises InvalidFile."""
    policy, root = read_file(data, name, Policy)
    if root.line_of(("service_tiers",)) is None:  # the defaults name default classes, which the file may not have
        tiers = {tier: name for tier, name in policy.service_tiers.items() if name in policy.classes}
        policy = msgspec.structs.replace(policy, service_tiers=tiers)
    refuse(name, root, faults(policy))
    return policy, root


def explain(policy: Policy) -> str:
    """The policy as YAML, every default written out; it decodes to an equal policy."""
    return written(policy, Policy)
