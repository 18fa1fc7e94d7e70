"""Answer to GET /v1/models: the models of the whole fleet, in OpenAI's shape with vLLM's `max_model_len`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from types import MappingProxyType
from urllib.parse import unquote_to_bytes

import msgspec

from gateway.core.engines.fleet import Fleet
from gateway.core.request.outcome import STATUS, Outcome, error_body
from gateway.shared.vllm.answers import ModelCard


class _ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


def model_list(
    fleet: Fleet, path: bytes, allowed: Container[str] = (), aliases: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, bytes]:
    """Status and JSON for `/v1/models` or `/v1/models/{id}` (percent-encoded or raw; ids may hold slashes).

    `allowed`: the models the caller may use, empty: all. `aliases`: other names of models.
    """
    cards = {id: card for id, card in fleet.models.items() if not allowed or id in allowed}
    cards |= {
        name: msgspec.structs.replace(cards[id], id=name)
        for name, id in aliases.items()
        if id in cards and name not in cards
    }
    id = unquote_to_bytes(path.removeprefix(b"/v1/models").removeprefix(b"/")).decode("utf-8", "replace")
    if not id:
        return 200, msgspec.json.encode(_ModelList(list(cards.values())))
    card = cards.get(id)
    if card is not None:
        return 200, msgspec.json.encode(card)
    advice = STATUS[Outcome.NOT_FOUND]
    message = f"The model {id[:200]!r} does not exist here. GET /v1/models lists what does."
    return advice.status, error_body(message, advice.type, advice.code, "model")
