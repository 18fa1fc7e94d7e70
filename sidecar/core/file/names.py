"""Names that calls may use for the models of a sidecar's file: served names, aliases, adapters. Each has one meaning.

A served name may be that of several profiles, which are engines of one model then, and so may their aliases and the
adapters that are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from gateway.shared.files.checked import Fault, Path, readable, shortened
from sidecar.core.profile import Profile

MOST = 64  # aliases, and adapters, of one profile: as many as a report to a gateway holds

Meanings = dict[str, tuple[Hashable, str]]  # by name: the meaning, and the profile that has it first


def name_faults(served: dict[str, tuple[str, Profile]]) -> Iterator[Fault]:
    """Names with two meanings, and too many of them. `served`: by profile, its served name and its settings."""
    meanings: Meanings = {model: (("model", model), profile) for profile, (model, _) in reversed(served.items())}
    for name, (model, profile) in served.items():
        at = ("models", name)
        yield from readable(_aliases(name, model, profile, at, meanings), _adapters(name, model, profile, at, meanings))


def _aliases(name: str, model: str, profile: Profile, at: Path, meanings: Meanings) -> Iterator[Fault]:
    yield from _number(len(profile.aliases), (*at, "aliases"))
    for index, alias in enumerate(profile.aliases):
        yield from _one(alias, ("alias", model), name, (*at, "aliases", index), meanings)


def _adapters(name: str, model: str, profile: Profile, at: Path, meanings: Meanings) -> Iterator[Fault]:
    yield from _number(len(profile.adapters), (*at, "adapters"))
    for adapter, path in profile.adapters.items():
        yield from _one(adapter, ("adapter", model, path), name, (*at, "adapters", adapter), meanings)


def _number(found: int, at: Path) -> Iterator[Fault]:
    if found > MOST:
        yield Fault(at, f"{found} names", f"at most {MOST}: as many as a report to a gateway holds")


def _one(given: str, meaning: Hashable, profile: str, at: Path, meanings: Meanings) -> Iterator[Fault]:
    known, first = meanings.setdefault(given, (meaning, profile))
    if known != meaning:
        yield Fault(at, f"the name {shortened(given)}", f"a name that is not one of models.{first} already")
