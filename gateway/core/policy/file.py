"""Policy file: from YAML to the frozen `Policy`, or to a list of all its problems.

All problems of a file are gathered, so that an operator can fix them in one edit.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gateway.core.policy.policy import Policy
from gateway.core.policy.rules import faults
from gateway.shared.files.checked import Reading, readable
from gateway.shared.files.yaml_file import read_file, written


def decode(data: bytes, name: str = "policy") -> Policy:
    """The policy in a YAML file. `name`: the file's name in messages. Raises InvalidFile."""
    return read_policy(data, name).good()


def read_policy(data: bytes, name: str = "policy") -> Reading[Policy]:
    """The policy as far as it is readable, and all problems of the file. Raises InvalidFile where it is no YAML."""
    return judged(read_file(data, name, Policy))


def judged(reading: Reading[Policy]) -> Reading[Policy]:
    """A policy that was read field by field, with what depends on several fields."""
    policy = reading.value
    if reading.root.mark_of(("service_tiers",)) is None:
        for tiers in readable(_tiers(policy)):
            policy = reading.value = msgspec.structs.replace(policy, service_tiers=tiers)
    reading.judge(faults(policy, reading.structs))
    return reading


def _tiers(policy: Policy) -> Iterator[dict[str, str]]:
    """The default service tiers whose classes exist: the file may define classes of its own."""
    yield {tier: name for tier, name in policy.service_tiers.items() if name in policy.classes}


def explain(policy: Policy) -> str:
    """The policy as YAML with every default written out. It decodes to an equal policy."""
    return written(policy, Policy)
