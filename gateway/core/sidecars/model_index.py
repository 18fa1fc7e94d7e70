"""Index of the models that sidecars have: who holds each, other names for it, and names whose sidecars are gone.

Synchronous, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.core.sidecars.sidecar import Sidecar

MOST_MODELS = 10_000  # profiles of all sidecars together


class ModelIndex:
    """Models by name.

    `aliases`: other names of models, with the model. A model's own name is no alias; if two models share an alias, the
    model reported first has it. `remembered`: names of models that sidecars had before the gateway's last restart.
    `profiles`: how many all sidecars have.
    """

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}
        self.remembered: frozenset[str] = frozenset()
        self.profiles = 0
        self._gone: frozenset[str] = frozenset()  # names of models whose sidecars are gone
        self._holders: dict[str, list[tuple[Sidecar, str]]] = {}

    def rebuild(self, sidecars: Iterable[Sidecar]) -> None:
        """Index the models of these sidecars, and of no others."""
        self._holders = {}
        self.profiles = 0
        aliases: dict[str, str] = {}
        for sidecar in sidecars:
            self.profiles += len(sidecar.models)
            for profile, model in sidecar.models.items():
                for name in model.served if model.answers else ():
                    self._holders.setdefault(name, []).append((sidecar, profile))
                for name in model.aliases:
                    aliases.setdefault(name, model.model)
        self.aliases = {name: model for name, model in aliases.items() if name not in self._holders}

    def holders(self, model: str) -> Sequence[tuple[Sidecar, str]]:
        """Sidecars, and their profiles, that serve the model."""
        return self._holders.get(model, ())

    @property
    def names(self) -> frozenset[str]:
        """All names of models, aliases too."""
        return frozenset([*self._holders, *self.aliases])

    def knows(self, model: str) -> bool:
        """Whether any sidecar lists the model, also by an alias, awake or not, able to start it or not."""
        return model in self._holders or model in self.aliases

    def recalls(self, model: str) -> bool:
        """Whether a sidecar had the model before, and may be about to report it again."""
        return model in self.remembered and not self.knows(model)

    def away(self, model: str) -> bool:
        """Whether a sidecar had the model that is gone without a word, and may come back with it."""
        return model in self._gone and not self.knows(model)

    def note_gone(self, names: frozenset[str]) -> None:
        """The sidecars that had these names are gone."""
        if len(self._gone) + len(names) <= MOST_MODELS:
            self._gone |= names

    def forget_gone(self) -> None:
        """The policy has no sidecars any more: none comes back."""
        self._gone = frozenset()

    def forget_remembered(self) -> None:
        """Sidecars have had time to report what they had before the gateway's restart."""
        names, self.remembered = self.remembered, frozenset()
        self.note_gone(names)

    def kv_tokens(self, model: str) -> int | None:
        """The most KV-cache tokens that any sidecar reports for the model; None: none reports any."""
        found = (sidecar.models[profile].kv_tokens for sidecar, profile in self.holders(model))
        return max((tokens for tokens in found if tokens), default=None)
