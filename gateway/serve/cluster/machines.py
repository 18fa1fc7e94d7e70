"""Machines of a cluster, as its leader tells their relays apart: by a place for each, while the store has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gateway.decider.relays.elsewhere import process_of, relay_number, relay_of
from gateway.serve.cluster.store import MemberRecord


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
