"""LoRA adapters that an engine has probably loaded, and what it costs it to serve one that it has not.

vLLM keeps `--max-loras` adapters on the GPU, the least recently used out first. Its /metrics name those with calls
under way, in vllm:lora_requests_info, and not those that stay loaded. So the gateway keeps the order of use itself, by
the calls that it sends and by those that the engine tells of, which may be others'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.shared.vllm.answers import LoraLoad, ModelCard

LOADED = 1.0
ROOM = 0.8
REPLACES = 0.6  # another adapter has to go, which may be wanted again


class Adapters:
    """`names`: the adapters that the engine serves. Until it tells how many it keeps, that is vLLM's default, one."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.most = 1
        self._used: dict[str, None] = {}  # the least recently used first

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the adapters used last, as many as the engine keeps, the least recently used first."""
        return tuple(self._used)

    def used(self, name: str) -> None:
        """A call of this model is sent to the engine, or runs there."""
        if name in self.names:
            self._used.pop(name, None)
            self._used[name] = None
            self._keep()

    def told(self, load: LoraLoad) -> None:
        """Take in what the engine's metrics say of its adapters."""
        self.most = load.most
        for name in load.names:
            self.used(name)
        self._keep()

    def forget(self) -> None:
        """The engine was restarted, or has slept."""
        self._used.clear()

    def score(self, name: str) -> float:
        """Score of the engine for calls of this model: 1.0 if the adapter is loaded, or if the model is no adapter."""
        if name not in self.names or name in self._used:
            return LOADED
        return ROOM if len(self._used) < self.most else REPLACES

    def _keep(self) -> None:
        while len(self._used) > self.most:
            del self._used[next(iter(self._used))]


def adapters_of(models: Mapping[str, ModelCard], before: Adapters | None) -> Adapters | None:
    """The adapters among an engine's models, with what was known of them; None: it has none."""
    names = frozenset([card.id for card in models.values() if card.parent is not None])
    if before is not None and before.names == names:
        return before
    if not names:
        return None
    found = Adapters(names)
    if before is not None:
        found.told(LoraLoad(before.most, before.loaded))
    return found
