"""Cluster of this gateway as JSON, for GET /cluster."""

from __future__ import annotations

import msgspec


class ClusterView(msgspec.Struct, frozen=True):
    """A cluster as one member knows it.

    `leader`: the member whose decider leads, in `epoch`, since `since_s` seconds; None: nobody. `leads`: this one does.
    `candidates`: members that would be elected at once, as far as the leader knows; others wait for 10 s.
    `granting`: it has a lease, and all members have told what they hold; `awaited`: those that have not. `gone`:
    members that have not left, and are silent. `store_error`: why the store did not answer last; `store_heard_s`: since
    it has.
    """

    name: str
    member: str
    leader: str | None
    epoch: int
    since_s: float | None
    leads: bool
    granting: bool
    awaited: list[str]
    members: list[str]
    candidates: list[str]
    gone: list[str]
    store_error: str | None
    store_heard_s: float | None

    @property
    def line(self) -> str:
        """For /readyz."""
        if self.leader is None:
            who = "nobody leads"
        else:
            who = (
                f"{'this gateway' if self.leads else self.leader} leads in epoch {self.epoch} for {self.since_s:.0f} s"
            )
        waits = f", and waits for what {', '.join(self.awaited)} hold" if self.awaited else ""
        store = f"; the store does not answer: {self.store_error}" if self.store_error else ""
        return f"cluster {self.name}: {who}{waits}{store}"
