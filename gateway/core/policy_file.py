"""The policy's file: YAML in, the frozen `Policy` or every problem found out.

Every problem of the file is gathered, since an operator wants to mend them in one edit.
"""

from __future__ import annotations

import msgspec

from gateway.core.checked import Problem, Reader, Value
from gateway.core.policy import Policy
from gateway.core.policy_rules import faults
from gateway.core.yaml_file import Unreadable, read_tree, written


class PolicyError(Exception):
    """A policy file that cannot be used: every problem found in it, in the order of its lines."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: problem.line)
        super().__init__("\n".join(map(str, self.problems)))


def decode(data: bytes, name: str = "policy") -> Policy:
    """The policy in a YAML file. `name` is how messages call the file. Raises PolicyError."""
    return decode_with_lines(data, name)[0]


def decode_with_lines(data: bytes, name: str = "policy") -> tuple[Policy, Value]:
    """The policy, and the file's tree, whose `line_of` says where something is written. Raises PolicyError."""
    reader = Reader(name)
    try:
        root = read_tree(data, reader)
    except Unreadable:
        raise PolicyError(reader.problems) from None
    policy: Policy = reader.read(root, Policy, "")
    if not reader.problems:
        if root.line_of(("service_tiers",)) is None:  # the defaults name default classes, which the file may not have
            tiers = {tier: name for tier, name in policy.service_tiers.items() if name in policy.classes}
            policy = msgspec.structs.replace(policy, service_tiers=tiers)
        for fault in faults(policy):
            reader.fault(root, fault)
    if reader.problems:
        raise PolicyError(reader.problems)
    return policy, root


def explain(policy: Policy) -> str:
    """The policy as YAML, every default written out; it decodes to an equal policy."""
    return written(policy, Policy)
