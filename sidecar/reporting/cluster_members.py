"""Members of gateways' clusters to which this sidecar reports beside the gateways of its file. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.shared.protocol import MAX_MEMBERS, ClusterMember
from sidecar.core.config import is_local


class KnownGateway(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway that is reported to. `member`: its name in its cluster, as far as it is known; `members`: those that it
    has told of, none of one that does not take reports now. `configured`: the file names it."""

    url: str
    configured: bool
    taken: bool
    member: str
    members: tuple[ClusterMember, ...]


class Following(msgspec.Struct, frozen=True):
    """Members to report to from now on, and URLs of those to leave."""

    join: list[ClusterMember]
    leave: list[str]


def following(known: Sequence[KnownGateway], *, relay: bool) -> Following:
    """The change of whom to report to. A member that no gateway names, and that takes no reports, is left, once some
    gateway has told of others; so is one that the file names by another address. `relay`: gateways on other machines
    can reach this one."""
    named = {
        member.name: member
        for gateway in known
        for member in gateway.members
        if _acceptable(member.control, gateway.url, relay=relay)
    }
    own = {gateway.member for gateway in known if gateway.configured} - {""}
    urls = {member.control for member in named.values()}
    leave = [
        gateway.url
        for gateway in known
        if not gateway.configured
        and (gateway.member in own or (urls and not gateway.taken and gateway.url not in urls))
    ]
    stay = [gateway for gateway in known if gateway.url not in leave]
    names, reached = {gateway.member for gateway in stay}, {gateway.url for gateway in stay}
    join = [each for name, each in sorted(named.items()) if name not in names and each.control not in reached]
    room = MAX_MEMBERS - sum(not gateway.configured for gateway in stay)
    return Following(join[:room], leave)


def _acceptable(url: str, teller: str, *, relay: bool) -> bool:
    """Whether the report token may go there at a gateway's word: nowhere in the clear if that gateway is asked over
    TLS, to no port of this machine if it is on another, and to other machines only if they can reach this one."""
    if teller.startswith("https:") and not url.startswith("https:"):
        return False
    return is_local(teller) if is_local(url) else relay
