"""Answer to GET /v1/models: the whole fleet's, in OpenAI's shape with vLLM's `max_model_len`, or in Anthropic's."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from types import MappingProxyType
from urllib.parse import unquote_to_bytes

import msgspec

from gateway.core.answer.error_shape import ANTHROPIC_PATH, shaped
from gateway.core.engines.fleet import Fleet
from gateway.core.policy.routes import ModelRoute
from gateway.core.request.outcome import STATUS, Outcome, error_body
from gateway.shared.vllm.answers import ModelCard

UNDATED = "1970-01-01T00:00:00Z"  # as Anthropic's API has it where a date is unknown


def model_list(
    fleet: Fleet,
    path: bytes,
    allowed: Container[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
    routes: Mapping[str, ModelRoute] = MappingProxyType({}),
    hidden: Container[str] = (),
) -> tuple[int, bytes]:
    """Status and JSON for `/v1/models` or `/v1/models/{id}` (percent-encoded or raw; ids may hold slashes).

    `allowed`: the models the caller may use, empty: all. `aliases`: other names of models.
    `hidden`: providers' models that the caller may not use.
    `routes`: model routes, each with the shortest context of its models that are known.
    """
    known = fleet.models
    of_routes = _cards_of(routes, known, allowed, aliases, hidden)
    cards = {id: card for id, card in known.items() if (not allowed or id in allowed) and id not in hidden}
    cards |= {
        name: msgspec.structs.replace(cards[id], id=name)
        for name, id in aliases.items()
        if id in cards and name not in cards
    }
    cards |= of_routes
    id = unquote_to_bytes(path.removeprefix(b"/v1/models").removeprefix(b"/")).decode("utf-8", "replace")
    if not id:
        return 200, msgspec.json.encode({"object": "list", "data": list(cards.values())})
    card = cards.get(id)
    if card is not None:
        return 200, msgspec.json.encode(card)
    advice = STATUS[Outcome.NOT_FOUND]
    message = f"The model {id[:200]!r} does not exist here. GET /v1/models lists what does."
    return advice.status, error_body(message, advice.type, advice.code, "model")


def _cards_of(
    routes: Mapping[str, ModelRoute],
    models: Mapping[str, ModelCard],
    allowed: Container[str],
    aliases: Mapping[str, str],
    hidden: Container[str],
) -> dict[str, ModelCard]:
    """The cards of the routes of which some model is known."""
    cards = {}
    for name, route in routes.items():
        names = [model for model in route.models if not allowed or name in allowed or model in allowed]
        names = [model for model in names if model not in hidden]
        known = [models[id] for model in names if (id := aliases.get(model, model)) in models]
        if known:
            least = min(known, key=lambda card: card.max_model_len or math.inf)
            cards[name] = msgspec.structs.replace(least, id=name)
    return cards


def as_anthropic(status: int, body: bytes) -> bytes:
    """The body of `model_list` as Anthropic's clients read it: they send `anthropic-version`."""
    if status != 200:
        return shaped(ANTHROPIC_PATH, status, body)
    told = msgspec.json.decode(body)
    is_list = told["object"] == "list"
    models = [
        {
            "type": "model",
            "id": card["id"],
            "display_name": card["id"],
            "created_at": UNDATED,
            "max_input_tokens": card["max_model_len"],
        }
        for card in (told["data"] if is_list else [told])
    ]
    if not is_list:
        return msgspec.json.encode(models[0])
    first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return msgspec.json.encode({"data": models, "first_id": first, "last_id": last, "has_more": False})
