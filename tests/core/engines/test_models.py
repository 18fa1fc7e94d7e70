"""GET /v1/models: one list for the whole fleet."""

from __future__ import annotations

import json

import pytest

from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.models import as_anthropic, model_list
from gateway.core.policy.policy import Policy
from gateway.core.policy.routes import ModelRoute, RouteMember
from gateway.shared.vllm.answers import ModelCard


def fleet() -> Fleet:
    made = Fleet()
    for id, cards in (
        ("a", [ModelCard(id="org/m", max_model_len=100), ModelCard(id="é b")]),
        ("b", [ModelCard(id="org/m", max_model_len=200)]),
    ):
        engine = Engine(id, "http://127.0.0.1:1", Policy())
        made.add(engine)
        made.has_models(engine, cards)
    return made


@pytest.mark.parametrize("path", [b"/v1/models", b"/v1/models/"])
def test_the_list(path: bytes) -> None:
    status, body = model_list(fleet(), path)
    told = json.loads(body)
    assert (status, told["object"]) == (200, "list")
    assert {card["id"]: card["max_model_len"] for card in told["data"]} == {"org/m": 200, "é b": None}


@pytest.mark.parametrize(
    ("path", "id"),
    [
        (b"/v1/models/org/m", "org/m"),
        (b"/v1/models/org%2Fm", "org/m"),
        (b"/v1/models/org%2fm", "org/m"),
        ("/v1/models/é%20b".encode(), "é b"),
        (b"/v1/models/%C3%A9%20b", "é b"),
    ],
)
def test_one_model(path: bytes, id: str) -> None:
    status, body = model_list(fleet(), path)
    assert (status, json.loads(body)["id"]) == (200, id)


@pytest.mark.parametrize("id", [b"nobody", b"org", b"%ff", b"%00", b"x" * 5000])
def test_a_model_that_is_not_there(id: bytes) -> None:
    status, body = model_list(fleet(), b"/v1/models/" + id)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert len(error["message"]) < 400


def test_anthropics_clients_read_it_in_their_shape() -> None:
    told = json.loads(as_anthropic(*model_list(fleet(), b"/v1/models")))
    assert (told["first_id"], told["last_id"], told["has_more"]) == ("org/m", "é b", False)
    model = {"id": "org/m", "type": "model", "display_name": "org/m", "created_at": "1970-01-01T00:00:00Z"}
    model |= {"max_input_tokens": 200}
    assert told["data"][0] == model
    assert json.loads(as_anthropic(*model_list(fleet(), b"/v1/models/org/m"))) == model
    gone = json.loads(as_anthropic(*model_list(fleet(), b"/v1/models/gone")))
    assert (gone["type"], gone["error"]["type"]) == ("error", "not_found_error")
    nothing = json.loads(as_anthropic(*model_list(Fleet(), b"/v1/models")))
    assert nothing == {"data": [], "first_id": None, "last_id": None, "has_more": False}


def test_a_route_is_listed_with_the_shortest_context_of_its_models() -> None:
    routes = {
        "support": ModelRoute(members=(RouteMember(model="é b"), RouteMember(model="alias")), fallback=("gone",)),
        "nowhere": ModelRoute(members=(RouteMember(model="gone"),)),
    }

    def told(*allowed: str) -> dict[str, int | None]:
        body = model_list(fleet(), b"/v1/models", allowed, {"alias": "org/m"}, routes)[1]
        return {card["id"]: card["max_model_len"] for card in json.loads(body)["data"]}

    assert told() == {"org/m": 200, "é b": None, "alias": 200, "support": 200}
    assert told("support") == {"support": 200}
    assert told("é b") == {"é b": None, "support": None}
    assert told("gone") == {}
