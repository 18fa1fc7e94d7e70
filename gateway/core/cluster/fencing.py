"""Fencing token: the highest epoch of a decider that a process has met. Every check of an epoch is made here.

A decider has an epoch: each election, and each start of a decider on one machine, gives a higher one. A process obeys
no decider whose epoch is below its token. So a decider that was replaced, and does not know it yet, changes nothing
(Kleppmann, "How to do distributed locking", 2016). Who checks:

- a relay, when a decider welcomes it (`gateway/relay/remote/link.py`);
- a decider, when a relay says hello with the token that it has (`gateway/decider/relays/session.py`);
- a member of a cluster, with every answer of the store and every vote (`election.py`).
"""

from __future__ import annotations


class FencingToken:
    """Token of one process. `epoch`: the highest that was met; 0: none was."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def fences(self, epoch: int) -> bool:
        """Whether this epoch is over: a decider of a higher one was met."""
        return epoch < self.epoch

    def raise_to(self, epoch: int) -> bool:
        """Remember a higher epoch. Return whether it is one."""
        if epoch <= self.epoch:
            return False
        self.epoch = epoch
        return True
