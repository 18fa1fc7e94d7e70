"""Resolution of a route: the model that a call goes to, before it is charged and admitted.

    its own member, if that can serve at once
    else another member that can, the soonest first
    else the first fallback that can serve within the call's targets, providers after the own models
    else whatever may still come to serve it, and the ordinary path refuses the call or lets it wait

A member that is full or asleep is not waited for while another can serve in time. One that could serve in time, were
there no provider to go to meanwhile, keeps the call from every model but a provider's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from hashlib import blake2b

import msgspec

from gateway.core.admission.decision import KEPT
from gateway.core.policy.routes import ModelRoute, RouteMember
from gateway.core.routes.prospect import Prospect, Readiness

Asks = Callable[[str], Prospect]


class Resolved(msgspec.Struct, frozen=True):
    """`how`: member, the call's own; moved, to another member; fallback; or spilled, to a provider. `instead`: of a
    spilled call, the member that could serve it in time if another call left."""

    model: str
    how: str
    instead: Resolved | None = None


class _Candidate(msgspec.Struct, frozen=True):
    resolved: Resolved
    prospect: Prospect

    @property
    def rank(self) -> tuple[int, bool]:
        """The least is the best. Of refusals, one with a booking is best: a retry is admitted."""
        refusal = self.prospect.refusal
        return self.prospect.readiness.value, refusal is not None and refusal.reason not in KEPT


def resolve(
    route: ModelRoute,
    conversation: int,
    asks: Asks,
    *,
    permitted: Callable[[str], bool],
    fallback: bool,
    out: Container[str] = (),
    spills: Callable[[str, Sequence[Prospect]], bool] | None = None,
    outside: Container[str] = (),
) -> Resolved | None:
    """Return the model for a call; None: its tenant may use none of them.

    `asks` says how soon a model can serve the call. `permitted`: whether the tenant may use the model. `fallback`:
    whether the caller accepts one. `out`: canaries that were taken out. `outside`: models of providers. `spills`:
    whether one of these may have the call, by the prospects of the members.
    """
    members_in = [member for member in route.members if member.model not in out and permitted(member.model)]
    own = [
        member.model
        for place, member in enumerate(ordered(members_in, conversation))
        if not place or member.until is None  # a canary gets its share of calls, and no others
    ]
    members = _asked(own, "member", asks, until=lambda prospect: prospect.readiness is Readiness.AT_ONCE)
    if members and members[-1].prospect.readiness is Readiness.AT_ONCE:
        return members[-1].resolved
    best = min(members, key=lambda each: each.rank, default=None)
    if best is not None and best.prospect.in_time:
        return best.resolved
    fallbacks = [model for model in route.fallback if fallback and permitted(model)]
    others = [model for model in fallbacks if model not in outside]
    found = _asked(others, "fallback", asks, until=lambda prospect: prospect.in_time)
    if found and found[-1].prospect.in_time:
        return best.resolved if best is not None and best.prospect.leaves else found[-1].resolved
    if spills is not None and members:
        prospects = [each.prospect for each in members]
        last = [model for model in fallbacks if model in outside and spills(model, prospects)]
        spilled = _asked(last, "spilled", asks, until=lambda prospect: prospect.in_time)
        if spilled and spilled[-1].prospect.in_time:
            refusal = None if best is None else best.prospect.refusal
            wants_room = best is not None and (best.prospect.leaves or (refusal is not None and refusal.reason in KEPT))
            return msgspec.structs.replace(spilled[-1].resolved, instead=best.resolved if best and wants_room else None)
    best = min([*members, *found], key=lambda each: each.rank, default=None)
    return None if best is None else best.resolved


def _asked(models: Iterable[str], how: str, asks: Asks, until: Callable[[Prospect], bool]) -> list[_Candidate]:
    """Ask the models in order until one is soon enough."""
    found = []
    for place, model in enumerate(models):
        prospect = asks(model)
        named = "moved" if place and how == "member" else how
        found.append(_Candidate(Resolved(model, named), prospect))
        if until(prospect):
            break
    return found


def ordered(members: Sequence[RouteMember], conversation: int) -> list[RouteMember]:
    """Return the members in the conversation's order, by weighted rendezvous hashing. `conversation`: any 64-bit hash,
    with its sign.

        u = hash(conversation, member), evenly spread over (0, 1);  score = -ln(u) / weight;  the least score is first

    A member is first for weight / (sum of weights) of the conversations (Thaler and Ravishankar, 1998; the weighted
    form is by Schindelhauer and Schomaker, 2005). A conversation keeps its order while members and weights stay, in all
    processes. When a member goes, only its own conversations move.
    """
    if len(members) == 1:
        return list(members)
    key = conversation.to_bytes(8, "big", signed=True)

    def score(member: RouteMember) -> float:
        digest = blake2b(member.model.encode(), key=key, digest_size=8).digest()
        return -math.log((int.from_bytes(digest) + 0.5) / 2.0**64) / member.weight

    return sorted(members, key=score)
