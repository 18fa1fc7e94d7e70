"""Turns of the models of one engine, adapters and other names: which of them goes next when calls of several wait."""

from __future__ import annotations


class ModelTurns:
    """Counters of the models: tokens that each was granted here from its queue, over weights of classes. As between
    classes (Start-time Fair Queueing) nobody has less than the last whose turn it was had: staying away saves up
    nothing, and what a model had while no other waited is not held against it."""

    def __init__(self) -> None:
        self._floor = 0.0
        self._counters: dict[str, float] = {}  # above the floor

    def counter(self, model: str) -> float:
        return self._counters.get(model, self._floor)

    def take(self, model: str, tokens: float) -> None:
        """Count so many tokens that were granted to a model whose turn it was."""
        floor = self._floor = self.counter(model)
        self._counters[model] = floor + tokens
        self._counters = {name: counter for name, counter in self._counters.items() if counter > floor}
