"""Machines of a cluster, as its leader tells their relays apart: by a place for each, while the store has it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping

import msgspec

from gateway.decider.relays.elsewhere import process_of, relay_number, relay_of
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


class Machines:
    """`records` gives what the store has of the members that are there."""

    def __init__(self, records: Callable[[], Mapping[str, MemberRecord]]) -> None:
        self._records = records
        self._places: dict[tuple[str, str], int] = {}  # by name and life

    def place(self, name: str, life: str) -> int:
        """The number of a machine's place among the others."""
        return self._places.setdefault((name, life), len(self._places) + 1)

    def relays_of(self, names: Iterable[str]) -> dict[int, int]:
        """The relays of these members, with what stands for their processes."""
        found: dict[int, int] = {}
        records = self._records()
        for name in names:
            record = records.get(name)
            if record is not None:
                place = self.place(name, record.life)
                found |= {relay_number(place, each): process_of(place, each) for each in record.there}
        return found

    def has(self, process: int) -> bool:
        """Whether the relay that this stands for is there."""
        place, relay = relay_of(process)
        records = self._records().items()
        return any(self._places.get((name, each.life)) == place and each.has(relay) for name, each in records)
