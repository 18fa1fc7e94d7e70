"""Fleet: all engines, and which of them serve a model."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Set
from itertools import islice
from operator import attrgetter

from gateway.core.engines.choice import SCAN_AT_MOST
from gateway.core.engines.engine import Engine
from gateway.shared.protocol import Role
from gateway.shared.vllm.answers import ModelCard

BLOCKS_AT_MOST = 1_000_000  # an entry is about 100 bytes
READERS = 2  # engines of one block: where the latest is full, the one before may have room


class PrefixIndex:
    """Index from blocks of prompts to the ids of the engines that read them last, the latest first. It is for fleets
    too large to compare all engines. The blocks used longest ago come first.

    The estimate of each engine's cache (`prefix_cache.py`) says what is cached there; this index only says where to
    look, so a wrong entry costs one look. Of one prompt the last block is forgotten first: a known block's prefix is
    known too.
    """

    def __init__(self, most: int = BLOCKS_AT_MOST) -> None:
        self._most = most
        self._readers: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def note(self, prefix: tuple[int, ...], id: str) -> None:
        """Note that the engine has read this prompt."""
        readers = self._readers
        before: tuple[str, ...] = ()
        now: tuple[str, ...] = (id,)  # shared by blocks with the same readers
        for block in reversed(prefix):
            known = readers.pop(block, ())
            if known != before:
                before = known
                now = (id, *[each for each in known if each != id][: READERS - 1])
            readers[block] = now
        if len(readers) > self._most:  # many at once: a dict finds its first entry by passing over all before it
            for block in list(islice(readers, len(readers) - self._most + self._most // 256)):
                del readers[block]

    def readers(self, prefix: tuple[int, ...]) -> tuple[str, ...]:
        """Engines that have read the longest known part of `prefix`."""
        known, low, high = self._readers, 0, len(prefix)
        while low < high:
            middle = (low + high) // 2
            if prefix[middle] in known:
                low = middle + 1
            else:
                high = middle
        return known[prefix[low - 1]] if low else ()


class EnginesByModel:
    """Index from models to the engines that have them, in the order in which these joined the fleet. A change of one
    engine costs no look at the others."""

    def __init__(self) -> None:
        self.engines: dict[str, tuple[Engine, ...]] = {}  # by model
        self._models: dict[str, Set[str]] = {}  # by engine id

    def put(self, engine: Engine, models: Set[str]) -> None:
        """Note that the engine has these models now, and no others."""
        before = self._models.pop(engine.id, frozenset())
        if models:
            self._models[engine.id] = frozenset(models)
        for model in before - models:
            left = tuple([each for each in self.engines.pop(model) if each is not engine])
            if left:
                self.engines[model] = left
        for model in models - before:
            engines = list(self.engines.get(model, ()))
            insort(engines, engine, key=attrgetter("number"))
            self.engines[model] = tuple(engines)


def longest_of(cards: Iterable[ModelCard]) -> dict[str, ModelCard]:
    """Each model's card; of several the one with the longest context."""
    longest: dict[str, ModelCard] = {}
    for card in cards:
        known = longest.get(card.id)
        if known is None or (card.max_model_len or 0) > (known.max_model_len or 0):
            longest[card.id] = card
    return longest


class Fleet:
    """All engines, by id, and which of them serve a model."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.expected: dict[str, ModelCard] = {}  # models that sidecars have or can have ready
        self.unasked: set[str] = set()  # engines that are asked for the first time: nobody knows their models
        self.is_large = False  # a choice looks at a sample of its engines
        self.reads_apart = False  # an engine reads prompts for others
        self._serving = EnginesByModel()
        self._readers = EnginesByModel()
        self._answering = EnginesByModel()
        self._contexts: dict[str, int | None] = {}  # of models that were asked for since the last change
        self._prefixes = PrefixIndex()
        self._added = 0  # engines so far, those that are gone included

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.engines.values())

    def add(self, engine: Engine) -> None:
        """Raises ValueError if the id is taken."""
        if engine.id in self.engines:
            raise ValueError(f"engine id {engine.id!r} is used twice")
        self._added += 1
        engine.number, engine.name = self._added, f"engine-{self._added}"
        engine.health.joins = any(each.health.up and not each.provider for each in self.engines.values())
        self.engines[engine.id] = engine
        self._index(engine, engine.models.keys())

    def remove(self, id: str) -> None:
        engine = self.engines.pop(id)
        self.unasked.discard(id)
        self._index(engine, frozenset())

    def _index(self, engine: Engine, models: Set[str]) -> None:
        """Note that the engine has these models now."""
        self._serving.put(engine, models)
        self._readers.put(engine, models if engine.transfers.reads_for_others else frozenset())
        self._answering.put(engine, models if engine.transfers.answers else frozenset())
        self.is_large, self.reads_apart = len(self.engines) > SCAN_AT_MOST, bool(self._readers.engines)
        self._contexts.clear()

    def expect(self, cards: dict[str, ModelCard]) -> None:
        """The models that can be had from sidecars, whether an engine serves them now or not."""
        self.expected = cards
        self._contexts.clear()

    def named(self, name: str) -> Engine | None:
        """The engine of this id or label."""
        return self.engines.get(name) or next((engine for engine in self if engine.label == name), None)

    def serving(self, model: str) -> tuple[Engine, ...]:
        """Engines that have `model`, up or not; empty: none of them is there to answer calls."""
        return self._serving.engines.get(model, ()) if self.answering(model) else ()

    def answering(self, model: str) -> tuple[Engine, ...]:
        """Engines of `model` whose role is to answer calls: they are scaled, woken and kept for it."""
        return self._answering.engines.get(model, ())

    def serves(self, model: str) -> bool:
        """Whether an engine may be given calls for the model, if its breaker allows."""
        return any(engine.health.up and not engine.draining for engine in self.serving(model))

    def readers(self, model: str) -> tuple[Engine, ...]:
        """Engines that read prompts of `model` for others, up or not."""
        return self._readers.engines.get(model, ())

    def note_prefix(self, engine: Engine, prefix: tuple[int, ...]) -> None:
        """Note where a prompt was read. Of use to large fleets alone."""
        if self.is_large:
            self._prefixes.note(prefix, engine.id)

    def likely(self, prefix: tuple[int, ...]) -> list[Engine]:
        """Engines that probably have most of a prompt cached; of a large fleet alone."""
        return [self.engines[id] for id in self._prefixes.readers(prefix) if id in self.engines]

    @property
    def models(self) -> dict[str, ModelCard]:
        """Every model of the fleet, also those that would have to be woken first; where engines differ, the card with
        the longest context."""
        answering = (engine for engine in self if engine.transfers.answers)
        return {**self.expected, **longest_of(card for engine in answering for card in engine.models.values())}

    def context(self, model: str) -> int | None:
        """The longest context, in tokens, any engine gives this model; None where none tells."""
        if model not in self._contexts:
            cards = [engine.models[model] for engine in self.answering(model)]
            if not cards and model in self.expected:
                cards = [self.expected[model]]
            if not cards:
                return None  # a client's invention is not kept
            self._contexts[model] = max([card.max_model_len or 0 for card in cards]) or None
        return self._contexts[model]

    def take_role(self, engine: Engine, group: str, role: Role) -> None:
        """Take the engine's part in exchanges of KV caches, as in `Transfers`."""
        engine.transfers.group, engine.transfers.role = group, role
        self._index(engine, engine.models.keys())

    def has_models(self, engine: Engine, cards: Iterable[ModelCard]) -> None:
        """Take the engine's own list of models."""
        engine.serve(cards)
        self._index(engine, engine.models.keys())
