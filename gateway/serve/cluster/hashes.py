"""Prefix hashes that are equal on all machines of a cluster: Python's keyed hash, under a key from its token."""

from __future__ import annotations

import os
import sys

from gateway.decider.loading import Configuration
from gateway.frames.entrance import ClusterToken

VARIABLE = "PYTHONHASHSEED"


def key_of(cluster: str, token: str) -> str:
    """The value of PYTHONHASHSEED that all machines of a cluster have."""
    return str(int(ClusterToken(cluster, (token,)).secret("hashes")[:8], 16))


def same_hashes(configuration: Configuration) -> None:
    """Start this program again where its hashes are not yet those of its cluster: Python takes their key at its start
    alone. Nothing may be open."""
    policy, files = configuration.policy.cluster, configuration.cluster
    if policy is None or files is None:
        return
    seed = key_of(policy.name, files.tokens[0])
    if os.environ.get(VARIABLE) == seed:
        return
    os.environ[VARIABLE] = seed
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 # it is this program
