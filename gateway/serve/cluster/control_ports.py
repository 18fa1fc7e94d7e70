"""Control ports of a cluster's members, as sidecars on all machines reach them."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import msgspec

from gateway.serve.cluster.store import MemberRecord
from gateway.shared.addresses import EVERY_INTERFACE, is_loopback, split_address
from gateway.shared.protocol import MAX_MEMBERS, ClusterMember


def control_url(control: socket.socket, advertise: str, *, secure: bool) -> str:
    """The URL of a member's control port. Empty where other machines cannot reach it: a unix socket, and loopback where
    the member advertises another address."""
    if control.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    host, port = control.getsockname()[:2]
    own = f"[{host}]" if ":" in host else host
    advertised, _ = split_address(advertise)
    if own in EVERY_INTERFACE:
        own = f"[{advertised}]" if ":" in advertised else advertised
    elif is_loopback(own) and not is_loopback(advertised):
        return ""
    return f"{'https' if secure else 'http'}://{own}:{port}"


def members_of(records: Mapping[str, MemberRecord]) -> tuple[ClusterMember, ...]:
    """Members that sidecars can report to, by what the store has of them; what is no address is left out."""
    found = []
    for name, record in sorted(records.items()):
        try:
            found.append(msgspec.convert({"name": name, "control": record.control}, ClusterMember))
        except msgspec.ValidationError:
            continue
    return tuple(found[:MAX_MEMBERS])
