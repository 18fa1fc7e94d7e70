"""Order of a route's members for one conversation: weighted rendezvous hashing.

    u = hash(conversation, member), evenly spread over (0, 1);  score = -ln(u) / weight;  the least score is first

A member is first for weight / (sum of weights) of the conversations (Thaler and Ravishankar, 1998; the weighted form is
by Schindelhauer and Schomaker, 2005). A conversation keeps its order while members and weights stay, in all processes.
When a member goes, only its own conversations move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from gateway.core.policy.routes import RouteMember


def ordered(members: Sequence[RouteMember], conversation: int) -> list[RouteMember]:
    """Return the members in the conversation's order. `conversation`: any 64-bit hash, with its sign."""
    if len(members) == 1:
        return list(members)
    key = conversation.to_bytes(8, "big", signed=True)

    def score(member: RouteMember) -> float:
        digest = blake2b(member.model.encode(), key=key, digest_size=8).digest()
        return -math.log((int.from_bytes(digest) + 0.5) / 2.0**64) / member.weight

    return sorted(members, key=score)
